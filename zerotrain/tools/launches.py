"""The file RUN/launches.jsonl, in which the launcher notes each attempt at a run, for goodput.

A line has times in Unix seconds: `started`; `printed`, the first line of a rank; `failed`, the
first failure that was seen; `ended`, on all hosts. It also has `step` and `last`: the last step in
metrics.jsonl and its time, because a resumed run removes the lines of the steps that it repeats.
Nothing is noted if the launcher runs where the run folder is not.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.manifest import stat_inside
from zerotrain.checkpoint.run_folder import METRICS
from zerotrain.runtime.files import MAX_TEXT_BYTES, append_line
from zerotrain.tracking.metrics import parse_record

LAUNCHES = "launches.jsonl"
TAIL_BYTES = 1 << 20


def note_attempt(folder: Path, times: dict[str, float], cause: str) -> None:
    """Append the line of an attempt that has just ended on all hosts."""
    with suppress(OSError):
        line = {**times, "ended": time.time(), "cause": cause, **last_step(folder / METRICS)}
        append_line(folder / LAUNCHES, line)


def last_step(metrics: Path) -> dict[str, Any]:
    """Return `step` and `last` of a metrics.jsonl; nothing if it has no step.

    Raises:
        OSError: it cannot be read.
    """
    with metrics.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            record = parse_record(line)
            if record and record["kind"] == "train":
                return {"step": record["step"], "last": record.get("time")}
    return {}


def read_launches(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, the oldest first; none if they cannot be read."""
    found = []
    with suppress(OSError, ValueError, RecursionError):
        stat_inside(folder, LAUNCHES, MAX_TEXT_BYTES)
        for line in (folder / LAUNCHES).read_text(encoding="utf-8").splitlines():
            if isinstance(launch := json.loads(line), dict):
                found.append(launch)
    return found
