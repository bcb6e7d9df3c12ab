"""Parameter groups, the update, and the learning-rate schedule."""

import math
import re
from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import torch
from deepspeed.runtime import lr_schedules
from torch import nn

from zerotrain.config.schema import TrainConfig
from zerotrain.data.data_plan import DataPlan
from zerotrain.runtime.errors import UserError, describe

LR_SCALING_POWER = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


NOT_DECAYED = re.compile(
    # The patterns of transformers' Trainer, whose first one also finds the biases of experts.
    r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)"
    # A and D of state-space layers, as transformers names them. In some models they are matrices.
    r"|(^|\.)(a_log|d)$"
)
"""Finds the names, in lower case, of parameters without weight decay."""


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies to a parameter: the rule of transformers' Trainer, which
    also decays vectors with other names, such as attention sinks and scales, and A_log and D.
    """
    # Under ZeRO-3 parameters are empty tensors whose full shape is ds_shape.
    is_vector = len(getattr(parameter, "ds_shape", parameter.shape)) <= 1
    return not is_vector and not NOT_DECAYED.search(name.lower())


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of trained parameters: those with weight decay, and those without.

    Their learning rate is 0 until the first step sets it: see reset_update_count.
    """
    decayed, others = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (decayed if is_decayed(name, p) else others).append(p)
    groups = [
        {"params": decayed, "weight_decay": weight_decay, "lr": 0.0},
        {"params": others, "weight_decay": 0.0, "lr": 0.0},
    ]
    return [group for group in groups if group["params"]]


def reset_update_count(optimizer: torch.optim.Optimizer) -> None:
    """Set Adam's count of updates to 0.

    To allocate optimizer state, DeepSpeed's wrappers for stage 0 in 16 bits and for stage 1 in bf16
    run an update on zero gradients. With a learning rate of 0 it does not change the weights. But
    it increments the count, and bias correction would make the first real update 26% too small.
    """
    for state in [*optimizer.state.values(), *optimizer.param_groups]:
        if "step" in state:  # a tensor in torch's Adam, a number in DeepSpeed's Adam
            state["step"] *= 0


class Schedule(NamedTuple):
    """The learning rate of a run. It depends on the optimizer step only, so a resumed run uses the
    rate of its current config.
    """

    peak: float
    """Learning rate after warm-up."""
    warmup_steps: int
    total_steps: int
    """Optimizer steps of the whole run."""
    rate: Callable[[int], float]
    """rate(k): learning rate of step k + 1."""


def scaled_learning_rate(train: TrainConfig, mean_batch: float) -> float:
    """Return learning_rate * (mean batch / reference global batch) ** p.

    p = 1 is the linear rule for SGD (Goyal et al. 2017, arXiv:1706.02677), p = 0.5 the square-root
    rule for Adam (Malladi et al. 2022, arXiv:2205.10287), and p = 0 applies no scaling.

    Args:
        mean_batch: DataPlan.mean_batch, in the unit of the reference global batch: examples or
            tokens.
    """
    scale = mean_batch / (train.reference_global_batch or mean_batch)
    return train.learning_rate * scale ** LR_SCALING_POWER[train.lr_scaling]


def warmup_steps(train: TrainConfig, mean_examples: float) -> int:
    """Return train.warmup_examples in optimizer steps: at least 1, or 0 without warm-up."""
    if train.warmup_examples == 0:
        return 0
    return max(1, math.floor(train.warmup_examples / mean_examples + 0.5))


def make_schedule(train: TrainConfig, plan: DataPlan) -> Schedule:
    """Return the schedule of a run over `plan`, which may begin in the middle of an epoch that was
    started with a different plan.

    Raises:
        UserError: train.lr_schedule_args does not fit train.lr_schedule.
    """
    from transformers import get_scheduler  # imports peft and bitsandbytes, which take 2 s

    steps = train.steps or train.epochs * plan.steps_per_epoch - plan.step_shift
    peak = scaled_learning_rate(train, plan.mean_batch)
    warmup = warmup_steps(train, plan.mean_examples)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    of_deepspeed = vars(lr_schedules).get(train.lr_schedule)
    # The first update of a transformers warm-up has a rate of 0. It is skipped, so that step k
    # (from 1) of a warm-up of w steps runs at k/w of the peak. DeepSpeed's schedulers stay as they
    # are.
    shift = 1 if warmup and not of_deepspeed else 0
    shift += plan.step_shift if train.steps is None else 0
    try:
        if of_deepspeed:
            known = {  # Trainer sets these
                "warmup_max_lr": peak,
                "warmup_num_steps": max(1, warmup),
                "total_num_steps": steps + shift,
                "last_batch_iteration": 0,  # without it, a warning that the schedule has not begun
            }
            taken = signature(of_deepspeed).parameters
            own = {name: value for name, value in known.items() if name in taken}
            scheduler = of_deepspeed(optimizer, **own, **train.lr_schedule_args)

            def factor(step: int) -> float:
                # Trainer moves the scheduler after each update, so two updates have its first rate.
                scheduler.step(max(0, step - 1))
                return optimizer.param_groups[0]["lr"] / peak

        else:
            [factor] = get_scheduler(
                train.lr_schedule,
                optimizer,
                num_warmup_steps=warmup,
                num_training_steps=steps + shift,
                scheduler_specific_kwargs=train.lr_schedule_args,
            ).lr_lambdas
        for step in (0, warmup, steps - 1):
            factor(step + shift)  # raises an error now instead of in that step
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"train.lr_schedule_args: {train.lr_schedule} cannot use {train.lr_schedule_args}: "
            f'{describe(error)}; in a scheduler of ds_config, set to "auto" what train decides'
        ) from error
    return Schedule(peak, warmup, steps, lambda step: peak * factor(step + shift))
