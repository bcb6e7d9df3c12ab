"""Compare the loss curves of two runs, step by step.

    python scripts/compare_runs.py runs/before runs/after

Prints the largest relative difference of loss and gradient norm; exit code 1 if it exceeds 1e-5.
"""

import sys
from pathlib import Path

from zerotrain.runtime.errors import EXIT_FAILURE, UserError, exit_on_error
from zerotrain.tools.report import read_run

TOLERANCE = 1e-5  # relative: the effect of summing in another order in fp32


def main() -> None:
    if len(sys.argv) != 3:
        raise UserError("give two run folders: compare_runs.py runs/before runs/after")
    before, after = (read_run(Path(folder)).series for folder in sys.argv[1:])
    worst = 0.0
    for name in ("loss", "grad_norm"):
        if not (name in before and name in after and {*before[name].index} & {*after[name].index}):
            raise UserError(f"the runs have no steps with {name} in common")
        difference = ((after[name] - before[name]) / before[name].clip(lower=1e-30)).abs().dropna()
        worst = max(worst, difference.max())
        print(f"{name}: largest relative difference {difference.max():.1e}, at step "
              f"{difference.idxmax()} of {len(difference)}")  # fmt: skip
    print("the same curve" if worst <= TOLERANCE else f"NOT the same within {TOLERANCE}")
    sys.exit(0 if worst <= TOLERANCE else EXIT_FAILURE)


if __name__ == "__main__":
    exit_on_error(main)
