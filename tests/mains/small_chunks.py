"""train.py whose loss has chunks of 60 targets, for the tests that compare it with a plain loop."""

import train
from zerotrain.config.schema import Config
from zerotrain.training import loss


def main(config: Config, dry_run: str) -> None:
    """As train.main."""
    loss.CHUNK_TOKENS = {"cpu": 60}
    train.main(config, dry_run)
