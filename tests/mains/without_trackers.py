"""train.py, for test_tracking.py: W&B is not loaded when it is off."""

import sys

import train


def main(config, dry_run):
    """As train.main."""
    train.main(config, dry_run)
    assert "wandb" not in sys.modules
