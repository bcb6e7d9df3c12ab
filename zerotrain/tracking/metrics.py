"""One interface for what a run reports, and the sinks behind it. Only rank 0 reports.

Another destination is a class with the methods of Sink, such as tracking/tensorboard.py, a key of
TrackingConfig and a line in open_sinks.
"""

import json
import platform
import socket
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import torch

from zerotrain.checkpoint.nodes import Nodes
from zerotrain.checkpoint.run_folder import METRICS, RESOLVED_DS_CONFIG, TENSORBOARD
from zerotrain.checkpoint.state import Progress
from zerotrain.config.schema import Config
from zerotrain.runtime.agreement import gather_json, run_on_first_rank
from zerotrain.runtime.errors import describe
from zerotrain.runtime.process_group import Ranks
from zerotrain.tracking.console import ConsoleSink
from zerotrain.tracking.jsonl import JsonlSink
from zerotrain.tracking.tensorboard import TensorBoardSink
from zerotrain.tracking.wandb import WandbSink

PACKAGES = ("torch", "deepspeed", "transformers")


class Sink(Protocol):
    """A destination of measurements."""

    def log(self, kind: str, values: dict[str, Any]) -> None: ...

    def close(self, exit_code: int) -> None: ...


class Metrics:
    """Passes every measurement to every sink; has none on ranks other than 0. Threads may log."""

    def __init__(self, sinks: list[Sink], wandb_id: str | None = None) -> None:
        self.sinks, self.wandb_id = sinks, wandb_id
        self._lock = Lock()

    def log(self, kind: str, values: dict[str, Any]) -> None:
        """Report a measurement.

        Args:
            kind: train, ranks, eval, save, event ...; a sink ignores the kinds and names that it
                does not know.
            values: of the types of JSON by name, with units in the names; always has `step`, the
                number of finished optimizer steps.
        """
        with self._lock:
            for sink in list(self.sinks):
                try:
                    sink.log(kind, values)
                except Exception as error:  # e.g. W&B's process was killed: training goes on
                    self.sinks.remove(sink)
                    print(
                        f"WARNING: {type(sink).__name__} stopped at step {values['step']} "
                        f"({describe(error)}); training continues without it",
                        flush=True,
                    )

    def close(self, exit_code: int) -> None:
        """Flush and finish. W&B shows a run whose exit code is not 0 as failed."""
        for sink in self.sinks:
            try:
                sink.close(exit_code)
            except Exception as error:  # the training is finished anyway
                print(f"{type(sink).__name__} did not finish: {describe(error)}", flush=True)


def open_metrics(config: Config, start: Progress, total_steps: int, nodes: Nodes) -> Metrics:
    """The metrics of this rank; all ranks call it.

    Args:
        start: the steps that are finished, and the W&B run that is continued, after a resume.

    Raises:
        UserError: metrics.jsonl cannot be written, or W&B rejects its settings; on every rank.
    """
    ranks, metrics = nodes.ranks, Metrics([])
    cluster = describe_cluster(ranks)

    def open_sinks() -> None:
        folder, tracking = Path(config.output_dir), config.tracking
        metrics.sinks.append(ConsoleSink(start.step, total_steps))
        metrics.sinks.append(JsonlSink(folder / METRICS, start.step, nodes.lock, cluster))
        if tracking.tensorboard:
            metrics.sinks.append(TensorBoardSink(folder / TENSORBOARD, start.step))
        if tracking.wandb != "disabled":
            ds_config = json.loads((folder / RESOLVED_DS_CONFIG).read_text())
            about = {"resolved_ds_config": ds_config, "cluster": cluster}
            wandb = WandbSink(config, folder, start, about)
            metrics.sinks.append(wandb)
            metrics.wandb_id = wandb.run.id

    run_on_first_rank(ranks, open_sinks)
    return metrics


def describe_cluster(ranks: Ranks) -> dict[str, Any]:
    """The hosts, GPUs and versions that a run is on; called by all ranks."""
    gpu = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else None
    gpus: dict[str, list[str]] = {}
    for host, name in gather_json(ranks, [socket.gethostname(), gpu]):
        gpus.setdefault(host, []).extend([name] if name else [])
    return {
        "world_size": ranks.world_size,
        "hosts": list(gpus),
        "gpus": list(gpus.values()),  # of each host
        "versions": {"python": platform.python_version(), **{p: version(p) for p in PACKAGES}},
    }
