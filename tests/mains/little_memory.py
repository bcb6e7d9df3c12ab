"""train.py, or the function that MAIN names, in a process that cannot allocate much more than it
has, for test_out_of_memory.py.
"""

import os
import pkgutil
import resource

import psutil

MORE_BYTES = 600 << 20


def main(config, dry_run):
    """As train.main."""
    limit = psutil.Process().memory_info().data + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    pkgutil.resolve_name(os.environ.get("MAIN", "train:main"))(config)
