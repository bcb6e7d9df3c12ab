"""One interface for what a run reports, and the sinks behind it. Only rank 0 reports."""

from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from checkpoint.lock import RunLock
from checkpoint.run_folder import METRICS
from checkpoint.state import Progress
from config.schema import Config
from tracking.console import ConsoleSink
from tracking.jsonl import JsonlSink
from tracking.wandb import WandbSink


class Sink(Protocol):
    """A destination of measurements."""

    def log(self, kind: str, values: dict[str, Any]) -> None: ...

    def close(self, exit_code: int) -> None: ...


class Metrics:
    """Passes every measurement to every sink; has none on ranks other than 0. Threads may log."""

    def __init__(self, sinks: list[Sink], wandb_id: str | None = None) -> None:
        self.sinks, self.wandb_id, self._lock = sinks, wandb_id, Lock()

    def log(self, kind: str, values: dict[str, Any]) -> None:
        """Report a measurement.

        Args:
            kind: train, ranks, eval, save or event.
            values: of the types of JSON, by name, with units in the names; always has `step`, the
                number of finished optimizer steps.
        """
        with self._lock:
            for sink in self.sinks:
                sink.log(kind, values)

    def close(self, exit_code: int) -> None:
        """Flush and finish. W&B shows a run whose exit code is not 0 as failed."""
        for sink in self.sinks:
            sink.close(exit_code)


def open_metrics(config: Config, start: Progress, total_steps: int, lock: RunLock) -> Metrics:
    """The sinks of rank 0.

    Args:
        start: the steps that are finished, and the W&B run that is continued, after a resume.
        lock: of the output folder.

    Raises:
        UserError: metrics.jsonl cannot be written.
    """
    folder = Path(config.output_dir)
    sinks: list[Sink] = [
        ConsoleSink(start.step, total_steps),
        JsonlSink(folder / METRICS, start.step, lock),
    ]
    if config.tracking.wandb == "disabled":
        return Metrics(sinks)
    wandb = WandbSink(config, folder, start.wandb_id)
    return Metrics([*sinks, wandb], wandb.run.id)
