"""Parameter groups, gradient clipping and the learning-rate schedule."""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime import lr_schedules
from torch import nn

from config.batch_math import scaled_learning_rate, warmup_steps
from config.ds_config import DEEPSPEED_SCHEDULERS
from config.schema import Config, TrainConfig
from data.data_plan import DataPlan, total_steps
from runtime.errors import UserError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with decay, biases and norms (one dimension) without.

    Their learning rate is 0 until the first step sets it; see forget_empty_update.
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


def forget_empty_update(optimizer: torch.optim.Optimizer) -> None:
    """Reset Adam's update count to 0.

    To allocate optimizer state, DeepSpeed's wrappers for stage 0 in 16 bits and for stage 1 in bf16
    run an update on zero gradients. With a learning rate of 0 it does not change the weights, but
    it increments the count, and bias correction makes the first real update 26 % too small.
    """
    for state in [*optimizer.state.values(), *optimizer.param_groups]:
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0


def clip_plain_gradients(engine: "DeepSpeedEngine") -> torch.Tensor | None:
    """Clip gradients in place before engine.step() if DeepSpeed does not wrap the optimizer, which
    is ZeRO stage 0 in fp32; otherwise do nothing.

    The norm is accumulated in fp64, as under ZeRO. DeepSpeed would use torch's fp32 norm here,
    which on CPU is off by 1e-3 for a tensor of a few million elements.

    Returns:
        The global L2 norm before clipping, a float64 scalar; None if DeepSpeed clips.
    """
    if engine.optimizer is not engine.basic_optimizer:
        return None
    trained = [p for p in engine.module.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in trained]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if engine.gradient_clipping() > 0:
        nn.utils.clip_grads_with_norm_(trained, engine.gradient_clipping(), norm.float())
    return norm


def update(engine: "DeepSpeedEngine", is_wanted: bool) -> tuple[float, bool]:
    """engine.step(): clip, update the weights, zero the gradients. If the gradient is not finite,
    or the update is not wanted, neither the weights nor the state of the optimizer change.

    DeepSpeed skips updates with a gradient that is not finite, except at stage 0 in fp32. Any other
    one is skipped by an optimizer that does nothing, for which the wrappers around it, one for each
    stage and precision, clip and clear gradients and copy the same weights again.

    Returns:
        The global L2 norm before clipping, and whether the update was applied.
    """
    norm = clip_plain_gradients(engine)
    is_wanted = is_wanted and (norm is None or bool(norm.isfinite()))
    if not is_wanted:
        engine.basic_optimizer.step = lambda *_args, **_options: None
    try:
        engine.step()
    finally:
        if not is_wanted:
            del engine.basic_optimizer.step  # that of its class shows again
            engine._step_applied = False
    if not engine.was_step_applied() and getattr(engine.optimizer, "cpu_offload", False):
        # stage 2 in 16 bits: DeepSpeed keeps them, and would add the next gradient to NaN
        engine.optimizer.averaged_gradients.update(
            dict.fromkeys(engine.optimizer.averaged_gradients)
        )
    if norm is None:
        norm = engine.get_global_grad_norm()
    return float(norm), engine.was_step_applied()


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
        """Learning rate of the step that follows `finished_steps` global steps."""
        return self._rate_at(finished_steps + self.shift)

    def text(self) -> str:
        """A description, e.g. `linear to 3e-05 over 40 steps, warm-up 4`."""
        return f"{self.name} to {self.peak:.3g} over {self.steps:,} steps, warm-up " + (
            f"{self.warmup_steps:,}"
        )

    @cached_property
    def _rate_at(self) -> Callable[[int], float]:
        from transformers import get_scheduler  # imports peft and bitsandbytes, .5 s

        try:
            if self.name in DEEPSPEED_SCHEDULERS:
                return self._deepspeed_rate()
            # The first update of a transformers warm-up has a rate of 0. Skip it, so that step k
            # (from 1) of w warm-up steps runs at k/w of the peak.
            skip = 1 if self.warmup_steps else 0
            scheduler = get_scheduler(
                self.name,
                torch.optim.SGD([torch.zeros(1)], lr=self.peak),
                num_warmup_steps=self.warmup_steps,
                num_training_steps=self.steps + skip,
                scheduler_specific_kwargs=self.arguments,
            )
        except (TypeError, ValueError, ArithmeticError) as error:
            raise self._cannot_be_used(error) from error
        [factor] = scheduler.lr_lambdas
        return lambda position: self.peak * factor(position + skip)

    def _deepspeed_rate(self) -> Callable[[int], float]:
        """DeepSpeed's own scheduler over two more steps, without its first two updates, which run
        at the lowest rate (0 by default).
        """
        kind = getattr(lr_schedules, self.name)
        arguments = dict(self.arguments)
        warmup = arguments.pop("warmup_num_steps", self.warmup_steps)
        skip = 1 if warmup > 1 else 2  # DeepSpeed's shortest warm-up has 2 steps
        arguments |= {"warmup_num_steps": max(warmup, 2), "last_batch_iteration": 0}
        for name, value in (
            ("warmup_max_lr", self.peak),
            ("total_num_steps", self.steps + skip + 1),
        ):
            if name in inspect.signature(kind).parameters:
                arguments[name] = value
        scheduler = kind(torch.optim.SGD([torch.zeros(1)], lr=self.peak), **arguments)

        def rate_at(position: int) -> float:
            scheduler.last_batch_iteration = position + skip
            return float(scheduler.get_lr()[0])

        return rate_at

    def _cannot_be_used(self, error: Exception) -> UserError:
        return UserError(
            f"train.lr_schedule_args: {self.name} cannot use {self.arguments}: "
            f"{' '.join(str(error).split())}"
        )

    def check(self) -> None:
        """Raises UserError: the arguments do not fit the schedule."""
        try:
            for step in (0, self.warmup_steps, self.steps - 1):
                self._rate_at(step)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise self._cannot_be_used(error) from error


