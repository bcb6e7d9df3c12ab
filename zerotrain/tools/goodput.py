"""Goodput of a run: useful step seconds over wall seconds, and where the other seconds went.

metrics.jsonl has each step once, also in a run that was killed and resumed. So the sum of its step
seconds is the useful time. The rest comes from the times of its records, and from the launcher's
notes of its attempts (launches.py). Without these notes, all time between the last saved step and
the next start is one part.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from zerotrain.tools.launches import read_launches
from zerotrain.tools.records import number
from zerotrain.tracking.metrics import metrics_lines, parse_record

USEFUL = "useful steps"
PARTS = (
    USEFUL, "imports", "loading", "first step", "steps that were repeated", "detection",
    "ending the ranks", "preflight", "saves", "evaluations", "between two starts, not recorded",
    "other",
)  # fmt: skip
MAX_RECORDS = 1 << 21
SECONDS = {"start": "", "train": "step_seconds", "save": "save_seconds", "eval": "eval_seconds"}
"""Kinds of records that count, and their key for how long they took."""
KINDS = [*SECONDS]


@dataclass(frozen=True)
class Goodput:
    """Where the wall seconds of a run went."""

    wall_seconds: float
    seconds: dict[str, float]
    """Seconds of each of PARTS. They add up to wall_seconds."""
    to_next_step: list[float]
    """For each restart, the seconds from the last step before the failure to the first one after
    it. Without the launcher's notes, the last step that the run has kept counts.
    """

    @property
    def share(self) -> float:
        """Useful seconds over wall seconds; NaN before the first step."""
        return self.seconds[USEFUL] / self.wall_seconds if self.wall_seconds > 0 else math.nan


def measure_goodput(folder: Path) -> Goodput:
    """Return the goodput of a run since its first start.

    Raises:
        UserError: the folder has no metrics.jsonl that can be read.
    """
    attempts = list(attempts_of(folder))
    steps = [took for _, events in attempts for _, kind, took in events if kind == "train"]
    usual = median(steps) if steps else 0.0
    seconds = Counter(dict.fromkeys(PARTS, 0.0))
    to_next_step = []
    before = last = None
    for launch, events in attempts:
        began = events[0][0]
        started = launch.get("started", began)
        if before is not None:
            is_noted = launch and "ended" in before
            name = "preflight" if is_noted else "between two starts, not recorded"
            seconds[name] += max(0.0, started - before.get("ended", last))
        printed = min(launch.get("printed", started), began)
        seconds["imports"] += printed - started
        seconds["loading"] += began - printed
        is_first = True
        for time, kind, took in events:
            if kind == "train" and is_first:
                is_first = False
                # Compilation and the first collectives are not useful time.
                useful = min(took, usual)
                idle = sum(took for at, kind, took in events if kind == "eval" and at <= time)
                seconds["first step"] += max(0.0, time - began - useful - idle)
                seconds[USEFUL] += useful
                if before is not None:
                    to_next_step.append(time - before.get("last", last))
            elif kind == "train":
                seconds[USEFUL] += took
            elif kind != "start":
                seconds["saves" if kind == "save" else "evaluations"] += took
        last = events[-1][0]
        reached = max(last, launch.get("last", last))
        seconds["steps that were repeated"] += reached - last
        if "failed" in launch:
            seconds["detection"] += max(0.0, launch["failed"] - reached)
            seconds["ending the ranks"] += launch["ended"] - launch["failed"]
        before = launch
    if not attempts:
        return Goodput(0.0, dict(seconds), [])
    first, events = attempts[0]
    wall = max(last, before.get("ended", last)) - first.get("started", events[0][0])
    seconds["other"] = max(0.0, wall - sum(seconds.values()))
    return Goodput(wall, dict(seconds), to_next_step)


def attempts_of(folder: Path) -> Iterator[tuple[dict[str, float], list[tuple[float, str, float]]]]:
    """Yield each attempt that has begun to train: the launcher's times of it, empty if there are
    none; and its events (Unix time, kind, seconds), beginning with its start.
    """
    times, kinds, took = array("d"), array("b"), array("d")
    for record in islice(filter(None, map(parse_record, metrics_lines(folder))), MAX_RECORDS):
        kind, time = record["kind"], number(record.get("time"))
        if kind in SECONDS and not math.isnan(time):
            times.append(time)
            kinds.append(KINDS.index(kind))
            took.append(max(0.0, number(record.get(SECONDS[kind], 0.0))))
    launches = [*map(times_of, read_launches(folder))]
    events = []
    for i, time in enumerate(times):
        if KINDS[kinds[i]] == "start" and events:
            yield launch_at(events[0][0], launches), events
            events = []
        if events or KINDS[kinds[i]] == "start":
            events.append((time, KINDS[kinds[i]], took[i]))
    if events:
        yield launch_at(events[0][0], launches), events


def times_of(launch: dict[str, Any]) -> dict[str, float]:
    found = {key: number(value) for key, value in launch.items()}
    return {key: value for key, value in found.items() if not math.isnan(value)}


def launch_at(time: float, launches: list[dict[str, float]]) -> dict[str, float]:
    """Return the attempt of the launcher that was running at a time; empty if there was none."""
    for launch in launches:
        if launch.get("started", math.inf) <= time <= launch.get("ended", -math.inf):
            return launch
    return {}
