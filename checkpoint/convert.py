"""Convert a checkpoint to another world size, ZeRO stage or AdamW through DeepSpeed's universal
format: a folder for each parameter, with its fp32 weight, AdamW's moments and the step.

    checkpoints/step_00001000.universal.0123456789abcdef/     the checksum of the manifest
        zero/model.embed_tokens.weight/{fp32,exp_avg,exp_avg_sq,step}.pt

The parameters are assigned to the ranks. Each folder is renamed into place when it is complete, so
that an interrupted conversion can be continued. Loading is ours: DeepSpeed 0.19.8 refuses another
stage, and at stage 3 gives all parameter groups the settings of the first and all parameters one
step count.

This file can be deleted; a run then resumes with the same world size, ZeRO stage and optimizer.
"""

import os
import shutil
import time
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from checkpoint.files import write_measured
from checkpoint.fill import fill
from checkpoint.nodes import Nodes
from checkpoint.run_folder import MANIFEST, converted_path, list_converted, remove
from checkpoint.shards import ADAMS, STATES, Shards, flat_weights, layout, load_safely
from runtime.agreement import run_on_all_ranks
from runtime.errors import UserError
from runtime.process_group import Ranks
from runtime.progress import progress

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

FILE_BYTES = 8192  # at most, of a file besides its elements: torch's zip headers, disk blocks


class Universal:
    """A converted checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """As Shards.read."""
        path = self.folder / "zero" / name / f"{key}.pt"
        whole = load_safely(path, map_location="cpu", mmap=True)["param"]
        return whole.flatten()[start : start + numel]


# --------------------------------------------------------------------------------------------------
# Convert


def convert(checkpoint: Path, shards: Shards, folder: Path, nodes: Nodes) -> Universal:
    """Convert a checkpoint into `folder`, where parameters that are already converted are kept.

    Called by all ranks together; the ranks of a node share the work. Holds one parameter in memory.

    Raises:
        UserError: there is not enough free disk space, or it cannot be written.
    """
    manifest = (checkpoint / MANIFEST).read_bytes()
    target = converted_path(folder, checkpoint.name, xxhash.xxh3_64_hexdigest(manifest))
    began = time.perf_counter()
    ranks, sharing = nodes.ranks, nodes.local_ranks
    prepared = nodes.run_on_each_node(lambda: _prepare(checkpoint, shards, target, ranks))
    missing = prepared[nodes.here]
    mine = _assign(missing, shards, len(sharing))[sharing.index(ranks.rank)]
    draft = target / f"draft_{ranks.rank:05d}"
    run_on_all_ranks(ranks, lambda: _write_all(shards, mine, draft, target))
    if ranks.is_first:
        done, seconds = len(shards.trained) - len(missing), time.perf_counter() - began
        print(
            f"converted in {seconds:.1f} s; {done:,} of {len(shards.trained):,} parameters had "
            "been converted before",
            flush=True,
        )
    return Universal(target)


def _prepare(checkpoint: Path, shards: Shards, target: Path, ranks: Ranks) -> list[str]:
    """The parameters that are still to be converted, after checking that the disk has room."""
    try:
        for other in list_converted(target.parent):
            if other != target:
                remove(other)
        (target / "zero").mkdir(parents=True, exist_ok=True)
        for draft in target.glob("draft_[0-9][0-9][0-9][0-9][0-9]"):
            shutil.rmtree(draft)
    except OSError as error:
        raise UserError(f"cannot convert {checkpoint} into {target}: {error.strerror}") from error
    missing = [name for name in shards.trained if not (target / "zero" / name).exists()]
    elements = sum(prod(shards.shape(name)) for name in missing)
    needed = 4 * len(STATES) * elements + (len(STATES) + 1) * FILE_BYTES * len(missing)
    free = shutil.disk_usage(target).free
    was = shards.layout(0)
    change = f"ZeRO stage {was['zero_stage']} with {was['optimizer']}, {was['shards']} shards"
    if free < needed:
        raise UserError(
            f"{checkpoint}: converting it ({change}) for {ranks.world_size} ranks takes "
            f"{needed:,} bytes in {target.parent}, and {free:,} are free; make room, or resume "
            "with the same world size, ZeRO stage and optimizer"
        )
    if ranks.is_first:
        print(
            f"converting {checkpoint} ({change}) for {ranks.world_size} ranks; needs "
            f"{needed / 2**20:,.0f} MiB of disk until the next save",
            flush=True,
        )
    return missing


def _assign(names: list[str], shards: Shards, ranks: int) -> list[list[str]]:
    """The names of each of `ranks`, near-equal in elements: the largest first, each to the rank
    with the fewest elements.
    """
    sizes = {name: prod(shards.shape(name)) for name in names}
    of_ranks: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(names, key=lambda name: -sizes[name]):
        rank = loads.index(min(loads))
        of_ranks[rank].append(name)
        loads[rank] += sizes[name]
    return of_ranks


def _write_all(shards: Shards, names: list[str], draft: Path, target: Path) -> None:
    """Convert parameters; the progress shown is that of rank 0's share."""
    with progress("converting", len(names), "parameters") as report:
        for done, name in enumerate(names):
            report(done)
            _write(shards, name, draft, target)


