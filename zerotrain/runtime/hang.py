"""Show where each rank is, and what it has called, when no step ends."""

import faulthandler
import os
import subprocess
import sys
import threading
from pathlib import Path

from torch._C import _distributed_c10d as c10d

from zerotrain.runtime.errors import rank_prefix
from zerotrain.runtime.files import replace_text


class HangWatch:
    """Prints the stacks of this rank's threads when no step has ended for 9/10 of the process
    group's timeout, and when this process crashes in C. At the timeout, ranks that wait in a
    collective fail.

    All ranks print their stacks. The others wait for a rank that is not in the same collective. A
    rank that prints nothing is stopped, or its host is lost. Each rank also writes its last
    collectives to the run folder, unless C code keeps Python's lock.
    """

    def __init__(self, timeout_seconds: float, run_folder: str) -> None:
        self._seconds = 0.9 * timeout_seconds
        self._file = Path(run_folder, f"collectives_{os.environ['RANK']}")
        self._timer = threading.Timer(0, print)
        # faulthandler prints even while no Python code runs. It needs a real file, so another
        # process adds the rank's prefix.
        self._sed = subprocess.Popen(
            ["sed", "-u", f"s|^|{rank_prefix()}|"],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )
        faulthandler.enable(self._sed.stdin)

    def restart(self) -> None:
        """Start the count again; to be called before every step, evaluation and save."""
        faulthandler.dump_traceback_later(self._seconds, file=self._sed.stdin)
        self._timer.cancel()
        self._timer = threading.Timer(self._seconds, self._record)
        self._timer.start()

    def _record(self) -> None:
        """Write this rank's last collectives, of gloo and of NCCL, as torch has recorded them."""
        dumps = [getattr(c10d, name)() for name in dir(c10d) if name.endswith("_trace_json")]
        replace_text(self._file, b"\n".join([rank_prefix().encode(), *dumps]).decode())
        command = f"python -m scripts.who_waits {self._file.parent}\n"
        print(f"which rank do they wait for? {command}", end="")  # one write: ranks share the pipe

    def close(self) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        self._sed.communicate()
