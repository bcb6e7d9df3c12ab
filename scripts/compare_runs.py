"""Compare the loss curves of two runs, step by step.

    python scripts/compare_runs.py runs/before runs/after

Prints the largest relative difference of loss and gradient norm between the first and the last step
that both runs have. Exit code 1 if it exceeds 1e-5, or if a step is missing or NaN in one run only.
"""

import sys
from pathlib import Path

from zerotrain.runtime.errors import EXIT_FAILURE, UserError, exit_on_error, listed
from zerotrain.tools.report import read_run

TOLERANCE = 1e-5  # relative: the effect of summing in another order in fp32


def main() -> None:
    if len(sys.argv) != 3:
        raise UserError("give two run folders: compare_runs.py runs/before runs/after")
    before, after = (read_run(Path(folder)).series for folder in sys.argv[1:])
    is_same = True
    for name in ("loss", "grad_norm"):
        if not (name in before and name in after and {*before[name].index} & {*after[name].index}):
            raise UserError(f"the runs have no steps with {name} in common")
        # step_seconds is recorded with every step, and always finite
        steps = [run["step_seconds"].index for run in (before, after)]
        both = before[name].to_frame("before").join(after[name].rename("after"), how="outer")
        both = both.loc[max(s[0] for s in steps) : min(s[-1] for s in steps)]
        difference = ((both.after - both.before) / both.before.clip(lower=1e-30)).abs()
        in_one = both.index[both.isna().any(axis="columns")]
        is_same &= difference.max() <= TOLERANCE and in_one.empty
        print(f"{name}: largest relative difference {difference.max():.1e}, at step "
              f"{difference.idxmax()} of {len(difference)}")  # fmt: skip
        if not in_one.empty:
            print(f"{name}: missing or NaN in one run only: steps {listed(in_one)}")
    print("the same curve" if is_same else f"NOT the same within {TOLERANCE}")
    sys.exit(0 if is_same else EXIT_FAILURE)


if __name__ == "__main__":
    exit_on_error(main)
