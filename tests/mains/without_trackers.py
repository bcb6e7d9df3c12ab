"""train.py, for test_tracking.py: W&B is not loaded when it is off."""

import sys

import train


def main(config, mode):
    """As train.main."""
    train.main(config, mode)
    assert "wandb" not in sys.modules
