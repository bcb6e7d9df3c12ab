"""train.py in fp16 on CPU. torch computes in fp16 on any CPU, but DeepSpeed allows it on few. For
test_training.py.
"""

from deepspeed.accelerator import get_accelerator

import train


def main(config, dry_run):
    """As train.main."""
    get_accelerator().is_fp16_supported = lambda: True
    train.main(config, dry_run)
