"""What a run reports of its steps: times of the phases, counts, and how fast each rank is."""

import socket
import time
from collections import Counter
from collections.abc import Mapping
from itertools import chain, pairwise
from statistics import fmean

import numpy as np
import torch

from zerotrain.checkpoint.state import Progress
from zerotrain.config.ds_config import zero_stage
from zerotrain.data.data_plan import DataPlan
from zerotrain.data.loader import StepBatch
from zerotrain.runtime.machine import GIB, device_name, gpu_health, peak_flops_per_s
from zerotrain.runtime.ranks import Ranks
from zerotrain.tracking.metrics import Metrics
from zerotrain.tracking.profiler import trace_on_request
from zerotrain.training.setup import Setup

# Each rank's times are reported as means over so many steps.
WINDOW_STEPS = 50


class PhaseTimer:
    """Times the phases of a step, including the collectives in them.

    On CUDA each mark is an event in the stream of the computation. It costs microseconds and does
    not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks = []  # (phase, its end): a time in seconds, or an event on CUDA.

    def mark(self, phase: str) -> None:
        """Mark the end of `phase`. The next phase begins here."""
        now = time.perf_counter()
        if self._on_cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((phase, now))

    def take(self) -> dict[str, float]:
        """Return PHASE_seconds of every phase after the first mark, and forget the marks.

        Waits for the device.
        """
        if self._on_cuda:  # An event has a time once the stream has passed it.
            torch.cuda.synchronize()
        seconds = Counter()
        for (_, begin), (phase, end) in pairwise(self._marks):
            elapsed = begin.elapsed_time(end) / 1000 if self._on_cuda else end - begin
            seconds[f"{phase}_seconds"] += elapsed
        self._marks.clear()
        return dict(seconds)


class StepReporter:
    """Reports each step, and what each rank measured. All ranks call the same methods."""

    def __init__(self, setup: Setup, plan: DataPlan, metrics: Metrics, ranks: Ranks) -> None:
        self._flops = setup.architecture.flops
        self._stage = zero_stage(setup.ds_config)
        self._plan = plan
        self._metrics = metrics
        self._ranks = ranks
        self._tracing = trace_on_request(setup.config.output_dir)
        # Four values for each step since the last report of the ranks: step seconds, data seconds,
        # compute seconds, work.
        self._window = []
        is_16_bit = setup.config.train.precision != "fp32"
        self._peak_flops_per_s = peak_flops_per_s(device_name(ranks.device)) if is_16_bit else None

    def report(self, batch: StepBatch, values: Mapping[str, float], progress: Progress) -> None:
        """Report a finished step. Counts are of the global batch, over all ranks.

        Args:
            values: the loop's measurements, such as loss, lr, step_seconds and data_seconds.
        """
        plan = batch.plan
        data = self._plan.data
        step_seconds = values["step_seconds"]
        own = np.concatenate([by_rank[self._ranks.data_rank] for by_rank in plan.micro_batches])
        # Only phases without collectives tell ranks apart. At ZeRO 3, forward gathers weights.
        compute, work = values["head_seconds"], data.supervised[own].sum()
        if self._stage < 3:
            compute += values["forward_seconds"]
            work = self._flops.of_examples(data.lengths[own], work)
        self._window.append((step_seconds, values["data_seconds"], compute, work))
        if self._ranks.is_first:
            # The plan knows the examples of all ranks, so nothing is communicated.
            lengths = data.lengths[np.concatenate([*chain(*plan.micro_batches)])]
            flops_per_s = self._flops.of_examples(lengths, plan.supervised_tokens) / step_seconds
            record = {
                "step": progress.step,
                "epoch": self._plan.epochs_at(progress.step),
                "examples": plan.examples,
                "tokens": plan.tokens,
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
            if self._peak_flops_per_s is not None:
                record["mfu"] = flops_per_s / (self._peak_flops_per_s * self._ranks.world_size)
            self._metrics.log("train", record)
            next(self._tracing)
        if len(self._window) == WINDOW_STEPS:
            self._report_ranks(progress.step)

    def _report_ranks(self, step: int) -> None:
        """Report each rank's means over the last WINDOW_STEPS steps."""
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
        by_rank = ranks.gather_json(measured)  # Uses gloo, so it costs no GPU time.
        self._metrics.log("ranks", {"step": step, "step_seconds": step_seconds, "ranks": by_rank})

    def report_skipped(self, batch: StepBatch, losses: torch.Tensor, reason: str) -> None:
        """Report a step whose update was skipped, with FILE:LINE of its suspicious rows.

        These are the rows of the micro-batches whose own loss was not finite, or else all rows of
        the step.

        Args:
            losses: the losses of this rank's micro-steps, [losses, micro-steps].
        """
        micro_batches = batch.plan.micro_batches
        bad = (~losses.isfinite().all(0)).nonzero().flatten().tolist()
        own = [micro_batches[i][self._ranks.data_rank].tolist() for i in bad]
        suspects = [*chain(*self._ranks.gather_json(own))] or chain(*micro_batches)
        rows = [self._plan.data.place_of(example) for example in sorted({*chain(*suspects)})]
        text = f"{reason}; the update is skipped"
        event = {"step": batch.global_step + 1, "name": "skipped_step", "text": text, "rows": rows}
        self._metrics.log("event", event)
