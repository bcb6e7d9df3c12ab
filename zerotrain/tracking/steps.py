"""The record of each step, and every 50 steps a comparison of the ranks."""

import socket
from contextlib import suppress
from statistics import fmean, median_low
from typing import Any

import deepspeed
import numpy as np
import torch

from zerotrain.checkpoint.state import Progress
from zerotrain.data.data_plan import DataPlan
from zerotrain.data.loader import StepBatch
from zerotrain.model.setup import Setup
from zerotrain.runtime.agreement import gather_json
from zerotrain.runtime.gpu import peak_flops_per_s
from zerotrain.runtime.process_group import Ranks
from zerotrain.tracking.metrics import Metrics
from zerotrain.tracking.speed import probe_seconds
from zerotrain.tracking.stragglers import WINDOWS, Stragglers

WINDOW_STEPS = 50


class StepReporter:
    """Reports steps, and ranks that are slow; all ranks call the same methods.

    Args:
        setup: of the run, for the FLOPs of its model.
        first_step: finished steps at the start of this process.
    """

    def __init__(
        self,
        setup: Setup,
        plan: DataPlan,
        engine: deepspeed.DeepSpeedEngine,
        metrics: Metrics,
        ranks: Ranks,
        first_step: int,
    ) -> None:
        self._flops, self._plan, self.engine = setup.flops, plan, engine
        self._metrics, self._ranks = metrics, ranks
        self._on_cuda = ranks.device.type == "cuda"
        self._peak_flops_per_s = None
        if self._on_cuda and setup.precision != "fp32":
            self._peak_flops_per_s = peak_flops_per_s(torch.cuda.get_device_name(ranks.device))
        self._stragglers = Stragglers(ranks.world_size)
        self._step = first_step  # the last one that is finished
        self._peak_bytes = 0
        self._waits: list[float] = []  # of this window's steps
        self._seconds: list[float] = []
        places = gather_json(ranks, [socket.gethostname(), ranks.local_rank])
        self._hosts = [host for host, _ in places]
        self.rank_names = [
            f"rank {rank} @ {host} (local rank {local})"
            for rank, (host, local) in enumerate(places)
        ]

    def report(self, batch: StepBatch, values: dict[str, Any], progress: Progress) -> None:
        """Report a finished step. Counts are of the global batch, over all ranks.

        Args:
            values: what the loop has measured: loss, lr, step_seconds, data_seconds ...
        """
        plan, step_seconds = batch.plan, values["step_seconds"]
        self._step = progress.step
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
            self._peak_bytes = max(self._peak_bytes, torch.cuda.max_memory_allocated())
            record["memory_peak_bytes"] = self._peak_bytes  # of the others up to their last window
        if self._ranks.is_first:
            record |= self._flops_per_s(batch, step_seconds)
        self._metrics.log("train", record)
        self._waits.append(values["data_seconds"])
        self._seconds.append(step_seconds)
        if len(self._seconds) == WINDOW_STEPS:
            self._compare_ranks()

    def report_event(self, name: str, text: str, **values: Any) -> None:
        """Report that something has happened after the last step."""
        event = {"step": self._step, "name": name, "text": text, **values}
        self._metrics.log("event", event)

    def _flops_per_s(self, batch: StepBatch, step_seconds: float) -> dict[str, float]:
        """Of the model, over all ranks, and the share of the devices' peak, if that is known."""
        examples = np.concatenate([of for ranks in batch.plan.micro_batches for of in ranks])
        lengths = self._plan.data.lengths[examples]
        flops = self._flops.of_examples(lengths, batch.plan.supervised_tokens)
        values = {"model_flops_per_s": flops / step_seconds}
        if self._peak_flops_per_s is not None:
            peak = self._peak_flops_per_s * self._ranks.world_size
            values["mfu"] = values["model_flops_per_s"] / peak
        return values

    def _compare_ranks(self) -> None:
        """Gather what each rank has measured in the window, and report it."""
        window = {
            "probe_seconds": probe_seconds(self._ranks.device),
            "data_seconds": fmean(self._waits),
            "memory_peak_bytes": torch.cuda.max_memory_allocated() if self._on_cuda else 0,
            "gpu": gpu_health() if self._on_cuda else None,
        }
        step_seconds = fmean(self._seconds)
        self._waits.clear()
        self._seconds.clear()
        of_ranks = gather_json(self._ranks, window)
        columns = {name: [rank[name] for rank in of_ranks] for name in window}
        self._peak_bytes = max(self._peak_bytes, *columns.pop("memory_peak_bytes"))
        self._metrics.log(
            "ranks",
            {"step": self._step, "hosts": self._hosts, "step_seconds": step_seconds, **columns},
        )
        probes, waits = columns["probe_seconds"], columns["data_seconds"]
        for rank in self._stragglers.update(probes, waits, step_seconds):
            text = (
                f"{self.rank_names[rank]} is slow, for {WINDOWS} x {WINDOW_STEPS} steps: "
                f"matrix products take {probes[rank] / median_low(probes):.2f} times as long as "
                f"on the median rank, and it waits {waits[rank]:.3g} s per step for data "
                f"(median {median_low(waits):.3g} s)"
            )
            if gpu := of_ranks[rank]["gpu"]:
                text += f"; GPU at {gpu['temperature_celsius']} C, {gpu['sm_clock_mhz']} MHz"
            self.report_event("slow_rank", text, ranks=[rank])


def gpu_health() -> dict[str, float] | None:
    """What NVIDIA's management library (NVML) says of this rank's GPU; None without it."""
    with suppress(Exception):  # no NVML, or a GPU that does not support a question
        return {
            "temperature_celsius": torch.cuda.temperature(),
            "sm_clock_mhz": torch.cuda.clock_rate(),
            "power_watts": torch.cuda.power_draw() / 1000,
        }
    return None
