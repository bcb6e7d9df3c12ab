"""Skips updates whose gradient is not finite, and says when a run does nothing else."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerotrain.runtime.agreement import gather_json
from zerotrain.runtime.process_group import Ranks

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MAX_SKIPPED_IN_A_ROW = 5


@dataclass(frozen=True)
class Problem:
    """Why the update of a step was skipped."""

    reason: str
    micro_batches: set[tuple[int, int]]
    """(micro-step, data rank) of those whose loss was not finite."""


class Guard:
    """Applies updates, and records those that are skipped: neither weights nor the optimizer's
    state change. All ranks decide the same, from the gradient's norm over all ranks. Updates that
    fp16 skips to find its loss scale are not counted.
    """

    def __init__(self, skipped_in_a_row: int, ranks: Ranks) -> None:
        self.skipped_in_a_row = skipped_in_a_row
        self.ranks = ranks
        # of the last step
        self.problem: Problem | None = None
        self.is_applied = False

    def update(self, engine: "DeepSpeedEngine", loss: float, micro_losses: torch.Tensor) -> float:
        """Update the weights unless the gradient is not finite, and clear the gradients.

        Args:
            loss: of the step, over all ranks.
            micro_losses: this rank's, float64 [losses, micro-steps].

        Returns:
            The global L2 norm of the gradient before clipping; infinite or NaN in a skipped update.
        """
        norm, self.is_applied = apply_update(engine)
        self.problem = None
        if self.is_applied:
            self.skipped_in_a_row = 0
        elif not engine.fp16_enabled() or not math.isfinite(loss):
            bad = (~micro_losses.isfinite().all(0)).nonzero().flatten().tolist()
            reason = f"loss {loss:.4f}, gradient norm {norm}"
            of_ranks = gather_json(self.ranks, [(step, self.ranks.data_rank) for step in bad])
            self.problem = Problem(reason, {tuple(pair) for pairs in of_ranks for pair in pairs})
            self.skipped_in_a_row += 1
        return norm


def apply_update(engine: "DeepSpeedEngine") -> tuple[float, bool]:
    """engine.step(): clip, update the weights, zero the gradients. DeepSpeed skips an update whose
    gradient is not finite, except at stage 0 in fp32, where it is skipped here.

    Returns:
        The global L2 norm before clipping, and whether the update was applied.
    """
    is_wrapped = engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled()
    if is_wrapped:
        engine.step()
        is_applied = engine.was_step_applied()
        if not is_applied and getattr(engine.optimizer, "cpu_offload", False):
            # stage 2: DeepSpeed keeps the gradients, and would add the next ones to NaN
            engine.optimizer.averaged_gradients.clear()
        return float(engine.get_global_grad_norm()), is_applied
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    is_finite = bool(norm.isfinite())
    if is_finite:
        engine.step()
    else:
        engine.zero_grad()
    return float(norm), is_finite
