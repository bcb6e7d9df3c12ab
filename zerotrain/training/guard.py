"""The update of a step, which is skipped if the gradient is not finite or is a spike."""

import math
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from torch import nn

from zerotrain.runtime.errors import RunFailed

MAX_SKIPPED_IN_A_ROW = 5
SPIKE_WINDOW = 100  # steps whose median norm a spike is compared with
MIN_WINDOW = 20  # the first steps have no median yet


def is_bad_step(values: dict[str, float], engine: DeepSpeedEngine) -> bool:
    """Return whether an update was skipped, and not by fp16 to find its loss scale.

    Args:
        values: the step's loss, grad_norm and update_skipped.
    """
    is_search = engine.fp16_enabled() and engine.dynamic_loss_scale() and _overflows(values)
    return values["update_skipped"] and not is_search


def cure(values: dict[str, float], engine: DeepSpeedEngine) -> str:
    """Return what to change after MAX_SKIPPED_IN_A_ROW bad steps; `values` as in is_bad_step."""
    if engine.fp16_enabled() and _overflows(values):
        return f"fp16.loss_scale 0, which searches for one, or less than {engine.loss_scale():g}"
    return "a lower train.learning_rate"


def _overflows(values: dict[str, float]) -> bool:
    return math.isfinite(values["loss"]) and not math.isfinite(values["grad_norm"])


def spike_limit(norms: tuple[float, ...], times: float | None) -> float:
    """Return the norm above which a gradient is a spike: `times` the median of the last norms."""
    # A bad step's norm may be NaN.
    return np.nanmedian(norms) * times if times and len(norms) >= MIN_WINDOW else math.inf


def step_below(engine: DeepSpeedEngine, limit: float) -> None:
    """Call engine.step(). It changes nothing if the gradient's norm is above `limit`.

    The norm is known only when DeepSpeed calls the optimizer. So a spike leaves the optimizer
    without parameters while it is called.

    Raises:
        RunFailed: a gradient in fp16 overflows at the smallest loss scale.
    """
    optimizer = engine.basic_optimizer
    groups = optimizer.param_groups

    def hide(*_: Any) -> None:
        if engine.optimizer._global_grad_norm > limit:
            optimizer.param_groups = []

    def show(*_: Any) -> None:
        optimizer.param_groups = groups

    hooks = optimizer.register_step_pre_hook(hide), optimizer.register_step_post_hook(show)
    try:
        engine.step()
    except Exception as error:  # DeepSpeed raises no class of its own.
        scaler = engine.optimizer.loss_scaler
        if not scaler.dynamic or scaler.cur_scale > scaler.min_scale:
            raise
        raise RunFailed(
            f"the gradient overflows in fp16 at the smallest loss scale, {scaler.min_scale:g} "
            "(fp16.min_loss_scale); start in another output_dir with train.precision bf16 or fp32"
        ) from error
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
        step_below(engine, limit)
        norm = float(engine.get_global_grad_norm())
        is_applied = engine.was_step_applied() and norm <= limit
        if not is_applied and getattr(engine.optimizer, "cpu_offload", False):
            # At stage 2 DeepSpeed keeps these gradients, and would add the next ones to NaN.
            engine.optimizer.averaged_gradients.clear()
        return norm, is_applied
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
