"""The variables by which launchers tell a process its rank."""

import os
from collections.abc import Mapping

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def rank_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return NAMES and their values for a process that deepspeed, torchrun or srun has started. A
    process without a launcher is the only rank.
    """
    get = environment.get
    values = "0", "0", "1", "1"
    if get("RANK") and get("WORLD_SIZE"):
        local_size = get("LOCAL_WORLD_SIZE") or get("LOCAL_SIZE", "1")  # torchrun, deepspeed
        values = get("RANK"), get("LOCAL_RANK", "0"), get("WORLD_SIZE"), local_size
    elif tasks := get("SLURM_STEP_NUM_TASKS"):
        # SLURM_NTASKS counts all tasks of the job, also in salloc's shell, which is one task.
        local_size = -(-int(tasks) // int(get("SLURM_STEP_NUM_NODES", "1")))
        values = get("SLURM_PROCID", "0"), environment["SLURM_LOCALID"], tasks, str(local_size)
    return dict(zip(NAMES, values, strict=True))
