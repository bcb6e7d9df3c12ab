"""Compares the loss curves of two runs, for compare_runs.py."""

from pathlib import Path

from zerotrain.runtime.errors import UserError, listed
from zerotrain.tools.report import read_run

TOLERANCE = 1e-5  # relative: the effect of summing in another order in fp32


def compare_curves(before: Path, after: Path, tolerance: float = TOLERANCE) -> bool:
    """Print the largest relative difference of loss and gradient norm between the first and the
    last step that both runs have.

    Returns:
        Whether both are within the tolerance, and no step is missing or NaN in one run only.

    Raises:
        UserError: not a run folder, or the runs have no steps in common.
    """
    first, second = (read_run(folder).series for folder in (before, after))
    is_same = True
    for name in ("loss", "grad_norm"):
        if not (name in first and name in second and {*first[name].index} & {*second[name].index}):
            raise UserError(f"the runs have no steps with {name} in common")
        # step_seconds is recorded with every step, and always finite
        steps = [run["step_seconds"].index for run in (first, second)]
        both = first[name].to_frame("before").join(second[name].rename("after"), how="outer")
        both = both.loc[max(s[0] for s in steps) : min(s[-1] for s in steps)]
        difference = ((both.after - both.before) / both.before.clip(lower=1e-30)).abs()
        in_one = both.index[both.isna().any(axis="columns")]
        is_same &= difference.max() <= tolerance and in_one.empty
        print(f"{name}: largest relative difference {difference.max():.1e}, at step "
              f"{difference.idxmax()} of {len(difference)}")  # fmt: skip
        if not in_one.empty:
            print(f"{name}: missing or NaN in one run only: steps {listed(in_one)}")
    print("the same curve" if is_same else f"NOT the same within {tolerance:.0e}")
    return is_same
