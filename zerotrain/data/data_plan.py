"""Plans: examples, their order and the budget of a micro-batch together give any step of a run.

If the global batch of a run changes, the rest of its epoch is split into steps of the new size. An
epoch still has every example the same number of times.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from zerotrain.config.schema import HELD_OUT, Config, NonNegativeInt, PositiveInt
from zerotrain.data.cache import TokenizedRows, hold_out
from zerotrain.data.epoch_order import PLAN_VERSION, EpochOrder
from zerotrain.data.plan import Budget, StepPlan, plan_step
from zerotrain.runtime.errors import UserError


@dataclass(frozen=True)
class PlanStart:
    """Where a plan begins: at the start of a run, or in the middle of an epoch where the global
    batch changed.
    """

    step: NonNegativeInt = 0
    """Global step."""
    epoch: NonNegativeInt = 0
    position: NonNegativeInt = 0
    """Position in the order of that epoch."""


@dataclass(frozen=True)
class DataPlan:
    """Every step of a run over one set of examples. Step numbers continue across epochs."""

    data: TokenizedRows
    order: EpochOrder
    budget: Budget
    start: PlanStart = PlanStart()
    """Earlier steps belong to another plan."""

    def with_budget(self, tokens: int) -> "DataPlan":
        """Return a plan with a budget of `tokens` per micro-batch, or of the longest example if
        that has more.
        """
        longest = int(self.budget.padded(self.data.lengths.max()))
        budget = replace(self.budget, micro_batch_tokens=max(longest, tokens))
        return replace(self, budget=budget)

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    @property
    def epoch_size(self) -> int:
        """Examples per epoch, or tokens where the global batch is in tokens."""
        order = self.order
        return order.places if order.global_batch_size else order.tokens_per_epoch

    @property
    def mean_batch(self) -> float:
        """Mean examples, or tokens, per step. An epoch is split into equal steps, so this is at
        most the global batch of the config.
        """
        return self.epoch_size / self.steps_per_epoch

    @property
    def mean_examples(self) -> float:
        """Mean examples per step."""
        return self.order.places / self.steps_per_epoch

    @property
    def source_names(self) -> list[str]:
        """Names of the sources in metrics: the last part of the path, unless two have the same."""
        names = self.data.meta.sources
        short = [Path(name.partition("*")[0]).stem for name in names]
        return short if len({*short}) == len(names) else names

    @property
    def step_shift(self) -> int:
        """Offset: a global step + this = its number if the run had always used this plan."""
        # The epochs after the one in which the plan begins are whole.
        start = self.start
        next_epoch = start.step + self.order.steps_from(start.epoch, start.position)
        return (start.epoch + 1) * self.steps_per_epoch - next_epoch

    def locate(self, global_step: int) -> tuple[int, int, int]:
        """Return the arguments of EpochOrder.examples for a global step: its epoch, its number
        there, and the position in the epoch at which the numbers begin.
        """
        start = self.start
        # This assumes whole epochs; the epoch in which the plan begins may lack its first steps.
        epoch, step = divmod(global_step + self.step_shift, self.steps_per_epoch)
        if epoch <= start.epoch:
            return start.epoch, global_step - start.step, start.position
        return epoch, step, 0

    def epochs_at(self, global_step: int) -> float:
        """Return how many epochs this many steps are, as a fraction."""
        return (global_step + self.step_shift) / self.steps_per_epoch

    def step(self, global_step: int) -> StepPlan:
        """Assign the examples of a step to all ranks. Any step takes milliseconds, in any order."""
        examples = self.order.examples(*self.locate(global_step))
        data = self.data
        step = plan_step(examples, data.lengths, data.supervised, self.budget)
        weights = np.bincount(data.sources[examples], data.weight[examples], len(data.meta.sources))
        return replace(step, weights=weights)


# --------------------------------------------------------------------------------------------------
# Making the plans of a config


def make_plans(
    config: Config, caches: list[TokenizedRows], budget: Budget
) -> tuple[DataPlan, dict[str, DataPlan]]:
    """The plans of the training data and of each held-out set.

    Args:
        caches: the examples of the training data, and of each of data.eval_sources.

    Raises:
        UserError: there is less than one global batch, or an example exceeds the budget.
    """
    data = config.data
    train = config.train
    train_rows, *eval_rows = caches
    held_out = dict(zip(data.eval_sources, eval_rows, strict=True))
    if data.eval_fraction:
        train_rows, held_out[HELD_OUT] = hold_out(train_rows, data.eval_fraction, train.seed)
    counts = train_rows.meta.source_examples
    mix = tuple(
        (n, n and max(1, round(n * source.repeat)))  # none if all are held out
        for n, source in zip(counts, data.train_sources, strict=True)
    )
    order = EpochOrder(
        train_rows.lengths,
        train.seed,
        train.global_batch_size,
        train.global_batch_tokens,
        mix=mix if any(n != m for n, m in mix) else (),
    )
    train_plan = DataPlan(train_rows, order, budget)
    if train.global_batch > train_plan.epoch_size:
        raise UserError(
            f"train.{train.global_batch_key}: {train.global_batch:,} is larger than the epoch "
            f"({train_plan.epoch_size:,} after holding out data.eval_fraction); lower it, add "
            "data, or raise `repeat` of a source"
        )
    eval_plans = {
        name: DataPlan(rows, replace(order, lengths=rows.lengths, shuffle=False, mix=()), budget)
        for name, rows in held_out.items()
    }
    # plan_step would never return with an example over the budget.
    for rows in (train_rows, *held_out.values()):
        longest = np.argmax(rows.lengths)
        tokens = budget.padded(rows.lengths[longest])
        if tokens > budget.micro_batch_tokens:
            raise UserError(
                f"{rows.place_of(longest)}: the example has {tokens:,} tokens (padded), over "
                f"data.micro_batch_tokens ({budget.micro_batch_tokens:,}); raise it, or lower "
                "data.max_length and let data.on_too_long truncate, split or drop longer rows"
            )
    return train_plan, eval_plans


# --------------------------------------------------------------------------------------------------
# Resuming with a changed plan


@dataclass(frozen=True)
class PlanRecord:
    """All that decides which examples a plan's steps have. World size and budget do not."""

    version: int
    content: str
    """A hash of the examples, followed by EpochOrder.mix if that is not empty."""
    seed: int
    global_batch_size: PositiveInt | None
    global_batch_tokens: PositiveInt | None

    @classmethod
    def of(cls, plan: DataPlan) -> "PlanRecord":
        order = plan.order
        return cls(
            PLAN_VERSION,
            plan.data.meta.content + str(order.mix or ""),
            order.seed,
            order.global_batch_size,
            order.global_batch_tokens,
        )


def continue_plan(
    plan: DataPlan, before: PlanRecord, start: PlanStart, global_step: int
) -> DataPlan:
    """Return `plan` as it continues a run at `global_step`. If the global batch has changed, the
    rest of the epoch is split again.

    Args:
        before: the plan of the run so far, which began at `start`.

    Raises:
        ValueError: no plan of this data begins at `start`.
    """
    # An epoch has at least one step.
    if not (start.epoch <= start.step <= global_step and start.position < plan.order.places):
        raise ValueError(f"plan_start: {start} before step {global_step}")
    # Splitting the rest again would move the bounds of its steps, even by the same global batch.
    if PlanRecord.of(plan) == before:
        return replace(plan, start=start)
    order = replace(
        plan.order,
        global_batch_size=before.global_batch_size,
        global_batch_tokens=before.global_batch_tokens,
    )
    # The plan so far has trained on the positions before the one at which it would continue.
    place = replace(plan, order=order, start=start).locate(global_step)
    return replace(plan, start=PlanStart(global_step, place[0], order.first_of(*place)))