def _write(shards: Shards, name: str, draft: Path, target: Path) -> None:
    """Convert one parameter. It is synced to disk before it is renamed to its name."""
    try:
        draft.mkdir()
        for key in STATES:
            # a copy, because torch.save writes the whole flat tensor of a view
            values = shards.read(name, key, 0, prod(shards.shape(name))).clone()
            whole = {"param": values.view(shards.shape(name))}
            write_measured(draft / f"{key}.pt", partial(torch.save, whole))
        updates = float(shards.progress["updates"])
        write_measured(draft / "step.pt", partial(torch.save, updates))
        os.replace(draft, target / "zero" / name)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        line = " ".join(str(error).split())
        raise UserError(f"cannot convert {name} into {target}: {line}") from error


# --------------------------------------------------------------------------------------------------
# Load


def check_optimizer(engine: "DeepSpeedEngine", shards: Shards, checkpoint: Path) -> None:
    """Check that the optimizer's state can be converted from one layout to the other.

    Raises:
        UserError: names both remedies.
    """
    was, now = shards.layout(0), layout(engine)
    trained = {n for n, p in engine.module.named_parameters() if p.requires_grad}
    if {was["optimizer"], now["optimizer"]} <= ADAMS and trained == set(shards.trained):
        return
    what = [
        f"ZeRO stage {at['zero_stage']} with {at['optimizer']}, {at['shards']} shards, {count:,} "
        "trained parameters"
        for at, count in ((was, len(shards.trained)), (now, len(trained)))
    ]
    raise UserError(
        f"{checkpoint} has {what[0]}, this run has {what[1]}, and only AdamW's state of the same "
        "parameters can be converted; resume with the same ones, or load the weights alone: "
        f"--checkpoint.weights_only true --checkpoint.resume {checkpoint} and another output_dir"
    )


def load(engine: "DeepSpeedEngine", shards: Shards, converted: Universal) -> None:
    """Load weights, buffers, AdamW's state and counters, whatever the engine's layout. The
    parameter groups keep this run's settings.
    """
    optimizer, saved = engine.basic_optimizer, shards.model
    updates, loss_scale = (shards.progress[key] for key in ("updates", "loss_scale"))
    for flat in flat_weights(engine):
        step: Any = updates
        if isinstance(optimizer, torch.optim.Adam):  # a tensor in torch's, a number in DeepSpeed's
            on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
            # a tensor of its own, because it is incremented in place
            step = torch.tensor(float(updates), device=flat.device if on_device else "cpu")
        moments = {key: torch.zeros_like(flat, dtype=torch.float32) for key in STATES[1:]}
        optimizer.state[flat] = {"step": step, **moments}
    fill(engine, shards, converted, STATES)
    engine.global_steps, engine.global_samples = saved["global_steps"], saved["global_samples"]
    engine.skipped_steps = saved["skipped_steps"]
    if engine.fp16_enabled() and loss_scale is not None:
        engine.optimizer.loss_scale = loss_scale
