"""Process group, device, who goes first, agreement on errors, exact sums."""

import argparse
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import deepspeed
import psutil
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from deepspeed.accelerator import get_accelerator

from cluster.hostfile import read_hostfile
from cluster.rank import rank_variables
from finetune.config import DistributedConfig, LaunchConfig
from finetune.errors import UserError, exit_code_of_signal

T = TypeVar("T")

RUNNER_POLL_SECONDS = 1.0
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
DEEPSPEED_KILL_SECONDS = 30.0  # deepspeed/launcher/launch.py, terminate_process_tree
TIDY_SECONDS = 5.0  # for the `finally`s of a process that leaves without saving
ONE_SIGNAL_SECONDS = 1.0  # a launcher and the one above it both pass on the same signal


class StopRequest:
    """SIGTERM and SIGUSR1: asked to leave, by a scheduler or a launcher.

    While `deferred`, the first one is remembered for the loop, which saves and leaves; a second one
    ends the process at once. At other times there is nothing to save and the first one ends it.

    The main thread hears of a signal when it is back in Python. One that waits in a collective for
    a rank that is gone never is, so a thread watches too, and ends the process when its time is up.

    Args:
        grace_seconds: how long the loop may take to save and leave.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.signal: int | None = None
        self.grace_seconds = grace_seconds
        self._deferred = False
        self._first_at = 0.0
        self._noticed, notice = socket.socketpair()
        notice.setblocking(False)
        self._notice = notice  # the kernel's side writes the signal's number here at once
        signal.set_wakeup_fd(notice.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)
        threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()

    def _receive(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if not self._deferred or (self.signal and now - self._first_at > ONE_SIGNAL_SECONDS):
            sys.exit(exit_code_of_signal(number))  # through every finally
        if self.signal is None:
            self.signal, self._first_at = number, now

    def _watch(self) -> None:
        told, told_at, leave_by = 0, 0.0, math.inf
        while (now := time.monotonic()) < leave_by:
            self._noticed.settimeout(None if leave_by == math.inf else leave_by - now)
            with suppress(TimeoutError):
                number = self._noticed.recv(1)[0]
                if number not in STOP_SIGNALS:
                    continue
                now = time.monotonic()
                if not told:
                    told, told_at = number, now
                    leave_by = now + (self.grace_seconds if self._deferred else TIDY_SECONDS)
                elif now - told_at > ONE_SIGNAL_SECONDS:
                    leave_by = min(leave_by, now + TIDY_SECONDS)
        print(
            f"{signal.Signals(told).name} {time.monotonic() - told_at:.0f} s ago, and this rank is "
            "still at it: leaving without another save",
            file=sys.stderr,
            flush=True,
        )
        os._exit(exit_code_of_signal(told))

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the first signal is only remembered."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False


@dataclass(frozen=True)
class Ranks:
    """This process among all of them."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    """A CPU group for messages and long waits: it neither holds GPU memory nor has the
    collectives' short time-out.
    """
    stop: StopRequest

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@contextmanager
def process_group(config: DistributedConfig, grace_seconds: float = math.inf) -> Iterator[Ranks]:
    """Join the job's process group, as `deepspeed`, `torchrun`, `mpirun`, `srun` or a plain
    `python train.py` started it; leave it at the end.

    Leaving is not optional: a gloo process that exits without it aborts at random.

    Args:
        grace_seconds: for a rank that is told to stop, see StopRequest.
    """
    os.environ.update(rank_variables(os.environ) or ALONE)
    if os.environ["WORLD_SIZE"] == "1":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    if _follow_launcher():
        grace_seconds = min(grace_seconds, DEEPSPEED_KILL_SECONDS)
    stop = StopRequest(grace_seconds)
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    local_rank = int(os.environ["LOCAL_RANK"])
    if on_cpu:
        # DeepSpeed would compile a shared-memory all-reduce here, which needs g++ and leaves 69 MB
        # per rank in /dev/shm after every run; gloo does the same work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        _share_cores()
    else:
        accelerator.set_device(local_rank)
    say_state("joining the process group")
    deepspeed.init_distributed(
        dist_backend="gloo" if on_cpu else accelerator.communication_backend_name(),
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=config.timeout_seconds),
        verbose=False,
    )
    say_state("at work")
    try:
        yield Ranks(
            rank=dist.get_rank(),
            local_rank=local_rank,
            world_size=dist.get_world_size(),
            device=torch.device(accelerator.current_device_name()),
            control=dist.new_group(
                backend="gloo", timeout=timedelta(seconds=config.data_timeout_seconds)
            ),
            stop=stop,
        )
    except RuntimeError:
        if on_cpu:
            write_flight_record()
        raise
    finally:
        dist.destroy_process_group()


def check_world_size(launch: LaunchConfig) -> None:
    """That the job has the ranks that it was promised.

    `deepspeed --hostfile FILE` only warns where FILE is missing, and trains on one machine.

    Raises:
        UserError: names the promise.
    """
    world_size = int(rank_variables(os.environ).get("WORLD_SIZE", "1"))
    promises = {"launch.world_size": launch.world_size}
    if "LAUNCH_WORLD_SIZE" in os.environ:
        promises["its launcher (LAUNCH_WORLD_SIZE)"] = int(os.environ["LAUNCH_WORLD_SIZE"])
    for process in psutil.Process().parents():
        with suppress(psutil.Error):
            hostfile, is_filtered = _hostfile_of(process.cmdline())
            if hostfile is not None:
                hosts = read_hostfile(Path(process.cwd()) / hostfile)
                if not is_filtered:
                    promises[f"--hostfile {hostfile}"] = sum(len(host.slots) for host in hosts)
    for name, promised in promises.items():
        if promised not in (None, world_size):
            raise UserError(
                f"{name} promises {promised} ranks, but WORLD_SIZE is {world_size}: "
                f"this process is on {socket.gethostname()}; were all hosts started, with the same "
                "hostfile?"
            )


def _hostfile_of(words: list[str]) -> tuple[str | None, bool]:
    """FILE of a `deepspeed --hostfile FILE [options] script.py ...`, and whether the options leave
    a part of its hosts.
    """
    if not any(Path(word).name == "deepspeed" for word in words[:2]):
        return None, False
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-H", "--hostfile")
    filters = ("-i", "--include", "-e", "--exclude", "--num_nodes", "--num_gpus")
    parser.add_argument(*filters, dest="filter")
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    options, _ = parser.parse_known_args(words[:script])
    return options.hostfile, options.filter is not None


def _follow_launcher() -> bool:
    """End with the launcher's parent: the runner that a person or a scheduler stops.

    DeepSpeed's runner dies of SIGTERM without a word to the launcher that it started, which would
    train on with its ranks, nobody watching. The launcher itself ends its ranks on SIGTERM.

    Returns:
        Whether this process is a child of DeepSpeed's launcher.
    """
    launcher = psutil.Process().parent()
    if launcher is None or "deepspeed.launcher.launch" not in launcher.cmdline():
        return False
    runner = launcher.ppid()

    def watch() -> None:
        while launcher.is_running():
            if launcher.ppid() != runner:
                launcher.terminate()
                return
            time.sleep(RUNNER_POLL_SECONDS)

    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()
    return True


def write_flight_record() -> None:
    """With TORCH_FR_BUFFER_SIZE set, write this rank's last collectives for torch's
    flight_recorder.fr_trace, as NCCL does by itself on a time-out; gloo only keeps them.
    """
    if int(os.environ.get("TORCH_FR_BUFFER_SIZE", "0")) == 0:
        return
    record = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    record["pg_config"] = {  # gloo leaves out which ranks a group has, and fr_trace asks for it
        name: {
            "name": name,
            "desc": group.group_desc,
            "ranks": str(sorted(c10d._world.pg_group_ranks[group])),
        }
        for group, name in c10d._world.pg_names.items()
    }
    path = os.environ.get("TORCH_FR_DUMP_TEMP_FILE", "/tmp/nccl_trace_rank_") + str(dist.get_rank())
    Path(path).write_bytes(pickle.dumps(record))


def _share_cores() -> None:
    """Give each rank of this machine its part of the cores; torch would give every rank all of
    them.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        neighbours = int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // neighbours))


