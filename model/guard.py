"""Guards the update of each optimizer step against a loss or gradient that is not finite, and
against a spike of the loss.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from config.schema import GuardConfig
from model.optimizer import update
from runtime.agreement import gather_json
from runtime.process_group import Ranks

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

NORMAL = 1.4826  # times the MAD: the standard deviation of a normal distribution
LEAST_SCALE = 0.01  # of the median: the losses of rows known by heart hardly vary


@dataclass(frozen=True)
class GuardState:
    """What a resumed run continues with."""

    losses: list[float] = field(default_factory=list)
    """Of the last guard.spike_window steps that were not skipped, oldest first."""
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
    """Applies updates, or skips them. All ranks decide the same, from losses and norms over all
    ranks. Updates that fp16 skips to find its loss scale are not counted here.
    """

    def __init__(self, config: GuardConfig, state: GuardState, ranks: Ranks) -> None:
        self.config, self.state, self.ranks = config, state, ranks
        self.problem: Problem | None = None
        """Of the last step."""

    def update(self, engine: "DeepSpeedEngine", loss: float, micro_losses: torch.Tensor) -> float:
        """Update the weights unless the step has a problem, and clear the gradients.

        Args:
            loss: of the step, over all ranks.
            micro_losses: this rank's, float64 [losses, micro-steps].

        Returns:
            The global L2 norm of the gradient before clipping; infinite or NaN in an update that
            was skipped for it.
        """
        reason = None if math.isfinite(loss) else f"loss {loss}"
        spike = self._spike(loss) if reason is None else None
        is_wanted = reason is None and (spike is None or self.config.on_spike == "warn")
        norm, is_applied = update(engine, is_wanted)
        if is_wanted and not (is_applied or engine.fp16_enabled()):
            reason, is_wanted = f"loss {loss:.4f}, gradient norm {norm}", False
        self.problem = None
        if reason or spike:
            finite = micro_losses.isfinite().all(0).tolist()
            mine = [number for number, is_finite in enumerate(finite) if not is_finite]
            self.problem = Problem(
                reason or spike, reason is None, not is_wanted, gather_json(self.ranks, mine)
            )
        if is_wanted:
            losses = [*self.state.losses, loss][-self.config.spike_window :]
            self.state = replace(self.state, losses=losses, skipped_in_a_row=0)
        else:
            skipped, in_a_row = self.state.skipped + 1, self.state.skipped_in_a_row + 1
            self.state = replace(self.state, skipped=skipped, skipped_in_a_row=in_a_row)
        return norm

    def stop_reason(self) -> str | None:
        """Why the run has to stop after the last step; None if it continues."""
        if self.problem is None:
            return None
        if self.problem.is_spike and self.config.on_spike == "stop":
            return "guard.on_spike is stop"
        in_a_row = self.state.skipped_in_a_row
        if in_a_row < self.config.max_skipped_in_a_row:
            return None
        return f"{in_a_row:,} steps in a row were skipped (guard.max_skipped_in_a_row)"

    def _spike(self, loss: float) -> str | None:
        """Why a loss is a spike; None if it is not, or as long as the window is not full.

        By the modified z-score of Iglewicz and Hoaglin (1993, "How to Detect and Handle Outliers"):
        the distance from the median of the window in units of the standard deviation that a normal
        distribution with its median absolute deviation (MAD) has. Half of the window may be
        outliers without any effect on it.
        """
        window = np.array(self.state.losses[-self.config.spike_window :])
        if self.config.on_spike == "off" or len(window) < self.config.spike_window:
            return None
        median = float(np.median(window))
        deviation = NORMAL * float(np.median(np.abs(window - median)))
        z = (loss - median) / max(deviation, LEAST_SCALE * abs(median), 1e-12)
        if z <= self.config.spike_z:
            return None
        return (
            f"loss {loss:.4f} is {z:,.1f} deviations above {median:.4f}, the median of the last "
            f"{len(window):,}"
        )
