"""Compare the loss curves of two runs, step by step.

    python -m scripts.compare_runs runs/before runs/after

Prints the largest relative difference of loss and gradient norm, from the first to the last step
that both runs have. The tolerance is 1e-5, the effect of another order of summation in fp32.
Exit code 1 if a difference exceeds it, or if a step is missing or NaN in one run only.
"""

import sys

import pandas as pd

from zerotrain.runtime.errors import EXIT_FAILURE, UserError, exit_on_error, first_of
from zerotrain.tools.records import number, read_metrics

TOLERANCE = 1e-5
COMPARED = ["loss", "grad_norm"]


def main() -> None:
    if len(sys.argv) != 3:
        raise UserError(
            "give two run folders: python -m scripts.compare_runs runs/before runs/after"
        )
    runs = [read_curves(folder) for folder in sys.argv[1:]]
    first = max(run.index.min() for run in runs)
    last = min(run.index.max() for run in runs)
    before, after = (run.loc[first:last] for run in runs)
    before, after = before.align(after)
    is_same = True
    for name in COMPARED:
        differences = (after[name] - before[name]).abs() / before[name].clip(lower=1e-30)
        if differences.isna().all():
            raise UserError(f"the runs have no step in common with a finite {name}")
        worst = differences.idxmax()
        print(
            f"{name}: largest relative difference {differences[worst]:.1e}, at step {worst} of "
            f"{len(differences)}"
        )
        in_one = differences.index[before[name].isna() != after[name].isna()]
        if len(in_one):
            print(f"{name}: missing or NaN in one run only: steps {first_of(in_one)}")
        is_same &= bool(differences[worst] <= TOLERANCE) and not len(in_one)
    print("the same curve" if is_same else f"NOT the same within {TOLERANCE:.0e}")
    sys.exit(0 if is_same else EXIT_FAILURE)


def read_curves(folder: str) -> pd.DataFrame:
    """Return the loss and the gradient norm of each step, NaN if not finite."""
    records = pd.DataFrame(read_metrics(folder), columns=["step", *COMPARED])
    if records.empty:
        raise UserError(f"{folder} has no steps; give a run that has trained")
    return records.drop_duplicates("step", keep="last").set_index("step").sort_index().map(number)


if __name__ == "__main__":
    exit_on_error(main)
