"""What is done to each block of a model: compiled, and its activations recomputed in the backward
pass.
"""

import warnings

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from zerotrain.config.schema import ModelConfig
from zerotrain.model.hub import summarize
from zerotrain.runtime.errors import UserError

MAX_GRAPHS = 64  # of one function: training or not, one example or several, kinds of layers


def change_blocks(model: nn.Module, options: ModelConfig) -> list[nn.Module]:
    """Apply model.activation_checkpointing and model.compile; before deepspeed.initialize.

    Returns:
        The blocks; none if the model does not say which modules they are.

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
    return blocks
