"""Compare the loss curves of two runs, step by step.

    python -m scripts.compare_runs runs/before runs/after

Prints the largest relative difference of loss and gradient norm between the first and the last step
that both runs have. Exit code 1 if it exceeds 1e-5, the effect of summing in another order in fp32,
or if a step is missing or NaN in one run only.
"""

import sys

import pandas as pd

from zerotrain.runtime.errors import EXIT_FAILURE, UserError, exit_on_error, first_of
from zerotrain.tracking.metrics import read_metrics

TOLERANCE = 1e-5


def main() -> None:
    if len(sys.argv) != 3:
        raise UserError(
            "give two run folders: python -m scripts.compare_runs runs/before runs/after"
        )
    runs = [
        pd.DataFrame(read_metrics(run), columns=["step", "loss", "grad_norm"]).set_index("step")
        for run in sys.argv[1:]
    ]
    first, last = max(run.index.min() for run in runs), min(run.index.max() for run in runs)
    is_same = True
    for name in ("loss", "grad_norm"):
        curves = [pd.to_numeric(run[name], errors="coerce") for run in runs]  # else NaN
        steps = pd.concat(curves, axis=1, keys=["before", "after"]).sort_index().loc[first:last]
        both = steps.dropna()
        if both.empty:
            raise UserError(f"the runs have no steps with {name} in common")
        differences = (both.after - both.before).abs() / both.before.clip(lower=1e-30)
        print(f"{name}: largest relative difference {differences.max():.1e}, at step "
              f"{differences.idxmax()} of {len(steps)}")  # fmt: skip
        in_one = steps.index[steps.isna().sum(axis=1) == 1]
        if len(in_one):
            print(f"{name}: missing or NaN in one run only: steps {first_of(in_one)}")
        is_same &= bool(differences.max() <= TOLERANCE) and not len(in_one)
    print("the same curve" if is_same else f"NOT the same within {TOLERANCE:.0e}")
    sys.exit(0 if is_same else EXIT_FAILURE)


if __name__ == "__main__":
    exit_on_error(main)
