"""train.py, or the function that MAIN names, on a machine that has 600 MiB more than the process
begins with, and in a process that can allocate MORE_MIB more, which is the same by default.
"""

import os
import pkgutil
import resource

import psutil


def main(config, dry_run):
    """As train.main."""
    process, machine = psutil.Process(), psutil.virtual_memory
    total = process.memory_info().rss + (600 << 20)
    psutil.virtual_memory = lambda: machine()._replace(available=total - process.memory_info().rss)
    limit = process.memory_info().data + (int(os.environ.get("MORE_MIB", "600")) << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    pkgutil.resolve_name(os.environ.get("MAIN", "train:main"))(config)
