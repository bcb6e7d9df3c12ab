"""Shows where a rank is while no step ends."""

import faulthandler
import os
import subprocess
import sys

from zerotrain.runtime.errors import rank_prefix


class HangWatch:
    """Prints the stacks of this rank's threads once no step has ended for 9/10 of the process
    group's timeout, at which the ranks that wait in a collective fail.

    All ranks print theirs. The one that is not in the same collective as the others is the one
    that they wait for; one that prints nothing is stopped, or its host is lost.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._seconds = 0.9 * timeout_seconds
        # faulthandler prints even while no Python runs, into a file; sed says of which rank it is
        self._sed = subprocess.Popen(
            ["sed", "-u", f"s|^|{rank_prefix()}|"],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )

    def restart(self) -> None:
        """Count from now on; called before every step, evaluation and save."""
        faulthandler.dump_traceback_later(self._seconds, file=self._sed.stdin)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._sed.communicate()
