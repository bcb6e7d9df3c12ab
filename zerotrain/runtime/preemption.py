"""Preemption: SIGTERM and SIGUSR1 are recorded until the training loop has saved. A rank whose
launcher has ended gets SIGTERM too.
"""

import atexit
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
TIDY_SECONDS = 20.0
"""Time for `finally` blocks, where W&B takes up to 10 s. DeepSpeed's launcher kills after 30 s."""


class PreemptionHandler:
    """Receives SIGTERM and SIGUSR1, with which a scheduler or a launcher preempts a run.

    Within `deferred`, the first signal is recorded for the training loop, which saves and exits.
    Before that there is nothing to save, and the signal ends the process.

    Python runs signal handlers only in the main thread, and only while that thread executes Python
    code. A thread that waits in a collective for a failed rank does not. So a second thread waits
    for the first signal too, and ends the process after the grace period.

    Args:
        grace_seconds: time for the loop to save and exit.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.signal: int | None = None
        self.grace_seconds = grace_seconds
        self._deferred = False
        self._noticed, self._notice = socket.socketpair()
        self._notice.setblocking(False)
        # CPython's handler in C writes each signal's number there, whatever the main thread does.
        signal.set_wakeup_fd(self._notice.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGINT):
            signal.signal(number, self._receive)
            # While it shuts down, Python restores the default handler of a signal that has one.
            atexit.register(signal.signal, number, signal.SIG_IGN)
        threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()

    def _receive(self, number: int, frame: object) -> None:
        """Record the first signal, or exit. Ctrl-C exits even in the loop. Later signals, which
        launchers send too, do not interrupt the `finally` blocks.
        """
        is_first = self.signal is None
        self.signal = self.signal or number
        if number == signal.SIGINT or (is_first and not self._deferred):
            sys.exit(128 + number)  # a shell's code for a signal; `finally` blocks run

    def _watch(self) -> None:
        number = 0
        while number not in STOP_SIGNALS:
            number = self._noticed.recv(1)[0]
        seconds = self.grace_seconds if self._deferred else TIDY_SECONDS
        time.sleep(seconds)
        print(
            f"{rank_prefix()}received {signal.Signals(number).name} {seconds:.0f} s ago and is "
            "still running: exiting without another save",
            file=sys.stderr,
        )
        os._exit(128 + number)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Return a context in which the first signal is only recorded. After a clean end, later
        signals are only recorded as well: this rank's signal may arrive after another rank's has
        ended the loop. The process then exits with the code of the run, or after the grace period.
        """
        self._deferred = True
        yield
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def follow_launcher() -> None:
    """Send this rank SIGTERM, as at a preemption, when its launcher has ended. Its launcher is
    torchrun, or DeepSpeed's launcher and the `deepspeed` command above it.

    Otherwise the rank would train unattended, with the GPUs and the lock of the run folder. A
    launcher that is killed leaves its ranks running; so does `deepspeed` on SIGTERM, which a user
    or a scheduler sends.
    """
    # CROSS_SIZE is a variable of DeepSpeed's launcher alone.
    depth = 2 if "CROSS_SIZE" in os.environ else int("TORCHELASTIC_RUN_ID" in os.environ)
    if not depth:
        return
    launchers = psutil.Process().parents()[:depth]
    # If one was killed before this line, another process has adopted its child: init, or a user's
    # systemd. Launchers are in Python, and in a container init may be one. Above DeepSpeed's
    # launcher is, on other hosts, a shell or sshd.
    above = launchers[-1]
    is_adopted = "python" not in "".join(launchers[0].cmdline()[:1])
    if depth == 2 and "python" not in "".join(above.cmdline()[:1]):
        is_adopted |= above.pid == 1 or above.name() == "systemd"
    if is_adopted:
        sys.exit(128 + signal.SIGTERM)

    def watch() -> None:
        # Compare parents: a process that has ended may stay as a zombie.
        while psutil.Process().parents()[:depth] == launchers:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
