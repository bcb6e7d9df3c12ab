"""What is done to each block of a model: its MLP tiled, the block compiled, its activations
recomputed in the backward pass. In this order, each one replaces a forward method by one around it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from config.schema import Config, ModelConfig
from model.architecture import meta_model
from model.hub import first_line
from model.leaf import gather_at_once
from model.packed_attention import PACKED_EXAMPLES, packed_attention
from runtime.errors import UserError

KEYS = ("tiled_mlp", "compile", "activation_checkpointing")
MLP_NAMES = ("mlp", "feed_forward", "ffn")
MOST_GRAPHS = 64  # of one function: training or not, one example or several, kinds of layers


def check_blocks(config: Config, model_config: PretrainedConfig, device: torch.device) -> None:
    """Refuse options that the model's blocks, or this machine, cannot have.

    Raises:
        UserError: names the key.
    """
    options = config.model
    if any(getattr(options, key) for key in KEYS):
        change_blocks(meta_model(model_config, options.trust_remote_code), options)
    if options.compile:
        try:
            torch.compile(torch.sin)(torch.ones(8, device=device))
        except Exception as error:  # no C++ compiler, no Triton, ...
            raise UserError(
                f"model.compile: torch.compile does not work here: {first_line(error)}"
            ) from error


def change_blocks(model: nn.Module, options: ModelConfig) -> None:
    """Apply tiled_mlp, compile and activation_checkpointing; before deepspeed.initialize.

    Raises:
        UserError: the model's blocks, or their MLPs, cannot be found, or have experts.
    """
    if not any(getattr(options, key) for key in KEYS):
        return
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    names = getattr(model, "_no_split_modules", None) or ()  # of older code that comes with a model
    blocks = blocks or [m for m in model.modules() if type(m).__name__ in names]
    if not blocks:
        keys = [
            k for k in ("tiled_mlp", "compile", "activation_checkpointing") if getattr(options, k)
        ]
        raise UserError(
            f"model.{keys[0]}: {type(model).__name__} does not say which modules are its blocks"
        )
    for block in blocks:
        if options.tiled_mlp:
            mlp = _mlp_of(block)
            mlp.forward = _tiled(mlp.forward, options.tiled_mlp)
            gather_at_once(mlp)
        if options.compile:
            for module in block.modules():
                # peft's adapters of experts give them a new class in each pass
                if hasattr(module, "parameter_name"):
                    module.forward = torch.compiler.disable(module.forward)
            block.forward = _compiled(block.forward)
            gather_at_once(block)  # else ZeRO-3's hooks would be between its parts
        if options.activation_checkpointing:
            offload = options.activation_checkpointing == "cpu"
            block.forward = _checkpointed(block.forward, offload)
    if options.compile:
        torch._dynamo.config.recompile_limit = MOST_GRAPHS
        # the lengths of the examples, on which its work depends, are values of a tensor
        AttentionInterface.register(PACKED_EXAMPLES, torch.compiler.disable(packed_attention))


def _mlp_of(block: nn.Module) -> nn.Module:
    """The block's MLP, which computes a tensor from a tensor, each token alone."""
    name = type(block).__name__
    if any("expert" in path for path, _ in block.named_modules()):
        raise UserError(f"model.tiled_mlp: {name} has experts, which cannot be tiled; set it to 0")
    for child in (getattr(block, n, None) for n in MLP_NAMES):
        if isinstance(child, nn.Module):
            parameters = inspect.signature(child.forward).parameters.values()
            if sum(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters) == 1:
                return child
    raise UserError(
        f"model.tiled_mlp: {name} has no MLP that is a module of its own and takes one tensor; set "
        "it to 0"
    )


def _tiled(forward: Callable, tiles: int) -> Callable:
    """An MLP over one tile of the tokens after the other. In the backward pass each tile is
    computed again, so only one tile's inner activations exist at a time. As in DeepSpeed's TiledMLP
    (ALST, arXiv:2506.13996), which though loses all gradients of a micro-batch with fewer tokens
    than tiles, and cannot have dropout.
    """

    def forward_tiled(hidden: torch.Tensor) -> torch.Tensor:
        """[..., tokens, hidden size] -> the same."""
        parts = hidden.flatten(0, -2)[None].chunk(tiles, dim=1)
        outputs = [checkpoint(forward, part, use_reentrant=False) for part in parts]
        return torch.cat(outputs, dim=1).view(hidden.shape)

    return forward_tiled


def _compiled(forward: Callable) -> Callable:
    """A block compiled for training, for any number of tokens. Evaluation is not worth as many
    graphs again.
    """
    compiled = torch.compile(forward, dynamic=True)

    def forward_compiled(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else forward)(*args, **kwargs)

    return forward_compiled


def _checkpointed(forward: Callable, offload: bool) -> Callable:
    """A block of which only the input is kept for the backward pass, which computes the rest again.

    Args:
        offload: keep it in CPU memory, pinned where there is a GPU; the copies run beside the
            computation.
    """

    def forward_checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not offload:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        with save_on_cpu(pin_memory=True):  # applies to the arguments alone: checkpoint has its own
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return forward_checkpointed
