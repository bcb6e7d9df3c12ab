"""Measures the steps of a run and reports them: their speed, the ranks' own times, hangs."""

import socket
import statistics
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import deepspeed
import numpy as np
import torch

from checkpoint.state import Progress
from data.data_plan import DataPlan
from data.loader import StepBatch
from model.setup import Setup
from runtime.agreement import gather_json
from runtime.gpu import open_gpu, peak_flops_per_s, read_health
from runtime.hang import HangWatch
from runtime.process_group import Ranks
from tracking.metrics import Metrics
from tracking.profiler import StepProfiler
from tracking.step_timer import StepTimer, WindowTimes
from tracking.stragglers import WINDOWS, Stragglers


class StepRecorder:
    """Times, profiles and reports the steps of a run. Used as a context around training, in which
    it also watches for hangs; all ranks call the same methods.

        with recorder:
            for batch in recorder.waiting(batches):
                ...
                recorder.finished(batch, values, progress)
    """

    def __init__(
        self,
        setup: Setup,
        plan: DataPlan,
        engine: deepspeed.DeepSpeedEngine,
        metrics: Metrics,
        ranks: Ranks,
    ) -> None:
        config = setup.config
        self._config, self._plan, self.engine = config, plan, engine
        self._metrics, self._ranks = metrics, ranks
        self._on_cuda = ranks.device.type == "cuda"
        self._timer = StepTimer(engine, ranks.device)
        self._window = WindowTimes(config.tracking.rank_window_steps)
        self._stragglers = Stragglers(ranks.world_size)
        self.profiler = StepProfiler(config.profile, config.output_dir, ranks.rank, self._on_cuda)
        self._flops = setup.flops
        self._peak_flops_per_s = _peak(setup, ranks)
        self._gpu = None
        if self._on_cuda:
            self._gpu = open_gpu(str(torch.cuda.get_device_properties(ranks.device).uuid))
        self._began = self._data_seconds = self._log_seconds = 0.0
        self._step, self._peak_bytes = 0, 0
        self._hosts: list[str] = []
        self._names: list[str] = []

    def __enter__(self) -> None:
        places = gather_json(self._ranks, [socket.gethostname(), self._ranks.local_rank])
        self._hosts = [host for host, _ in places]
        self._names = [
            f"rank {rank} @ {host} (local rank {local})"
            for rank, (host, local) in enumerate(places)
        ]
        self._hang_watch = HangWatch(
            self._ranks,
            self._config.distributed.warn_seconds,
            self._names,
            lambda text, ranks: self._report("hang", text, ranks=ranks),
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hang_watch.close()
        self.profiler.close()
        if isinstance(error, torch.OutOfMemoryError):
            self.profiler.ran_out_of_memory()

    def waiting(self, batches: Iterable[StepBatch], steps_done: int) -> Iterator[StepBatch]:
        """The batches. A step begins when its batch is asked for, and ends with `finished`:
        evaluations and saves are not in it.

        Args:
            steps_done: finished optimizer steps.
        """
        self._step, batches = steps_done, iter(batches)
        while True:
            self.profiler.step_begins(self._step + 1)
            self._began = time.perf_counter()
            if (batch := next(batches, None)) is None:
                return
            self._data_seconds = time.perf_counter() - self._began
            self._timer.begin()
            yield batch

    def finished(self, batch: StepBatch, values: dict[str, Any], progress: Progress) -> float:
        """Report a finished step.

        Args:
            values: measurements of the step, by name.
            progress: after it.

        Returns:
            The seconds that the step took.
        """
        times, ended = self._timer.end(), time.perf_counter()
        step_seconds = ended - self._began
        self._step = progress.step
        self._hang_watch.step_finished()
        if self._ranks.is_first:
            speed = self._speed(batch, step_seconds)
            self._log_step(batch, {**values, **speed, **times.parts}, progress)
        self._window.add(self._log_seconds + times.own, self._data_seconds, step_seconds)
        self._log_seconds = time.perf_counter() - ended  # counts in the next step
        if self._window.is_full:
            self._compare_ranks()
        if (text := self.profiler.step_ended(progress.step)) is not None:
            self._report("profile", text)
        return step_seconds

    def _log_step(self, batch: StepBatch, values: dict[str, Any], progress: Progress) -> None:
        """Counts are of the global batch, over all ranks."""
        plan = batch.plan
        record = {
            "step": progress.step,
            "epoch": self._plan.epochs_at(progress.step),
            "examples": plan.examples,
            "tokens": plan.tokens,  # without padding
            "tokens_total": progress.tokens,
            "supervised_tokens": plan.supervised_tokens,
            "padding_efficiency": plan.tokens / plan.padded_tokens,
            "micro_steps": len(batch.micro_batches),
            "update_skipped": not self.engine.was_step_applied(),  # fp16 overflow
        }
        self._metrics.log("train", {**record, **values})

    def _speed(self, batch: StepBatch, step_seconds: float) -> dict[str, float]:
        plan = batch.plan
        rows = np.concatenate([rows for ranks in plan.micro_batches for rows in ranks])
        flops = self._flops.of_examples(self._plan.data.lengths[rows], plan.supervised_tokens)
        values = {
            "tokens_per_s": plan.tokens / step_seconds,
            "model_flops_per_s": flops / step_seconds,  # of all ranks
            "step_seconds": step_seconds,  # without evaluation and checkpoints
            "data_seconds": self._data_seconds,  # part of it: waiting for the loader
        }
        if self._peak_flops_per_s is not None:
            peak = self._peak_flops_per_s * self._ranks.world_size
            values["mfu"] = values["model_flops_per_s"] / peak
        if self._on_cuda:
            self._peak_bytes = max(self._peak_bytes, torch.cuda.max_memory_allocated())
            values["memory_peak_bytes"] = self._peak_bytes  # of the others up to their last window
        return values

    def _compare_ranks(self) -> None:
        """Gather the ranks' times of a window and report them; called by all ranks."""
        own, error, data, step_seconds = self._window.take()
        mine = {
            "own_seconds": own,
            "error": error,
            "data_seconds": data,
            "memory_bytes": torch.cuda.max_memory_allocated() if self._on_cuda else 0,
            "gpu": None if self._gpu is None else read_health(self._gpu),
        }
        all_ranks = gather_json(self._ranks, mine)
        if not self._ranks.is_first:
            return
        of = {name: [rank[name] for rank in all_ranks] for name in mine}
        self._peak_bytes = max(self._peak_bytes, *of["memory_bytes"])
        slow, new = self._stragglers.update(of["own_seconds"], of["error"], step_seconds)
        values = {
            "step": self._step,
            "window_steps": self._window.steps,
            "own_seconds": of["own_seconds"],
            "data_seconds": of["data_seconds"],
            "hosts": self._hosts,
            "slow_ranks": slow,
            "gpu": of["gpu"],
        }
        self._metrics.log("ranks", values)
        for rank in new:
            self._report("slow_rank", self._describe(rank, all_ranks), ranks=[rank])

    def _describe(self, rank: int, all_ranks: list[dict[str, Any]]) -> str:
        """Why a rank is reported as slow, in one line."""
        its = all_ranks[rank]
        usual, waits = (
            statistics.median_low(r[name] for r in all_ranks)
            for name in ("own_seconds", "data_seconds")
        )
        excess = its["own_seconds"] - usual
        text = (
            f"{self._names[rank]} is slow: {its['own_seconds']:.3g} s per step of its own, the "
            f"median is {usual:.3g} s, for {WINDOWS} x {self._window.steps} steps"
        )
        if its["data_seconds"] - waits > excess / 2:
            text += "; it waits for data"
        if gpu := its["gpu"]:
            why = f" ({', '.join(gpu['throttle'])})" if gpu["throttle"] else ""
            text += f"; GPU at {gpu['temperature_celsius']} C, {gpu['sm_clock_mhz']} MHz{why}"
        return text

    def _report(self, name: str, text: str, **values: Any) -> None:
        self._metrics.log("event", {"step": self._step, "name": name, "text": text, **values})


def _peak(setup: Setup, ranks: Ranks) -> float | None:
    """Of one device, in FLOP/s; None if it is not known for the run's precision."""
    given = setup.config.tracking.peak_tflops_per_s
    if given is not None:
        return 1e12 * given
    if ranks.device.type != "cuda" or setup.precision == "fp32":
        return None
    return peak_flops_per_s(torch.cuda.get_device_name(ranks.device))
