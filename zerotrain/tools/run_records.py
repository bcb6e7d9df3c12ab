"""A run read back from its folder, to be drawn or compared."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from zerotrain.checkpoint.manifest import stat_inside
from zerotrain.checkpoint.run_folder import METRICS, RESOLVED_CONFIG, RESOLVED_DS_CONFIG
from zerotrain.runtime.errors import UserError, describe

TRAIN_KEYS = (
    "step", "time", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu",
    "padding_efficiency", "memory_peak_bytes", "router_loss", "step_seconds", "data_seconds",
    "forward_seconds", "backward_seconds", "optimizer_seconds",
)  # fmt: skip
MAX_RECORDS = 300  # of a kind, the last ones
MAX_BYTES = 1 << 20  # of a line or a config


@dataclass(frozen=True)
class RunRecords:
    """A run that is still training, has ended, or died at any moment."""

    name: str
    records: dict[str, list[dict[str, Any]]]
    """Those of metrics.jsonl by kind, but `train`. Their steps are checked, and nothing else: they
    may come from anybody.
    """
    train: pd.DataFrame
    """A row per step, with those of TRAIN_KEYS that any record has."""
    configs: str
    problems: list[str]
    """What is missing or cannot be read."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return self.records.get(kind, [])[-MAX_RECORDS:]


def read_run(folder: Path, name: str = "") -> RunRecords:
    """Raises UserError: it is not a run folder."""
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    problems, bad_lines = [], []
    try:
        stat_inside(folder, METRICS)  # a pipe would be waited for, a link could lead anywhere
        with (folder / METRICS).open("rb") as file:
            for place, line in enumerate(iter(lambda: file.readline(MAX_BYTES), b""), start=1):
                try:
                    record = json.loads(line)
                    if type(record["step"]) is not int or not 0 <= record["step"] < 1 << 53:
                        raise ValueError("not a step")
                    by_kind[str(record["kind"])].append(record)
                except (ValueError, KeyError, TypeError, RecursionError):
                    bad_lines.append(place)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: not a run folder ({describe(error)}); give output_dir of a run"
        ) from None
    if bad_lines:
        problems.append(
            f"{METRICS}: {len(bad_lines):,} lines cannot be read, e.g. {bad_lines[0]:,}"
        )
    steps = by_kind.pop("train", [])
    if not steps:
        problems.append("no step is recorded: the run ended, or still is, before its first")
    rows = [{key: number(step.get(key)) for key in TRAIN_KEYS} for step in steps]
    train = pd.DataFrame(rows, columns=TRAIN_KEYS).drop_duplicates("step", keep="last")
    train["padding"] = 1 - train.pop("padding_efficiency")
    train["memory_gib"] = train.pop("memory_peak_bytes") / 2**30
    train = train.sort_values("step").dropna(axis=1, how="all")
    configs = ""
    for config in (RESOLVED_CONFIG, RESOLVED_DS_CONFIG):
        try:
            stat_inside(folder, config)
            with (folder / config).open("rb") as file:
                configs += f"# {config}\n{file.read(MAX_BYTES).decode(errors='replace')}\n"
        except (OSError, ValueError) as error:
            problems.append(describe(error))
    return RunRecords(name, by_kind, train, configs, problems)


def number(value: Any) -> float:
    """`value` as a float; NaN if it is not a number that can be drawn."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e30 else math.nan
