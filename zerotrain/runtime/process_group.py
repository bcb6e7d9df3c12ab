"""The process group: this process's rank and device, and the timeouts of its groups."""

import os
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from deepspeed.accelerator import get_accelerator

from zerotrain.runtime.errors import AgreedError, EnvironmentFailure, UserError, describe
from zerotrain.runtime.preemption import PreemptionHandler
from zerotrain.runtime.rank_env import rank_variables
from zerotrain.runtime.ranks import Ranks

QUIET_SECONDS = 10  # of waiting for other ranks
CONTROL_TIMEOUT = timedelta(days=1)  # of Ranks.control


@contextmanager
def process_group(
    timeout_seconds: float = 1800,
    grace_seconds: float = 120,
    expected_ranks: int | None = None,
) -> Iterator[Ranks]:
    """Join the process group of a job that was started by `deepspeed`, `torchrun`, `mpirun`,
    `srun` or a plain `python train.py`, and destroy it at the end, because a gloo process that
    exits without doing so aborts at random. NCCL's groups are left if this rank may fail alone.

    Args:
        timeout_seconds: of a collective; ZeRO's own groups get it from `apply_timeout`.
        grace_seconds: how long a preempted rank may take to save, see PreemptionHandler.
        expected_ranks: world size that the user has asked for.

    Raises:
        UserError: another world size, or no address of a rendezvous.
        EnvironmentFailure: no GPU for this rank, the ranks do not meet within `timeout_seconds`, or
            the port is busy.
    """
    variables = rank_variables()
    os.environ.update(variables)
    rank, local_rank, world_size, local_ranks = map(int, variables.values())
    if expected_ranks not in (None, world_size):
        raise UserError(
            f"distributed.world_size is {expected_ranks}, but WORLD_SIZE is {world_size}; were all "
            "hosts started, with the same hostfile?"
        )
    if world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        # it meets nobody, at any free port: two such runs on a host need not be given two
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    find_ninja()
    stop = PreemptionHandler(grace_seconds)
    device = _choose_device(local_rank)
    if "OMP_NUM_THREADS" not in os.environ:
        # by default torch uses all cores of a node in each of its ranks, also for the CPU Adam
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    if world_size == local_ranks:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one node
    backend = get_accelerator().communication_backend_name()
    _join(backend, timedelta(seconds=timeout_seconds))
    control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    to_destroy = None  # all groups
    try:
        yield Ranks(rank, local_rank, world_size, local_ranks, device, control, stop)
    except AgreedError:
        raise
    except BaseException:
        if backend == "nccl" and world_size > 1:
            # Its shutdown waits for the other ranks, and they wait in a collective for this one,
            # whose error would not be printed before their timeout.
            to_destroy = control
        raise
    finally:
        dist.destroy_process_group(to_destroy)


def _choose_device(local_rank: int) -> torch.device:
    """The device of this rank, which DeepSpeed's accelerator uses from now on.

    Raises:
        EnvironmentFailure: there is no GPU for it.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # DeepSpeed would compile a shared-memory all-reduce, which needs g++ and leaves 69 MB per
        # rank in /dev/shm after every run; gloo is used instead. Nothing else reads this table.
        deepspeed.ops.__compatible_ops__ = {}
    else:
        check_devices(local_rank, accelerator.device_count())
        # Micro-batches differ in size: GPU memory in segments that cannot grow would be fragmented.
        # torch reads this at its first allocation; the second name is a former one.
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        accelerator.set_device(local_rank)
    return torch.device(accelerator.current_device_name())


def _join(backend: str, timeout: timedelta) -> None:
    """Meet the other ranks, in torch's default process group and DeepSpeed's communication.

    Raises:
        UserError: there is no address to meet at.
        EnvironmentFailure: the ranks do not meet within the timeout, or the port is busy.
    """
    others = (
        f"the other ranks (WORLD_SIZE or SLURM_NTASKS is {os.environ['WORLD_SIZE']}; in a shell of "
        "srun, SLURM_STEP_NUM_TASKS=1 before the command runs one rank)"
    )
    notice = threading.Timer(QUIET_SECONDS, print, [f"waiting for {others}"])
    if os.environ["LOCAL_RANK"] == "0":
        notice.start()
    try:
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, timeout=timeout)
    except (ValueError, dist.DistNetworkError) as error:
        # a variable that is not set, or a port that is busy and a first rank that is late
        kind = UserError if isinstance(error, ValueError) else EnvironmentFailure
        raise kind(
            f"cannot meet {others} at MASTER_ADDR and MASTER_PORT, which launchers set: "
            f"{describe(error)[:200]}; if another run uses the port, choose another one with the "
            "launcher's --master_port"
        ) from error
    finally:
        notice.cancel()


def check_devices(local_rank: int, visible: int) -> None:
    """Raises EnvironmentFailure: this rank has no GPU, which may have failed. DeepSpeed takes
    LOCAL_RANK as an index into those that the process sees.
    """
    if local_rank >= visible:
        raise EnvironmentFailure(
            f"LOCAL_RANK is {local_rank}, but the rank sees {visible} GPUs: each rank has to see "
            "those of all ranks of its node (`nvidia-smi` lists them unless one has failed); under "
            "srun, use --gpus-per-node, and on CPUs DS_ACCELERATOR=cpu"
        )


def find_ninja() -> None:
    """Put ninja on the PATH, which compiles DeepSpeed's optimizers: pip has installed it beside
    Python, in an environment that need not be activated.
    """
    os.environ["PATH"] = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")]
    )


def apply_timeout(timeout_seconds: float, ranks: Ranks) -> None:
    """Set the timeout of every existing group but `Ranks.control`, including ZeRO's.

    DeepSpeed creates its groups with torch's default timeout, 30 minutes on gloo and 10 on NCCL,
    and has no option for it; torch has only a private function.
    """
    timeout = timedelta(seconds=timeout_seconds)
    for group in list(c10d._world.pg_map):
        if group is not ranks.control:
            c10d._set_pg_timeout(timeout, group)
