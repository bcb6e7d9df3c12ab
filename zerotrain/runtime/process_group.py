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

QUIET_SECONDS = 10
"""How long to wait for other ranks before a line says so."""
CONTROL_TIMEOUT = timedelta(days=1)


@contextmanager
def process_group(
    timeout_seconds: float = 1800,
    grace_seconds: float = 120,
    expected_ranks: int | None = None,
) -> Iterator[Ranks]:
    """Join the process group of a job that `deepspeed`, `torchrun`, `srun` or a plain `python
    train.py` has started, and destroy it at the end.

    It also prepares this process: its rank variables, device, signal handlers, CPU threads, GPU
    allocator and PATH.

    Args:
        timeout_seconds: for a collective; `apply_timeout` sets it for ZeRO's own groups.
        grace_seconds: for a preempted rank to save, see PreemptionHandler.
        expected_ranks: world size that the user has asked for.

    Raises:
        UserError: the world size differs, or there is no address to meet at.
        EnvironmentFailure: no GPU for this rank, the ranks do not meet within `timeout_seconds`, or
            the port is busy.
    """
    variables = rank_variables()
    os.environ.update(variables)
    rank, local_rank, world_size, local_ranks = map(int, variables.values())
    if expected_ranks not in (None, world_size):
        raise UserError(
            f"distributed.world_size: is {expected_ranks}, but WORLD_SIZE is {world_size}; start "
            f"all hosts, with the same hostfile, or set it to {world_size}"
        )
    if world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        # any free port, so that two such runs on one host do not collide
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    find_ninja()
    stop = PreemptionHandler(grace_seconds)
    device = _choose_device(local_rank)
    if "OMP_NUM_THREADS" not in os.environ:
        # By default each rank would use all cores of the node, for DeepSpeed's CPU Adam too.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    if world_size == local_ranks:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one node
    backend = get_accelerator().communication_backend_name()
    _join(backend, timedelta(seconds=timeout_seconds))
    control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    # A gloo process aborts at random if it exits without destroying its groups. None: all groups.
    to_destroy = None
    try:
        yield Ranks(rank, local_rank, world_size, local_ranks, device, control, stop)
    except AgreedError:
        raise
    except BaseException:
        if backend == "nccl" and world_size > 1:
            # NCCL's shutdown waits for the other ranks. They wait in a collective for this rank,
            # so its error would be printed only after their timeout.
            to_destroy = control
        raise
    finally:
        dist.destroy_process_group(to_destroy)


def _choose_device(local_rank: int) -> torch.device:
    """Return the device of this rank, and make DeepSpeed's accelerator use it.

    Raises:
        EnvironmentFailure: there is no GPU for this rank.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # DeepSpeed would compile a shared-memory all-reduce, which needs g++ and leaves 69 MB per
        # rank in /dev/shm after every run. Without this table it uses gloo.
        deepspeed.ops.__compatible_ops__ = {}
    else:
        check_devices(local_rank, accelerator.device_count())
        # Micro-batches differ in size, which fragments GPU memory unless segments can grow. torch
        # reads this at its first allocation. The second name is an older one.
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        accelerator.set_device(local_rank)
    return torch.device(accelerator.current_device_name())


def _join(backend: str, timeout: timedelta) -> None:
    """Join torch's default process group and DeepSpeed's communication.

    Raises:
        UserError: MASTER_ADDR or MASTER_PORT is not set.
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
        # ValueError: a variable is missing. DistNetworkError: the port is busy, or rank 0 is late.
        kind = UserError if isinstance(error, ValueError) else EnvironmentFailure
        raise kind(
            f"cannot meet {others} at MASTER_ADDR and MASTER_PORT, which launchers set: "
            f"{describe(error)[:200]}; if another run uses the port, set a different --master_port "
            "of the launcher"
        ) from error
    finally:
        notice.cancel()


def check_devices(local_rank: int, visible: int) -> None:
    """Check that this rank sees its GPU, whose index is LOCAL_RANK.

    Raises:
        EnvironmentFailure: it does not; a GPU may have failed.
    """
    if local_rank >= visible:
        raise EnvironmentFailure(
            f"LOCAL_RANK is {local_rank}, but the rank sees {visible} GPUs; each rank must see the "
            "GPUs of all ranks on its node (`nvidia-smi` lists them unless one has failed); under "
            "srun, use --gpus-per-node; on CPUs, set DS_ACCELERATOR=cpu"
        )


def find_ninja() -> None:
    """Put ninja, which compiles DeepSpeed's optimizers, on the PATH. pip has installed it beside
    Python, and the virtual environment may not be activated.
    """
    os.environ["PATH"] = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")]
    )


def apply_timeout(timeout_seconds: float, ranks: Ranks) -> None:
    """Set the timeout of every existing group, including ZeRO's, except `Ranks.control`.

    DeepSpeed creates its groups with torch's default timeout, 30 minutes on gloo and 10 on NCCL. It
    has no option for that, and torch has only a private function.
    """
    timeout = timedelta(seconds=timeout_seconds)
    for group in list(c10d._world.pg_map):
        if group is not ranks.control:
            c10d._set_pg_timeout(timeout, group)
