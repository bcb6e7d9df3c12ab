"""Trackers beside W&B: TensorBoard, MLflow, trackio and SwanLab.

They get the numbers of the records. What they collect by themselves is off, such as the command
line, the git remote, which may have a password, and what the run prints (SECURITY.md).
"""

import importlib
import os
from pathlib import Path
from types import ModuleType
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
            start_mlflow(tracker, project, folder.name, run_id)
            self._log, self._finish = tracker.log_metrics, tracker.end_run
            return
        if name == "swanlab":
            more = {"id": run_id, "settings": swanlab_settings(tracker)}
        else:  # trackio knows a run by its name
            more = {"auto_log_gpu": False, "auto_log_cpu": False}
        tracker.init(project=project, name=f"{folder.name}-{run_id}", resume="allow", **more)
        self._log, self._finish = tracker.log, tracker.finish

    def log(self, kind: str, values: dict[str, Any]) -> None:
        self._log(numbers(kind, values), values["step"])

    def close(self, exit_code: int) -> None:
        self._finish()


def start_mlflow(mlflow: ModuleType, project: str, name: str, run_id: str) -> None:
    """Start a run of MLflow, or continue the run whose tag `run` is the id."""
    # MLflow repeats a failed request for minutes, unless told otherwise.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    mlflow.config.enable_async_logging()
    experiment = mlflow.set_experiment(project).experiment_id
    # repr, because the id comes from a checkpoint and might have a quote.
    same = f"tags.run = {run_id!r}"
    begun = mlflow.search_runs(filter_string=same, output_format="list")
    if not begun:
        # start_run would add tags with the user, the command and the git remote.
        begun = [mlflow.MlflowClient().create_run(experiment, tags={"run": run_id}, run_name=name)]
    mlflow.start_run(begun[0].info.run_id, log_system_metrics=False)


def swanlab_settings(swanlab: ModuleType) -> Any:
    """Return settings with which SwanLab collects nothing by itself."""
    probes = swanlab.Settings.Probe.model_fields.items()
    off = {name: False for name, probe in probes if probe.annotation is bool}
    return swanlab.Settings(probe=off, terminal={"proxy_type": "none"})
