"""Shows where a rank is while no step ends."""

import sys
import threading
import traceback

from zerotrain.runtime.errors import with_rank


class HangWatch:
    """Prints the stack of this rank once no step has ended for 9/10 of the process group's timeout,
    at which the ranks that wait in a collective fail.

    All ranks print theirs. The one that is not in the same collective as the others is the one
    that they wait for; one that prints nothing is stopped, or its host is lost.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._seconds = 0.9 * timeout_seconds
        self._timer: threading.Timer | None = None

    def restart(self) -> None:
        """Count from now on; called before every step, evaluation and save."""
        self.close()
        self._timer = threading.Timer(self._seconds, self._report)
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # a thread left at exit can abort the process

    def _report(self) -> None:
        stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident])
        text = f"no step has ended for {self._seconds:.0f} s; this rank is at:\n{''.join(stack)}"
        print(with_rank(text), file=sys.stderr, flush=True)
