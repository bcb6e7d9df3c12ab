"""The loss of a run by step as a picture, for model cards; reports have charts of their own."""

from pathlib import Path

import numpy as np

from checkpoint.run_folder import METRICS
from runtime.errors import UserError
from tracking.history import read_records

CURVE = "training_loss.png"
LARGEST = 1e30  # of a loss that is drawn: matplotlib fails with axes near the range of floats


def draw_curve(
    run_folder: Path, last_step: int, evaluations: list[tuple[int, float]], folder: Path
) -> str | None:
    """Draw the training loss up to `last_step`, from metrics.jsonl, and held-out losses.

    Args:
        evaluations: (step, loss).

    Returns:
        The name of the picture in `folder`; None if the run has no metrics.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    try:
        train = read_records(run_folder / METRICS).train
    except UserError:  # a checkpoint that was copied out of its run
        return None
    shown = train["step"] <= last_step
    if "loss" not in train or not shown.any():
        return None
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for steps, losses, color, label in (
        (train["step"][shown], train["loss"][shown], "#4878a8", "training"),
        (*np.array(evaluations).reshape(-1, 2).T, "#e08a4a", "held out"),
    ):
        if len(steps):
            drawn = np.where(np.abs(losses) < LARGEST, losses, np.nan)
            axes.plot(steps, drawn, color=color, marker="." * (len(steps) < 50), label=label)
    axes.set(xlabel="step", ylabel="loss, nats per supervised token")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    figure.savefig(folder / CURVE, dpi=150)
    plt.close(figure)
    return CURVE
