"""Whole weights of a checkpoint, whose parameters tensor parallelism may have split."""

from math import prod

import torch

from zerotrain.checkpoint.shards import Shards, piece_name
from zerotrain.runtime.errors import UserError, describe


def count_elements(shards: Shards) -> int:
    """Elements of all parameters of the model."""
    saved = shards.first
    return sum(
        prod(shape) * (saved.tensor if name in saved.split else 1)
        for name, shape in saved.shapes.items()
    )


def whole_weight(shards: Shards, name: str) -> torch.Tensor:
    """A parameter in fp32 and its shape, on the CPU. Do not modify it.

    Raises:
        UserError: it is not in the files that are here, or damaged.
    """
    saved = shards.first
    if name not in saved.split:
        shape = saved.shapes[name]
        return shards.read(name, "fp32", 0, prod(shape)).view(shape)
    pieces = []
    try:
        for tensor_rank in range(saved.tensor):
            part = piece_name(name, tensor_rank)
            shard, _ = shards.find(part, "fp32", 0)
            shape = shard.shapes[name]
            pieces.append(shards.read(part, "fp32", 0, prod(shape)).view(shape))
        return torch.cat(pieces, saved.split[name])
    except (LookupError, RuntimeError) as error:
        raise UserError(
            f"{shards.checkpoint}: the pieces of {name} do not fit together ({describe(error)}); "
            "use another checkpoint"
        ) from error
