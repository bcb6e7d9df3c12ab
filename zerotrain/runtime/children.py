"""Processes that end with the process that has started them."""

import ctypes
import signal

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that has started it ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
