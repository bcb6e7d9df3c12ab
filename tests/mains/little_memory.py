"""train.py in a process that cannot allocate much more than it has, for test_rehearsal.py."""

import resource

import psutil

import train
from zerotrain.config.schema import Config

MORE_BYTES = 600 << 20


def main(config: Config, mode: str) -> None:
    """As train.main."""
    limit = psutil.Process().memory_info().data + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    train.main(config, mode)
