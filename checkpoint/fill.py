"""Fill a running engine with weights and AdamW's state, one parameter at a time."""

from typing import TYPE_CHECKING, Protocol

import torch

from checkpoint.shards import STATES, Fragment, Shards, flat_weights, is_on_nvme, layout, partition
from model.base import is_same_base
from runtime.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from deepspeed import DeepSpeedEngine


class Source(Protocol):
    """Where the states of parameters are read from: Shards, or a converted checkpoint."""

    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor: ...


def check_model(engine: "DeepSpeedEngine", shards: Shards, checkpoint: "Path") -> None:
    """Check that the checkpoint is of the engine's model, and that the engine's state is in memory.

    Raises:
        UserError: names the first parameter that differs.
    """
    if is_on_nvme(engine):
        raise UserError(
            f"{checkpoint} has another layout and cannot be loaded into states on NVMe; set the "
            "offload device to cpu"
        )
    saved = {name: shards.shape(name) for name in shards.names()}
    now = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in engine.module.named_parameters()}
    for name in (*now, *saved):
        if saved.get(name) != now.get(name):
            raise UserError(
                f"{checkpoint} is of another model: {name} is {saved.get(name, 'missing')}, in "
                f"this run {now.get(name, 'missing')}; if only model.lora differs, export it "
                "(scripts/export.py) and set model.name_or_path to the export"
            )
    check_base(engine, shards, checkpoint)


def check_base(engine: "DeepSpeedEngine", shards: Shards, checkpoint: "Path") -> None:
    """Check that the engine's model has been read from the files that hold the weights which the
    checkpoint lacks.

    Raises:
        UserError: names both.
    """
    was, now = shards.read_from, engine.module.read_from
    if shards.missing() and (now is None or not is_same_base(was, now)):
        other = "was drawn at random" if now is None else f"is {now['name_or_path']}"
        raise UserError(
            f"{checkpoint} has only the weights that were trained; the others are those of "
            f"{was['name_or_path']}, and this run's model {other}, with other weights; set "
            "model.name_or_path and model.revision to that model"
        )


def load_weights(engine: "DeepSpeedEngine", shards: Shards) -> None:
    """Load the weights and buffers of a checkpoint of the same model, whatever its layout. What it
    lacks stays as it was read from the model's files.
    """
    fill(engine, shards, shards, STATES[:1])


@torch.no_grad()
def fill(engine: "DeepSpeedEngine", shards: Shards, source: Source, keys: tuple[str, ...]) -> None:
    """Copy the states `keys` of this rank's partitions of all parameters into the engine, then
    update the weights that the model computes with.

    Args:
        shards: of the checkpoint, for frozen parameters and buffers.
        source: of the states `keys`, a subset of STATES.
    """
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    parameters = dict(engine.module.named_parameters())
    if stage == 3:
        optimizer.checkpoint_event_prologue()  # releases all gathered parameters
    flats = flat_weights(engine)
    fragments = [Fragment(*values) for values in layout(engine)["fragments"]]
    for at in fragments:
        flat, within = flats[at.flat], slice(at.offset, at.offset + at.numel)
        for key in keys if shards.holds(at.name) else ():
            held = flat if key == "fp32" else engine.basic_optimizer.state[flat][key]
            held.view(-1)[within].copy_(source.read(at.name, key, at.start, at.numel))
        if stage == 0:
            parameters[at.name].view(-1).copy_(flat.view(-1)[within])
    if stage == 3:
        for weights, flat in zip(optimizer.fp16_partitioned_groups_flat, flats, strict=True):
            weights.copy_(flat)
    elif stage > 0:
        optimizer.update_lp_params()
    for name, p in parameters.items():
        if not p.requires_grad and shards.holds(name):
            engine.module.read_from = None  # from here on, checkpoints hold the frozen weights
            weight = shards.weight(name)
            if stage == 3:
                start, numel = partition(p)
                p.ds_tensor.view(-1)[:numel].copy_(weight.flatten()[start : start + numel])
            else:
                p.copy_(weight)
    for name, values in shards.buffers().items():
        engine.module.get_buffer(name).copy_(values)
    if stage == 3:
        optimizer.checkpoint_event_epilogue()
