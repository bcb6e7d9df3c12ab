"""Checkpoints as tools read them: which one to take, whether it is damaged, whole weights."""

import functools
from math import prod
from pathlib import Path

import torch

from zerotrain.checkpoint.manifest import find_problems, inspect, read_manifest
from zerotrain.checkpoint.run_folder import checkpoint_name, checkpoints_folder, list_checkpoints
from zerotrain.checkpoint.shards import Shards
from zerotrain.checkpoint.state import read_state
from zerotrain.runtime.errors import UserError, describe, printable


def checkpoint_problem(checkpoint: Path) -> str | None:
    """Return why `checkpoint` cannot be used; None if it can. This reads all of its files."""
    _, problems = inspect(checkpoint)
    if not problems:
        problems = find_problems(checkpoint, read_manifest(checkpoint).files, checksums=True)
    return next((f"{name} {problem}" for name, problem in problems.items()), None)


def choose_checkpoint(folder: Path, best: bool = False) -> Path:
    """Return `folder` itself if it is a checkpoint. From a run folder, return the newest usable
    checkpoint, or with `best` the checkpoint of the best evaluation.

    Raises:
        UserError: there is no such checkpoint, or it cannot be used.
    """
    try:
        checkpoints = list_checkpoints(checkpoints_folder(folder)) or [folder]
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {describe(error)}") from error
    for checkpoint in reversed(checkpoints):
        problem = checkpoint_problem(checkpoint)
        if problem is None:
            break
        if checkpoint != folder:
            print(printable(f"skipping {checkpoint}: {problem}"))
    else:
        raise UserError(
            f"{folder} is not a usable checkpoint or run ({problem}); give output_dir of a run, or "
            "one of its checkpoints; if each node has a disk of its own, bring their files together"
        )
    if not best:
        return checkpoint
    evaluated = read_state(checkpoint).progress.best
    if evaluated is None or checkpoint == folder:
        raise UserError(f"--best: {folder} is not the folder of a run with evaluations")
    chosen = checkpoint.with_name(checkpoint_name(evaluated.step))
    if problem := checkpoint_problem(chosen):
        raise UserError(
            f"the best evaluation was at step {evaluated.step:,}, but {chosen} cannot be used: "
            f"{problem}; checkpoint.keep_best: true keeps the best checkpoint"
        )
    return chosen


@functools.cache
def shards_of_rank(checkpoint: Path, rank: int) -> Shards:
    """Return the files of a checkpoint as a rank reads them. They are opened once."""
    return Shards(checkpoint, rank)


def whole_weight(shards: Shards, name: str) -> torch.Tensor:
    """Return a parameter in fp32 and its shape, on the CPU. Do not modify it.

    Raises:
        UserError: the parameter is damaged or not in the files.
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
            f"{shards.checkpoint}: the pieces of {name} do not fit ({describe(error)}); "
            "use another checkpoint"
        ) from error
