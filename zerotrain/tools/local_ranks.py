"""Short runs on the ranks of this machine, for tools and benchmarks."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zerotrain.runtime.ports import free_port

SECONDS_AFTER_A_FAILURE = 10  # The other ranks have as long to report it too.


def short_run(steps: int) -> list[str]:
    """Return flags of train.py that end a run after some steps, without evaluation and W&B, and
    with one checkpoint, after the last step.
    """
    flags = {
        "train.steps": steps,
        "train.epochs": "null",
        "data.eval_sources": "[]",
        "data.eval_fraction": 0,
        "eval.every_steps": 0,
        "eval.generate": 0,
        "checkpoint.every_steps": 0,
        "checkpoint.every_minutes": 0,
        "checkpoint.resume": "auto",
        "checkpoint.weights_only": "false",
        "tracking.wandb": "disabled",
        "distributed.world_size": "null",
    }
    return [f"--{name}={value}" for name, value in flags.items()]


class Ended(NamedTuple):
    """End of a command on all of its ranks."""

    code: int
    """Exit code of the rank that failed first, or 0."""
    output: str
    """Output of all ranks."""


def run_local_ranks(
    ranks: int,
    command: Sequence[object],
    log: Path,
    until: Callable[[], bool] = lambda: False,
    seconds: float = math.inf,
) -> Ended:
    """Run `python COMMAND` once for each rank; the ranks share the cores.

    Ranks are killed as soon as `until` returns True, and after `seconds`. They are also killed some
    seconds after one has failed, because the others may wait for it forever.

    Args:
        log: file for the output.
    """
    shared = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")
        or max(1, len(os.sched_getaffinity(0)) // ranks),
    }
    processes = []
    failure = 0
    end = time.monotonic() + seconds
    try:
        with log.open("w") as file:
            for rank in range(ranks):
                variables = {**shared, "RANK": rank, "LOCAL_RANK": rank}
                process = subprocess.Popen(
                    [sys.executable, *map(str, command)],
                    env=os.environ | {name: str(value) for name, value in variables.items()},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    process_group=processes[0].pid if processes else 0,
                )
                processes.append(process)
        running = ranks
        while running and not until() and time.monotonic() < end:
            ended, status = os.waitpid(-processes[0].pid, os.WNOHANG)  # any rank of the group
            if not ended:
                time.sleep(0.02)
                continue
            running -= 1
            code = os.waitstatus_to_exitcode(status)
            if code and not failure:
                failure = code
                end = min(end, time.monotonic() + SECONDS_AFTER_A_FAILURE)
    finally:
        if processes:
            with suppress(ProcessLookupError):
                os.killpg(processes[0].pid, signal.SIGKILL)
        for process in processes:
            process.wait()
    return Ended(failure, log.read_text(errors="replace"))
