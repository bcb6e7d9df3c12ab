"""Parameter groups, the update, and the learning-rate schedule."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerotrain.config.batch_math import scaled_learning_rate, warmup_steps
from zerotrain.config.schema import Config, TrainConfig
from zerotrain.data.data_plan import DataPlan, total_steps
from zerotrain.runtime.errors import UserError

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with decay, biases and norms (one dimension) without.

    Their learning rate is 0 until the first step sets it; see reset_update_count.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    # under ZeRO-3 parameters are empty tensors whose full shape is ds_shape
    matrices = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) > 1]
    others = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "lr": 0.0},
        {"params": others, "weight_decay": 0.0, "lr": 0.0},
    ]
    return [group for group in groups if group["params"]]


def reset_update_count(optimizer: torch.optim.Optimizer) -> None:
    """Set Adam's count of updates to 0.

    To allocate optimizer state, DeepSpeed's wrappers for stage 0 in 16 bits and for stage 1 in bf16
    run an update on zero gradients. With a learning rate of 0 it does not change the weights, but
    it increments the count, and bias correction makes the first real update 26 % too small.
    """
    for state in [*optimizer.state.values(), *optimizer.param_groups]:
        if "step" in state:
            state["step"] = state["step"] * 0


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a run as a function of the optimizer step alone, so that a resumed run
    uses the rate of its current config.
    """

    name: str
    """train.lr_schedule."""
    arguments: dict[str, Any]
    """train.lr_schedule_args."""
    peak: float
    """Learning rate after warm-up."""
    warmup_steps: int
    steps: int
    """Optimizer steps that the schedule spans."""
    shift: int = 0
    """Added to a global step to get its position in the schedule."""

    def rate(self, finished_steps: int) -> float:
        """Learning rate of the step that follows `finished_steps` global steps.

        Raises:
            UserError: the arguments do not fit the schedule.
        """
        # The first update of a transformers warm-up has a rate of 0. Skip it, so that step k
        # (from 1) of w warm-up steps runs at k/w of the peak.
        skip = 1 if self.warmup_steps else 0
        try:
            [factor] = self._scheduler.lr_lambdas
            return self.peak * factor(finished_steps + self.shift + skip)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UserError(
                f"train.lr_schedule_args: {self.name} cannot use {self.arguments}: "
                f"{' '.join(str(error).split())}"
            ) from error

    @cached_property
    def _scheduler(self) -> "LambdaLR":
        """Only its function of the step is used; it never steps."""
        from transformers import get_scheduler  # imports peft and bitsandbytes, .5 s

        return get_scheduler(
            self.name,
            torch.optim.SGD([torch.zeros(1)], lr=self.peak),
            num_warmup_steps=self.warmup_steps,
            num_training_steps=self.steps + (1 if self.warmup_steps else 0),
            scheduler_specific_kwargs=self.arguments,
        )


def make_schedule(train: TrainConfig, plan: DataPlan) -> Schedule:
    """The schedule of a run over `plan`, which may begin in the middle of an epoch that was started
    with another plan.

    Raises:
        UserError: train.lr_schedule_args does not fit train.lr_schedule.
    """
    steps = total_steps(train, plan)
    shift = plan.step_shift if train.steps is None else 0
    schedule = Schedule(
        name=train.lr_schedule,
        arguments=train.lr_schedule_args,
        peak=scaled_learning_rate(train, plan.mean_batch),
        warmup_steps=warmup_steps(train, plan.mean_examples),
        steps=steps + shift,
        shift=shift,
    )
    for step in (0, schedule.warmup_steps, steps - 1):
        schedule.rate(step)  # to check it
    return schedule


def optimization_of(config: Config, mean_batch: float) -> dict[str, Any]:
    """The settings in which a resumed run has to agree with the saved one."""
    train, model = config.train, config.model
    return {
        "train.learning_rate (scaled)": scaled_learning_rate(train, mean_batch),
        "train.weight_decay": train.weight_decay,
        "train.adam_betas": list(train.adam_betas),
        "train.lr_schedule": train.lr_schedule,
        "train.lr_schedule_args": train.lr_schedule_args,
        "model.lora": model.lora and asdict(model.lora),
        "model.trainable": model.trainable,
        "model.quantization": model.quantization,
    }
