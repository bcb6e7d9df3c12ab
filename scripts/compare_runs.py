"""Compare the loss curves of two runs, step by step.

    python -m scripts.compare_runs runs/before runs/after

Prints the largest relative difference of loss and gradient norm between the first and the last step
that both runs have. Exit code 1 if it exceeds 1e-5, the effect of summing in another order in fp32,
or if a step is missing or NaN in one run only.
"""

import sys

import numpy as np

from zerotrain.runtime.errors import EXIT_FAILURE, UserError, exit_on_error, first_of
from zerotrain.tools.records import read_metrics

TOLERANCE = 1e-5


def main() -> None:
    if len(sys.argv) != 3:
        raise UserError(
            "give two run folders: python -m scripts.compare_runs runs/before runs/after"
        )
    runs = [{record["step"]: record for record in read_metrics(run)} for run in sys.argv[1:]]
    first, last = max(min(run, default=1) for run in runs), min(max(run, default=0) for run in runs)
    steps = np.array([step for step in sorted({*runs[0], *runs[1]}) if first <= step <= last])
    is_same = True
    for name in ("loss", "grad_norm"):
        curves = np.array([[number(run.get(k, {}).get(name)) for k in steps] for run in runs])
        is_number = np.isfinite(curves)
        in_both = is_number.all(0)
        if not in_both.any():
            raise UserError(f"the runs have no steps with {name} in common")
        before, after = curves[:, in_both]
        differences = np.abs(after - before) / np.maximum(before, 1e-30)
        worst = differences.argmax()
        print(f"{name}: largest relative difference {differences[worst]:.1e}, at step "
              f"{steps[in_both][worst]} of {len(steps)}")  # fmt: skip
        in_one = steps[is_number.any(0) & ~in_both]
        if len(in_one):
            print(f"{name}: missing or NaN in one run only: steps {first_of(in_one)}")
        is_same &= bool(differences[worst] <= TOLERANCE) and not len(in_one)
    print("the same curve" if is_same else f"NOT the same within {TOLERANCE:.0e}")
    sys.exit(0 if is_same else EXIT_FAILURE)


def number(value: object) -> float:
    """NaN for what is no number, and for None, of a step that is missing."""
    return float(value) if isinstance(value, int | float) else np.nan


if __name__ == "__main__":
    exit_on_error(main)
