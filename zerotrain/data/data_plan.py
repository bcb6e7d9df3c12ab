"""The step plans of a run: tokenized examples, their order and the budget joined, for any global
step.

A run whose global batch or seed changes goes on with the rest of its epoch in steps of the new
plan, then with whole epochs of it, so every example is still trained on once per epoch.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from zerotrain.config.schema import HELD_OUT
from zerotrain.data.epoch_order import PLAN_VERSION, EpochOrder, Remainder, Share, shares_of
from zerotrain.data.plan import Budget, ExampleTooLong, StepPlan, plan_step
from zerotrain.data.tokenize import TokenizedRows, hold_out, open_cache, tokenize_sources
from zerotrain.runtime.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zerotrain.config.schema import Config, DataConfig, Source, TrainConfig


@dataclass(frozen=True)
class EpochRemainder:
    """What was left of an epoch when the plan changed; it precedes whole epochs of the new plan."""

    first_step: int  # global
    epoch: int
    order: EpochOrder | None  # None: the plan changed between two epochs

    @property
    def steps(self) -> int:
        return self.order.steps_per_epoch if self.order else 0


@dataclass(frozen=True)
class DataPlan:
    """Every step of a run over one tokenized data set. Step numbers continue across epochs."""

    data: TokenizedRows
    order: EpochOrder
    budget: Budget
    rest: EpochRemainder | None = None
    """From the last change of plan; earlier steps belong to another plan."""

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    @property
    def mean_batch(self) -> float:
        """Mean examples per step, or tokens where the global batch is in tokens: at most the global
        batch of the config, since an epoch is divided into equal steps.
        """
        order = self.order
        by_tokens = order.global_batch_tokens is not None
        epoch = order.tokens_per_epoch if by_tokens else order.examples_per_epoch
        return epoch / self.steps_per_epoch

    @property
    def mean_examples(self) -> float:
        """Mean examples per step."""
        return self.order.examples_per_epoch / self.steps_per_epoch

    @property
    def step_shift(self) -> int:
        """What to add to a global step to get its number had all epochs been of this plan."""
        if self.rest is None:
            return 0
        return (self.rest.epoch + 1) * self.steps_per_epoch - self.rest.first_step - self.rest.steps

    def locate(self, global_step: int) -> tuple[EpochOrder, int, int]:
        """Order, epoch, and step within that epoch of a global step."""
        if self.rest is not None and global_step < self.rest.first_step + self.rest.steps:
            return self.rest.order, self.rest.epoch, global_step - self.rest.first_step
        return self.order, *divmod(global_step + self.step_shift, self.steps_per_epoch)

    def epochs_at(self, global_step: int) -> float:
        """Passes over the data, as a fraction, after this many steps."""
        return (global_step + self.step_shift) / self.steps_per_epoch

    def step(self, global_step: int) -> StepPlan:
        """The step's examples assigned to all ranks: any step, in any order, in milliseconds."""
        order, epoch, step = self.locate(global_step)
        examples = order.examples(epoch, step)
        return plan_step(examples, self.data.lengths, self.data.supervised, self.budget)

    def content_hash(self) -> str:
        """16 hex digits that change whenever the examples of any step would. World size and token
        budget do not matter.
        """
        return xxhash.xxh3_64_hexdigest(repr(PlanRecord.of(self)).encode())

    def changed_to(self, order: EpochOrder, at_step: int) -> "DataPlan":
        """The plan that goes on with `order` at a global step of this one."""
        old, epoch, step = self.locate(at_step)
        if step == 0 and old.remainder is None:
            return replace(self, order=order, rest=EpochRemainder(at_step, epoch - 1, None))
        remainder = Remainder(old, epoch, old.first_of(epoch, step))
        rest = EpochRemainder(at_step, epoch, replace(order, mix=(), remainder=remainder))
        return replace(self, order=order, rest=rest)


# --------------------------------------------------------------------------------------------------
# Making the plans of a config


def total_steps(train: "TrainConfig", plan: DataPlan) -> int:
    """Optimizer steps of the whole run: train.steps, or those of train.epochs epochs."""
    if train.steps is not None:
        return train.steps
    return train.epochs * plan.steps_per_epoch - plan.step_shift


def make_budget(data: "DataConfig", world_size: int, linear_cost: int) -> Budget:
    """The budget of a run; data.batching has been resolved (no longer auto)."""
    return Budget(world_size, data.micro_batch_tokens, linear_cost, data.batching == "packed")


