"""Preemption: SIGTERM and SIGUSR1 are recorded until the training loop has saved. They are also
what is left of a launcher that was killed.
"""

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from zerotrain.runtime.errors import rank_prefix

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# for `finally` blocks, of which W&B's takes up to 10 s; DeepSpeed's launcher waits longer
TIDY_SECONDS = 20.0


class PreemptionHandler:
    """Receives SIGTERM and SIGUSR1, with which a scheduler or a launcher preempts a run.

    While `deferred`, the first signal is recorded for the training loop, which saves and exits.
    Before, there is nothing to save, and the signal ends the process.

    Python runs signal handlers only in the main thread, and only when that thread is executing
    Python. A thread that waits in a collective for a failed rank never is. A second thread
    therefore waits for the first signal too, and ends the process when the grace period is over.

    Args:
        grace_seconds: how long the loop may take to save and exit.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.signal: int | None = None
        self.grace_seconds = grace_seconds
        self._deferred = False
        self._noticed, self._notice = socket.socketpair()
        self._notice.setblocking(False)
        # CPython's C handler writes the signal's number there at once
        signal.set_wakeup_fd(self._notice.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGINT):
            signal.signal(number, self._receive)
            # Python restores the default handlers while it shuts down, but not for ignored signals
            atexit.register(signal.signal, number, signal.SIG_IGN)
        threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()

    def _receive(self, number: int, frame: object) -> None:
        """Ctrl-C ends the process even in the loop. What a launcher sends on top of a signal does
        not interrupt the `finally` blocks.
        """
        is_first = self.signal is None
        self.signal = self.signal or number
        if number == signal.SIGINT or (is_first and not self._deferred):
            sys.exit(128 + number)  # as a shell reports it; runs every `finally` block

    def _watch(self) -> None:
        number = 0
        while number not in STOP_SIGNALS:
            number = self._noticed.recv(1)[0]
        seconds = self.grace_seconds if self._deferred else TIDY_SECONDS
        time.sleep(seconds)
        print(
            f"{rank_prefix()}{signal.Signals(number).name} {seconds:.0f} s ago, and this rank has "
            "not finished: exiting without another save",
            file=sys.stderr,
        )
        os._exit(128 + number)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A context in which the first signal is only recorded. If it ends without an error, so is
        one that comes later: another rank's signal may have ended the loop before this rank's
        arrives, and the process exits with the code of the run, or after the grace period.
        """
        self._deferred = True
        yield
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def follow_launcher() -> None:
    """End with the launcher, torchrun's or DeepSpeed's, that has started this rank: if it is
    killed, the rank gets SIGTERM, as at a preemption. And terminate DeepSpeed's launcher when its
    parent, the runner, has ended.

    A user or a scheduler stops the runner. On SIGTERM it exits without stopping the launcher that
    it started, which would continue to train unattended. The launcher stops its ranks on SIGTERM,
    and kills them 30 s later.
    """
    has_runner = "CROSS_SIZE" in os.environ  # a variable of DeepSpeed's launcher alone
    if not has_runner and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    launcher = psutil.Process(os.getppid())
    runner = launcher.ppid()
    # Where one was killed before that, its child is init's. In a container init may be a launcher.
    is_orphan = 1 in (launcher.pid, has_runner and runner)
    if is_orphan and "python" not in psutil.Process(1).cmdline()[0]:
        sys.exit(128 + signal.SIGTERM)

    def watch() -> None:
        while launcher.is_running():
            # not by waiting for the runner: one that has ended may stay a zombie
            if launcher.ppid() != runner:
                launcher.terminate()
                return
            time.sleep(1)

    if has_runner:
        threading.Thread(target=watch, daemon=True).start()
