"""Build DeepSpeed's engine around the model of a config."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_module
from torch.utils.checkpoint import checkpoint
from torch.utils.cpp_extension import get_default_build_root
from transformers import PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from zerotrain.config.ds_config import zero_stage
from zerotrain.config.schema import ModelConfig
from zerotrain.data.data_plan import DataPlan
from zerotrain.model.hub import Base, summarize, weight_files
from zerotrain.model.load import load_model, set_end_tokens
from zerotrain.model.mixers import keep_apart, kernel_keywords
from zerotrain.model.packing import activate_kernel, kernel_line
from zerotrain.model.probes import (
    check_answers,
    check_causal,
    check_end_tokens,
    check_packing,
    layers_with_kernel,
    ordinary_tokens,
)
from zerotrain.runtime.errors import EXIT_FAILURE, UserError, rank_prefix
from zerotrain.runtime.process_group import apply_timeout
from zerotrain.runtime.progress import print_line
from zerotrain.runtime.ranks import Ranks
from zerotrain.runtime.seeding import rank_seed, seed_everything
from zerotrain.training.loss import SupervisedLoss
from zerotrain.training.optimizer import parameter_groups, reset_update_count
from zerotrain.training.setup import Setup

LOCK_SECONDS = 30.0  # Locks are named after this time; after 60 times as long the run ends.
# Most graphs of a block: training or evaluation, one example or several, kinds of layers.
MAX_GRAPHS = 64


def name_locks() -> None:
    """Print the locks in torch's extension cache, and end the process if they are still there half
    an hour later. A killed compiler leaves one, and DeepSpeed would wait for it without end.
    """
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    locks = [*cache.rglob("lock")]
    for lock in locks:
        print(
            f"{rank_prefix()}{lock}: an operator is being compiled; if none of your processes is "
            "compiling, remove the file",
            file=sys.stderr,
        )
    is_built = threading.current_thread().finished.wait(60 * LOCK_SECONDS)  # The timer's event.
    if not is_built and any(map(Path.exists, locks)):
        print("error: an operator is still being compiled; run: rm -f", *locks, file=sys.stderr)
        os._exit(EXIT_FAILURE)


def build_engine(
    setup: Setup, tokenizer: PreTrainedTokenizerBase, plan: DataPlan, ranks: Ranks
) -> tuple[deepspeed.DeepSpeedEngine, SupervisedLoss, Base | None]:
    """Build DeepSpeed's engine around the model, with the optimizer of ds_config.

    The engine gets no learning-rate schedule: the rate is set before every step.

    Returns:
        The engine, the model's loss, and the files that hold the frozen weights, as load_model.

    Raises:
        UserError: DeepSpeed refuses the config, or the weights cannot be loaded or do not fit.
    """
    config = setup.config
    ds_config = setup.ds_config
    if not config.model.from_config:
        # Downloads happen once per node. Ranks.control waits for them, up to 24 hours.
        ranks.run_on_all(lambda: weight_files(config.model.name_or_path), first_on_node=True)
    # All ranks draw weights with the same seed. At the end each gets its own seed for dropout.
    seed_everything(config.train.seed)
    model, base = ranks.run_on_all(
        lambda: load_model(config.model, config.train, setup.architecture.model_config, ds_config)
    )
    set_end_tokens(model, tokenizer, plan.data.meta.end_tokens)
    stage = zero_stage(ds_config)
    # In initialize() ZeRO-3 puts hooks on the blocks, so they are changed before.
    change_blocks(model, config.model, stage)
    if stage == 0 and config.train.precision == "fp32":
        ds_config = ds_config | {"gradient_clipping": 0.0}  # apply_update in guard.py clips
    # DeepSpeed compiles operators here, or waits for another process that does.
    long_wait = threading.Timer(LOCK_SECONDS, name_locks)
    long_wait.start()
    try:
        with redirect_stdout(StringIO()):  # DeepSpeed prints its memory use, in 15 lines
            engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=parameter_groups(model, config.train.weight_decay),
                config=ds_config,
            )
    except Exception as error:
        # A lack of memory and a lost connection are RuntimeErrors. So are NotImplementedErrors.
        is_failure = isinstance(error, RuntimeError | OSError | MemoryError)
        if is_failure and not isinstance(error, NotImplementedError):
            raise
        raise UserError(f"{config.ds_config}: DeepSpeed refuses it: {summarize(error)}") from error
    finally:
        long_wait.cancel()
    apply_timeout(config.distributed.timeout_seconds, ranks)  # for DeepSpeed's groups, too
    if ranks.tensor > 1:
        engine.first_dataloader_check.remove()  # it would send inputs as pickles
    if config.data.batching == "packed":
        keep_apart(model, kernel_keywords(model))
        if ranks.device.type == "cuda":
            activate_kernel()
    loss = SupervisedLoss(model, ranks.sequence_group)
    reset_update_count(engine.basic_optimizer)  # load_start() sets a checkpoint's count
    engine.train()
    problem = ranks.run_on_all(lambda: loss.check(engine))
    if problem and ranks.is_first:
        print(f"the loss is slower and takes more memory: {problem}")
    seed_everything(rank_seed(config.train.seed, ranks.replica))
    return engine, loss, base


def check_engine(
    engine: deepspeed.DeepSpeedEngine,
    loss: SupervisedLoss,
    setup: Setup,
    tokenizer: PreTrainedTokenizerBase,
    plan: DataPlan,
    ranks: Ranks,
) -> None:
    """Check the model's attention, a frozen output head and a router loss with forward passes on
    random tokens. All ranks call it.

    Raises:
        UserError: tokens attend to later tokens, or packed examples to each other; or the model
            could not learn to stop, cannot write the answers of eval.generate, or has a router loss
            of its own kind.
    """
    tokens = ordinary_tokens(tokenizer)
    # In separate calls: when a rank fails in a check, no other rank may have begun the next check.
    ranks.run_on_all(lambda: check_causal(engine, tokens))
    ranks.run_on_all(lambda: check_end_tokens(engine, tokenizer, plan.data.meta.end_tokens))
    if setup.config.eval.generate:
        ranks.run_on_all(lambda: check_answers(engine, tokens))
    if setup.config.data.batching == "packed" or ranks.sequence > 1:
        ranks.run_on_all(lambda: check_packing(engine, tokens))
    ranks.run_on_all(lambda: loss.router_loss.check(engine, tokens))
    if setup.config.data.batching == "packed" and ranks.device.type == "cuda":
        layers = ranks.run_on_all(lambda: layers_with_kernel(engine, tokens))
        print_line(f"attention kernel: {kernel_line(layers)}")


@cache
def compile_once(forward: Callable) -> Callable:
    return torch.compile(forward, dynamic=True)


@torch.compiler.disable
def checkpoint_compiled(forward: partial, *states: torch.Tensor) -> Any:
    """Checkpoint a block's forward pass, compiled. transformers calls it in each block.

    torch cannot compile a checkpoint around packed attention, which is never compiled itself.
    """
    run = partial(compile_once(forward.func), *forward.args, **forward.keywords)
    return checkpoint(run, *states, use_reentrant=False)


def change_blocks(model: torch.nn.Module, options: ModelConfig, stage: int) -> None:
    """Apply model.activation_checkpointing and model.compile to a model's blocks, and at ZeRO
    stage 3 have each block gathered as a whole. To be called before deepspeed.initialize.

    Raises:
        UserError: the model does not support one of the two settings.
    """
    if options.activation_checkpointing:
        try:
            model.activation_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise UserError(f"model.activation_checkpointing: {summarize(error)}") from error
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if options.compile:
        if not blocks:
            raise UserError(f"model.compile: {type(model).__name__} names no blocks; remove it")
        torch.compiler.config.recompile_limit = MAX_GRAPHS
        for block in blocks:
            block.compile(dynamic=True)
        if options.activation_checkpointing:
            model._set_gradient_checkpointing(gradient_checkpointing_func=checkpoint_compiled)
    if stage == 3 and blocks:
        # ZeRO-3 reduces a block's gradients once autograd has the gradient of the block's input. If
        # everything before the block is frozen, its input needs no gradient, and ZeRO-3 would
        # reduce zeros. So the output of the embeddings is made to need a gradient.
        for block in blocks:
            set_z3_leaf_module(block, True)
        model.enable_input_require_grads()
