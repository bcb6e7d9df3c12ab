"""Ranks that are slow: every rank waits for the slowest one in each step, so all of them have the
same step time, and each one times a little work of its own.
"""

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean, median_low

import torch
from torch.utils.benchmark import Timer

from zerotrain.runtime.ranks import Ranks
from zerotrain.tracking.metrics import Metrics

WINDOW_STEPS = 50  # between two comparisons of the ranks
WINDOWS = 3  # in a row in which a rank is slow until it is reported
PROBE_MARGIN = 0.25  # of the median rank's probe
WAIT_SHARE = 0.05  # of a step, spent waiting for data beyond the median rank's wait
PROBE_REPEATS = 5


class RankComparison:
    """Compares the ranks every WINDOW_STEPS steps; all ranks call the same methods."""

    def __init__(self, metrics: Metrics, ranks: Ranks) -> None:
        self._metrics = metrics
        self._ranks = ranks
        self._window: list[Mapping[str, float]] = []  # what the loop has measured of each step
        self._windows_slow: Counter[int] = Counter()  # in a row, by rank
        place = f"{socket.gethostname()} (local rank {ranks.local_rank})"
        self._places = ranks.gather_json(place)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add what the loop has measured of a step. At the end of a window, report what each rank
        has measured in it, and which ones are slow.
        """
        self._window.append(values)
        if len(self._window) < WINDOW_STEPS:
            return
        measured = {
            "probe_seconds": probe_seconds(self._ranks.device),
            "data_seconds": fmean(step["data_seconds"] for step in self._window),
            "gpu": gpu_health(),
        }
        step_seconds = fmean(step["step_seconds"] for step in self._window)
        self._window.clear()
        by_rank = self._ranks.gather_json(measured)
        columns = {name: [rank[name] for rank in by_rank] for name in measured}
        record = {"step": step, "hosts": self._places, "step_seconds": step_seconds, **columns}
        self._metrics.log("ranks", record)
        slow = slow_ranks(columns["probe_seconds"], columns["data_seconds"], step_seconds)
        self._windows_slow = Counter({rank: self._windows_slow[rank] + 1 for rank in slow})
        for rank, windows in self._windows_slow.items():
            if windows == WINDOWS:
                name = f"rank {rank} @ {self._places[rank]}"
                text = f"{name} is slow, for {WINDOWS} x {WINDOW_STEPS} steps: {by_rank[rank]}"
                event = {"step": step, "name": "slow_rank", "text": text, "ranks": [rank]}
                self._metrics.log("event", event)


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


def gpu_health() -> dict[str, float] | None:
    """What NVIDIA's management library (NVML) says of this rank's GPU; None without one."""
    with suppress(Exception):  # no GPU, no NVML, or a GPU that does not support a question
        return {
            "temperature_celsius": torch.cuda.temperature(),
            "sm_clock_mhz": torch.cuda.clock_rate(),
            "power_watts": torch.cuda.power_draw() / 1000,
        }
    return None
