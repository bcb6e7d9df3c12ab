"""Trackers beside W&B: TensorBoard, MLflow, trackio and SwanLab."""

import importlib
import os
from pathlib import Path
from typing import Any

from zerotrain.config.schema import Config
from zerotrain.tracking.metrics import numbers

FLUSH_SECONDS = 2  # a killed run loses what TensorBoard has not written


class TrackerSink:
    """A run of one tracker. Each tracker sends its records in a thread of its own.

    A resumed run continues it. MLflow, trackio and SwanLab show its repeated steps twice.
    """

    def __init__(self, name: str, config: Config, run_id: str, first_step: int) -> None:
        """
        Args:
            name: one of tracking.also.
            run_id: the same for all starts of a run.
            first_step: the step after which this start begins.
        """
        project, folder = config.tracking.project, Path(config.output_dir)
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            # It hides what the steps from purge_step on have logged before.
            writer = SummaryWriter(
                folder / name, purge_step=first_step + 1, flush_secs=FLUSH_SECONDS
            )
            self._log = lambda row, step: [writer.add_scalar(*item, step) for item in row.items()]
            self._finish = writer.close
            return
        tracker = importlib.import_module(name)
        if name == "mlflow":
            # MLflow repeats a failed request for minutes, unless told otherwise.
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
            tracker.config.enable_async_logging()
            tracker.set_experiment(project)
            same = f"tags.run = '{run_id}'"
            begun = tracker.search_runs(filter_string=same, output_format="list")
            known = begun[0].info.run_id if begun else None  # MLflow chooses ids itself.
            tracker.start_run(known, run_name=folder.name, tags={"run": run_id})
            self._log, self._finish = tracker.log_metrics, tracker.end_run
            return
        same = {"id": run_id} if name == "swanlab" else {}  # trackio knows a run by its name
        tracker.init(project=project, name=f"{folder.name}-{run_id}", resume="allow", **same)
        self._log, self._finish = tracker.log, tracker.finish

    def log(self, kind: str, values: dict[str, Any]) -> None:
        self._log(numbers(kind, values), values["step"])

    def close(self, exit_code: int) -> None:
        self._finish()
