"""What a run is, resolved before any data or weights are read; and its data plans."""

import os
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from config.ds_check import check_with_deepspeed, try_engine
from config.ds_config import merge_ds_config, resolve_precision
from config.schema import Config
from data.data_plan import DataPlan, make_budget, make_plans, total_steps
from data.plan import Budget
from data.questions import choose_questions
from model.architecture import check_model_fits, hidden_size, linear_cost
from model.blocks import check_blocks
from model.flops import ModelFlops, count_flops
from model.hub import commits, pin_revisions
from model.load import (
    best_precision,
    check_quantization,
    load_model_config,
    load_tokenizer,
)
from model.memory import Memory, estimate_memory
from model.optimizer import make_schedule
from model.packing import resolve_batching
from model.trained import Counts, trained_skeleton
from runtime.agreement import require_same, run_on_all_ranks
from runtime.process_group import Ranks


@dataclass(frozen=True)
class Setup:
    """Config, tokenizer and architecture, with the settings that follow from them resolved."""

    config: Config
    """With data.batching, model.attn_implementation and revisions on the hub resolved."""
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    precision: str
    ds_config: dict[str, Any]
    """Merged with the run config: no value is "auto"."""
    why_batching: str
    """Why data.batching was resolved as it is, for the start-up table."""
    skeleton: nn.Module
    """The model on the meta device, with adapters and requires_grad as in training."""
    counts: Counts
    """Numbers of parameters."""
    flops: ModelFlops
    """What a step needs."""

    def with_mean_batch(self, mean_batch: float) -> "Setup":
        """With ds_config's learning rate scaled for `mean_batch`, from DataPlan.mean_batch."""
        ds_config = merge_ds_config(
            self.config, self.precision, hidden_size(self.model_config), mean_batch
        )
        return replace(self, ds_config=ds_config)

    def memory(self, world_size: int) -> Memory:
        """Estimated memory of a run on this many ranks, with as many per node as here."""
        quantized, local_ranks = self.counts.quantized, int(os.environ["LOCAL_WORLD_SIZE"])
        return estimate_memory(
            self.config, self.skeleton, quantized, self.ds_config, world_size, local_ranks
        )

    def budget(self, world_size: int) -> Budget:
        """The token budget of micro-batches."""
        return make_budget(self.config.data, world_size, linear_cost(self.model_config))


def describe_run(config: Config, ranks: Ranks, dry_run: bool = False) -> Setup:
    """Load tokenizer and model config and resolve what follows from them; called by all ranks.

    Args:
        dry_run: also build DeepSpeed's engine, around a tiny model; a real run does so later.

    Raises:
        UserError: something cannot be loaded, or settings contradict each other.
    """
    tokenizer = run_on_all_ranks(ranks, lambda: load_tokenizer(config), first_on_machine=True)
    model_config = run_on_all_ranks(ranks, lambda: load_model_config(config), first_on_machine=True)
    config = run_on_all_ranks(ranks, lambda: pin_revisions(config), first_on_machine=True)
    require_same(ranks, "the hub's commit", ",".join(commits(config).values()))
    precision = resolve_precision(config, best_precision(ranks.device))
    ds_config = merge_ds_config(config, precision, hidden_size(model_config))
    for note in check_with_deepspeed(config, ds_config):
        if ranks.is_first:
            print(note, flush=True)
    if dry_run:
        try_engine(config, ds_config)
    check_model_fits(config, model_config, tokenizer)
    run_on_all_ranks(ranks, lambda: check_blocks(config, model_config, ranks.device))
    check_quantization(config, ranks.device)
    skeleton, counts = trained_skeleton(config.model, model_config)
    flops = count_flops(skeleton, model_config)
    config, why = resolve_batching(config, model_config, ranks.device, precision)
    resolved = config, tokenizer, model_config, precision, ds_config, why
    return Setup(*resolved, skeleton, counts, flops)


def load_plans(setup: Setup, ranks: Ranks) -> tuple[DataPlan, dict[str, DataPlan]]:
    """The plans of the training examples and of each held-out set, the same on all ranks.

    Raises:
        UserError: unusable rows, different data on different ranks, invalid arguments of the
            learning-rate schedule, or nothing to ask for eval.generate.
    """
    plan, eval_plans = run_on_all_ranks(
        ranks,
        lambda: make_plans(setup.config, setup.tokenizer, setup.budget(ranks.world_size)),
        first_on_machine=True,
    )
    for each in (plan, *eval_plans.values()):
        require_same(ranks, "the data plan", each.content_hash())
    config = setup.config
    make_schedule(config.train, total_steps(config.train, plan), plan.mean_batch)  # to check it
    for name, each in eval_plans.items() if config.eval.generate else ():
        choose_questions(name, each.data, config.data.max_length, 1)  # to check that there are any
    return plan, eval_plans
