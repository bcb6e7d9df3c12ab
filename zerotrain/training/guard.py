"""The update of a step, which is skipped if the gradient is not finite or is a spike."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import nn

from zerotrain.runtime.ranks import Ranks

MAX_SKIPPED_IN_A_ROW = 5
SPIKE_WINDOW = 100  # steps whose median norm a spike is compared with
MIN_WINDOW = 20  # the first steps have no median yet


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
    if is_fp16 and math.isfinite(loss) and not math.isfinite(norm):
        return None
    # The micro-steps in which a loss of this rank is not finite.
    bad = (~micro_losses.isfinite().all(0)).nonzero().flatten().tolist()
    of_ranks = ranks.gather_json([(step, ranks.data_rank) for step in bad])
    pairs = {tuple(pair) for pairs in of_ranks for pair in pairs}
    return Problem(f"loss {loss:.4f}, gradient norm {norm}", pairs)


def spike_limit(norms: tuple[float, ...], times: float | None) -> float:
    """Return the largest norm that is no spike: `times` the median of the last steps' norms."""
    return median(norms) * times if times and len(norms) >= MIN_WINDOW else math.inf


@contextmanager
def spikes_skipped(engine: DeepSpeedEngine, limit: float) -> Iterator[None]:
    """Within it, an update whose gradient's norm is above `limit` changes nothing.

    The norm is known only when DeepSpeed calls the optimizer. An optimizer skips weights without a
    gradient, moments included. So the gradients are hidden while it is called.
    """
    hidden = []

    def hide(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if engine.optimizer._global_grad_norm > limit:
            hidden.extend((p, p.grad) for group in optimizer.param_groups for p in group["params"])
            for p, _ in hidden:
                p.grad = None

    def show(*_: Any) -> None:
        for p, gradient in hidden:
            p.grad = gradient
        hidden.clear()

    optimizer = engine.basic_optimizer
    hooks = optimizer.register_step_pre_hook(hide), optimizer.register_step_post_hook(show)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def apply_update(
    engine: DeepSpeedEngine, clipping: float, limit: float = math.inf
) -> tuple[float, bool]:
    """Clip the gradient, update the weights and zero the gradient, as engine.step() does.

    DeepSpeed skips an update whose gradient is not finite, unless it does not wrap the optimizer.
    Without a wrapper its norm is off by up to 1e-3, so norm and clipping are computed here, in fp64
    as under ZeRO.

    Args:
        clipping: train.gradient_clipping.
        limit: the norm above which the update is skipped, also without a wrapper.

    Returns:
        The global L2 norm before clipping, and whether the update was applied.
    """
    if engine.optimizer is not engine.basic_optimizer:  # it is wrapped
        with spikes_skipped(engine, limit):
            engine.step()
        is_applied = engine.was_step_applied()
        if not is_applied and getattr(engine.optimizer, "cpu_offload", False):
            # At stage 2 DeepSpeed keeps these gradients, and would add the next ones to NaN.
            engine.optimizer.averaged_gradients.clear()
        norm = float(engine.get_global_grad_norm())
        return norm, is_applied and norm <= limit
    trained = [p for p in engine.module.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in trained]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    is_applied = math.isfinite(norm) and norm <= limit
    if is_applied:
        if clipping:
            # Clipping uses the norm that is reported.
            nn.utils.clip_grads_with_norm_(trained, clipping, norm.float())
        engine.step()
    else:
        engine.zero_grad()  # otherwise the next step would add to NaN
    return float(norm), is_applied
