"""The names under which dashboards show measurements: GROUP/KEY."""

import statistics
from typing import Any

AXES = ("step", "tokens_total")
"""What a chart's x axis can be: finished optimizer steps, or the tokens trained on so far."""
KINDS = ("train", "eval", "save", "ranks", "event")
GROUPS = {
    **dict.fromkeys(
        ("epoch", "examples", "tokens", "supervised_tokens", "padding_efficiency", "micro_steps"),
        "data",
    ),
    **dict.fromkeys(
        (
            "tokens_per_s", "model_flops_per_s", "mfu", "step_seconds", "data_seconds",
            "forward_seconds", "backward_seconds", "optimizer_seconds", "own_seconds",
            "eval_seconds", "save_seconds", "window_steps",
        ),
        "time",
    ),
    "memory_peak_bytes": "memory",
}  # fmt: skip
"""Keys that do not go into the group of their kind: `eval` for evaluations, otherwise `train`."""


def grouped(kind: str | None, values: dict[str, Any]) -> dict[str, float]:
    """The numbers of a measurement by GROUP/KEY; none for a kind that is not in KINDS.

    Of a list with a float per rank these are its median and its maximum, and an event is a 1 at its
    step, under its name.
    """
    if kind not in KINDS:
        return {}
    if kind == "event":
        return {f"event/{values['name']}": 1}
    numbers: dict[str, float] = {}
    for key, value in values.items():
        name = f"{GROUPS.get(key, 'eval' if kind == 'eval' else 'train')}/{key}"
        if key in AXES or key == "time":
            continue
        if isinstance(value, int | float):
            numbers[name] = int(value) if isinstance(value, bool) else value
        elif isinstance(value, list) and value and all(isinstance(v, float) for v in value):
            numbers |= {f"{name}_median": statistics.median(value), f"{name}_max": max(value)}
    return numbers
