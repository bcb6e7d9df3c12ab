"""A run read back from its folder, to be shown or compared."""

import json
import math
import sys
from array import array
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from checkpoint.run_folder import METRICS, RESOLVED_CONFIG, RESOLVED_DS_CONFIG
from config.yaml_check import compose, read_config_text
from runtime.errors import UserError, describe

TRAIN_KEYS = (
    "step", "time", "loss", "lr", "grad_norm", "tokens", "tokens_total", "tokens_per_s",
    "padding_efficiency", "step_seconds", "data_seconds", "forward_seconds", "backward_seconds",
    "optimizer_seconds", "update_skipped", "model_flops_per_s", "mfu", "memory_peak_bytes",
    "router_loss", "expert_load_max", "experts_unused",
)  # fmt: skip
KINDS = ("start", "eval", "save", "event", "generations")
OF_RANKS = ("own_seconds", "data_seconds")  # the former includes the latter
OF_GPUS = ("temperature_celsius", "sm_clock_mhz", "power_watts")
MOST_STEPS = 1 << 53  # a float has larger integers only with gaps


@dataclass(frozen=True)
class Window:
    """A record `ranks`: what was measured on each rank, up to and with `step`."""

    step: int
    hosts: tuple[str, ...]
    """The host of each rank; empty if the record does not say."""
    values: dict[str, np.ndarray]
    """Of OF_RANKS and OF_GPUS those that were measured: float32 of shape (ranks,), or NaN."""

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Window":
        gpus = [gpu if isinstance(gpu, dict) else {} for gpu in _list(record.get("gpu"))]
        lists = {key: _list(record.get(key)) for key in OF_RANKS}
        lists |= {key: [gpu.get(key) for gpu in gpus] for key in OF_GPUS}
        with np.errstate(over="ignore"):
            values = {
                key: np.array([number_of(value) for value in values]).astype(np.float32)
                for key, values in lists.items()
            }
        return cls(
            step=record["step"],
            hosts=tuple(map(sys.intern, map(str, _list(record.get("hosts"))))),
            values={key: array for key, array in values.items() if np.isfinite(array).any()},
        )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


@dataclass(frozen=True)
class Records:
    """The content of metrics.jsonl."""

    train: dict[str, np.ndarray]
    """The records of steps: for each key of TRAIN_KEYS float64 of shape (steps,), NaN where a
    record lacks it; `step` increases. Keys that no record has are left out, except step.
    """
    windows: list[Window]
    others: dict[str, list[dict[str, Any]]]
    """Of each of KINDS the records in the order of the file; their steps are checked, and nothing
    else. Like all texts of a run they may come from anybody.
    """
    bad_lines: list[int]
    """Lines that are no records, such as the last one of a killed run."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return self.others.get(kind, [])


@dataclass(frozen=True)
class History:
    """The records of a run and its resolved configs."""

    folder: Path
    records: Records
    config: dict[str, Any]
    """resolved_config.yaml by dotted keys."""
    ds_config: dict[str, Any]
    missing: list[str]
    """Which of the run's files cannot be read, and why."""


def read_history(folder: Path) -> History:
    """Read a run folder, also that of a run that is still training or has died at any moment.

    Raises:
        UserError: it is not a run folder: it has no metrics.jsonl that can be read.
    """
    missing: list[str] = []
    config: dict[str, Any] = {}
    try:
        text = read_config_text(str(folder / RESOLVED_CONFIG))
        compose(text, str(folder / RESOLVED_CONFIG))  # refuses unbounded aliases
        config = flatten(yaml.safe_load(text))
    except (UserError, yaml.YAMLError, ValueError, RecursionError) as error:
        missing.append(describe(error))
    try:
        ds_config = flatten(json.loads(read_config_text(str(folder / RESOLVED_DS_CONFIG))))
    except (UserError, ValueError, RecursionError) as error:
        ds_config = {}
        missing.append(describe(error))
    return History(folder, read_records(folder / METRICS), config, ds_config, missing)


def read_records(path: Path) -> Records:
    """Read metrics.jsonl; of several records of one step the last one counts.

    Raises:
        UserError: the file cannot be read.
    """
    columns: dict[str, array[float]] = {"step": array("d")}
    others: dict[str, list[dict[str, Any]]] = defaultdict(list)
    windows, bad_lines = [], []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line)
                    kind, step = record["kind"], record["step"]
                    if type(step) is not int or not 0 <= step < MOST_STEPS:
                        raise ValueError("not a step")
                    if kind == "train":
                        values = {key: number_of(record.get(key)) for key in TRAIN_KEYS}
                        _append(columns, values)
                    elif kind == "ranks":
                        windows.append(Window.of(record))
                    elif kind in KINDS:
                        others[kind].append(record)
                except (ValueError, KeyError, TypeError, RecursionError):
                    bad_lines.append(number)
    except OSError as error:
        raise UserError(
            f"{path.parent}: not a run folder ({describe(error)}); give output_dir of a run"
        ) from None
    count = len(columns["step"])
    for column in columns.values():
        column.extend([math.nan] * (count - len(column)))
    train = {key: np.array(column) for key, column in columns.items()}
    last = count - 1 - np.unique(train["step"][::-1], return_index=True)[1]
    train = {key: values[last] for key, values in train.items()}
    return Records(train, windows, dict(others), bad_lines)


def _append(columns: "dict[str, array[float]]", values: dict[str, float]) -> None:
    """Append a row; a column begins with the first row that has a value in it."""
    count = len(columns["step"])
    for key, value in values.items():
        if key in columns or not math.isnan(value):
            column = columns.setdefault(key, array("d"))
            column.extend([math.nan] * (count - len(column)))
            column.append(value)


def number_of(value: Any) -> float:
    """`value` as a float; NaN if it is not a number."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of over 308 digits
        return math.nan


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by dotted keys."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    leaves = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves
