"""What a run reports: records, each passed to every sink, and metrics.jsonl, which has them all."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.manifest import stat_inside
from zerotrain.checkpoint.run_folder import METRICS
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.files import replace_text

BUFFER_BYTES = 1 << 24
MAX_METRICS_BYTES = 1 << 32  # Millions of steps; 200,000 of 4,096 ranks.
MAX_LINE_BYTES = 1 << 24  # A step of 65,536 ranks.


class Metrics:
    """Passes every record to every sink; has none on ranks other than 0. A sink has the methods
    log and close of this class.

    Training goes on where a sink fails, e.g. on a full disk: there is one warning, and the sink
    gets the next records.
    """

    def __init__(self, sinks: list[Any]) -> None:
        self.sinks = sinks
        self._failing = set()

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

    def _for_each(self, work: Callable[[Any], None]) -> None:
        for sink in self.sinks:
            try:
                work(sink)
                self._failing.discard(sink)
            except Exception as error:  # whatever it is, e.g. W&B's process was killed
                if sink not in self._failing:
                    print(f"WARNING: {type(sink).__name__} has failed: {describe(error)}")
                self._failing.add(sink)


class JsonlSink:
    """metrics.jsonl: one JSON object per line, with `kind` and `time`, in Unix seconds. A resumed
    run removes the steps after its checkpoint, which it is about to repeat. Once `lock` is lost,
    nothing is written. What a full disk does not take, up to BUFFER_BYTES, is written with the next
    record.
    """

    def __init__(self, first_step: int, lock: RunLock) -> None:
        path = lock.folder / METRICS
        lines = metrics_lines(lock.folder, math.inf) if first_step and path.exists() else []
        records = filter(None, map(parse_record, lines))
        kept = (json.dumps(record) + "\n" for record in records if record["step"] <= first_step)
        replace_text(path, kept)
        # what could not be flushed stays in the buffer, and goes out with the next record
        self._file = path.open("ab", buffering=BUFFER_BYTES)
        self._lock = lock

    def log(self, kind: str, values: dict[str, Any]) -> None:
        if not self._lock.is_lost():
            record = {"kind": kind, "time": time.time(), **values}
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()

    def close(self, exit_code: int) -> None:
        self._file.close()


def metrics_lines(run_folder: str | Path, max_bytes: float = MAX_METRICS_BYTES) -> Iterator[bytes]:
    """The lines of a run's metrics.jsonl but the empty ones, read one at a time. A line that is too
    long comes in pieces.

    Raises:
        UserError: the folder has no metrics.jsonl that can be read.
    """
    try:
        stat_inside(Path(run_folder), METRICS, max_bytes)  # it may be a stranger's
        with Path(run_folder, METRICS).open("rb", BUFFER_BYTES) as file:
            while line := file.readline(MAX_LINE_BYTES):
                if not line.isspace():
                    yield line
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run_folder}: not a run folder ({describe(error)}); give output_dir of a run"
        ) from None


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record in a line, or None if it has none, such as one that a killed run has begun."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        record = json.loads(line)
        # not isinstance: true is an int
        is_step = type(record["step"]) is int and 0 <= record["step"] < 1 << 53
        if is_step and isinstance(record["kind"], str):
            return record
    return None
