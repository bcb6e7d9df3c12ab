"""The step plans of a run: tokenized examples, contents and budget joined, for any global step."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from config.schema import HELD_OUT
from data.plan import Budget, Contents, RowTooLong, StepPlan, plan_step, shares_of
from data.tokenize import TokenizedRows, hold_out, open_cache, tokenize_sources
from runtime.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from config.schema import Config, DataConfig, Source, TrainConfig


@dataclass(frozen=True)
class EpochRemainder:
    """What was left of an epoch when the plan changed; it precedes whole epochs of the new plan."""

    first_step: int  # global
    steps: int
    epoch: int
    contents: Contents | None  # None once the run is past it


@dataclass(frozen=True)
class DataPlan:
    """Every step of a run over one tokenized data set. Step numbers continue across epochs."""

    data: TokenizedRows
    contents: Contents
    budget: Budget
    rest: EpochRemainder | None = None
    """From the last change of plan (data/plan_change.py); earlier steps belong to another plan."""

    @property
    def steps_per_epoch(self) -> int:
        return self.contents.steps_per_epoch

    @property
    def mean_batch(self) -> float:
        """Mean examples per step, or tokens where the global batch is in tokens: at most the global
        batch of the config, since an epoch is divided into equal steps.
        """
        contents = self.contents
        by_rows = contents.global_batch_tokens is None
        epoch = contents.rows_per_epoch if by_rows else contents.tokens_per_epoch
        return epoch / self.steps_per_epoch

    @property
    def step_shift(self) -> int:
        """What to add to a global step to get its number had all epochs been of this plan."""
        if self.rest is None:
            return 0
        return (self.rest.epoch + 1) * self.steps_per_epoch - self.rest.first_step - self.rest.steps

    def locate(self, global_step: int) -> tuple[Contents, int, int]:
        """Contents, epoch, and step within that epoch of a global step."""
        if self.rest is not None and global_step < self.rest.first_step + self.rest.steps:
            return self.rest.contents, self.rest.epoch, global_step - self.rest.first_step
        return self.contents, *divmod(global_step + self.step_shift, self.steps_per_epoch)

    def epochs_at(self, global_step: int) -> float:
        """Passes over the data, as a fraction, after this many steps."""
        return (global_step + self.step_shift) / self.steps_per_epoch

    def step(self, global_step: int) -> StepPlan:
        """The step's examples assigned to all ranks: any step, in any order, in milliseconds."""
        contents, epoch, step = self.locate(global_step)
        examples = contents.rows(epoch, step)
        return plan_step(examples, self.data.lengths, self.data.supervised, self.budget)

    def content_hash(self) -> str:
        """16 hex digits that change whenever the contents of any step would. World size and token
        budget do not matter.
        """
        c = self.contents
        key = [c.version, self.data.meta["content"], len(self.data), c.seed]
        key += [c.global_batch_size, c.global_batch_tokens, c.window, c.mix]
        return xxhash.xxh3_64_hexdigest(repr(key).encode())


def total_steps(train: "TrainConfig", plan: DataPlan) -> int:
    """Optimizer steps of the whole run: train.steps, or those of train.epochs epochs."""
    if train.steps is not None:
        return train.steps
    return train.epochs * plan.steps_per_epoch - plan.step_shift


def make_budget(data: "DataConfig", world_size: int, linear_cost: int) -> Budget:
    """The budget of a run; data.batching has been resolved (no longer auto)."""
    return Budget(
        world_size,
        data.micro_batch_tokens,
        data.pad_to_multiple_of,
        linear_cost,
        packed=data.batching == "packed",
    )


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
    mix = ()
    if sources[0].weight is not None:
        rows = train_rows.meta["source_rows"]
        if 0 in rows:
            emptied = train_rows.meta["sources"][rows.index(0)]
            raise UserError(
                f"data.eval_fraction: it holds out every row of {emptied}; set data.eval_sources"
            )
        mix = shares_of(rows, [source.weight for source in sources])
    contents = Contents(
        train_rows.lengths,
        train.seed,
        train.global_batch_size,
        train.global_batch_tokens,
        data.window,
        mix,
    )
    train_plan, eval_plans = DataPlan(train_rows, contents, budget), {}
    check_global_batch(train_plan)
    for name, rows in held_out.items():
        in_order = replace(contents, lengths=rows.lengths, mix=(), shuffle=False)
        eval_plans[name] = DataPlan(rows, in_order, budget)
    for plan in (train_plan, *eval_plans.values()):
        check_fits(plan)
    return train_plan, eval_plans


def check_global_batch(plan: DataPlan) -> None:
    """Raise UserError if an epoch has fewer examples, or tokens, than one global batch."""
    contents = plan.contents
    key, wanted, available = "size", contents.global_batch_size, contents.rows_per_epoch
    if wanted is None:
        key, wanted, available = "tokens", contents.global_batch_tokens, contents.tokens_per_epoch
    if wanted > available:
        unit = "examples" if key == "size" else "tokens"
        raise UserError(
            f"train.global_batch_{key}: {wanted:,} is more than an epoch has ({available:,} "
            f"{unit}); lower it to {available} or less, or add data"
        )


def check_fits(plan: DataPlan) -> None:
    """Raise UserError if the longest example exceeds the budget."""
    longest = int(np.argmax(plan.data.lengths))
    try:
        plan_step(np.array([longest]), plan.data.lengths, plan.data.supervised, plan.budget)
    except RowTooLong as error:
        message = str(error).replace(f"example {error.row}", "this example")
        raise UserError(f"{plan.data.place_of(longest)}: {message}") from error
