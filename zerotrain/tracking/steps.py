"""What is measured of steps: their phases and speed, ranks that are slow, profiles."""

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import fmean, median, median_low
from typing import Any

import numpy as np
import torch
from torch.profiler import profile, schedule, tensorboard_trace_handler

from zerotrain.checkpoint.state import Progress
from zerotrain.config.schema import Config
from zerotrain.data.data_plan import DataPlan
from zerotrain.data.loader import StepBatch
from zerotrain.data.plan import StepPlan
from zerotrain.runtime.agreement import gather_json
from zerotrain.runtime.machine import device_name, peak_flops_per_s
from zerotrain.runtime.process_group import Ranks
from zerotrain.tracking.metrics import Metrics
from zerotrain.training.guard import Problem
from zerotrain.training.setup import Setup
from zerotrain.training.states import GIB

WINDOW_STEPS = 50  # between two comparisons of the ranks
WINDOWS = 3  # in a row in which a rank is slow until it is reported
PROBE_MARGIN = 0.25  # of the median rank's probe
WAIT_SHARE = 0.05  # of a step, spent waiting for data beyond the median rank's wait
PROBE_REPEATS = 5
PROFILED_STEPS = 3


class PhaseTimer:
    """Seconds of each phase of a step, collectives in it included. On CUDA the marks are events in
    the stream of the computation, which cost microseconds and do not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def mark(self, phase: str) -> None:
        """The end of a phase, and the beginning of the next one."""
        if self._on_cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
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


class StepReporter:
    """Reports steps, and ranks that are slow; all ranks call the same methods.

    Args:
        setup: of the run, for the FLOPs of its model.
        start: the steps that are finished at the start of this process.
    """

    def __init__(
        self, setup: Setup, plan: DataPlan, metrics: Metrics, ranks: Ranks, start: Progress
    ) -> None:
        self._flops = setup.architecture.flops
        self._seconds: list[float] = []
        self._plan = plan
        self._metrics = metrics
        self._ranks = ranks
        self._on_cuda = ranks.device.type == "cuda"
        # of 16-bit matrix products; None if unknown
        self._peak_flops_per_s = (
            None if setup.precision == "fp32" else peak_flops_per_s(device_name(ranks.device))
        )
        self._step = start.step
        self._window: list[Mapping[str, float]] = []  # what the loop has measured of each step
        self._windows_slow: Counter[int] = Counter()  # in a row, by rank
        place = f"{socket.gethostname()} (local rank {ranks.local_rank})"
        self._places = gather_json(ranks, place)

    def report(self, batch: StepBatch, values: Mapping[str, float], progress: Progress) -> None:
        """Report a finished step. Counts are of the global batch, over all ranks.

        Args:
            values: what the loop has measured: loss, lr, step_seconds, data_seconds ...
        """
        plan = batch.plan
        step_seconds = values["step_seconds"]
        self._step = progress.step
        self._seconds.append(step_seconds)
        record = {
            "step": progress.step,
            "epoch": self._plan.epochs_at(progress.step),
            "examples": plan.examples,
            "tokens": plan.tokens,  # without padding
            "tokens_total": progress.tokens,
            "supervised_tokens": plan.supervised_tokens,
            "padding_efficiency": plan.tokens / plan.padded_tokens,
            "micro_steps": len(batch.micro_batches),
            "tokens_per_s": plan.tokens / step_seconds,
            **values,
        }
        if self._on_cuda:
            record["memory_peak_gib"] = torch.cuda.max_memory_allocated() / GIB  # of rank 0
        if self._ranks.is_first:
            lengths = self._plan.data.lengths[np.concatenate(examples_of_step(plan))]
            flops = self._flops.of_examples(lengths, plan.supervised_tokens)
            record["model_flops_per_s"] = flops / step_seconds
            if self._peak_flops_per_s is not None:
                peak = self._peak_flops_per_s * self._ranks.world_size
                record["mfu"] = record["model_flops_per_s"] / peak
        self._metrics.log("train", record)
        self._window.append(values)
        if len(self._window) == WINDOW_STEPS:
            self._compare_ranks()

    def summary(self) -> str:
        """The median time of a step and, on a GPU, the peak of rank 0's memory."""
        if not self._seconds:
            return ""
        text = f"median step {median(self._seconds):.3g} s; "
        if self._on_cuda:
            text += f"peak memory {torch.cuda.max_memory_allocated() / GIB:.2f} GiB on rank 0; "
        return text

    def report_event(self, name: str, text: str, **values: Any) -> None:
        """Report that something has happened after the last step."""
        event = {"step": self._step, "name": name, "text": text, **values}
        self._metrics.log("event", event)

    def report_problem(self, problem: Problem, batch: StepBatch) -> None:
        """Report what the guard found in a step, with the rows of the micro-batches whose own loss
        was not finite, or those of the whole step if there are none.
        """
        if not self._ranks.is_first:
            return
        micro_batches = batch.plan.micro_batches
        suspects = [micro_batches[i][rank] for i, rank in sorted(problem.micro_batches)]
        examples = np.concatenate(suspects or examples_of_step(batch.plan))
        rows = [self._plan.data.place_of(example) for example in examples.tolist()]
        self.report_event("skipped_step", f"{problem.reason}; the update is skipped", rows=rows)

    def _compare_ranks(self) -> None:
        """Report what each rank has measured in the window, and which ones are slow."""
        measured = {
            "probe_seconds": probe_seconds(self._ranks.device),
            "data_seconds": fmean(step["data_seconds"] for step in self._window),
            "gpu": gpu_health() if self._on_cuda else None,
        }
        step_seconds = fmean(step["step_seconds"] for step in self._window)
        self._window.clear()
        by_rank = gather_json(self._ranks, measured)
        columns = {name: [rank[name] for rank in by_rank] for name in measured}
        record = {"hosts": self._places, "step_seconds": step_seconds, **columns}
        self._metrics.log("ranks", {"step": self._step, **record})
        slow = slow_ranks(columns["probe_seconds"], columns["data_seconds"], step_seconds)
        self._windows_slow = Counter({rank: self._windows_slow[rank] + 1 for rank in slow})
        for rank, windows in self._windows_slow.items():
            if windows == WINDOWS:
                name = f"rank {rank} @ {self._places[rank]}"
                text = f"{name} is slow, for {WINDOWS} x {WINDOW_STEPS} steps: {by_rank[rank]}"
                self.report_event("slow_rank", text, ranks=[rank])


