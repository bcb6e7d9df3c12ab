"""Show where each rank is when no step ends."""

import faulthandler
import os
import subprocess
import sys

from zerotrain.runtime.errors import rank_prefix


class HangWatch:
    """Prints the stacks of this rank's threads when no step has ended for 9/10 of the process
    group's timeout. At the timeout, ranks that wait in a collective fail.

    All ranks print their stacks. The others wait for a rank that is not in the same collective. A
    rank that prints nothing is stopped, or its host is lost.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._seconds = 0.9 * timeout_seconds
        # faulthandler prints even while no Python code runs. It needs a real file, so another
        # process adds the rank's prefix.
        self._sed = subprocess.Popen(
            ["sed", "-u", f"s|^|{rank_prefix()}|"],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )

    def restart(self) -> None:
        """Start the count again; to be called before every step, evaluation and save."""
        faulthandler.dump_traceback_later(self._seconds, file=self._sed.stdin)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._sed.communicate()
