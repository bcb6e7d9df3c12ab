"""train.py, for tests/test_tracking.py: no W&B or TensorBoard is loaded when they are off."""

import sys

import train
from zerotrain.config.schema import Config


def main(config: Config, dry_run: bool) -> None:
    """As train.main."""
    train.main(config, dry_run)
    loaded = {name.split(".")[0] for name in sys.modules} & {"wandb", "tensorboard"}
    assert not loaded, loaded
