"""train.py, for tests/test_tracking.py: W&B is not loaded when it is off."""

import sys

import train
from zerotrain.config.schema import Config


def main(config: Config, dry_run: bool) -> None:
    """As train.main."""
    train.main(config, dry_run)
    assert "wandb" not in sys.modules
