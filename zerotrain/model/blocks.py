"""What is done to each block of a model: compiled, and its activations recomputed in the backward
pass.
"""

import warnings

from deepspeed.utils import set_z3_leaf_module
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from zerotrain.config.schema import ModelConfig
from zerotrain.model.hub import summarize
from zerotrain.runtime.errors import UserError

MAX_GRAPHS = 64  # of one function: training or not, one example or several, kinds of layers


def change_blocks(model: nn.Module, options: ModelConfig, stage: int = 0) -> None:
    """Apply model.activation_checkpointing, model.compile, and at ZeRO stage 3 gather blocks as a
    whole, rather than with hooks of each of their modules; before deepspeed.initialize.

    Raises:
        UserError: the model cannot have them.
    """
    if options.activation_checkpointing:
        try:
            with warnings.catch_warnings(action="ignore"):  # a newer name
                model.gradient_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise UserError(f"model.activation_checkpointing: {summarize(error)}") from error
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if options.compile and not blocks:
        raise UserError(
            f"model.compile: {type(model).__name__} does not say which modules are its blocks"
        )
    for block in blocks if options.compile else ():
        block.compile(dynamic=True, recompile_limit=MAX_GRAPHS)
    if stage == 3 and blocks:
        # ZeRO-3 reduces the gradients of a block once autograd has the gradient of its input. Where
        # the input needs none, because everything before is frozen, it would reduce zeros; so the
        # output of the embeddings is made to need one.
        for block in blocks:
            set_z3_leaf_module(block, True)
        model.enable_input_require_grads()
