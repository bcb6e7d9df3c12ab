"""What a run is, resolved before any data or weights are read; and its data plans."""

import json
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from zerotrain.config.ds_config import check_machine, group_sizes, resolve_ds_config
from zerotrain.config.parse import dump_config
from zerotrain.config.schema import Config
from zerotrain.data.data_plan import DataPlan, make_budget, make_plans
from zerotrain.data.questions import choose_questions
from zerotrain.model.architecture import (
    ModelFlops,
    check_model_fits,
    count_flops,
    hidden_size,
    linear_cost,
    meta_model,
)
from zerotrain.model.hub import pin_revisions
from zerotrain.model.load import (
    best_precision,
    check_quantization,
    load_model_config,
    load_tokenizer,
)
from zerotrain.model.packing import check_attention, resolve_batching
from zerotrain.model.states import ModelStates, model_states
from zerotrain.model.tensor_parallel import check_tensor_parallel
from zerotrain.model.trained import Counts, count_trained
from zerotrain.runtime.agreement import require_same, run_on_all_ranks
from zerotrain.runtime.process_group import Ranks, group_ranks


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
    linear_cost: int
    """K in the cost K*L + L^2 of an example of L tokens."""
    counts: Counts
    """Numbers of parameters."""
    flops: ModelFlops
    """What a step needs."""
    ranks: Ranks
    """In the groups that the DeepSpeed config asks for."""
    skeleton: PreTrainedModel
    """The model on the meta device, with requires_grad as in training."""

    @property
    def states(self) -> ModelStates:
        """The bytes of a rank's model states."""
        return model_states(
            self.config.model, self.skeleton, self.counts, self.ds_config, self.ranks.world_size
        )


def describe_run(config: Config, ranks: Ranks) -> Setup:
    """Load tokenizer and model config and resolve what follows from them; called by all ranks.

    Raises:
        UserError: something cannot be loaded, or settings contradict each other.
    """
    tokenizer = run_on_all_ranks(ranks, lambda: load_tokenizer(config), first_on_node=True)
    model_config = run_on_all_ranks(ranks, lambda: load_model_config(config), first_on_node=True)
    config = run_on_all_ranks(ranks, lambda: pin_revisions(config), first_on_node=True)
    skeleton = meta_model(model_config, config.model.trust_remote_code)
    config, precision, ds_config = resolve_ds_config(
        config, best_precision(ranks.device), hidden_size(skeleton)
    )
    size = ranks.world_size
    run_on_all_ranks(ranks, lambda: check_machine(config, ds_config, ranks.device.type, size))
    require_same(ranks, "the DeepSpeed config", json.dumps(ds_config, indent=1))
    ranks = group_ranks(ranks, *group_sizes(ds_config))
    check_model_fits(config, skeleton, tokenizer)
    check_quantization(config, ranks.device)
    check_attention(config.model.attn_implementation, skeleton)
    config, why = resolve_batching(config, skeleton, ranks.device, precision, ranks.sequence)
    counts = count_trained(skeleton, config.model)
    check_tensor_parallel(config, ds_config, skeleton, counts, ranks.tensor)
    cost = linear_cost(skeleton)
    require_same(ranks, "the resolved config", f"{dump_config(config)}linear_cost: {cost}")
    return Setup(
        config=config,
        tokenizer=tokenizer,
        model_config=model_config,
        precision=precision,
        ds_config=ds_config,
        why_batching=why,
        linear_cost=cost,
        counts=counts,
        flops=count_flops(skeleton),
        ranks=ranks,
        skeleton=skeleton,
    )


def load_plans(setup: Setup, ranks: Ranks) -> tuple[DataPlan, dict[str, DataPlan]]:
    """The plans of the training examples and of each held-out set, the same on all ranks.

    Raises:
        UserError: unusable rows, different data on different ranks, or nothing to ask for
            eval.generate.
    """
    budget = make_budget(setup.config.data, ranks.data_size, setup.linear_cost)
    plan, eval_plans = run_on_all_ranks(
        ranks,
        lambda: make_plans(setup.config, setup.tokenizer, budget),
        first_on_node=True,
    )
    for each in (plan, *eval_plans.values()):
        require_same(ranks, "the data plan", each.content_hash())
    config = setup.config
    for name, each in eval_plans.items() if config.eval.generate else ():
        choose_questions(name, each.data, config.data.max_length, 1)  # to check that there are any
    return plan, eval_plans
