"""Ranks on this machine, for tools and benchmarks."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SECONDS_AFTER_A_FAILURE = 10  # in which the other ranks may report it too


class Ended(NamedTuple):
    """How a command has ended on all of its ranks."""

    code: int
    """The exit code of the rank that failed first, or 0."""
    output: str
    """What all ranks have printed."""
    peak_gib: float
    """The peak resident memory of the largest rank."""


def run_local_ranks(ranks: int, command: Sequence[object], log: Path) -> Ended:
    """Run `python COMMAND` once for each rank; the ranks share the cores.

    Args:
        log: the file that the output is written to.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // ranks),
    }
    group = failure = peak = 0  # the first rank's number becomes the number of the process group
    timer = threading.Timer(SECONDS_AFTER_A_FAILURE, lambda: _kill(group))
    try:
        with log.open("w") as file:
            for rank in range(ranks):
                variables = {**shared, "RANK": rank, "LOCAL_RANK": rank}
                process = subprocess.Popen(
                    [sys.executable, *map(str, command)],
                    env=os.environ | {name: str(value) for name, value in variables.items()},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    process_group=group,
                )
                group = group or process.pid
        for _ in range(ranks):
            _, status, used = os.wait4(-group, 0)
            peak = max(peak, used.ru_maxrss)  # KiB
            code = os.waitstatus_to_exitcode(status)
            if code and not failure:
                failure = code
                timer.start()  # the others may wait for ever for the rank that failed
    finally:
        timer.cancel()
        _kill(group)  # after Ctrl-C, which the group does not get
    return Ended(failure, log.read_text(errors="replace"), peak / 2**20)


def _kill(group: int) -> None:
    if group:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
