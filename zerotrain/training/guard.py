"""The update of a step, which is skipped if the gradient is not finite, and the reason for it."""

import math
from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine
from torch import nn

from zerotrain.runtime.ranks import Ranks

MAX_SKIPPED_IN_A_ROW = 5


@dataclass(frozen=True)
class Problem:
    """The reason why the update of a step was skipped."""

    reason: str
    micro_batches: set[tuple[int, int]]
    """Micro-step and data rank of each micro-batch whose loss was not finite."""


def find_problem(
    loss: float, norm: float, micro_losses: torch.Tensor, ranks: Ranks, is_fp16: bool
) -> Problem | None:
    """Return why an update was skipped, or None if fp16 has skipped it to find its loss scale.

    All ranks call it and get the same result.

    Args:
        loss: the step's loss over all ranks.
        norm: the gradient's norm over all ranks, before clipping.
        micro_losses: this rank's losses, float64 [losses, micro-steps].
    """
    if is_fp16 and math.isfinite(loss):
        return None
    # The micro-steps in which a loss of this rank is not finite.
    bad = (~micro_losses.isfinite().all(0)).nonzero().flatten().tolist()
    of_ranks = ranks.gather_json([(step, ranks.data_rank) for step in bad])
    pairs = {tuple(pair) for pairs in of_ranks for pair in pairs}
    return Problem(f"loss {loss:.4f}, gradient norm {norm}", pairs)


def apply_update(engine: DeepSpeedEngine, clipping: float) -> tuple[float, bool]:
    """Clip the gradient, update the weights and zero the gradient, as engine.step() does.

    DeepSpeed skips an update whose gradient is not finite, unless it does not wrap the optimizer.
    Without a wrapper its norm is off by up to 1e-3, so norm and clipping are computed here, in fp64
    as under ZeRO.

    Args:
        clipping: train.gradient_clipping.

    Returns:
        The global L2 norm before clipping, and whether the update was applied.
    """
    if engine.optimizer is not engine.basic_optimizer:  # it is wrapped
        engine.step()
        is_applied = engine.was_step_applied()
        if not is_applied and getattr(engine.optimizer, "cpu_offload", False):
            # At stage 2 DeepSpeed keeps these gradients, and would add the next ones to NaN.
            engine.optimizer.averaged_gradients.clear()
        return float(engine.get_global_grad_norm()), is_applied
    trained = [p for p in engine.module.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in trained]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    is_finite = bool(norm.isfinite())
    if is_finite:
        if clipping:
            # Clipping uses the norm that is reported.
            nn.utils.clip_grads_with_norm_(trained, clipping, norm.float())
        engine.step()
    else:
        engine.zero_grad()  # otherwise the next step would add to NaN
    return float(norm), is_finite
