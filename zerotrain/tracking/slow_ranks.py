"""Ranks that are slow: every rank waits for the slowest one in each step, so all of them have the
same step time, and each one times what it computes while it waits for no other.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median_low

import numpy as np
import torch

COMPUTE_MARGIN = 0.25  # of the median rank's compute
WAIT_SHARE = 0.05  # of a step, spent waiting for data beyond the median rank's wait


def slow_ranks(by_rank: Sequence[Mapping[str, float]], step_seconds: float) -> list[int]:
    """The ranks that take longer than the median rank to compute, both in all and for their work,
    or that wait longer for data. The lower median is used, so that of two ranks the slower one is
    compared with the faster one.

    Args:
        by_rank: of each rank the means over some steps: compute_seconds, in which it waits for no
            other; work, what it computed, in FLOPs or supervised tokens; and data_seconds, in which
            it waits for data.
    """
    seconds, work, waits = (
        np.array([rank[name] for rank in by_rank])
        for name in ("compute_seconds", "work", "data_seconds")
    )
    paces = seconds / np.maximum(work, 1)  # a rank may have had no example
    times_median = np.minimum(seconds / median_low(seconds), paces / median_low(paces))
    is_late = waits > median_low(waits) + WAIT_SHARE * step_seconds
    return np.flatnonzero((times_median > 1 + COMPUTE_MARGIN) | is_late).tolist()


def gpu_health() -> dict[str, float]:
    """What NVIDIA's management library (NVML) says of this rank's GPU; empty without one."""
    with suppress(Exception):  # no GPU, no NVML, or a GPU that does not support a question
        return {
            "temperature_celsius": torch.cuda.temperature(),
            "sm_clock_mhz": torch.cuda.clock_rate(),
            "power_watts": torch.cuda.power_draw() / 1000,
        }
    return {}
