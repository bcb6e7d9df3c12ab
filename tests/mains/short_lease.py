"""train.py with a lease of 1 s on the output folder, for test_lock.py."""

import train
from zerotrain.checkpoint import lock


def main(config, dry_run):
    """As train.main."""
    lock.LEASE_SECONDS = 1.0
    train.main(config, dry_run)
