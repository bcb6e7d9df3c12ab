"""One interface for what a run reports, and the sinks behind it. Only rank 0 reports.

Another destination is a class with the methods of Sink, such as tracking/tensorboard.py, a key of
TrackingConfig and a line in open_sinks.
"""

from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from checkpoint.nodes import Nodes
from checkpoint.run_folder import METRICS, TENSORBOARD
from checkpoint.state import Progress
from config.schema import Config
from runtime.agreement import run_on_first_rank
from runtime.errors import describe
from tracking.cluster import describe_cluster
from tracking.console import ConsoleSink
from tracking.jsonl import JsonlSink
from tracking.tensorboard import TensorBoardSink
from tracking.wandb import WandbNodeSink, WandbSink


class Sink(Protocol):
    """A destination of measurements."""

    def log(self, kind: str, values: dict[str, Any]) -> None: ...

    def close(self, exit_code: int) -> None: ...


class Metrics:
    """Passes every measurement to every sink; has none on ranks other than 0, or only one for
    system metrics. Threads may log.
    """

    def __init__(self, sinks: list[Sink], wandb_id: str | None = None) -> None:
        self.sinks, self.wandb_id, self._lock = sinks, wandb_id, Lock()

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
                self._log_to(sink, kind, values)

    def _log_to(self, sink: Sink, kind: str, values: dict[str, Any]) -> None:
        try:
            sink.log(kind, values)
        except Exception as error:  # e.g. W&B's process was killed, which must not end training
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
    cluster = {"world_size": ranks.world_size, **describe_cluster(ranks)}

    def open_sinks() -> str | None:
        """Fill `metrics`. Returns the id of a W&B run that other nodes can write to."""
        folder, tracking = Path(config.output_dir), config.tracking
        metrics.sinks = [
            ConsoleSink(start.step, total_steps),
            JsonlSink(folder / METRICS, start.step, nodes.lock, cluster),
        ]
        if tracking.tensorboard:
            metrics.sinks.append(TensorBoardSink(folder / TENSORBOARD, start.step))
        if tracking.wandb == "disabled":
            return None
        wandb = WandbSink(config, folder, start, cluster)
        metrics.sinks.append(wandb)  # after metrics.jsonl, which it reads
        metrics.wandb_id = wandb.run.id
        return wandb.run.id if wandb.is_shared else None

    shared_id = run_on_first_rank(ranks, open_sinks)
    if shared_id is not None and ranks.local_rank == 0 and not ranks.is_first:
        metrics.sinks = [WandbNodeSink(config, Path(config.output_dir), shared_id)]
    return metrics
