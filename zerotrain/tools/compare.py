"""Compares the loss curves of two runs, for compare_runs.py."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from zerotrain.runtime.errors import UserError, first_of
from zerotrain.tracking.metrics import read_metrics

TOLERANCE = 1e-5  # relative: the effect of summing in another order in fp32


def compare_curves(before: Path, after: Path) -> bool:
    """Print the largest relative difference of loss and gradient norm between the first and the
    last step that both runs have.

    Returns:
        Whether both are within TOLERANCE, and no step is missing or NaN in one run only.

    Raises:
        UserError: not a run folder, or the runs have no steps in common.
    """
    runs = [{r["step"]: r for r in read_metrics(run, "train")} for run in (before, after)]
    first = max(min(run, default=1) for run in runs)
    last = min(max(run, default=0) for run in runs)
    steps = sorted(k for k in {*runs[0], *runs[1]} if first <= k <= last)
    is_same = True
    for name in ("loss", "grad_norm"):
        a, b = (np.array([number(run.get(k, {}).get(name)) for k in steps]) for run in runs)
        if not np.isfinite(a + b).any():
            raise UserError(f"the runs have no steps with {name} in common")
        difference = np.abs(b - a) / np.maximum(a, 1e-30)
        worst = np.nanargmax(difference)
        in_one = np.array(steps)[np.isnan(a) != np.isnan(b)]
        is_same &= bool(difference[worst] <= TOLERANCE) and not in_one.size
        print(f"{name}: largest relative difference {difference[worst]:.1e}, at step "
              f"{steps[worst]} of {len(steps)}")  # fmt: skip
        if in_one.size:
            print(f"{name}: missing or NaN in one run only: steps {first_of(in_one)}")
    print("the same curve" if is_same else f"NOT the same within {TOLERANCE:.0e}")
    return is_same


def number(value: Any) -> float:
    """A value of a record as a float, NaN if it is no number."""
    return float(value) if isinstance(value, int | float) else math.nan