def say_state(text: str) -> None:
    """What this rank is doing, for scripts/launch.sh to name when it fails."""
    if path := os.environ.get("LAUNCH_STATE_FILE"):
        Path(path).write_text(text)


def apply_timeout(config: DistributedConfig, ranks: Ranks) -> None:
    """Give every group that exists by now, ZeRO's among them, `config.timeout_seconds`.

    DeepSpeed makes its groups with torch's default, 30 minutes on gloo and 10 on NCCL, and has no
    knob for it; torch has only a private one.
    """
    timeout = timedelta(seconds=config.timeout_seconds)
    for group in list(c10d._world.pg_map):
        if group is not ranks.control:
            c10d._set_pg_timeout(timeout, group)


def together(ranks: Ranks, work: Callable[[], T], first_on_machine: bool = False) -> T:
    """Run `work` on every rank and agree on how it went: a UserError on any rank is raised on all
    of them.

    Without this, the rank that found the mistake would leave and the others wait for it until the
    time-out. `first_on_machine` lets each machine's first rank finish before its other ranks start.
    """
    result: T | None = None
    for turn in (True, False) if first_on_machine else (None,):
        error = None
        if turn is None or turn == (ranks.local_rank == 0):
            try:
                result = work()
            except UserError as mistake:
                error = str(mistake)
        errors: list[str | None] = [None] * ranks.world_size
        dist.all_gather_object(errors, error, group=ranks.control)
        if first := next((e for e in errors if e is not None), None):
            raise UserError(first)
    return result  # type: ignore[return-value]


