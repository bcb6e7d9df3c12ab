"""Ranks on this machine, for tools and benchmarks."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_local_ranks(
    ranks: int, command: Sequence[object], log: Path, python: str = sys.executable
) -> tuple[int, str, float]:
    """Run a script under torchrun, which starts faster than DeepSpeed's launcher; the ranks share
    the cores.

    Args:
        log: the file that the output is written to.
        python: the interpreter of the environment to run in.

    Returns:
        The exit code, of the rank that failed first, the output, and the peak resident memory of
        the largest process, in GiB.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}"]
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    with log.open("w+", errors="replace") as file:
        process = subprocess.Popen(
            [python, *launcher, *map(str, command)],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},  # torchrun would set 1
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)  # of the ranks too
        file.seek(0)
        output = file.read()
    code = os.waitstatus_to_exitcode(status)
    of_ranks = re.findall(r"^ +exitcode +: (-?\d+) ", output, re.MULTILINE)
    if code and of_ranks:
        code = int(of_ranks[-1])  # torchrun's own is 1; it lists the first failure at the end
    return code, output, used.ru_maxrss / 2**20
