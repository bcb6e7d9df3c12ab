"""Ranks that are slow: every rank waits for the slowest one in each step, so all of them have the
same step time, and each one times what it computes while it waits for no other.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_low

import numpy as np

COMPUTE_MARGIN = 0.25  # of the median rank's compute
WAIT_SHARE = 0.05  # of a step, spent waiting for data beyond the median rank's wait
WINDOWS = 3  # in a row in which a rank is slow until it is named
MEASURED = ("compute_seconds", "work", "data_seconds")


def slow_ranks(by_rank: Sequence[Mapping[str, float]], step_seconds: float) -> list[int]:
    """The ranks that take longer than the median rank to compute, both in all and for their work,
    or that wait longer for data. The lower median is used, so that of two ranks the slower one is
    compared with the faster one.

    Args:
        by_rank: of each rank, of which there is at least one, the means over some steps, NaN if
            unknown: compute_seconds, in which it waits for no other; work, what it computed, in
            FLOPs or supervised tokens; and data_seconds, in which it waits for data.
    """
    seconds, work, waits = (np.array([rank[name] for rank in by_rank]) for name in MEASURED)
    paces = seconds / np.maximum(work, 1)  # a rank may have had no example
    longest, slowest = ((1 + COMPUTE_MARGIN) * median_low(each) for each in (seconds, paces))
    is_late = waits > median_low(waits) + WAIT_SHARE * step_seconds
    return np.flatnonzero((seconds > longest) & (paces > slowest) | is_late).tolist()


class SlowRanks:
    """Finds the ranks that are slow in WINDOWS windows in a row of a run."""

    def __init__(self) -> None:
        self._windows_slow = Counter()  # in a row, by rank

    def add(self, by_rank: Sequence[Mapping[str, float]], step_seconds: float) -> list[int]:
        """The ranks to name after another window: each once, not every window from then on. Its
        values are those of slow_ranks(); an empty one starts the counts again.
        """
        slow = slow_ranks(by_rank, step_seconds) if by_rank else []
        # a rank that was not slow this time is left out, so that its count starts again
        self._windows_slow = Counter({rank: self._windows_slow[rank] + 1 for rank in slow})
        return [rank for rank, windows in self._windows_slow.items() if windows == WINDOWS]
