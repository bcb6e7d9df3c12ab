"""What a run is, resolved before any data or weights are read; and its data plans."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zerotrain.config.ds_config import resolve_ds_config
from zerotrain.config.schema import Config
from zerotrain.data.data_plan import DataPlan, make_budget, make_plans
from zerotrain.data.plan import Budget
from zerotrain.data.questions import choose_questions
from zerotrain.model.architecture import check_model_fits, hidden_size, linear_cost, meta_model
from zerotrain.model.blocks import check_blocks
from zerotrain.model.flops import ModelFlops, count_flops
from zerotrain.model.hub import commits, pin_revisions
from zerotrain.model.load import (
    best_precision,
    check_quantization,
    load_model_config,
    load_tokenizer,
)
from zerotrain.model.packed_attention import PACKED_EXAMPLES
from zerotrain.model.packing import resolve_batching
from zerotrain.model.trained import Counts, count_trained
from zerotrain.runtime.agreement import require_same, run_on_all_ranks
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.process_group import Ranks


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
    counts: Counts
    """Numbers of parameters."""
    flops: ModelFlops
    """What a step needs."""

    def budget(self, world_size: int) -> Budget:
        """The token budget of micro-batches."""
        return make_budget(self.config.data, world_size, linear_cost(self.model_config))


def describe_run(config: Config, ranks: Ranks) -> Setup:
    """Load tokenizer and model config and resolve what follows from them; called by all ranks.

    Raises:
        UserError: something cannot be loaded, or settings contradict each other.
    """
    tokenizer = run_on_all_ranks(ranks, lambda: load_tokenizer(config), first_on_machine=True)
    model_config = run_on_all_ranks(ranks, lambda: load_model_config(config), first_on_machine=True)
    config = run_on_all_ranks(ranks, lambda: pin_revisions(config), first_on_machine=True)
    require_same(ranks, "the hub's commit", ",".join(commits(config).values()))
    config, precision, ds_config = resolve_ds_config(
        config, best_precision(ranks.device), hidden_size(model_config)
    )
    skeleton = meta_model(model_config, config.model.trust_remote_code)
    check_model_fits(config, skeleton, tokenizer)
    run_on_all_ranks(ranks, lambda: check_blocks(config.model, skeleton, ranks.device))
    check_quantization(config, ranks.device)
    if config.model.attn_implementation not in (None, PACKED_EXAMPLES):
        check_attention(config.model.attn_implementation, skeleton)
    config, why = resolve_batching(config, skeleton, ranks.device, precision)
    counts = count_trained(skeleton, config.model)
    return Setup(
        config=config,
        tokenizer=tokenizer,
        model_config=model_config,
        precision=precision,
        ds_config=ds_config,
        why_batching=why,
        counts=counts,
        flops=count_flops(skeleton, model_config),
    )


def check_attention(name: str, skeleton: nn.Module) -> None:
    """Raise UserError if the packages or the device for an attention implementation are missing."""
    try:
        skeleton.set_attn_implementation(name)
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"model.attn_implementation: {name}: {describe(error)[:200]}") from error


def load_plans(setup: Setup, ranks: Ranks) -> tuple[DataPlan, dict[str, DataPlan]]:
    """The plans of the training examples and of each held-out set, the same on all ranks.

    Raises:
        UserError: unusable rows, different data on different ranks, or nothing to ask for
            eval.generate.
    """
    plan, eval_plans = run_on_all_ranks(
        ranks,
        lambda: make_plans(setup.config, setup.tokenizer, setup.budget(ranks.world_size)),
        first_on_machine=True,
    )
    for each in (plan, *eval_plans.values()):
        require_same(ranks, "the data plan", each.content_hash())
    config = setup.config
    for name, each in eval_plans.items() if config.eval.generate else ():
        choose_questions(name, each.data, config.data.max_length, 1)  # to check that there are any
    return plan, eval_plans
