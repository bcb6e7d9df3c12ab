"""train.py with a lease of 1 s on the output folder, for test_lock.py."""

import train
from zerotrain.checkpoint import lock
from zerotrain.config.schema import Config


def main(config: Config, mode: str) -> None:
    """As train.main."""
    lock.LEASE_SECONDS = 1.0
    train.main(config, mode)
