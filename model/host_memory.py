"""Check, before any weights are read, that the machine's memory has room for them."""

import os
from pathlib import Path

import psutil

from config.ds_config import zero_stage
from model.memory import estimate_memory
from model.setup import Setup
from model.trained import trained_skeleton
from runtime.errors import UserError
from runtime.process_group import Ranks

CGROUPS = Path("/sys/fs/cgroup")


def check_host_memory(setup: Setup, ranks: Ranks) -> None:
    """Refuse a model that this machine cannot load, where Linux would kill a rank without a word.

    transformers 5.23 reads the weights on every rank under ZeRO 0 to 2, and under ZeRO-3 on rank 0
    alone. What offload and asynchronous saves keep in CPU memory is added.

    Raises:
        UserError: names what is needed and what is available, in GiB.
    """
    model, neighbours = setup.config.model, int(os.environ["LOCAL_WORLD_SIZE"])
    skeleton = trained_skeleton(model, setup.model_config)
    nodes = max(1, ranks.world_size // neighbours)
    shape = setup.counts.quantized, setup.ds_config, nodes, neighbours
    estimate = estimate_memory(setup.config, skeleton, *shape)
    reads = ranks.is_first or zero_stage(setup.ds_config) < 3
    needed, available = estimate.host + (estimate.loading if reads else 0), available_bytes()
    if needed > available:
        raise UserError(
            f"model.name_or_path: {model.name_or_path} needs {needed / 2**30:,.1f} GiB of CPU "
            f"memory on this machine, {estimate.loading / 2**30:,.1f} GiB of it to read the "
            f"weights, and {available / 2**30:,.1f} GiB are available; ZeRO stage 3 reads them "
            "once per run instead of once per rank; scripts/memory.py has the arithmetic"
        )


def available_bytes() -> int:
    """CPU memory that new pages can take: of the machine, and of the control groups (version 2)
    that a container or SLURM limits.
    """
    available = psutil.virtual_memory().available
    line = next((x for x in Path("/proc/self/cgroup").read_text().splitlines() if "0::" in x), "")
    group = CGROUPS / line.removeprefix("0::/")
    while line and group != CGROUPS.parent:
        try:
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            stat = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
        except OSError:
            limit = "max"  # the root group has no such files
        if limit != "max":
            available = min(available, int(limit) - used + int(stat["file"]))
        group = group.parent
    return available
