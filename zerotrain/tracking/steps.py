"""How long the phases of a step take, what is reported of each step and of each rank, and traces of
some steps, for https://ui.perfetto.dev.
"""

import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from statistics import fmean

import numpy as np
import torch
from torch.profiler import profile, schedule, tensorboard_trace_handler

from zerotrain.checkpoint.run_folder import PROFILE_NOW, take_request
from zerotrain.checkpoint.state import Progress
from zerotrain.config.ds_config import zero_stage
from zerotrain.data.data_plan import DataPlan
from zerotrain.data.loader import StepBatch
from zerotrain.runtime.machine import GIB, device_name, gpu_health, peak_flops_per_s
from zerotrain.runtime.ranks import Ranks
from zerotrain.tracking.metrics import Metrics
from zerotrain.training.guard import Problem
from zerotrain.training.setup import Setup

WINDOW_STEPS = 50  # between two records of what each rank has measured
TRACED_STEPS = 3


class PhaseTimer:
    """Seconds of each phase of a step, collectives in it included. On CUDA the marks are events in
    the stream of the computation, which cost microseconds and do not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks = []  # phase and end of each: in seconds, or an event on a GPU

    def mark(self, phase: str) -> None:
        """The end of a phase, and the beginning of the next one."""
        now = time.perf_counter()
        if self._on_cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((phase, now))

    def take(self) -> dict[str, float]:
        """PHASE_seconds of the phases since the first mark; waits for the device."""
        if self._on_cuda:  # an event has a time once the stream has passed it
            torch.cuda.synchronize()
        seconds = Counter()
        for (_, begin), (phase, end) in pairwise(self._marks):
            elapsed = begin.elapsed_time(end) / 1000 if self._on_cuda else end - begin
            seconds[f"{phase}_seconds"] += elapsed
        self._marks.clear()
        return dict(seconds)


class StepReporter:
    """Reports steps, and what each rank has measured; all ranks call the same methods."""

    def __init__(self, setup: Setup, plan: DataPlan, metrics: Metrics, ranks: Ranks) -> None:
        self._flops = setup.architecture.flops
        # of a step: its seconds, of them for data and for compute, and this rank's share of work
        self._window = []
        self._stage = zero_stage(setup.ds_config)
        self._plan = plan
        self._metrics = metrics
        self._ranks = ranks
        self._tracing = trace_on_request(setup.config.output_dir)
        is_16_bit = setup.config.train.precision != "fp32"
        self.peak_flops_per_s = peak_flops_per_s(device_name(ranks.device)) if is_16_bit else None
        """Of 16-bit matrix products; None in an fp32 run, and on a device that is not known."""

    def report(self, batch: StepBatch, values: Mapping[str, float], progress: Progress) -> None:
        """Report a finished step. Counts are of the global batch, over all ranks.

        Args:
            values: what the loop has measured: loss, lr, step_seconds, data_seconds ...
        """
        plan = batch.plan
        data = self._plan.data
        step_seconds = values["step_seconds"]
        own = np.concatenate([by_rank[self._ranks.data_rank] for by_rank in plan.micro_batches])
        compute, work = values["head_seconds"], data.supervised[own].sum()
        if self._stage < 3:  # which gathers weights in the layers
            compute += values["forward_seconds"]
            work = self._flops.of_examples(data.lengths[own], work)
        self._window.append((step_seconds, values["data_seconds"], compute, work))
        if self._ranks.is_first:
            # of the examples of all ranks, from the plan: no communication
            lengths = data.lengths[np.concatenate([*chain(*plan.micro_batches)])]
            flops_per_s = self._flops.of_examples(lengths, plan.supervised_tokens) / step_seconds
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
                "model_flops_per_s": flops_per_s,
                **values,
            }
            if self._ranks.device.type == "cuda":
                record["memory_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            if self.peak_flops_per_s is not None:
                record["mfu"] = flops_per_s / (self.peak_flops_per_s * self._ranks.world_size)
            self._metrics.log("train", record)
            next(self._tracing)
        if len(self._window) == WINDOW_STEPS:
            self._report_ranks(progress.step)

    def _report_ranks(self, step: int) -> None:
        """Report what each rank has measured in the last WINDOW_STEPS."""
        step_seconds, data_seconds, compute, work = map(fmean, zip(*self._window, strict=True))
        self._window.clear()
        ranks = self._ranks
        measured = {
            "host": f"{socket.gethostname()} (local rank {ranks.local_rank})",
            "compute_seconds": compute,
            "work": work,
            "data_seconds": data_seconds,
            **gpu_health(),
        }
        by_rank = ranks.gather_json(measured)  # on gloo, every 50 steps: it costs no GPU time
        self._metrics.log("ranks", {"step": step, "step_seconds": step_seconds, "ranks": by_rank})

    def report_problem(self, problem: Problem, batch: StepBatch) -> None:
        """Report what the guard found in a step, with the rows of the micro-batches whose own loss
        was not finite, or all rows of the step if there is none.
        """
        micro_batches = batch.plan.micro_batches
        suspects = [micro_batches[i][rank] for i, rank in sorted(problem.micro_batches)]
        examples = np.concatenate(suspects or [*chain(*micro_batches)])
        # source and line, so that a user can look at them
        rows = [self._plan.data.place_of(example) for example in examples]
        text = f"{problem.reason}; the update is skipped"
        event = {"step": batch.global_step + 1, "name": "skipped_step", "text": text, "rows": rows}
        self._metrics.log("event", event)


def trace_on_request(output_dir: str) -> Iterator[None]:
    """An iterator to advance after each step of this rank. Once OUTPUT_DIR/profile_now is touched,
    it traces TRACED_STEPS into OUTPUT_DIR/profile.
    """
    while True:
        if take_request(output_dir, PROFILE_NOW):
            with profile(
                # torch warms up in the step before: its first one would look slow
                schedule=schedule(wait=0, warmup=1, active=TRACED_STEPS, repeat=1),
                on_trace_ready=tensorboard_trace_handler(f"{output_dir}/profile", use_gzip=True),
            ) as running:
                for _ in range(1 + TRACED_STEPS):
                    yield
                    running.step()  # at the last one it writes the trace
        yield
