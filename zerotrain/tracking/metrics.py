"""What a run reports: records, each passed to a few sinks. Only rank 0 reports.

Another destination is a class with the methods of Sink and a line in open_metrics.
"""

import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.run_folder import METRICS
from zerotrain.checkpoint.state import Progress
from zerotrain.config.schema import Config
from zerotrain.runtime.agreement import gather_json, run_on_first_rank
from zerotrain.runtime.errors import describe
from zerotrain.runtime.files import replace_text
from zerotrain.runtime.machine import device_name
from zerotrain.runtime.process_group import Ranks
from zerotrain.tracking.console import ConsoleSink
from zerotrain.tracking.wandb import WandbSink


class Sink(Protocol):
    """A destination of records."""

    def log(self, kind: str, values: dict[str, Any]) -> None: ...

    def close(self, exit_code: int) -> None: ...


class Metrics:
    """Passes every record to every sink; has none on ranks other than 0.

    Training goes on where a sink fails, e.g. on a full disk: there is one warning, and the sink
    gets the next records.
    """

    def __init__(self, sinks: list[Sink]) -> None:
        self.sinks = sinks
        self._failing: set[int] = set()

    def log(self, kind: str, values: dict[str, Any]) -> None:
        """Report a record.

        Args:
            kind: start, train, ranks, eval, generations, save or event; a sink ignores what it
                does not know.
            values: of the types of JSON by name, with units in the names; always has `step`, the
                number of finished optimizer steps.
        """
        self._for_each(lambda sink: sink.log(kind, values))

    def close(self, exit_code: int) -> None:
        """Flush and finish. W&B shows a run whose exit code is not 0 as failed."""
        self._for_each(lambda sink: sink.close(exit_code))

    def _for_each(self, work: Callable[[Sink], None]) -> None:
        for i, sink in enumerate(self.sinks):
            try:
                work(sink)
                self._failing.discard(i)
            except Exception as error:  # whatever it is, e.g. W&B's process was killed
                if i not in self._failing:
                    name = type(sink).__name__
                    print(f"WARNING: {name} has failed: {describe(error)}", flush=True)
                self._failing.add(i)


class JsonlSink:
    """metrics.jsonl: one JSON object per line, with `kind` and `time`, in Unix seconds. A resumed
    run removes the steps after its checkpoint, which it is about to repeat. Once `lock` is lost,
    nothing is written. What a full disk does not take is written with the next record.
    """

    def __init__(self, path: Path, first_step: int, lock: RunLock) -> None:
        kept = []
        if first_step and path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [f"{line}\n" for line in lines if is_record_until(first_step, line)]
        replace_text(path, "".join(kept))
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._lock = lock

    def log(self, kind: str, values: dict[str, Any]) -> None:
        if not self._lock.is_lost():
            record = {"kind": kind, "time": time.time(), **values}
            self._unwritten += json.dumps(record).encode() + b"\n"
            self._write()

    def close(self, exit_code: int) -> None:
        with self._file:
            self._write()

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def is_record_until(step: int, line: str) -> bool:
    """Whether a line is a record of a step up to this one."""
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, LookupError, TypeError):  # such as a line that a killed run has begun
        return False


def open_metrics(
    config: Config, start: Progress, total_steps: int, ranks: Ranks, lock: RunLock
) -> Metrics:
    """The metrics of this rank; all ranks call it.

    Args:
        start: the steps that are finished, and the W&B run, which a resumed run continues.

    Raises:
        UserError: W&B rejects its settings; on every rank.
    """
    metrics = Metrics([])
    folder = Path(config.output_dir)
    places = gather_json(ranks, [socket.gethostname(), device_name(ranks.device)])
    cluster = {
        "world_size": len(places),
        "hosts": list(dict.fromkeys(host for host, _ in places)),
        "devices": Counter(device for _, device in places),
    }

    def open_sinks() -> None:
        metrics.sinks.append(ConsoleSink(start.step, total_steps))
        metrics.sinks.append(JsonlSink(folder / METRICS, start.step, lock))
        if config.tracking.wandb != "disabled":
            metrics.sinks.append(WandbSink(config, start, cluster))
        metrics.log("start", {"step": start.step, **cluster})

    run_on_first_rank(ranks, open_sinks)
    return metrics
