"""Preemption: SIGTERM and SIGUSR1 are recorded until the training loop has saved."""

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from zerotrain.runtime.errors import exit_code_of_signal, rank_prefix

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
RUNNER_POLL_SECONDS = 1.0
DEEPSPEED_KILL_SECONDS = 30.0  # deepspeed/launcher/launch.py, terminate_process_tree
TIDY_SECONDS = 5.0  # for the `finally` blocks of a process that exits without saving
ONE_SIGNAL_SECONDS = 1.0  # two launchers may both forward the same signal


class PreemptionHandler:
    """Receives SIGTERM and SIGUSR1, with which a scheduler or a launcher preempts a run.

    While `deferred`, the first signal is recorded for the training loop, which saves and exits; a
    second one ends the process at once. At other times there is nothing to save, and the first
    signal ends the process.

    Python runs signal handlers only in the main thread, and only when that thread is executing
    Python. A thread that waits in a collective for a failed rank never is. A second thread
    therefore watches the signals too, and ends the process when the grace period is over.

    Args:
        grace_seconds: how long the loop may take to save and exit.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.signal: int | None = None
        self.grace_seconds = grace_seconds
        self._deferred = False
        self._first_at = 0.0
        self._noticed, notice = socket.socketpair()
        notice.setblocking(False)
        self._notice = notice  # CPython's C handler writes the signal's number here at once
        signal.set_wakeup_fd(notice.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)
        threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()

    @property
    def seconds_left(self) -> float:
        """Of the grace period; infinite before a signal."""
        if self.signal is None:
            return math.inf
        return self._first_at + self.grace_seconds - time.monotonic()

    def _receive(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if not self._deferred or (self.signal and now - self._first_at > ONE_SIGNAL_SECONDS):
            sys.exit(exit_code_of_signal(number))  # runs every `finally` block
        if self.signal is None:
            self.signal, self._first_at = number, now

    def _watch(self) -> None:
        first, first_at, exit_at = 0, 0.0, math.inf
        while (now := time.monotonic()) < exit_at:
            self._noticed.settimeout(None if exit_at == math.inf else exit_at - now)
            with suppress(TimeoutError):
                number = self._noticed.recv(1)[0]
                if number not in STOP_SIGNALS:
                    continue
                now = time.monotonic()
                if not first:
                    first, first_at = number, now
                    exit_at = now + (self.grace_seconds if self._deferred else TIDY_SECONDS)
                elif now - first_at > ONE_SIGNAL_SECONDS:
                    exit_at = min(exit_at, now + TIDY_SECONDS)
        print(
            f"{rank_prefix()}{signal.Signals(first).name} {time.monotonic() - first_at:.0f} s ago, "
            "and this rank has not finished: exiting without another save",
            file=sys.stderr,
            flush=True,
        )
        os._exit(exit_code_of_signal(first))

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A context in which the first signal is only recorded."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False


def follow_launcher() -> bool:
    """Terminate DeepSpeed's launcher when its parent, the runner, has ended.

    A user or a scheduler stops the runner. On SIGTERM it exits without stopping the launcher that
    it started, which would continue to train unattended. The launcher stops its ranks on SIGTERM.

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
