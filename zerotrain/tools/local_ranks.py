"""Ranks on this machine, for tools and benchmarks."""

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

SECONDS_AFTER_A_FAILURE = 10  # in which the other ranks may report it too


class Ended(NamedTuple):
    """How a command has ended on all of its ranks."""

    code: int
    """The exit code of the rank that failed first, or 0."""
    output: str
    """What all ranks have printed."""
    peak_gib: float
    """The peak resident memory of the largest rank; at least that of this process, since Linux
    counts what a child had before it started its program.
    """


def run_local_ranks(
    ranks: int,
    command: Sequence[object],
    log: Path,
    until: Callable[[], bool] = lambda: False,
    seconds: float = math.inf,
) -> Ended:
    """Run `python COMMAND` once for each rank; the ranks share the cores. What still runs is killed
    as soon as `until` is true, after `seconds`, and some seconds after a rank has failed, for which
    others may wait for ever.

    Args:
        log: the file that the output is written to.
    """
    shared = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // ranks),
    }
    processes = []
    failure = peak = 0
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
            ended, status, used = os.wait4(-processes[0].pid, os.WNOHANG)  # any of the group
            if not ended:
                time.sleep(0.02)
                continue
            running -= 1
            peak = max(peak, used.ru_maxrss)  # KiB
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
    return Ended(failure, log.read_text(errors="replace"), peak / 2**20)
