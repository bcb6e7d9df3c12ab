"""The records of a run as tools read them, and which ranks they show to be slow.

All ranks have the same step time, because each step waits for the slowest rank. So every rank
measures how long it computes without waiting for another.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np

from zerotrain.checkpoint.manifest import stat_inside
from zerotrain.tracking.metrics import metrics_lines, number, parse_record

PHASES = [f"{phase}_seconds" for phase in ("data", "forward", "head", "backward", "optimizer")]
COMPUTE_MARGIN = 0.25  # A slow rank computes this much longer than the median rank.
WAIT_SHARE = 0.05  # Or it waits longer for data, by this share of a step.
WINDOWS = 3  # A rank is named once it is slow in as many windows in a row.
MAX_STALLS_BYTES = 1 << 24
STALLS = "stalls.jsonl"
"""File in a run folder: when a host did not run, and for how long, as its launcher saw it."""
MEASURED = ("compute_seconds", "work", "data_seconds")


def read_metrics(run_folder: str | Path, kind: str = "train") -> list[dict[str, Any]]:
    """Return the records of one kind in a run's metrics.jsonl, oldest first. Each has `kind` and
    `step`; other values may be NaN or infinite. Malformed lines are skipped.

    Raises:
        UserError: the folder has no metrics.jsonl that can be read.
    """
    records = filter(None, map(parse_record, metrics_lines(run_folder)))
    return [record for record in records if record["kind"] == kind]


def slow_ranks(by_rank: Sequence[Mapping[str, float]], step_seconds: float) -> list[int]:
    """Return the ranks that are slow in one window of steps.

    A rank is slow if it computes longer than the median rank, in all and per unit of work, or if it
    waits longer for data. The lower median is used: the slower of two ranks is compared with the
    faster.

    Args:
        by_rank: means over the steps, of at least one rank, NaN if unknown: compute_seconds, in
            which the rank waits for no other rank; work, in FLOPs or supervised tokens; and
            data_seconds, in which it waits for data.
    """
    seconds, work, waits = (np.array([rank[name] for rank in by_rank]) for name in MEASURED)
    paces = seconds / np.maximum(work, 1)  # A rank may have had no example.
    longest, slowest = ((1 + COMPUTE_MARGIN) * median_low(each) for each in (seconds, paces))
    is_late = waits > median_low(waits) + WAIT_SHARE * step_seconds
    return np.flatnonzero((seconds > longest) & (paces > slowest) | is_late).tolist()


def read_stalls(run_folder: Path) -> list[tuple[float, str, float]]:
    """Return when a host of a run did not run, its name, and for how many seconds, oldest first.
    Lines that cannot be read are skipped, and all lines of a file that is too large.
    """
    found = []
    with suppress(OSError, ValueError):
        stat_inside(run_folder, STALLS, MAX_STALLS_BYTES)
        for line in (run_folder / STALLS).read_bytes().splitlines():
            with suppress(ValueError, LookupError, TypeError, RecursionError):
                record = json.loads(line)
                when, seconds = number(record["time"]), number(record["stalled_seconds"])
                found.append((when, str(record["host"]), seconds))
    return found


class SlowRanks:
    """Finds the ranks that are slow in WINDOWS consecutive windows of a run."""

    def __init__(self) -> None:
        self._windows_slow = Counter()  # consecutive windows, by rank

    def add(self, by_rank: Sequence[Mapping[str, float]], step_seconds: float) -> list[int]:
        """Add a window, with the arguments of slow_ranks(), and return the ranks to name now. Each
        is named once. A window without ranks starts the counts again.
        """
        slow = slow_ranks(by_rank, step_seconds) if by_rank else []
        self._windows_slow = Counter({rank: self._windows_slow[rank] + 1 for rank in slow})
        return [rank for rank, windows in self._windows_slow.items() if windows == WINDOWS]
