"""The records of a run, which go to every sink, and metrics.jsonl, the sink that keeps them all."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.manifest import stat_inside
from zerotrain.checkpoint.run_folder import METRICS
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.files import open_to_append, replace_text

BUFFER_BYTES = 1 << 24
# Enough for millions of steps, or for 200,000 steps of 4,096 ranks.
MAX_METRICS_BYTES = 1 << 32
# Enough for the record of 65,536 ranks.
MAX_LINE_BYTES = 1 << 24


def number(value: Any) -> float:
    """Return `value` as a float; NaN if it is not a number below 1e30."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e30 else math.nan


class UsefulTime:
    """Goodput: the seconds of useful steps over all seconds since a run's first start.

    The records come in order, without those that a resumed run has removed. So a step that ran
    again counts once. The first step after a start compiles and connects: it counts with the second
    step, for at most as long.
    """

    began = seconds = 0.0
    _first = None

    def add(self, kind: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a record, with the goodput up to here if it is a step after a start,
        by the records' times.
        """
        if kind == "start":
            times = (number(values.get(name)) for name in ("started", "time"))
            self.began = self.began or next((time for time in times if time > 0), 0.0)
            self._first = None
        if kind != "train":
            return values
        took = number(values.get("step_seconds"))
        took = took if took > 0 else 0.0
        if self._first is None:
            self._first = took
        else:
            self.seconds += took + min(took, self._first)
            self._first = 0
        wall_seconds = number(values.get("time")) - self.began
        # A clock may be set back, and a file may have any numbers.
        return values | ({"goodput": self.seconds / wall_seconds} if wall_seconds > 0 else {})


class Metrics:
    """Passes each record to all sinks, which have the same methods: log and close.

    Ranks other than 0 have no sinks. If a sink fails, e.g. because the disk is full, training
    continues after one warning, and the sink still gets the next records.
    """

    def __init__(self, sinks: list[Any]) -> None:
        self.sinks = sinks
        self.useful_time = UsefulTime()
        self._failing = set()

    def log(self, kind: str, values: dict[str, Any]) -> None:
        """Report a record.

        Args:
            kind: start, train, ranks, eval, generations, save or event; a sink ignores the kinds
                that it does not know.
            values: values of JSON types by name, with units in the names. `step`, the number of
                finished optimizer steps, is always among them.
        """
        values = self.useful_time.add(kind, {"time": time.time(), **values})
        self._for_each(lambda sink: sink.log(kind, values))

    def close(self, exit_code: int) -> None:
        """Flush and close all sinks. W&B shows a run with an exit code other than 0 as failed."""
        self._for_each(lambda sink: sink.close(exit_code))

    def _for_each(self, work: Callable[[Any], None]) -> None:
        for sink in self.sinks:
            try:
                work(sink)
                self._failing.discard(sink)
            except Exception as error:  # For example, W&B's process was killed.
                if sink not in self._failing:
                    failed = f"{type(sink).__name__} failed"
                    print(f"WARNING: {failed}, training continues: {describe(error)}")
                self._failing.add(sink)


def numbers(kind: str, values: dict[str, Any]) -> dict[str, float]:
    """Return a record's numbers but its step, named `kind/name`."""
    return {
        f"{kind}/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name not in ("step", "time")
    }


class JsonlSink:
    """metrics.jsonl: one JSON object per line, with `kind` and `time` (Unix seconds).

    A resumed run removes the records after its checkpoint, because it repeats these steps. Nothing
    is written once another run has taken `lock`. Records that a full disk does not take are written
    with a later record, up to BUFFER_BYTES. A file that was removed, or renamed with its folder, is
    written again with all records once the folder has the lock.
    """

    def __init__(self, first_step: int, lock: RunLock, add: Callable) -> None:
        self._path = path = lock.folder / METRICS
        lines = metrics_lines(lock.folder, math.inf) if first_step and path.exists() else []
        records = filter(None, map(parse_record, lines))
        kept = (record for record in records if record["step"] <= first_step)
        replace_text(path, (json.dumps(add(record["kind"], record)) + "\n" for record in kept))
        # After a failed flush the buffer keeps its content for the next one.
        self._file = open_to_append(path, BUFFER_BYTES)
        self._lock = lock

    def log(self, kind: str, values: dict[str, Any]) -> None:
        if not self._lock.is_lost():
            if os.path.lexists(self._lock.lock_file):
                self._write_again()
            record = {"kind": kind, **values}
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()

    def _write_again(self) -> None:
        """Copy the open file to its path if the path no longer leads to it."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.lstat(), os.fstat(self._file.fileno())):
                return
        # The kernel opens a removed file, too, by the descriptor.
        with Path(f"/proc/self/fd/{self._file.fileno()}").open(encoding="utf-8") as lines:
            replace_text(self._path, lines)
        self._file.close()
        self._file = open_to_append(self._path, BUFFER_BYTES)
        print(f"WARNING: {self._path} was removed or renamed, and is written again")

    def close(self, exit_code: int) -> None:
        self._file.close()


def metrics_lines(run_folder: str | Path, max_bytes: float = MAX_METRICS_BYTES) -> Iterator[bytes]:
    """Yield the non-empty lines of a run's metrics.jsonl. A line over MAX_LINE_BYTES comes in
    pieces.

    Raises:
        UserError: the folder has no readable metrics.jsonl, or it has more than `max_bytes`.
    """
    try:
        stat_inside(Path(run_folder), METRICS, max_bytes)  # The folder may be a stranger's.
        with Path(run_folder, METRICS).open("rb", BUFFER_BYTES) as file:
            while line := file.readline(MAX_LINE_BYTES):
                if not line.isspace():
                    yield line
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run_folder}: not a run folder ({describe(error)}); give the output_dir of a run"
        ) from None


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, or None, e.g. for a line that a killed run left incomplete."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        record = json.loads(line)
        # isinstance would accept true, which is an int in Python.
        is_step = type(record["step"]) is int and 0 <= record["step"] < 1 << 53
        if is_step and isinstance(record["kind"], str):
            return record
    return None
