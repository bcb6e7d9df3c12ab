"""Ranks that are slow: every rank waits for the slowest one in each step, so all of them have the
same step time, and each one times a little work of its own.
"""

from collections.abc import Sequence
from contextlib import suppress
from statistics import median_low

import torch
from torch.utils.benchmark import Timer

PROBE_MARGIN = 0.25  # of the median rank's probe
WAIT_SHARE = 0.05  # of a step, spent waiting for data beyond the median rank's wait
PROBE_REPEATS = 5


def slow_ranks(probes: Sequence[float], waits: Sequence[float], step_seconds: float) -> list[int]:
    """The ranks whose probe is slower, or that wait longer for data, than the median rank. The
    lower median is used, so that of two ranks the slower one is compared with the faster one.

    Args:
        probes: seconds of each rank's probe.
        waits: seconds per step that each rank has waited for data.
    """
    slow_probe = (1 + PROBE_MARGIN) * median_low(probes)
    slow_wait = median_low(waits) + WAIT_SHARE * step_seconds
    measured = enumerate(zip(probes, waits, strict=True))
    return [rank for rank, (probe, wait) in measured if probe > slow_probe or wait > slow_wait]


def probe_seconds(device: torch.device) -> float:
    """The time of a few matrix products on this rank alone, the fastest of several tries, so that
    only what is slow all the time counts. It takes some milliseconds and, on a GPU, 100 MB.
    """
    size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    timer = Timer("matrix @ matrix @ matrix @ matrix", globals={"matrix": matrix})
    return min(timer.timeit(1).mean for _ in range(PROBE_REPEATS))


def gpu_health() -> dict[str, float]:
    """What NVIDIA's management library (NVML) says of this rank's GPU; empty without one."""
    with suppress(Exception):  # no GPU, no NVML, or a GPU that does not support a question
        return {
            "temperature_celsius": torch.cuda.temperature(),
            "sm_clock_mhz": torch.cuda.clock_rate(),
            "power_watts": torch.cuda.power_draw() / 1000,
        }
    return {}
