"""Check, before any weights are read, that the machine's memory has room for them."""

import os
from pathlib import Path

import psutil

from config.batch_math import model_state_parts
from model.architecture import count_parameters
from model.load import DTYPES
from model.setup import Setup
from runtime.errors import UserError
from runtime.process_group import Ranks

CGROUPS = Path("/sys/fs/cgroup")


def check_host_memory(setup: Setup, ranks: Ranks) -> None:
    """Refuse a model that this machine cannot load, where Linux would kill a rank without a word.

    transformers 5.23 reads the weights on every rank under ZeRO 0 to 2, and under ZeRO-3 on rank 0
    alone. What ZeRO keeps in CPU memory is added, activations and buffers of communication are not.

    Raises:
        UserError: names what is needed and what is available, in GiB.
    """
    model, zero = setup.config.model, setup.ds_config.get("zero_optimization", {})
    stage, neighbours = zero.get("stage", 0), int(os.environ["LOCAL_WORLD_SIZE"])
    parameters = count_parameters(setup.model_config, model.trust_remote_code)
    readers = neighbours if stage < 3 else int(ranks.is_first)
    read = readers * parameters * DTYPES[setup.precision].itemsize
    weights, _, optimizer = model_state_parts(parameters, ranks.world_size, stage, setup.precision)
    offloaded = {"offload_param": weights, "offload_optimizer": optimizer}
    kept = sum(
        size * neighbours
        for key, size in offloaded.items()
        if zero.get(key, {}).get("device") == "cpu"
    )
    available = available_bytes()
    if read + kept > available:
        by = f"{readers} ranks" if readers > 1 else "rank 0"
        offload = f" and {kept / 2**30:,.1f} GiB for what ds_config offloads" if kept else ""
        cure = "let ds_config offload less, use more nodes," if kept else "use ZeRO stage 3"
        raise UserError(
            f"model.name_or_path: {model.name_or_path} needs {read / 2**30:,.1f} GiB of CPU "
            f"memory to be read by {by} of this machine{offload}, and "
            f"{available / 2**30:,.1f} GiB are available; {cure} or a machine with more memory"
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
