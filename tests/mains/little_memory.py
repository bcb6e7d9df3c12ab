"""train.py in a process that cannot allocate much more than it has, for test_rehearsal.py."""

import resource

import psutil

import train

MORE_BYTES = 600 << 20


def main(config, mode):
    """As train.main."""
    limit = psutil.Process().memory_info().data + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    train.main(config, mode)
