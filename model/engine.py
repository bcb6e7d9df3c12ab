"""Build DeepSpeed's engine around the model of a config."""

import deepspeed

from config.ds_check import try_engine
from data.data_plan import DataPlan
from model.experts import fit_experts
from model.host_memory import check_host_memory
from model.load import load_model, set_end_tokens
from model.loss import SupervisedLoss
from model.optimizer import forget_empty_update, parameter_groups
from model.probes import check_causal, check_end_tokens, check_packing, ordinary_tokens
from model.setup import Setup
from model.weights import check_weights
from runtime.agreement import run_on_all_ranks
from runtime.library_output import prints_hidden
from runtime.process_group import Ranks
from runtime.seeding import rank_seed, seed_everything


def build_engine(
    setup: Setup, plan: DataPlan, ranks: Ranks
) -> tuple[deepspeed.DeepSpeedEngine, SupervisedLoss]:
    """DeepSpeed's engine around the model, pretrained or randomly initialized, with the optimizer
    of ds_config; and the model's loss.

    The engine gets no learning-rate schedule: the rate is set before every step.

    Raises:
        UserError: DeepSpeed refuses the config, or the weights cannot be loaded or do not fit.
    """
    config = setup.config
    if not config.model.from_config:
        # fetches the files, once per machine, within distributed.data_timeout_seconds
        unused = run_on_all_ranks(
            ranks, lambda: check_weights(config, setup.model_config), first_on_machine=True
        )
        if ranks.is_first and unused:
            print(unused, flush=True)
        run_on_all_ranks(ranks, lambda: check_host_memory(setup, ranks))
    # The same seed on all ranks for the weights, then a different one per rank for dropout.
    seed_everything(config.train.seed)
    model = run_on_all_ranks(ranks, lambda: load_model(config, setup.model_config, setup.ds_config))
    set_end_tokens(model, setup.tokenizer, plan.data.meta["end_tokens"])
    fit_experts(model, setup.ds_config.get("zero_optimization", {}).get("stage", 0))
    loss = SupervisedLoss(model)
    try:
        with prints_hidden():
            engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=parameter_groups(model, config.train.weight_decay),
                config=setup.ds_config,
            )
    except Exception as error:
        # out of memory and lost connections, RuntimeErrors, may concern one rank only
        if not isinstance(error, (RuntimeError, OSError, MemoryError)):
            try_engine(config, setup.ds_config)  # raises UserError if the config is the cause
        raise
    forget_empty_update(engine.basic_optimizer)
    engine.clip_fp32_gradients = lambda: None  # replaced by clip_plain_gradients
    engine.train()
    seed_everything(rank_seed(config.train.seed, ranks.rank))
    return engine, loss


def check_engine(
    engine: deepspeed.DeepSpeedEngine,
    loss: SupervisedLoss,
    setup: Setup,
    plan: DataPlan,
    ranks: Ranks,
) -> None:
    """Check the model's attention and a frozen output head with forward passes on random tokens,
    and whether the loss can be computed in chunks; called by all ranks.

    Raises:
        UserError: tokens attend to later ones, or packed examples to each other; or the model could
            not learn to stop.
    """
    tokens = ordinary_tokens(setup.tokenizer)
    run_on_all_ranks(ranks, lambda: check_causal(engine, tokens, ranks.device))
    if setup.config.data.batching == "packed":
        run_on_all_ranks(ranks, lambda: check_packing(engine, tokens, ranks.device))
    trained = plan.data.meta["end_tokens"]
    run_on_all_ranks(
        ranks, lambda: check_end_tokens(engine, setup.tokenizer, trained, ranks.device)
    )
    if chunk_tokens := setup.config.model.loss_chunk_tokens:
        problem = loss.use_chunks(engine, tokens, ranks.device, chunk_tokens)
        if problem and ranks.is_first:
            print(f"model.loss_chunk_tokens: the loss needs whole logits: {problem}", flush=True)
