"""train.py in fp16 on CPU, where torch computes in it and DeepSpeed says that it cannot, for
test_training.py.
"""

from deepspeed.accelerator import get_accelerator

import train
from zerotrain.config.schema import Config


def main(config: Config, mode: str) -> None:
    """As train.main."""
    get_accelerator().is_fp16_supported = lambda: True
    train.main(config, mode)
