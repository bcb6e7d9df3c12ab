"""How long the phases of a step take, and how fast this rank's device is."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event
"""A point in time: seconds on CPU, an event in the stream of the computation on CUDA."""

PROBE_REPEATS = 5


class PhaseTimer:
    """Seconds of each phase of a step, collectives in it included. On CUDA the marks are events,
    which cost microseconds and do not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._spans: list[tuple[str, Mark, Mark]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self._mark()
        yield
        self._spans.append((name, begin, self._mark()))

    def take(self) -> dict[str, float]:
        """NAME_seconds of the phases since the last call; waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
        seconds: Counter[str] = Counter()
        for name, begin, end in self._spans:
            elapsed = begin.elapsed_time(end) / 1000 if self._on_cuda else end - begin
            seconds[f"{name}_seconds"] += elapsed
        self._spans.clear()
        return dict(seconds)

    def _mark(self) -> Mark:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def probe_seconds(device: torch.device) -> float:
    """The time of a few matrix products on this rank alone, the fastest of several tries, so that
    only what is slow all the time counts. It takes some milliseconds and, on a GPU, 100 MB.
    """
    on_cuda = device.type == "cuda"
    size, dtype = (4096, torch.bfloat16) if on_cuda else (256, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(PROBE_REPEATS):
        began = time.perf_counter()
        product = matrix
        for _ in range(4):
            product = product @ matrix
        product[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    return min(seconds)
