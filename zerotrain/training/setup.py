"""What a run is, resolved once from its config, the machine and the architecture, before weights
are read. Every command that needs it calls `resolve`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from zerotrain.config.ds_config import check_machine, group_sizes, resolve_ds_config
from zerotrain.config.parse import dump_config
from zerotrain.config.schema import Config, ModelConfig, Source
from zerotrain.data.cache import TokenizedRows
from zerotrain.data.caches import make_missing_caches, open_caches
from zerotrain.data.data_plan import DataPlan, PlanRecord, make_plans
from zerotrain.data.plan import Budget
from zerotrain.data.questions import Question, choose_questions
from zerotrain.model.architecture import (
    Counts,
    ModelFlops,
    check_model_fits,
    check_tensor_parallel,
    count_flops,
    count_parameters,
    hidden_size,
)
from zerotrain.model.hub import pin_revisions
from zerotrain.model.load import load_model_config
from zerotrain.model.packing import resolve_batching
from zerotrain.model.tokenizer import load_tokenizer
from zerotrain.model.trained import skeleton_to_train
from zerotrain.runtime.machine import Machine, this_machine
from zerotrain.runtime.ranks import Ranks


@dataclass(frozen=True)
class Architecture:
    """A model without weights, and the numbers that follow from its shapes."""

    model_config: PretrainedConfig
    """As loaded. The skeleton may be only the part for text."""
    skeleton: PreTrainedModel
    """The model on the meta device, with requires_grad as in training."""
    counts: Counts
    """Numbers of parameters."""
    flops: ModelFlops
    """Floating-point operations of a step."""

    @classmethod
    def of(cls, config: ModelConfig, model_config: PretrainedConfig) -> "Architecture":
        """The model of a run with its adapters and frozen parts.

        Raises:
            UserError: model.attn_implementation, model.trainable or model.lora do not fit it.
        """
        skeleton = skeleton_to_train(model_config, config)
        return cls(model_config, skeleton, count_parameters(skeleton), count_flops(skeleton))


@dataclass(frozen=True)
class Setup:
    """A run whose settings are all resolved."""

    config: Config
    """The run config, with every default that depends on model or machine filled in."""
    machine: Machine
    architecture: Architecture
    ds_config: dict[str, Any]
    """The DeepSpeed config merged with the run config; no value is "auto"."""
    why_batching: str
    """Why data.batching is what it is, for the start-up table."""

    @property
    def budget(self) -> Budget:
        """What a micro-batch may hold, and how many micro-batches a micro-step has."""
        tensor, sequence = group_sizes(self.ds_config)
        data = self.config.data
        return Budget(
            world_size=max(1, self.machine.ranks // (tensor * sequence)),
            micro_batch_tokens=data.micro_batch_tokens,
            linear_cost=self.architecture.flops.linear_cost,
            packed=data.batching == "packed",
            windows=self.architecture.flops.windows,
        )


def resolve(config: Config, machine: Machine, architecture: Architecture) -> Setup:
    """Resolve a config for a machine. This reads the DeepSpeed config file and nothing else.

    Raises:
        UserError: settings contradict each other, or do not fit the model.
    """
    skeleton = architecture.skeleton
    config, ds_config = resolve_ds_config(config, machine, hidden_size(skeleton))
    tensor, sequence = group_sizes(ds_config)
    # The DeepSpeed config decides the precision and how many ranks share a sequence.
    config, why = resolve_batching(config, skeleton, machine, sequence)
    check_tensor_parallel(config, ds_config, skeleton, architecture.counts, tensor)
    return Setup(config, machine, architecture, ds_config, why)


def open_run(config: Config, machine: Machine) -> tuple[Setup, PreTrainedTokenizerBase]:
    """Load config and tokenizer from the model's folder or the hub, and resolve the run.

    Raises:
        UserError: something cannot be loaded, or resolve refuses it.
    """
    tokenizer = load_tokenizer(config.model)
    model_config = load_model_config(config.model)
    pinned = replace(config, model=pin_revisions(config.model))  # to the commits just loaded
    architecture = Architecture.of(pinned.model, model_config)
    check_model_fits(architecture.skeleton, tokenizer, config.data.max_length)
    return resolve(pinned, machine, architecture), tokenizer


def open_run_on_all_ranks(
    config: Config, world: Ranks
) -> tuple[Setup, PreTrainedTokenizerBase, Ranks]:
    """Call open_run for the machine of the ranks. All ranks call this.

    Returns:
        The resolved run, its tokenizer, and the ranks in the groups of its DeepSpeed config.

    Raises:
        UserError: open_run refuses it, this machine cannot run it, or ranks resolve it differently.
    """
    machine = this_machine(world)
    # The first rank of a node downloads. The others find the files in the cache.
    setup, tokenizer = world.run_on_all(lambda: open_run(config, machine), first_on_node=True)
    # open_run leaves this out, because tools resolve runs for other machines.
    world.run_on_all(lambda: check_machine(setup.config, setup.ds_config, machine))
    text = f"{setup.budget}\n{dump_config(setup.config)}{json.dumps(setup.ds_config, indent=1)}"
    # Nodes may differ in their GPUs, and so in precision, or in versions of libraries.
    world.require_same("the resolved config", text)
    return setup, tokenizer, world.in_groups(*group_sizes(setup.ds_config))


def pin_sources(setup: Setup, caches: Iterable[TokenizedRows]) -> Setup:
    """Return the run with the commits of the hub data sets from which its caches were made."""
    left = iter(caches)  # of the training rows, then of each held-out set

    def pinned(sources: list[Source]) -> list[Source]:
        pairs = zip(sources, next(left).meta.revisions, strict=True)
        return [replace(source, revision=commit) for source, commit in pairs]

    data = setup.config.data
    data = replace(
        data,
        train_sources=pinned(data.train_sources),
        eval_sources={name: pinned(sources) for name, sources in data.eval_sources.items()},
    )
    return replace(setup, config=replace(setup.config, data=data))


class RunData(NamedTuple):
    """What a run trains and evaluates on. It is the same on all ranks."""

    plan: DataPlan
    """The plan of the training examples."""
    eval_plans: dict[str, DataPlan]
    """The plan of each held-out set."""
    questions: dict[str, list[Question]]
    """The questions that eval.generate asks of each held-out set; empty lists if it is 0."""


def open_data(
    setup: Setup, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
) -> tuple[Setup, RunData]:
    """Open the token caches and plan the steps. If caches are missing, the first rank of each node
    has them made. All ranks call this.

    Returns:
        The run with the commits of its hub data sets, and its data.

    Raises:
        UserError: unusable rows, different data on different ranks, or nothing to ask for
            eval.generate.
    """

    def open_rows() -> list[TokenizedRows]:
        if ranks.local_rank == 0:
            make_missing_caches(setup.config, tokenizer)
        return open_caches(setup.config, tokenizer)

    caches = ranks.run_on_all(open_rows, first_on_node=True)
    setup = pin_sources(setup, caches)
    config = setup.config
    plan, eval_plans = ranks.run_on_all(lambda: make_plans(config, caches, setup.budget))
    for each in (plan, *eval_plans.values()):
        ranks.require_same("the data plan", repr(PlanRecord.of(each)))
    count = config.eval.generate
    questions = {
        name: choose_questions(name, each.data, config.data.max_length, count) if count else []
        for name, each in eval_plans.items()
    }
    return setup, RunData(plan, eval_plans, questions)
