"""The variables with which launchers tell a process its rank."""

from collections.abc import Mapping


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE of a process, by the variables of
    deepspeed, torchrun, mpirun or srun; empty if no launcher has started it.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        local_ranks = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or "1"
        return {
            "RANK": environment["RANK"],
            "LOCAL_RANK": environment.get("LOCAL_RANK", "0"),
            "WORLD_SIZE": environment["WORLD_SIZE"],
            "LOCAL_WORLD_SIZE": local_ranks,  # set by torchrun, and as LOCAL_SIZE by deepspeed
        }
    if "OMPI_COMM_WORLD_RANK" in environment:
        of_mpi = {"RANK": "RANK", "LOCAL_RANK": "LOCAL_RANK", "WORLD_SIZE": "SIZE",
                  "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}  # fmt: skip
        return {name: environment[f"OMPI_COMM_WORLD_{its}"] for name, its in of_mpi.items()}
    if "SLURM_PROCID" in environment and environment.get("SLURM_STEP_ID", "").isdigit():
        tasks = environment["SLURM_NTASKS"]
        nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
        return {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "WORLD_SIZE": tasks,
            "LOCAL_WORLD_SIZE": str(-(-int(tasks) // nodes)),
        }
    return {}
