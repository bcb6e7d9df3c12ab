"""Compare the loss curves of two runs, step by step.

    python scripts/compare_runs.py runs/before runs/after

Prints the largest relative difference of loss and gradient norm; exit code 1 if it exceeds 1e-5.
"""

import json
import sys
from pathlib import Path

from zerotrain.runtime.errors import EXIT_FAILURE, UserError, describe, exit_on_error

TOLERANCE = 1e-5  # relative: the effect of summing in another order in fp32


NAMES = ("loss", "grad_norm")


def read_steps(run: str) -> dict[int, list[float]]:
    """Loss and gradient norm of a run, by step."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        train = [line for line in lines if line["kind"] == "train"]
        return {int(line["step"]): [float(line[name]) for name in NAMES] for line in train}
    except (ValueError, TypeError, KeyError, OSError, OverflowError, RecursionError) as error:
        raise UserError(f"{path}: not the metrics of a run: {describe(error)}") from error


def main() -> None:
    if len(sys.argv) != 3:
        raise UserError("give two run folders: compare_runs.py runs/before runs/after")
    before, after = map(read_steps, sys.argv[1:])
    common = sorted(before.keys() & after.keys())
    if not common:
        raise UserError("the runs have no steps in common")
    worst = 0.0
    for i, name in enumerate(NAMES):
        differences = [
            abs(after[k][i] - before[k][i]) / max(abs(before[k][i]), 1e-30) for k in common
        ]
        largest = max(differences)
        step = common[differences.index(largest)]
        print(f"{name:<10} largest relative difference {largest:.1e}, at step {step}")
        worst = max(worst, largest)
    same = worst <= TOLERANCE
    print(
        f"{len(common)} steps: {'the same curve' if same else f'NOT the same within {TOLERANCE}'}"
    )
    sys.exit(0 if same else EXIT_FAILURE)


if __name__ == "__main__":
    exit_on_error(main)
