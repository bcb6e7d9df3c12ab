"""Which ranks are slower than the others, window after window."""

from collections.abc import Sequence
from statistics import median_low

MARGIN = 0.25  # of the median rank's probe
WAIT_SHARE = 0.05  # of a step, spent waiting for data beyond the median rank's wait
WINDOWS = 3  # in a row


class Stragglers:
    """Names ranks whose probe is slower, or that wait longer for data, than the median rank, for
    several windows in a row. The lower median is used, so that of two ranks the slower one is
    compared with the faster one.
    """

    def __init__(self, world_size: int) -> None:
        self._windows_slow = [0] * world_size

    def update(
        self, probes: Sequence[float], waits: Sequence[float], step_seconds: float
    ) -> list[int]:
        """Add a window, and return the ranks that have just become slow.

        Args:
            probes: seconds of each rank's probe.
            waits: seconds per step that each rank has waited for data.
        """
        slow_probe = (1 + MARGIN) * median_low(probes)
        slow_wait = median_low(waits) + WAIT_SHARE * step_seconds
        for rank, (probe, wait) in enumerate(zip(probes, waits, strict=True)):
            is_slow = probe > slow_probe or wait > slow_wait
            self._windows_slow[rank] = self._windows_slow[rank] + 1 if is_slow else 0
        return [rank for rank, count in enumerate(self._windows_slow) if count == WINDOWS]
