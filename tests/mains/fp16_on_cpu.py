"""train.py in fp16 on CPU, where torch computes in it and DeepSpeed says that it cannot, for
test_training.py.
"""

from deepspeed.accelerator import get_accelerator

import train


def main(config, mode):
    """As train.main."""
    get_accelerator().is_fp16_supported = lambda: True
    train.main(config, mode)
