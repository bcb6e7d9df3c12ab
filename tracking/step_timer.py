"""Where the time of a rank's steps goes."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.utils import z3_leaf_module
from torch import nn

FORWARD, BACKWARD, UPDATE, END = "forward", "backward", "optimizer", "end"

Mark = float | torch.cuda.Event
"""A point in time: seconds on CPU, an event in the stream of the computation on CUDA."""


class StepTimes(NamedTuple):
    """Of one rank and one step, in seconds."""

    parts: dict[str, float]
    """forward_seconds, backward_seconds and optimizer_seconds; collectives in them are included."""
    own: float
    """What no collective hides: the host between batch and forward pass, and the forward pass,
    under ZeRO 3 without its gathers.
    """


class StepTimer:
    """Times the parts of a step, and what a rank has spent on its own.

    A rank that waits in a collective for a slow one takes as long as that one. Its own time is
    measured where there are no collectives: in the forward pass, which under ZeRO 3 means in the
    modules between two gathers. On CUDA the marks are events, which cost microseconds and do not
    wait for the device; they are read once the step has ended.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, device: torch.device) -> None:
        """Add hooks to the engine, and to its modules under ZeRO 3."""
        self._on_cuda, self._is_on = device.type == "cuda", False
        self._marks: list[tuple[str, Mark]] = []
        self._spans: list[tuple[Mark, Mark]] = []  # in modules between gathers
        self._began, self._host_seconds = 0.0, 0.0
        self._entered: dict[nn.Module, Mark] = {}
        engine.register_forward_pre_hook(lambda *_: self._forward_begins())
        backward, step = engine.backward, engine.step
        engine.backward = lambda *args, **options: self._between(
            BACKWARD, lambda: backward(*args, **options), UPDATE
        )
        engine.step = lambda: self._between(None, step, END)
        self._has_gathers = engine.zero_optimization_stage() == 3
        for module in units(engine.module) if self._has_gathers else ():
            # inside of DeepSpeed's own hooks, which gather and release the weights
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, prepend=True)

    def begin(self) -> None:
        """The batch is there."""
        self._marks.clear()
        self._spans.clear()
        self._began, self._is_on = time.perf_counter(), True

    def end(self) -> StepTimes:
        """The times of the step; waits until the device has finished it."""
        self._is_on = False
        if self._on_cuda and self._marks:
            self._marks[-1][1].synchronize()  # CUDA cannot read an event that is still to come
        parts: Counter[str] = Counter()
        for (name, mark), (following, end) in pairwise(self._marks):
            if (name, following) != (UPDATE, FORWARD):  # from one micro-step to the next
                parts[f"{name}_seconds"] += self._seconds(mark, end)
        forward = sum(self._seconds(*span) for span in self._spans)
        if not self._has_gathers:
            forward = parts[f"{FORWARD}_seconds"]
        return StepTimes(dict(parts), self._host_seconds + forward)

    def _between(self, name: str | None, work: Callable[[], Any], following: str) -> Any:
        if name is not None:
            self._add(name)
        result = work()
        self._add(following)
        return result

    def _forward_begins(self) -> None:
        if self._is_on and not self._marks:
            self._host_seconds = time.perf_counter() - self._began
        self._add(FORWARD)

    def _add(self, name: str) -> None:
        if self._is_on:
            self._marks.append((name, self._now()))

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if self._is_on:
            self._entered[module] = self._now()

    def _leave(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._is_on and (entered := self._entered.pop(module, None)) is not None:
            self._spans.append((entered, self._now()))

    def _now(self) -> Mark:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Mark, end: Mark) -> float:
        return begin.elapsed_time(end) / 1000 if self._on_cuda else end - begin


def units(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that ZeRO 3 gathers at once, and that have a matrix: no collective is inside of
    them.
    """
    children = [m for m in module.children() if any(True for _ in m.parameters())]
    if z3_leaf_module(module) or not children:
        if any(len(p.ds_shape) > 1 for p in module.parameters()):
            yield module
        return
    for child in children:
        yield from units(child)


class WindowTimes:
    """The times of a rank over the steps of a window, in seconds."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._times: list[tuple[float, float, float]] = []

    def add(self, own_seconds: float, data_seconds: float, step_seconds: float) -> None:
        """Of a step; own_seconds without the others."""
        self._times.append((own_seconds + data_seconds, data_seconds, step_seconds))

    @property
    def is_full(self) -> bool:
        return len(self._times) == self.steps

    def take(self) -> tuple[float, float, float, float]:
        """Means per step: its own time, waiting for data included; the standard error of that;
        waiting for data; the whole step. Then a new window begins.
        """
        own, data, steps = zip(*self._times, strict=True)
        error = statistics.stdev(own) / len(own) ** 0.5 if len(own) > 1 else 0.0
        self._times = []
        return statistics.fmean(own), error, statistics.fmean(data), statistics.fmean(steps)
