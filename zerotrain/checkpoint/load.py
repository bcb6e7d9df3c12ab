"""Load a checkpoint into a running engine, one parameter at a time, whatever their layouts."""

from typing import TYPE_CHECKING

import torch

from zerotrain.checkpoint.shards import (
    Shard,
    Shards,
    flat_weights,
    fragments,
    optimizer_state,
    partition,
    shape_of,
)
from zerotrain.model.base import Base, is_same_base
from zerotrain.runtime.agreement import run_on_all_ranks
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.process_group import Ranks

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

ADAMS = {"Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam"}  # which have the same states


def check_model(
    engine: "DeepSpeedEngine", shards: Shards, weights_only: bool, base: Base | None
) -> None:
    """Check that a checkpoint is of the engine's model.

    Args:
        base: the files that the engine's weights were read from.

    Raises:
        UserError: names the first parameter that differs.
    """
    checkpoint = shards.checkpoint
    parameters = dict(engine.module.named_parameters())
    saved = {name: shards.shape(name) for name in shards.names()}
    now = {name: shape_of(p) for name, p in parameters.items()}
    optimizers = {shards.first.optimizer, type(engine.basic_optimizer).__name__}
    for name in (*now, *saved):
        if saved.get(name) != now.get(name):
            raise UserError(
                f"{checkpoint} is of another model: {name} is {saved.get(name, 'missing')}, in "
                f"this run {now.get(name, 'missing')}; if only model.lora differs, export it "
                "(scripts/export.py) and set model.name_or_path to the export"
            )
    trained = {name for name, p in parameters.items() if p.requires_grad}
    if not weights_only and (other := trained.symmetric_difference(shards.trained)):
        raise UserError(
            f"{checkpoint} was saved with other trained parameters: {min(other)}; resume with the "
            "same model.trainable"
        )
    if not weights_only and len(optimizers) > 1 and not optimizers <= ADAMS:
        raise UserError(
            f"{checkpoint} has the state of {shards.first.optimizer}, not of this run's optimizer; "
            "resume with the same, or start a new run in another output_dir from its weights: "
            f"--checkpoint.weights_only true --checkpoint.resume {checkpoint}"
        )
    was = shards.read_from
    if was is not None and (base is None or not is_same_base(was, base)):
        other = "was drawn at random" if base is None else f"is {base['name_or_path']}"
        raise UserError(
            f"{checkpoint} has only the weights that were trained; the others are those of "
            f"{was['name_or_path']}, and this run's model {other}, with other weights; set "
            "model.name_or_path and model.revision to that model"
        )


@torch.no_grad()
def load_shards(
    engine: "DeepSpeedEngine",
    shards: Shards,
    ranks: Ranks,
    base: Base | None,
    weights_only: bool,
) -> Base | None:
    """Load weights and buffers, and unless `weights_only` AdamW's state and the counters; called by
    all ranks. Parameter groups keep this run's settings. What the checkpoint leaves out stays as it
    was read from the model's files, `base`.

    Returns:
        The files that hold the frozen weights from now on; None: checkpoints have to hold them.

    Raises:
        UserError: the checkpoint is of another model, or damaged.
    """
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    run_on_all_ranks(ranks, lambda: check_model(engine, shards, weights_only, base))
    if stage == 3:
        optimizer.checkpoint_event_prologue()  # releases all gathered parameters
    run_on_all_ranks(ranks, lambda: _fill(engine, shards, weights_only))
    # from the fp32 weights to those that the model computes with
    if stage == 3:
        flats = flat_weights(engine)
        for weights, flat in zip(optimizer.fp16_partitioned_groups_flat, flats, strict=True):
            weights.copy_(flat)
        optimizer.checkpoint_event_epilogue()
    elif stage > 0:
        optimizer.update_lp_params()
    frozen = (name for name, p in engine.module.named_parameters() if not p.requires_grad)
    return None if any(map(shards.holds, frozen)) else base


def _fill(engine: "DeepSpeedEngine", shards: Shards, weights_only: bool) -> None:
    """Copy this rank's part of everything, without communication."""
    stage, flats = engine.zero_optimization_stage(), flat_weights(engine)
    parameters = dict(engine.module.named_parameters())
    if not weights_only:
        for flat in flats:
            _prepare_state(engine, flat, shards.first)
    states = ["fp32"] if weights_only else shards.first.states
    for at in fragments(engine):
        flat, end = flats[at.flat], at.offset + at.numel
        for key in states if shards.holds(at.name) else ():
            target = flat if key == "fp32" else optimizer_state(engine, flat)[key]
            target.view(-1)[at.offset : end].copy_(shards.read(at.name, key, at.start, at.numel))
        if stage == 0:
            parameters[at.name].view(-1).copy_(flat.view(-1)[at.offset : end])
    for name, p in parameters.items():
        if not p.requires_grad and shards.holds(name):
            start, numel = partition(p) if stage == 3 else (0, p.numel())
            target = p.ds_tensor if stage == 3 else p
            target.view(-1)[:numel].copy_(shards.read(name, "fp32", start, numel))
    for name, values in shards.buffers().items():
        engine.module.get_buffer(name).copy_(values)
    if weights_only:
        return
    for name, count in shards.first.counters.items():
        setattr(engine, name, count)
    if engine.fp16_enabled():
        vars(engine.optimizer.loss_scaler).update(shards.first.loss_scaler)


def _prepare_state(engine: "DeepSpeedEngine", flat: torch.Tensor, saved: Shard) -> None:
    """Make the optimizer's state of a flat tensor, which torch makes at the first update, and set
    the number of updates.
    """
    if saved.updates == 0:
        return
    updates = saved.updates
    state, optimizer = optimizer_state(engine, flat), engine.basic_optimizer
    if isinstance(state.get("step"), torch.Tensor):
        state["step"].fill_(updates)
    elif isinstance(optimizer, torch.optim.Adam) and "step" not in state:
        on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
        state["step"] = torch.tensor(float(updates), device=flat.device if on_device else "cpu")
    else:  # DeepSpeed's have a number
        state["step"] = updates
    for key in saved.states[1:]:
        if key not in state:
            state[key] = torch.zeros_like(flat)
