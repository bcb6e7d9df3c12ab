"""Trackers beside W&B: TensorBoard, MLflow, trackio and SwanLab."""

import importlib
import importlib.util
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.config.schema import Config
from zerotrain.runtime.errors import UserError, describe
from zerotrain.tracking.metrics import numbers

MAX_WAITING = 100_000  # records; a server that is gone must not fill the memory
FINISH_SECONDS = 10  # a preempted run has little time to exit
FLUSH_SECONDS = 2  # a killed run loses what TensorBoard has not written


class TrackerSink:
    """One tracker's run. Its records are sent by a thread, because servers may be slow or gone.

    A resumed run continues it. The repeated steps appear twice in MLflow.
    """

    def __init__(self, name: str, config: Config, run_id: str) -> None:
        """
        Args:
            name: one of tracking.also.
            run_id: the same for all starts of a run.

        Raises:
            UserError: the tracker's package is missing.
        """
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tracking.also: {name} is not installed; pip install {name}")
        self._waiting = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._send, args=(name, config, run_id), daemon=True)
        self._thread.start()

    def log(self, kind: str, values: dict[str, Any]) -> None:
        self._waiting.put_nowait((numbers(kind, values), values["step"]))

    def close(self, exit_code: int) -> None:
        self._waiting.put_nowait(None)
        self._thread.join(FINISH_SECONDS)

    def _send(self, name: str, config: Config, run_id: str) -> None:
        tracker = None
        is_failing = False
        for row, step in iter(self._waiting.get, None):
            try:
                tracker = tracker or open_tracker(name, config, run_id, step)
                tracker.log(row, step)
                is_failing = False
            except Exception as error:  # each tracker has its own errors
                if not is_failing:
                    print(f"WARNING: {name} failed, training continues: {describe(error)}")
                is_failing = True
        if tracker is not None:
            tracker.finish()


@dataclass(frozen=True)
class Tracker:
    """What a tracker does with the numbers of a step, and at the end."""

    log: Callable[[dict[str, float], int], None]
    finish: Callable[[], None]


def open_tracker(name: str, config: Config, run_id: str, step: int) -> Tracker:
    """Start a tracker's run, or continue the one that an earlier start of this run has begun. The
    next record is of a step after `step`.
    """
    folder = Path(config.output_dir)
    project = config.tracking.project
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides what a killed run has logged from purge_step on.
        writer = SummaryWriter(folder / name, purge_step=step + 1, flush_secs=FLUSH_SECONDS)

        def add_scalars(row: dict[str, float], step: int) -> None:
            for key, value in row.items():
                writer.add_scalar(key, value, step)

        return Tracker(add_scalars, writer.close)
    if name == "mlflow":
        # MLflow repeats a failed request for minutes, unless told otherwise.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        import mlflow

        mlflow.set_experiment(project)
        # MLflow itself chooses the ids of its runs.
        begun = mlflow.search_runs(filter_string=f"tags.run = '{run_id}'", output_format="list")
        known = begun[0].info.run_id if begun else None
        mlflow.start_run(known, run_name=folder.name, tags={"run": run_id})
        return Tracker(mlflow.log_metrics, mlflow.end_run)
    tracker = importlib.import_module(name)  # trackio and swanlab have W&B's functions
    if name == "trackio":
        tracker.init(project, name=f"{folder.name}-{run_id}", resume="allow")
    else:
        tracker.init(project=project, experiment_name=folder.name, id=run_id, resume="allow")
    return Tracker(tracker.log, tracker.finish)
