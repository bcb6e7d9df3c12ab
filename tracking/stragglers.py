"""Which ranks are slower than the others, window after window."""

import statistics
from collections.abc import Sequence

MARGIN = 0.15  # of the median
DEVIATIONS = 5.0  # standard deviations over the ranks, from the median absolute deviation
ERRORS = 4.0  # standard errors of the rank's mean over the steps of the window
SHARE_OF_STEP = 0.03  # less does not matter
WINDOWS = 3  # in a row
MAD_TO_DEVIATION = 1.4826  # for normally distributed values


class Stragglers:
    """Names ranks whose own time is above the median of all ranks for several windows in a row.

    The median and the median absolute deviation (Leys et al. 2013) are what half of the ranks
    agree on, however slow the others are. A fixed margin is needed too: over a few ranks, or equal
    ones, the deviation is nearly zero. And on a busy machine the mean over a window is itself
    uncertain, by its standard error. The lower median is used, so that of two ranks the slower one
    is compared with the faster one.
    """

    def __init__(self, world_size: int) -> None:
        self._windows = [0] * world_size  # in a row in which a rank was slow
        self._named: set[int] = set()

    def update(
        self, own_seconds: Sequence[float], errors: Sequence[float], step_seconds: float
    ) -> tuple[list[int], list[int]]:
        """Add a window.

        Args:
            own_seconds: of each rank, per step.
            errors: standard errors of these means.
            step_seconds: mean over the window, the same for all ranks.

        Returns:
            The ranks that are slow by now, and those of them that were not a window before.
        """
        middle = statistics.median_low(own_seconds)
        deviation = MAD_TO_DEVIATION * statistics.median_low(abs(x - middle) for x in own_seconds)
        least = max(MARGIN * middle, DEVIATIONS * deviation, SHARE_OF_STEP * step_seconds)
        for rank, (own, error) in enumerate(zip(own_seconds, errors, strict=True)):
            is_slow = own - middle > max(least, ERRORS * error)
            self._windows[rank] = self._windows[rank] + 1 if is_slow else 0
        slow = [rank for rank, count in enumerate(self._windows) if count >= WINDOWS]
        new = [rank for rank in slow if rank not in self._named]
        self._named = set(slow)
        return slow, new
