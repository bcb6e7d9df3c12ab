"""The names of measurements in W&B and TensorBoard: KIND/KEY of metrics.jsonl, e.g. train/loss."""

from typing import Any

KINDS = ("train", "eval", "save", "ranks")


def numbers_of(kind: str, values: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by name: of a list with a float per rank the largest one, and of an
    event a 1 under its name.
    """
    if kind == "event":
        return {f"event/{values['name']}": 1}
    numbers: dict[str, float] = {}
    for key, value in values.items() if kind in KINDS else ():
        if isinstance(value, list) and value and all(isinstance(v, float) for v in value):
            numbers[f"{kind}/{key}_max"] = max(value)
        elif isinstance(value, int | float) and key != "step":
            numbers[f"{kind}/{key}"] = float(value)
    return numbers
