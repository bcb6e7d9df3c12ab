"""The variables with which launchers tell a process its rank."""

import os
from collections.abc import Mapping

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def rank_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """NAMES and their values for a process, by the variables of deepspeed, torchrun, mpirun or
    srun; of the only rank if no launcher has started it.
    """
    get = environment.get
    if get("RANK") and get("WORLD_SIZE"):
        local_size = get("LOCAL_WORLD_SIZE") or get("LOCAL_SIZE", "1")  # torchrun, deepspeed
        values = get("RANK"), get("LOCAL_RANK", "0"), get("WORLD_SIZE"), local_size
    elif get("OMPI_COMM_WORLD_RANK"):
        names = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
        values = (environment[f"OMPI_COMM_WORLD_{name}"] for name in names)
    elif tasks := get("SLURM_STEP_NUM_TASKS"):
        # In the shell that salloc opens, a step of one task, SLURM_NTASKS counts the job's tasks.
        local_size = -(-int(tasks) // int(get("SLURM_STEP_NUM_NODES", "1")))
        values = get("SLURM_PROCID", "0"), environment["SLURM_LOCALID"], tasks, str(local_size)
    else:
        values = "0", "0", "1", "1"
    return dict(zip(NAMES, values, strict=True))