def make_plans(
    config: "Config", tokenizer: "PreTrainedTokenizerBase", budget: Budget
) -> tuple[DataPlan, dict[str, DataPlan]]:
    """The plans of the training data and of each held-out set, which are tokenized if not cached.

    Raises:
        UserError: a row cannot be used, there is less than one global batch, or an example exceeds
            the budget.
    """
    data, train = config.data, config.train

    def tokenized(sources: list["Source"]) -> TokenizedRows:
        return open_cache(tokenize_sources(sources, tokenizer, data))

    sources = data.sources("train_sources")
    train_rows = tokenized(sources)
    held_out = {name: tokenized(given) for name, given in data.eval_sets().items()}
    if data.eval_fraction:
        train_rows, held_out[HELD_OUT] = hold_out(train_rows, data.eval_fraction, train.seed)
    mix: tuple[Share, ...] = ()
    if sources[0].weight is not None:
        examples = train_rows.meta["source_examples"]
        if 0 in examples:
            emptied = train_rows.meta["sources"][examples.index(0)]
            raise UserError(
                f"data.eval_fraction: it holds out every row of {emptied}; set data.eval_sources"
            )
        mix = shares_of(examples, [source.weight for source in sources])
    batch = train.global_batch_size, train.global_batch_tokens
    order = EpochOrder(train_rows.lengths, train.seed, *batch, mix)
    train_plan = DataPlan(train_rows, order, budget)
    check_global_batch(train_plan)
    eval_plans = {}
    for name, rows in held_out.items():
        in_order = replace(order, lengths=rows.lengths, mix=(), shuffle=False)
        eval_plans[name] = DataPlan(rows, in_order, budget)
    for plan in (train_plan, *eval_plans.values()):
        check_fits(plan)
    return train_plan, eval_plans


def check_global_batch(plan: DataPlan) -> None:
    """Raise UserError if an epoch has fewer examples, or tokens, than one global batch."""
    order = plan.order
    unit, wanted, available = "examples", order.global_batch_size, order.examples_per_epoch
    if wanted is None:
        unit, wanted, available = "tokens", order.global_batch_tokens, order.tokens_per_epoch
    if wanted > available:
        key = "train.global_batch_tokens" if unit == "tokens" else "train.global_batch_size"
        raise UserError(
            f"{key}: {wanted:,} is more than an epoch has ({available:,} {unit}); lower it to "
            f"{available} or less, or add data"
        )


def check_fits(plan: DataPlan) -> None:
    """Raise UserError if the longest example exceeds the budget."""
    longest = int(np.argmax(plan.data.lengths))
    try:
        plan_step(np.array([longest]), plan.data.lengths, plan.data.supervised, plan.budget)
    except ExampleTooLong as error:
        raise UserError(f"{plan.data.place_of(longest)}: {error}") from error


# --------------------------------------------------------------------------------------------------
# Resuming with a changed plan


@dataclass(frozen=True)
class PlanRecord:
    """What the examples of a plan's steps follow from."""

    version: int
    content: str
    """A hash of the tokenized examples."""
    seed: int
    global_batch_size: int | None
    global_batch_tokens: int | None
    mix: list[list[int]]

    @classmethod
    def of(cls, plan: DataPlan) -> "PlanRecord":
        o = plan.order
        mix = [list(asdict(share).values()) for share in o.mix]
        content = plan.data.meta["content"]
        return cls(PLAN_VERSION, content, o.seed, o.global_batch_size, o.global_batch_tokens, mix)

    def order_of(self, lengths: np.ndarray) -> EpochOrder:
        mix = tuple(Share(*share) for share in self.mix)
        batch = self.global_batch_size, self.global_batch_tokens
        return EpochOrder(lengths, self.seed, *batch, mix)


@dataclass(frozen=True)
class PlanChange:
    """One change of a run's plan, as stored in checkpoints."""

    before: PlanRecord
    at_step: int
    """The first global step of the next plan."""


NAMES = {
    "version": "version of zerotrain/data/epoch_order.py",
    "content": "rows or their tokens",
    "seed": "train.seed",
    "global_batch_size": "train.global_batch_size",
    "global_batch_tokens": "train.global_batch_tokens",
    "mix": "weights of the sources",
}


def describe_change(before: PlanRecord, now: PlanRecord) -> str:
    """The differences between two records, by config key."""
    was, now_is = asdict(before), asdict(now)
    return ", ".join(
        f"{text} was {was[name]}, is {now_is[name]}"
        for name, text in NAMES.items()
        if was[name] != now_is[name]
    )


def continue_plan(
    plan: DataPlan, before: PlanRecord, changes: Sequence[PlanChange], global_step: int
) -> tuple[DataPlan, list[PlanChange]]:
    """Continue with `plan` a run that is at `global_step` of the plan `before`.

    Args:
        changes: all earlier changes of the run's plan.

    Returns:
        `plan` with the rest of the current epoch, and `changes` with this one, if it is one.

    Raises:
        UserError: the data has changed, so that the rest of the epoch is unknown.
    """
    now, changes = PlanRecord.of(plan), list(changes)
    if now != before:
        fixed = ("version", "content", "mix", *(["seed"] if now.mix else []))
        if any(getattr(now, name) != getattr(before, name) for name in fixed):
            raise UserError(
                f"cannot resume with a changed plan: {describe_change(before, now)}; resume with "
                "the previous data, or start another output_dir from the weights: "
                "checkpoint.resume: CHECKPOINT and checkpoint.weights_only: true"
            )
        changes.append(PlanChange(before, global_step))
    records = [*(change.before for change in changes), now]
    orders = [record.order_of(plan.data.lengths) for record in records]
    continued = replace(plan, order=orders[0])
    for change, order in zip(changes, orders[1:], strict=True):
        continued = continued.changed_to(order, change.at_step)
    return continued, changes
