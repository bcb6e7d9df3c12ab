"""checkpoint.after_save: the user's command that is run once a checkpoint is complete."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from checkpoint.nodes import Nodes
from checkpoint.save_interval import duration
from config.schema import CheckpointConfig
from runtime.errors import describe
from runtime.redact import redactor

POLL_SECONDS = 0.1
KILL_SECONDS = 3.0  # between SIGTERM and SIGKILL; rclone and aws tidy up in that time
ENDING_SECONDS = 15.0
"""What a preempted run needs after its last checkpoint; W&B alone may take 11 s."""
SHOWN_CHARACTERS = 500  # of what a failed command printed


class AfterSave:
    """Runs the command in a thread of each node's first rank, one at a time. Of the checkpoints
    that become complete meanwhile only the newest is waiting, and those before it are left out.

    A checkpoint is not removed while it is waiting or the command runs for it. Whatever goes wrong
    is one printed line, and nothing is raised.
    """

    def __init__(self, config: CheckpointConfig, nodes: Nodes) -> None:
        self._config, self._nodes, self._preemption = config, nodes, nodes.ranks.stop
        self._lock = threading.Lock()
        self._checkpoints: list[Path] = []  # the one that the command runs for, the waiting one
        self._interrupted: Path | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether the command runs, or would with start_again."""
        return bool(self._checkpoints) or self._interrupted is not None

    def start(self, checkpoint: Path) -> list[str]:
        """Run the command for `checkpoint`, in its turn.

        Returns:
            The names of the checkpoints that must not be removed now.
        """
        with self._lock:
            if len(self._checkpoints) == 2:
                left_out = self._checkpoints.pop()
                self._warn(
                    f"checkpoint.after_save is not run for {left_out.name}: it still runs for "
                    f"{self._checkpoints[0].name}, and {checkpoint.name} is newer"
                )
            self._interrupted = None
            self._checkpoints.append(checkpoint)
            if len(self._checkpoints) == 1:
                self._thread = threading.Thread(target=self._work, name="after-save", daemon=True)
                self._thread.start()
            return [path.name for path in self._checkpoints]

    def start_again(self) -> None:
        """Run the command again for the newest checkpoint if it failed when the run was preempted:
        launchers and SLURM signal all processes of a rank, this command too.
        """
        if self._interrupted is not None:
            self.start(self._interrupted)

    def stop(self) -> None:
        """Stop the command, and wait for its end, some seconds at most."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(KILL_SECONDS + 2)

    def _work(self) -> None:
        while True:
            checkpoint, signal_before = self._checkpoints[0], self._preemption.signal
            problem = self._run(checkpoint)
            if problem:
                self._warn(
                    f"{checkpoint.name} is complete, but checkpoint.after_save failed: {problem}"
                )
            with self._lock:
                self._checkpoints.pop(0)
                if self._checkpoints:
                    continue
                if problem and self._preemption.signal != signal_before:
                    self._interrupted = checkpoint
                return

    def _warn(self, line: str) -> None:
        here = self._nodes.label(self._nodes.here)
        print(f"WARNING: {here}{line}", flush=True)

    def _run(self, checkpoint: Path) -> str | None:
        """Run the command once.

        Returns:
            Why it failed; None if it did not.
        """
        if self._stopping.is_set():
            return "not run: the run is ending"
        began, timeout_seconds = time.monotonic(), self._config.after_save_timeout_seconds
        try:
            self._nodes.lock.check()  # the folder may belong to another run by now
            with TemporaryFile() as output:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", self._config.after_save],
                    env={**os.environ, **self._variables(checkpoint)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the run, which then stops the command
                )
                why = None
                while process.poll() is None and why is None:
                    if self._stopping.wait(POLL_SECONDS):
                        why = "stopped, since the run is ending,"
                    elif time.monotonic() - began > timeout_seconds:
                        why = "stopped by checkpoint.after_save_timeout_seconds"
                if why is not None:
                    _end(process)
                elif process.returncode:
                    why = _describe_exit(process.returncode)
                if why is None:
                    return None
                return f"{why} after {duration(time.monotonic() - began)}{_last_words(output)}"
        except Exception as error:  # whatever it is, training goes on
            return describe(error)

    def _variables(self, checkpoint: Path) -> Mapping[str, str]:
        return {
            "CHECKPOINT": str(checkpoint.absolute()),
            "STEP": str(int(checkpoint.name.removeprefix("step_"))),
            "OUTPUT_DIR": str(self._nodes.lock.folder.absolute()),
            "NODE_RANK": str(list(self._nodes.members).index(self._nodes.here)),
        }


def _end(process: subprocess.Popen) -> None:
    """End a command and the processes that it has started."""
    deadline = time.monotonic() + KILL_SECONDS
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()  # a process that has ended is in its group until it is waited for
            os.killpg(process.pid, 0)
            time.sleep(POLL_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"


def _last_words(output: IO[bytes]) -> str:
    """The end of what a command printed, in one line without secrets; empty if it was silent."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - 4 * SHOWN_CHARACTERS))  # UTF-8 has up to 4 bytes per character
    text = redactor(os.environ)(output.read().decode(errors="replace"))
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f"; it said: {line[-SHOWN_CHARACTERS:].lstrip()}" if line else ""