def require_same(ranks: Ranks, name: str, value: str) -> None:
    """Raise UserError on every rank where `value` is not the same on all of them."""
    values: list[str | None] = [None] * ranks.world_size
    dist.all_gather_object(values, f"{value} on {socket.gethostname()}", group=ranks.control)
    odd = [r for r, v in enumerate(values) if str(v).split()[0] != str(values[0]).split()[0]]
    if odd:
        raise UserError(
            f"{name} of rank {odd[0]} ({values[odd[0]]}) is not that of rank 0 ({values[0]}): do "
            "all machines have the same files, tokenizer and library versions?"
        )


def on_first_rank(ranks: Ranks, work: Callable[[], T]) -> T:
    """`work()` done by rank 0, its result (or its UserError) on every rank."""
    box: list = [None, None]
    if ranks.is_first:
        try:
            box[0] = work()
        except UserError as mistake:
            box[1] = str(mistake)
    dist.broadcast_object_list(box, src=0, group=ranks.control)
    if box[1] is not None:
        raise UserError(box[1])
    return box[0]


def count_ranks(ranks: Ranks, *flags: bool) -> list[int]:
    """For each flag, on how many ranks it is set: the same answer on all of them."""
    counts = torch.tensor(flags, dtype=torch.float32, device=ranks.device)
    dist.all_reduce(counts)
    return [int(count) for count in counts.tolist()]


def told_to_leave(ranks: Ranks) -> bool:
    """Whether any rank was asked to stop: the same answer on all of them."""
    return count_ranks(ranks, ranks.stop.signal is not None)[0] > 0


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """`value`, any shape, summed over all ranks, in float64: exact for counts, and for losses to
    1e-15.
    """
    total = value.detach().to(torch.float64)
    dist.all_reduce(total)
    return total
