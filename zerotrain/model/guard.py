"""Guards the update of each optimizer step against a loss or gradient that is not finite, and
against a spike of the loss.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from zerotrain.config.schema import GuardConfig
from zerotrain.model.optimizer import apply_update
from zerotrain.runtime.agreement import gather_json
from zerotrain.runtime.process_group import Ranks

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MAX_SKIPPED_IN_A_ROW = 5
SPIKE_WINDOW = 64  # steps
SPIKE_Z = 10.0  # deviations above the median
NORMAL = 1.4826  # times the MAD: the standard deviation of a normal distribution
MIN_SCALE = 0.01  # of the median: the losses of memorized rows hardly vary


@dataclass(frozen=True)
class GuardState:
    """What a resumed run continues with."""

    losses: list[float] = field(default_factory=list)
    """Of the last SPIKE_WINDOW steps that were not skipped, oldest first."""
    skipped: int = 0
    """Steps of the run whose update was skipped."""
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class Problem:
    """What is wrong with a step."""

    reason: str
    is_spike: bool
    is_skipped: bool
    micro_batches: list[list[int]]
    """Of each rank, the micro-steps in which its loss was not finite."""


class Guard:
    """Skips updates, and records why. All ranks decide the same, from losses and norms over all
    ranks. Updates that fp16 skips to find its loss scale are not counted here.

    DeepSpeed skips an update whose gradient is not finite, at every stage. So before the last
    backward pass of a step, `factor` makes its loss NaN if the step must not change the weights.
    """

    def __init__(self, config: GuardConfig, state: GuardState, ranks: Ranks) -> None:
        self.config, self.state, self.ranks = config, state, ranks
        # of the last step
        self.problem: Problem | None = None
        self.is_applied = False

    def factor(self, loss: torch.Tensor) -> torch.Tensor:
        """What to multiply the loss of the last micro-batch by: 1, or NaN to skip the update. The
        host does not wait for it.

        Args:
            loss: of the step, over all ranks; a scalar on the device.
        """
        skips_spikes = self.config.on_spike in ("skip", "stop")
        is_good = loss.isfinite() & (loss <= (self.spike_limit() if skips_spikes else math.inf))
        return torch.where(is_good, 1.0, math.nan)

    def update(self, engine: "DeepSpeedEngine", loss: float, micro_losses: torch.Tensor) -> float:
        """Update the weights unless the gradient is not finite, and clear the gradients.

        Args:
            loss: of the step, over all ranks.
            micro_losses: this rank's, float64 [losses, micro-steps].

        Returns:
            The global L2 norm of the gradient before clipping; infinite or NaN in a skipped update.
        """
        norm, self.is_applied = apply_update(engine)
        limit, reason = self.spike_limit(), None
        is_spike = loss > limit and math.isfinite(loss)
        if is_spike:
            reason = (
                f"loss {loss:.4f} is above {limit:.4f}, {SPIKE_Z:g} deviations above the median of "
                f"the last {SPIKE_WINDOW} steps"
            )
        elif not math.isfinite(loss):
            reason = f"loss {loss}"
        elif not self.is_applied and not engine.fp16_enabled():
            reason = f"loss {loss:.4f}, gradient norm {norm}"
        is_skipped = reason is not None and not self.is_applied
        self.problem = None
        if reason is not None:
            finite = micro_losses.isfinite().all(0).tolist()
            bad = [number for number, is_finite in enumerate(finite) if not is_finite]
            self.problem = Problem(reason, is_spike, is_skipped, gather_json(self.ranks, bad))
        if is_skipped:
            skipped, in_a_row = self.state.skipped + 1, self.state.skipped_in_a_row + 1
            self.state = replace(self.state, skipped=skipped, skipped_in_a_row=in_a_row)
        else:
            losses = [*self.state.losses, loss][-SPIKE_WINDOW:]
            self.state = replace(self.state, losses=losses, skipped_in_a_row=0)
        return norm

    def stop_reason(self) -> str | None:
        """Why the run has to stop after the last step; None if it continues."""
        if self.problem is None:
            return None
        if self.problem.is_spike and self.config.on_spike == "stop":
            return "guard.on_spike is stop"
        in_a_row = self.state.skipped_in_a_row
        if in_a_row < MAX_SKIPPED_IN_A_ROW:
            return None
        return f"{in_a_row} steps in a row were skipped"

    def spike_limit(self) -> float:
        """The loss above which a step is a spike; infinite until the window is full.

        By the modified z-score of Iglewicz and Hoaglin (1993, "How to Detect and Handle Outliers"):
        the distance from the median of the window in units of the standard deviation that a normal
        distribution with its median absolute deviation (MAD) has. Half of the window may be
        outliers without any effect on it.
        """
        window = np.array(self.state.losses[-SPIKE_WINDOW:])
        if self.config.on_spike == "off" or len(window) < SPIKE_WINDOW:
            return math.inf
        median = float(np.median(window))
        deviation = NORMAL * float(np.median(np.abs(window - median)))
        return median + SPIKE_Z * max(deviation, MIN_SCALE * abs(median), 1e-12)
