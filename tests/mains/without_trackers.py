"""train.py, for test_tracking.py: W&B is not loaded when it is off."""

import sys

import train
from zerotrain.config.schema import Config


def main(config: Config, mode: str) -> None:
    """As train.main."""
    train.main(config, mode)
    assert "wandb" not in sys.modules
