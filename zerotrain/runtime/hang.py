"""Show where each rank is, and what it has called, when no step ends."""

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from torch._C import _distributed_c10d as c10d

from zerotrain.runtime.errors import rank_prefix
from zerotrain.runtime.files import replace_text

ABORTED = "Fatal Python error: Aborted"
LIBC = ctypes.CDLL(None)


class HangWatch:
    """Prints the stacks of this rank's threads when no step has ended for 9/10 of the process
    group's timeout, and when this process crashes in C. At the timeout, ranks that wait in a
    collective fail.

    All ranks print their stacks. The others wait for a rank that is not in the same collective. A
    rank that prints nothing is stopped, or its host is lost. Each rank also writes its last
    collectives to the run folder, unless C code keeps Python's lock.

    If ranks call collectives of different sizes, gloo aborts the process that receives too much,
    often an innocent one, and the others lose their connection to it. They write their collectives,
    too.
    """

    def __init__(self, timeout_seconds: float, run_folder: str) -> None:
        self._seconds = 0.9 * timeout_seconds
        self._file = Path(run_folder, f"collectives_{os.environ['RANK']}")
        self._timer = threading.Timer(0, print)
        # faulthandler prints even while no Python code runs. It needs a real file, so another
        # process adds the rank's prefix. It also tells a thread of this process of an abort.
        aborted, told = os.pipe()
        self._sed = subprocess.Popen(
            ["sed", "-u", "-e", f"/{ABORTED}/w /dev/fd/{told}", "-e", f"s|^|{rank_prefix()}|"],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            pass_fds=[told],
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )
        os.close(told)
        threading.Thread(target=self._end_after_abort, args=(aborted,), daemon=True).start()
        # faulthandler calls the earlier handler after it has printed. No Python code can run in it.
        # sleep(SIGABRT) lets that thread run for 6 s, and the next SIGABRT ends the process.
        LIBC.sysv_signal(signal.SIGABRT, LIBC.sleep)
        faulthandler.enable(self._sed.stdin)

    def restart(self) -> None:
        """Start the count again; to be called before every step, evaluation and save."""
        faulthandler.dump_traceback_later(self._seconds, file=self._sed.stdin)
        self._timer.cancel()
        self._timer = threading.Timer(self._seconds, self._record)
        self._timer.start()

    def _end_after_abort(self, aborted: int) -> None:
        """Wait until this process is about to be aborted. Write its collectives and end it."""
        with open(aborted, "rb") as pipe:
            if pipe.read(1):
                self._record("aborted in C; if its ranks have called other collectives:")
                LIBC.signal(signal.SIGABRT, None)
                os.kill(os.getpid(), signal.SIGABRT)

    def _record(self, why: str = "which rank do they wait for?") -> None:
        """Write this rank's last collectives, of gloo and of NCCL, as torch has recorded them.

        Args:
            why: text before the command that compares the ranks' collectives; "" prints nothing.
        """
        dumps = [getattr(c10d, name)() for name in dir(c10d) if name.endswith("_trace_json")]
        replace_text(self._file, b"\n".join([rank_prefix().encode(), *dumps]).decode())
        command = f"python -m scripts.who_waits {self._file.parent}\n"
        print(f"{why} {command}" * bool(why), end="", flush=True)  # one write: ranks share the pipe

    def close(self) -> None:
        """Stop the watch. If a collective of gloo has failed, write this rank's collectives."""
        if "/gloo/" in str(sys.exception()):
            self._record("")
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        self._sed.communicate()