def examples_of_step(plan: StepPlan) -> list[np.ndarray]:
    """The examples of each micro-batch of a step, of all ranks."""
    return [examples for ranks in plan.micro_batches for examples in ranks]


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
    on_cuda = device.type == "cuda"
    size, dtype = (4096, torch.bfloat16) if on_cuda else (256, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(PROBE_REPEATS):
        began = time.perf_counter()
        product = matrix @ matrix @ matrix @ matrix
        product[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def gpu_health() -> dict[str, float] | None:
    """What NVIDIA's management library (NVML) says of this rank's GPU; None without it."""
    with suppress(Exception):  # no NVML, or a GPU that does not support a question
        return {
            "temperature_celsius": torch.cuda.temperature(),
            "sm_clock_mhz": torch.cuda.clock_rate(),
            "power_watts": torch.cuda.power_draw() / 1000,
        }
    return None


def open_profiler(config: Config, start: Progress, ranks: Ranks) -> profile | None:
    """A profiler of three steps of rank 0 from profile.start on, the one before them being its
    warm-up; None if there is nothing to profile. The loop calls step() after each step.
    """
    wait_steps = config.profile.start - start.step - 2
    if not ranks.is_first or wait_steps < 0:
        return None
    return profile(
        schedule=schedule(wait=wait_steps, warmup=1, active=PROFILED_STEPS, repeat=1),
        on_trace_ready=tensorboard_trace_handler(f"{config.output_dir}/profile", use_gzip=True),
    )
