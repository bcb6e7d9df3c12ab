"""One interface for what a run reports, and the sinks behind it. Only rank 0 reports."""

from pathlib import Path
from typing import Any, Protocol

from checkpoint.nodes import Nodes
from checkpoint.run_folder import METRICS
from checkpoint.state import Progress
from config.schema import Config
from tracking.cluster import describe_cluster
from tracking.console import ConsoleSink
from tracking.jsonl import JsonlSink
from tracking.wandb import WandbSink


class Sink(Protocol):
    """A destination of measurements."""

    def log(self, kind: str, values: dict[str, Any]) -> None: ...

    def close(self, exit_code: int) -> None: ...


class Metrics:
    """Passes every measurement to every sink; has none on ranks other than 0."""

    def __init__(self, sinks: list[Sink], wandb_id: str | None = None) -> None:
        self.sinks, self.wandb_id = sinks, wandb_id

    def log(self, kind: str, values: dict[str, Any]) -> None:
        """Report a measurement.

        Args:
            kind: train, eval, save ...; a sink ignores the kinds and names that it does not know.
            values: of the types of JSON by name, with units in the names; always has `step`, the
                number of finished optimizer steps.
        """
        for sink in self.sinks:
            sink.log(kind, values)

    def close(self, exit_code: int) -> None:
        """Flush and finish. W&B shows a run whose exit code is not 0 as failed."""
        for sink in self.sinks:
            sink.close(exit_code)


def open_metrics(config: Config, start: Progress, total_steps: int, nodes: Nodes) -> Metrics:
    """The sinks of rank 0; all ranks call it.

    Args:
        start: the steps that are finished, and the W&B run that is continued, after a resume.

    Raises:
        UserError: metrics.jsonl cannot be written.
    """
    cluster = {"world_size": nodes.ranks.world_size, **describe_cluster(nodes.ranks)}
    if not nodes.ranks.is_first:
        return Metrics([])
    folder = Path(config.output_dir)
    sinks: list[Sink] = [
        ConsoleSink(start.step, total_steps),
        JsonlSink(folder / METRICS, start.step, nodes.lock, cluster),
    ]
    if config.tracking.wandb == "disabled":
        return Metrics(sinks)
    wandb = WandbSink(config, folder, start.wandb_id)
    return Metrics([*sinks, wandb], wandb.run.id)
