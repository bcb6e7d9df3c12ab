"""train.py, or the function that MAIN names, with little memory. The machine has 600 MiB more than
the process uses at its start. The process may allocate MORE_MIB more, 600 by default.
"""

import os
import pkgutil
import resource

import psutil


def main(config, dry_run):
    """Limit the memory, and train."""
    process, machine = psutil.Process(), psutil.virtual_memory
    total = process.memory_info().rss + (600 << 20)
    psutil.virtual_memory = lambda: machine()._replace(available=total - process.memory_info().rss)
    limit = process.memory_info().data + (int(os.environ.get("MORE_MIB", "600")) << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    pkgutil.resolve_name(os.environ.get("MAIN", "train:main"))(config)
