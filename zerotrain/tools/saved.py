"""Checkpoints as tools read them: whole weights, and whether any file is damaged."""

import functools
from math import prod
from pathlib import Path

import torch

from zerotrain.checkpoint.manifest import find_problems, inspect, read_manifest
from zerotrain.checkpoint.shards import Shards
from zerotrain.runtime.errors import UserError, describe


@functools.cache
def shards_of_rank(checkpoint: Path, rank: int) -> Shards:
    """The files of a checkpoint as a rank reads them, opened once for all parameters."""
    return Shards(checkpoint, rank)


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
            of_rank = shards_of_rank(shards.checkpoint, tensor_rank)
            shape = of_rank.first.shapes[name]
            pieces.append(of_rank.read(name, "fp32", 0, prod(shape)).view(shape))
        return torch.cat(pieces, saved.split[name])
    except (LookupError, RuntimeError) as error:
        raise UserError(
            f"{shards.checkpoint}: the pieces of {name} do not fit together ({describe(error)}); "
            "use another checkpoint"
        ) from error


def checkpoint_problem(checkpoint: Path) -> str | None:
    """Why `checkpoint` cannot be used; None if it can. All of its files are read."""
    _, problems = inspect(checkpoint)
    if not problems:
        problems = find_problems(checkpoint, read_manifest(checkpoint).files, checksums=True)
    return next((f"{name} {problem}" for name, problem in problems.items()), None)
