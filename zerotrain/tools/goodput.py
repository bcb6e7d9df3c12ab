"""Goodput of a run: useful step seconds over wall seconds, and where the other seconds went.

The share is the `goodput` of the run's last step (zerotrain/tracking/metrics.py). The parts of the
rest come from the times of the records, and from the launcher's notes of its attempts
(launches.py). Without these notes, the time between the last saved step and the next start of rank
0 is one part, and its imports count as loading.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from zerotrain.tools.launches import read_launches
from zerotrain.tools.records import number
from zerotrain.tracking.metrics import UsefulTime, metrics_lines, parse_record

USEFUL = "useful steps"
PARTS = (
    USEFUL, "imports", "loading", "first step", "steps that were repeated", "detection",
    "ending the ranks", "preflight", "saves", "evaluations", "between two starts, not recorded",
    "other",
)  # fmt: skip
MAX_RECORDS = 1 << 21
SECONDS = {
    "start": "started",
    "train": "step_seconds",
    "save": "save_seconds",
    "eval": "eval_seconds",
}
"""Kinds of records that count, and their key for how long they took, or for when it began."""
KINDS = [*SECONDS]


@dataclass(frozen=True)
class Goodput:
    """Where the wall seconds of a run went."""

    share: float
    """Useful seconds over wall seconds; NaN before the first step."""
    wall_seconds: float
    seconds: dict[str, float]
    """Seconds of each of PARTS. They add up to wall_seconds."""
    to_next_step: list[float]
    """For each restart, the seconds from the last step before the failure to the first one after
    it. Without the launcher's notes, the last step that the run has kept counts.
    """


def measure_goodput(folder: Path) -> Goodput:
    """Return the goodput of a run from its first start to its last step.

    Raises:
        UserError: the folder has no metrics.jsonl that can be read.
    """
    attempts = [*attempts_of(folder)]
    steps = [time for _, events in attempts for time, kind, _ in events if kind == "train"]
    seconds = Counter(dict.fromkeys(PARTS, 0.0))
    if not steps:
        return Goodput(math.nan, 0.0, dict(seconds), [])
    end = max(steps)
    run = UsefulTime()
    share = math.nan
    to_next_step = []
    before, last = {}, None
    for launch, events in attempts:
        began, _, startup = events[0]
        if began > end:
            break
        # The first attempt begins with rank 0, which does not know when its launcher began.
        started = began - startup
        if last is not None:
            started = launch.get("started", started)
            reached = max(last, before.get("last", last))
            seconds["steps that were repeated"] += reached - last
            if "failed" in before:
                seconds["detection"] += max(0.0, before["failed"] - reached)
                seconds["ending the ranks"] += before["ended"] - before["failed"]
            is_noted = launch and "ended" in before
            name = "preflight" if is_noted else "between two starts, not recorded"
            seconds[name] += max(0.0, started - before.get("ended", last))
        printed = min(max(started, launch.get("printed", started)), began)
        seconds["imports"] += printed - started
        seconds["loading"] += began - printed
        useful = run.seconds
        first = None
        others = idle = 0.0
        for time, kind, took in events:
            if kind == "start":
                run.add(kind, {"started": time - took})
            elif kind == "train" and time > run.began:
                share = run.add(kind, {"time": time, "step_seconds": took}).get("goodput", share)
                others += took * (first is not None)
                first = first or time
            elif kind != "train" and time <= end:
                seconds["saves" if kind == "save" else "evaluations"] += took
                idle += took * (first is None)
        if first is not None:
            # Compilation and the first collectives are not useful time.
            useful = run.seconds - useful - others
            seconds["first step"] += max(0.0, first - began - useful - idle)
            if last is not None:
                to_next_step.append(first - before.get("last", last))
        last = events[-1][0]
        before = launch
    seconds[USEFUL] = run.seconds
    wall = end - run.began
    seconds["other"] = max(0.0, wall - sum(seconds.values()))
    return Goodput(share, wall, dict(seconds), to_next_step)


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
            value = number(record.get(SECONDS[kind], time * (kind == "start")))
            took.append(max(0.0, time - value if kind == "start" else value))
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
