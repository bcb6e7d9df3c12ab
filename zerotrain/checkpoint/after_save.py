"""checkpoint.after_save: the user's command that is run once a checkpoint is complete."""

import os
import select
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from zerotrain.checkpoint.nodes import Nodes
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.redact import redactor

TIMEOUT_SECONDS = 3600.0
POLL_SECONDS = 0.1
KILL_SECONDS = 3.0  # between SIGTERM and SIGKILL; rclone and aws tidy up in that time
ENDING_SECONDS = 15.0
"""What a preempted run needs after its last checkpoint; W&B alone may take 11 s."""
TAIL_BYTES = 2000  # of the command's output, which is kept in memory only


class AfterSave:
    """Runs the command in a thread of each node's first rank, one at a time. Of the checkpoints
    that become complete meanwhile only the newest waits for its turn.

    A checkpoint is not removed while it waits or the command runs for it. Whatever goes wrong is
    one printed line, and nothing is raised.
    """

    def __init__(self, command: str, nodes: Nodes) -> None:
        self._command, self._nodes = command, nodes
        self._lock = threading.Lock()
        self._checkpoints: list[Path] = []  # the one that the command runs for, the waiting one
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def in_use(self) -> set[str]:
        """The names of the checkpoints that must not be removed now; empty if it does not run."""
        return {path.name for path in self._checkpoints}

    def start(self, checkpoint: Path) -> None:
        """Run the command for `checkpoint`, in its turn."""
        with self._lock:
            for left_out in self._checkpoints[1:]:
                self._warn(f"checkpoint.after_save is not run for {left_out.name}: it is too slow")
            self._checkpoints[1:] = [checkpoint]
            if len(self._checkpoints) == 1:
                self._thread = threading.Thread(target=self._work, name="after-save", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop the command, and wait for its end, some seconds at most."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(KILL_SECONDS + 2)

    def _work(self) -> None:
        stop = self._nodes.ranks.stop
        while self._checkpoints:
            checkpoint, signal_before = self._checkpoints[0], stop.signal
            problem = self._run(checkpoint)
            if problem is not None:
                time.sleep(POLL_SECONDS)
                if stop.signal != signal_before and len(self._checkpoints) == 1:
                    # launchers and SLURM signal all processes of a preempted run, the command too
                    problem = self._run(checkpoint)
            if problem is not None:
                self._warn(
                    f"{checkpoint.name} is complete, but checkpoint.after_save failed: {problem}"
                )
            with self._lock:
                self._checkpoints.pop(0)
                if not self._checkpoints:
                    return

    def _warn(self, line: str) -> None:
        print(f"WARNING: {self._nodes.label(self._nodes.here)}{line}", flush=True)

    def _run(self, checkpoint: Path) -> str | None:
        """Run the command once.

        Returns:
            Why it failed; None if it did not.
        """
        nodes = self._nodes
        variables = {
            "CHECKPOINT": str(checkpoint.absolute()),
            "STEP": str(int(checkpoint.name.removeprefix("step_"))),
            "OUTPUT_DIR": str(nodes.lock.folder.absolute()),
            "NODE_RANK": str(list(nodes.members).index(nodes.here)),
        }
        began, tail, why = time.monotonic(), b"", None
        try:
            nodes.lock.check()  # the folder may belong to another run by now
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the run, which then stops the command
            )
        except (OSError, UserError) as error:
            return describe(error)
        with process.stdout as output:
            while why is None and process.poll() is None:
                tail = (tail + _read(output))[-TAIL_BYTES:]
                if self._stopping.is_set():
                    why = "stopped, since the run is ending"
                elif time.monotonic() - began > TIMEOUT_SECONDS:
                    why = f"stopped after {TIMEOUT_SECONDS:,.0f} s"
            if why is not None:
                _end(process)
            tail = (tail + _read(output))[-TAIL_BYTES:]
        if why is None and process.returncode == 0:
            return None
        text = redactor(os.environ)(tail.decode(errors="replace"))
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return f"{why or f'exit code {process.returncode}'}; its last output: {line}"


def _read(output: IO[bytes]) -> bytes:
    """What is there to read after 0.1 s."""
    if not select.select([output], [], [], POLL_SECONDS)[0]:
        return b""
    data = os.read(output.fileno(), 1 << 16)
    if not data:  # it was closed
        time.sleep(POLL_SECONDS)
    return data


def _end(process: subprocess.Popen) -> None:
    """End a command and the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
