"""Compare the loss curves of two runs, step by step.

    python scripts/compare_runs.py runs/before runs/after

Prints the largest relative difference of loss and gradient norm between the first and the last step
that both runs have. Exit code 1 if it exceeds 1e-5, or if a step is missing or NaN in one run only.
"""

import sys
from pathlib import Path

from zerotrain.runtime.errors import EXIT_FAILURE, UserError, exit_on_error
from zerotrain.tools.compare import compare_curves


def main() -> None:
    if len(sys.argv) != 3:
        raise UserError("give two run folders: compare_runs.py runs/before runs/after")
    sys.exit(0 if compare_curves(*map(Path, sys.argv[1:])) else EXIT_FAILURE)


if __name__ == "__main__":
    exit_on_error(main)
