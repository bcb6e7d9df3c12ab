"""train.py in fp16 on CPU, where torch computes in it; of most CPUs DeepSpeed says no. For
test_training.py.
"""

from deepspeed.accelerator import get_accelerator

import train


def main(config, mode):
    """As train.main."""
    get_accelerator().is_fp16_supported = lambda: True
    train.main(config, mode)
