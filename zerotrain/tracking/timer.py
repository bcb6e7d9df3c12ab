"""How long the phases of a step take."""

import time
from collections import Counter
from itertools import pairwise

import torch


class PhaseTimer:
    """Seconds of each phase of a step, collectives in it included. On CUDA the marks are events in
    the stream of the computation, which cost microseconds and do not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def mark(self, phase: str) -> None:
        """The end of a phase, and the beginning of the next one."""
        now = torch.cuda.Event(enable_timing=True) if self._on_cuda else time.perf_counter()
        if self._on_cuda:
            now.record()
        self._marks.append((phase, now))

    def take(self) -> dict[str, float]:
        """PHASE_seconds of the phases since the first mark; waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
        seconds: Counter[str] = Counter()
        for (_, begin), (phase, end) in pairwise(self._marks):
            elapsed = begin.elapsed_time(end) / 1000 if self._on_cuda else end - begin
            seconds[f"{phase}_seconds"] += elapsed
        self._marks.clear()
        return dict(seconds)