def make_schedule(train: TrainConfig, steps: int, mean_batch: float, shift: int = 0) -> Schedule:
    """The schedule of a run of `steps` optimizer steps.

    Args:
        mean_batch: DataPlan.mean_batch.
        shift: from schedule_shift.

    Raises:
        UserError: train.lr_schedule_args does not fit train.lr_schedule.
    """
    schedule = Schedule(
        name=train.lr_schedule,
        arguments=train.lr_schedule_args,
        peak=scaled_learning_rate(train, mean_batch),
        warmup_steps=warmup_steps(train, mean_batch),
        steps=steps + shift,
        shift=shift,
    )
    schedule.check()
    return schedule


def schedule_of(config: Config, plan: DataPlan) -> Schedule:
    """The schedule of a run over `plan`, which may begin in the middle of an epoch that was started
    with another plan.
    """
    steps, shift = total_steps(config.train, plan), schedule_shift(config.train, plan)
    return make_schedule(config.train, steps, plan.mean_batch, shift)


def describe_move(saved: Schedule, now: Schedule, finished_steps: int) -> str | None:
    """How the learning rate changes in a resumed run; None if the schedule is the saved one."""
    if saved == now:
        return None
    before, after = saved.rate(finished_steps), now.rate(finished_steps)
    return (
        f"learning rate: step {finished_steps + 1:,} moves from {before:.6g} ({saved.text()}) to "
        f"{after:.6g} ({now.text()})"
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def schedule_shift(train: TrainConfig, plan: DataPlan) -> int:
    """What has to be added to a global step to get its position in the schedule."""
    return plan.step_shift if train.steps is None else 0


def optimization_of(config: Config, mean_batch: float) -> dict[str, Any]:
    """The settings in which a resumed run has to agree with the saved one."""
    train, model = config.train, config.model
    lora = model.lora and asdict(model.lora)
    if lora and not lora["target_parameters"]:  # a key that earlier checkpoints do not have
        del lora["target_parameters"]
    return {
        "train.learning_rate (scaled)": scaled_learning_rate(train, mean_batch),
        "train.weight_decay": train.weight_decay,
        "train.adam_betas": list(train.adam_betas),
        "train.adam_epsilon": train.adam_epsilon,
        "train.lr_schedule": train.lr_schedule,
        "train.lr_schedule_args": train.lr_schedule_args,
        "model.lora": lora,
        "model.trainable": model.trainable,
        "model.quantization": model.quantization,
    }
