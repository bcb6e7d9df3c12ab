"""What is reported of each step."""

from collections.abc import Mapping
from itertools import chain
from statistics import median

import numpy as np
import torch

from zerotrain.checkpoint.state import Progress
from zerotrain.data.data_plan import DataPlan
from zerotrain.data.loader import StepBatch
from zerotrain.runtime.machine import device_name, peak_flops_per_s
from zerotrain.runtime.ranks import Ranks
from zerotrain.tracking.metrics import Metrics
from zerotrain.tracking.profiler import Profiler
from zerotrain.tracking.slow_ranks import RankComparison
from zerotrain.training.guard import Problem
from zerotrain.training.setup import Setup
from zerotrain.training.states import GIB


class StepReporter:
    """Reports steps, and ranks that are slow; all ranks call the same methods."""

    def __init__(self, setup: Setup, plan: DataPlan, metrics: Metrics, ranks: Ranks) -> None:
        self._flops = setup.architecture.flops
        self._seconds: list[float] = []
        self._plan = plan
        self._metrics = metrics
        self._ranks = ranks
        self._comparison = RankComparison(metrics, ranks)
        self._profiler = Profiler(setup.config.output_dir)
        # of 16-bit matrix products; None if unknown
        self._peak_flops_per_s = (
            None if setup.precision == "fp32" else peak_flops_per_s(device_name(ranks.device))
        )

    def report(self, batch: StepBatch, values: Mapping[str, float], progress: Progress) -> None:
        """Report a finished step. Counts are of the global batch, over all ranks.

        Args:
            values: what the loop has measured: loss, lr, step_seconds, data_seconds ...
        """
        plan = batch.plan
        step_seconds = values["step_seconds"]
        self._seconds.append(step_seconds)
        if self._ranks.is_first:
            lengths = self._plan.data.lengths[np.concatenate([*chain(*plan.micro_batches)])]
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
            if self._peak_flops_per_s is not None:
                record["mfu"] = flops_per_s / (self._peak_flops_per_s * self._ranks.world_size)
            self._metrics.log("train", record)
            self._profiler.step()
        self._comparison.add(progress.step, values)

    def report_problem(self, problem: Problem, batch: StepBatch) -> None:
        """Report what the guard found in a step, with the rows of the micro-batches whose own loss
        was not finite, or all rows of the step if there is none.
        """
        micro_batches = batch.plan.micro_batches
        suspects = [micro_batches[i][rank] for i, rank in sorted(problem.micro_batches)]
        examples = np.concatenate(suspects or [*chain(*micro_batches)])
        rows = [self._plan.data.place_of(example) for example in examples.tolist()]
        text = f"{problem.reason}; the update is skipped"
        event = {"step": batch.global_step + 1, "name": "skipped_step", "text": text, "rows": rows}
        self._metrics.log("event", event)

    def summary(self) -> str:
        """The median time of a step; "" before the first one."""
        return f"median step {median(self._seconds):.3g} s; " if self._seconds else ""
