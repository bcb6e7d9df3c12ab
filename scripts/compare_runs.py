"""Compare the loss curves of two runs, step by step.

    python scripts/compare_runs.py runs/before runs/after

Prints the largest relative difference of loss and gradient norm between the first and the last step
that both runs have. Exit code 1 if it exceeds 1e-5, the effect of summing in another order in fp32,
or if a step is missing or NaN in one run only.
"""

import math
import sys
from pathlib import Path
from typing import Any

from zerotrain.runtime.errors import EXIT_FAILURE, UserError, exit_on_error, first_of
from zerotrain.tracking.metrics import read_metrics

TOLERANCE = 1e-5


def main() -> None:
    if len(sys.argv) != 3:
        raise UserError("give two run folders: compare_runs.py runs/before runs/after")
    a, b = ({r["step"]: r for r in read_metrics(Path(run), "train")} for run in sys.argv[1:])
    first = max(min(run, default=1) for run in (a, b))
    last = min(max(run, default=0) for run in (a, b))
    steps = [k for k in sorted({*a, *b}) if first <= k <= last]
    is_same = True
    for name in ("loss", "grad_norm"):
        differences = {}
        in_one = []
        for k in steps:
            before, after = (number(run.get(k, {}).get(name)) for run in (a, b))
            if math.isfinite(before) != math.isfinite(after):
                in_one.append(k)
            elif math.isfinite(before):
                differences[k] = abs(after - before) / max(before, 1e-30)
        if not differences:
            raise UserError(f"the runs have no steps with {name} in common")
        worst = max(differences, key=differences.get)
        is_same &= differences[worst] <= TOLERANCE and not in_one
        print(f"{name}: largest relative difference {differences[worst]:.1e}, at step {worst} of "
              f"{len(steps)}")  # fmt: skip
        if in_one:
            print(f"{name}: missing or NaN in one run only: steps {first_of(in_one)}")
    print("the same curve" if is_same else f"NOT the same within {TOLERANCE:.0e}")
    sys.exit(0 if is_same else EXIT_FAILURE)


def number(value: Any) -> float:
    """A value of a record as a float, NaN if it is no number."""
    return float(value) if isinstance(value, int | float) else math.nan


if __name__ == "__main__":
    exit_on_error(main)
