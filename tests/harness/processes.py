"""Starts real processes, and waits for them."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.repository import REPO

from zerotrain.runtime import ports

# readline exports COLUMNS and LINES. Programs that draw prefer them to the terminal's size.
UNWANTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COLUMNS", "LINES")


@dataclasses.dataclass
class Finished:
    """The exit code and output of a process that has ended."""

    code: int
    output: str

    @property
    def errors(self):
        """The lines that report a user's mistake."""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]

    @property
    def error(self):
        """The one line that reports a user's mistake; fails if there are more or none."""
        assert len(self.errors) == 1, self.output
        return self.errors[0]


def environment():
    """The environment of a run on CPU without a network."""
    keep = {k: v for k, v in os.environ.items() if k not in UNWANTED}
    return {
        **keep,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # or DeepSpeed loads the compiler, which takes 1 s
        # a machine without a network may have packages on it
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
    }


def free_port():
    return str(ports.free_port())


def run(command, timeout=500, cwd=REPO, code=None):
    """Run a command to its end. At the time-out, kill it and all that it has started. Fails if
    `code` is given and the exit code differs.
    """
    process = subprocess.Popen(
        [str(c) for c in command], cwd=cwd, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"still running after {timeout} s: {command}\n{output[-4000:]}")
    assert code in (None, process.returncode), f"{command}\n{output}"
    return Finished(process.returncode, output)


def lacking(programs, packages):
    """Why tests that need root and these programs cannot run here; None if they can."""
    missing = [program for program in programs if shutil.which(program) is None]
    if os.geteuid() == 0 and not missing:
        return None
    return f"needs root and {', '.join(programs)}: apt install {packages}"


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount disks")


@contextmanager
def mounted(at, *options):
    """Mount a file system at a folder. Needs root."""
    subprocess.run(["mount", *options, at], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", at], check=True)


def start(config_file, *flags, ranks, launcher="deepspeed", stdout=subprocess.DEVNULL, **variables):
    """Start train.py on `ranks` processes in a new session, and return the launcher."""
    count = "--num_gpus" if launcher == "deepspeed" else "--nproc_per_node"
    command = [
        Path(sys.executable).parent / launcher, count, ranks, "--master_port", free_port(),
        "train.py", "--config", config_file, *flags,
    ]  # fmt: skip
    return subprocess.Popen(
        [str(c) for c in command], cwd=REPO, env={**environment(), **variables}, stdout=stdout,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def wait_until(happened, process, log=None, seconds=900, interval=0.01):
    """Poll `happened()` until it is true, and return its value. Fails with the text of `log` if
    the process ends before, or after `seconds`.

    Args:
        process: its method `poll` returns None while it runs.
        interval: seconds between two calls of `happened`.
    """
    deadline = time.monotonic() + seconds
    while True:
        code = process.poll()  # before `happened`, or its last act could be missed
        if result := happened():
            return result
        if code is not None or time.monotonic() > deadline:
            why = f"still running after {seconds} s" if code is None else f"ended with {code}"
            pytest.fail(f"{why}\n{log.read_text(errors='replace') if log and log.exists() else ''}")
        time.sleep(interval)
