"""What each rank writes into a checkpoint, and how it gets into an engine of any layout.

DeepSpeed keeps fp32 weights and AdamW's moments in flat tensors, whose layout depends on ZeRO
stage, precision and world size. Each rank's file has its part of each parameter by the parameter's
name, as views of these tensors, which torch.save writes once. So a checkpoint is loaded into a run
of any layout without a conversion; where the layout is the same, each rank reads its own file only.
Only the parts of a tensor-parallel group stay as they are: a run of another size starts from an
export.

Reading runs no code of the checkpoint's: torch unpickles only tensors and plain types, and only
files that the manifest names are opened.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from pydantic import ConfigDict, TypeAdapter

from zerotrain.checkpoint.manifest import read_manifest, stat_inside
from zerotrain.checkpoint.run_folder import SHARDS
from zerotrain.config.ds_config import offload_devices
from zerotrain.model.hub import Base, is_same_base
from zerotrain.runtime.agreement import run_on_all_ranks
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.process_group import Ranks
from zerotrain.runtime.seeding import rng_state

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

Part = tuple[int, dict[str, torch.Tensor]]
"""Consecutive elements of a flattened parameter: the number of the first one, and a tensor of them
for each state; of a frozen weight only `fp32`, in its own precision.
"""
LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Shard:
    """The content of one rank's file."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)  # tensors

    parts: dict[str, Part]
    """Those of the parameters that this rank holds elements of."""
    states: list[str]
    """`fp32` and those of the optimizer, such as AdamW's moments."""
    shapes: dict[str, list[int]]
    """Of all parameters of the model, of those in `split` of this rank's piece."""
    tensor: int
    """Consecutive ranks that have the pieces of the same parameters: tensor_parallel.autotp_size.
    """
    split: dict[str, int]
    """Of each parameter in pieces the dimension along which they are concatenated."""
    trained: list[str]
    buffers: dict[str, torch.Tensor]
    """The persistent ones."""
    updates: int | None
    """For AdamW's bias correction; None: without the optimizer's state."""
    loss_scaler: dict[str, Any]
    """LOSS_SCALER, of fp16."""
    base: Base | None
    """The files that have the frozen weights; None: the checkpoint has them."""
    rng: dict[str, Any]
    """zerotrain.runtime.seeding.rng_state."""


def shard_name(rank: int) -> str:
    return f"{SHARDS}/rank_{rank:05d}.pt"


# --------------------------------------------------------------------------------------------------
# Of a running engine


class Fragment(NamedTuple):
    """Consecutive elements of a parameter in a flat tensor. All numbers count elements."""

    name: str
    flat: torch.Tensor
    offset: int  # first element in the flat tensor
    start: int  # first element in the flattened parameter
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor that is laid out as `flat`."""
        return flat.detach().view(-1)[self.offset : self.offset + self.numel]


def flat_weights(engine: "DeepSpeedEngine") -> list[torch.Tensor]:
    """The fp32 tensors that this rank's optimizer updates: flat tensors, or at stage 0 single
    parameters.
    """
    if engine.zero_optimization_stage() == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def saved_states(engine: "DeepSpeedEngine", flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """`fp32` and the moments of one of flat_weights; of what is on NVMe, DeepSpeed's files, mapped
    into memory.
    """
    state = engine.basic_optimizer.state[flat]
    moments = {k: v for k, v in state.items() if torch.is_tensor(v) and v.shape == flat.shape}
    states = {"fp32": flat, **moments}
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    on_nvme = swapper and swapper.swap_params_info.get(flat.ds_id)
    if not on_nvme:
        return states
    paths = on_nvme.get_swap_paths()  # in the order of the states
    size = on_nvme.numel()
    return {key: torch.from_file(path, size=size) for key, path in zip(states, paths, strict=True)}


def shape_of(p: torch.Tensor) -> list[int]:
    """Of the whole parameter, which ZeRO-3 partitions."""
    return list(getattr(p, "ds_shape", p.shape))


def split_dimension(p: torch.Tensor) -> int | None:
    """The dimension along which tensor parallelism has split a parameter; None if it is whole."""
    return getattr(p, DS_AUTOTP_UC_META, {}).get("partition_dim")


def partition(p: torch.Tensor) -> tuple[int, int]:
    """(start, numel) of this rank's partition of a flattened ZeRO-3 parameter, without padding."""
    size = p.ds_tensor.ds_numel
    start = min(size * torch.distributed.get_rank(p.ds_process_group), p.ds_numel)
    return start, min(size, p.ds_numel - start)


def fragments(engine: "DeepSpeedEngine") -> list[Fragment]:
    """What this rank's flat_weights hold, at most one fragment of each parameter."""
    stage = engine.zero_optimization_stage()
    optimizer = engine.optimizer
    names = engine.param_names
    flats = flat_weights(engine)
    found = []
    if stage in (1, 2):  # each group concatenated, then partitioned
        groups = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
        for flat, group in zip(flats, groups, strict=True):
            for p in group:
                if (at := p._hp_mapping) is not None:
                    in_flat = at.hp_fragment_address
                    in_parameter = at.lp_fragment_address
                    where = in_flat.start, in_parameter.start, in_flat.numel
                    found.append(Fragment(names[p], flat, *where))
    elif stage == 3 or hasattr(optimizer, "fp32_groups_flat"):
        # stage 3: each parameter partitioned into equal parts, the last ones padded;
        # stage 0 in 16 bits with FusedAdam: each group concatenated
        for flat, group in zip(flats, optimizer.fp16_groups, strict=True):
            offset = 0
            for p in group:
                start, numel = partition(p) if stage == 3 else (0, p.numel())
                found.append(Fragment(names[p], flat, offset, start, numel))
                offset += p.ds_tensor.ds_numel if stage == 3 else numel
    else:
        groups = getattr(optimizer, "fp16_groups", None) or [
            group["params"] for group in engine.basic_optimizer.param_groups
        ]
        parameters = [p for group in groups for p in group]
        for flat, p in zip(flats, parameters, strict=True):
            found.append(Fragment(names[p], flat, 0, 0, p.numel()))
    return found


def frozen_part(p: torch.Tensor, stage: int) -> tuple[int, torch.Tensor]:
    """This rank's first element of a flattened frozen parameter, and its elements."""
    if stage < 3:
        return 0, p.detach().view(-1)
    start, numel = partition(p)
    return start, p.ds_tensor.detach().view(-1)[:numel]


@torch.no_grad()
def collect(engine: "DeepSpeedEngine", has_whole: bool, base: Base | None) -> Shard:
    """What this rank has to save; tensors are those in use, not copies.

    Args:
        has_whole: save what is not partitioned, which one rank does for each disk.
        base: the files that have the frozen weights, which are then left out.
    """
    stage = engine.zero_optimization_stage()
    updates: int | None = 0
    of_flat = {}
    states = ["fp32"]
    for flat in flat_weights(engine):
        of_flat[id(flat)] = saved_states(engine, flat)
        updates = max(updates, int(engine.basic_optimizer.state[flat].get("step", 0)))
        states = max(states, list(of_flat[id(flat)]), key=len)
    if engine.super_offload():  # the moments are in a process of their own, which keeps them
        states = ["fp32"]
        updates = None
    parts: dict[str, Part] = {}
    for at in fragments(engine) if stage > 0 or has_whole else ():
        tensors = of_flat[id(at.flat)]
        parts[at.name] = at.start, {key: at.of(tensors[key]) for key in states}
    parameters = dict(engine.module.named_parameters())
    for name, p in parameters.items():
        if base is None and not p.requires_grad and (stage == 3 or has_whole):
            start, weight = frozen_part(p, stage)
            # a clone, since torch.save would write all that its ZeRO-3 storage has
            parts[name] = start, {"fp32": weight.clone() if stage == 3 else weight}
    splits = {name: split_dimension(p) for name, p in parameters.items()}
    in_state = engine.module.state_dict()
    scaler = vars(engine.optimizer.loss_scaler) if engine.fp16_enabled() else {}
    return Shard(
        parts=parts,
        states=states,
        shapes={name: shape_of(p) for name, p in parameters.items()},
        tensor=max(1, engine.autotp_size()),
        split={name: d for name, d in splits.items() if d is not None},
        trained=[name for name, p in parameters.items() if p.requires_grad],
        buffers={name: b for name, b in engine.module.named_buffers() if name in in_state},
        updates=updates,
        loss_scaler={name: scaler[name] for name in LOSS_SCALER if name in scaler},
        base=base,
        rng=rng_state(),
    )


# --------------------------------------------------------------------------------------------------
# Of a checkpoint


class Shards:
    """The ranks' files that a node has of a checkpoint. They are memory-mapped: only what is used
    is read.

    Every method raises UserError if a file cannot be read, or something is in none of them.
    """

    def __init__(self, checkpoint: Path, rank: int = 0) -> None:
        """`rank`: whose file is looked into first."""
        self.checkpoint = checkpoint
        files = read_manifest(checkpoint).files
        names = sorted(name for name in files if name.startswith(f"{SHARDS}/"))
        self.world_size = len(names)
        own = shard_name(rank)
        here = [name for name in names if (checkpoint / name).exists()]
        if not here:
            raise UserError(f"{checkpoint} has no weights; use another checkpoint")
        self.has_own = own in here
        self._names = sorted(here, key=lambda name: (name != own, name))
        self._shards: dict[str, Shard] = {}
        tensor = self._shard(self._names[0]).tensor
        if tensor < 1 or self.world_size % tensor:
            raise UserError(f"{checkpoint} has files of only some ranks; use another checkpoint")
        self._tensor_rank = rank % tensor
        # of each rank in a tensor-parallel group, the files with its pieces
        self._with_pieces = [
            [name for name in self._names if name in names[i::tensor]] for i in range(tensor)
        ]
        self.first = self._shard([*self._with_pieces[self._tensor_rank], self._names[0]][0])

    def holds(self, name: str) -> bool:
        """Whether the weight is in the checkpoint, and not only in the files of `first.base`."""
        return self.first.base is None or name in self.first.trained

    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(
            prod(shape) * (self.first.tensor if name in self.first.split else 1)
            for name, shape in self.first.shapes.items()
        )

    def weight(self, name: str) -> torch.Tensor:
        """A parameter in fp32 and its shape, on the CPU."""
        if name not in self.first.split:
            shape = self.first.shapes[name]
            return self.read(name, "fp32", 0, prod(shape)).view(shape)
        pieces = []
        try:
            for tensor_rank, files in enumerate(self._with_pieces):
                shape = self._shard((files or self._names)[0]).shapes[name]
                pieces.append(self.read(name, "fp32", 0, prod(shape), tensor_rank).view(shape))
            return torch.cat(pieces, self.first.split[name])
        except (LookupError, RuntimeError) as error:
            raise UserError(
                f"{self.checkpoint}: the pieces of {name} do not fit together ({describe(error)}); "
                "use another checkpoint"
            ) from error

    def read(
        self, name: str, key: str, start: int, numel: int, tensor_rank: int | None = None
    ) -> torch.Tensor:
        """Elements [start, start + numel) of one of the flattened states of a parameter, in fp32.
        Do not modify them: they may be the mapped file.

        Args:
            tensor_rank: whose piece of a split parameter; None: this rank's.
        """
        files = self._names
        if name in self.first.split:
            files = self._with_pieces[self._tensor_rank if tensor_rank is None else tensor_rank]
        found = [torch.empty(0)]
        position = start
        while position < start + numel:
            first, values = self._part_at(files, name, key, position)
            values = values[position - first : start + numel - first].float()
            found.append(values)
            position += len(values)
        return found[-1] if len(found) < 3 else torch.cat(found)

    def _part_at(
        self, files: list[str], name: str, key: str, position: int
    ) -> tuple[int, torch.Tensor]:
        """The part of a flattened state that has an element, and the number of its first one."""
        for file in files:
            start, tensors = self._shard(file).parts.get(name, (0, {}))
            if key in tensors and start <= position < start + len(tensors[key]):
                return start, tensors[key]
        raise UserError(
            f"{self.checkpoint}: {key} of {name} is not in the files of {len(self._names)} of "
            f"{self.world_size} ranks that are on this node; resume with the same ranks on the "
            "same nodes, or gather the files of all nodes"
        )

    def _shard(self, name: str) -> Shard:
        if name not in self._shards:
            self._shards[name] = read_shard(self.checkpoint, name)
        return self._shards[name]


def read_shard(checkpoint: Path, name: str) -> Shard:
    """A file of a checkpoint that may be untrusted, memory-mapped.

    Raises:
        UserError: it cannot be read, or holds anything but the tensors and plain types of a Shard.
    """
    path = checkpoint / name
    try:
        stat_inside(checkpoint, name)
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        return TypeAdapter(Shard).validate_python(content)
    except UnpicklingError as error:
        raise UserError(
            f"{path} holds something other than tensors and plain types, which could run code when "
            "it is read; use another checkpoint"
        ) from error
    except Exception as error:  # whatever torch raises for a damaged file
        raise UserError(
            f"{path} cannot be read ({describe(error)[:200]}); use another checkpoint"
        ) from error


@torch.no_grad()
def load_shards(
    engine: "DeepSpeedEngine", shards: Shards, ranks: Ranks, base: Base | None, weights_only: bool
) -> Base | None:
    """Load weights and buffers, and unless `weights_only` AdamW's state; called by all ranks.
    Parameter groups keep this run's settings. What the checkpoint leaves out stays as it was read
    from the model's files, `base`.

    Returns:
        The files that hold the frozen weights from now on; None: checkpoints have to hold them.

    Raises:
        UserError: the checkpoint is of another model, or damaged.
    """
    stage = engine.zero_optimization_stage()
    optimizer = engine.optimizer
    run_on_all_ranks(ranks, lambda: check_model(engine, shards, base, weights_only))
    if stage == 3:
        optimizer.checkpoint_event_prologue()  # releases all gathered parameters
    run_on_all_ranks(ranks, lambda: _fill(engine, shards, weights_only))
    # from the fp32 weights to those that the model computes with
    if stage == 3:
        flats = flat_weights(engine)
        for weights, flat in zip(optimizer.fp16_partitioned_groups_flat, flats, strict=True):
            weights.copy_(flat)
        optimizer.invalidate_secondary_tensor()  # the copies of hpZ
        optimizer.checkpoint_event_epilogue()
    elif stage > 0:
        optimizer.update_lp_params()
    frozen = (name for name, p in engine.module.named_parameters() if not p.requires_grad)
    return None if any(map(shards.holds, frozen)) else base


def check_model(
    engine: "DeepSpeedEngine", shards: Shards, base: Base | None, weights_only: bool
) -> None:
    """Check that a checkpoint is of the engine's model.

    Args:
        base: the files that the engine's weights were read from.

    Raises:
        UserError: names the first parameter that differs.
    """
    checkpoint = shards.checkpoint
    saved = shards.first
    if "nvme" in offload_devices(engine.config).values():
        raise UserError(
            f"{checkpoint} cannot be loaded into a run with its optimizer or parameters on NVMe; "
            "go on with --ds_config ds_configs/zero3.json or zero3_offload.json"
        )
    if not weights_only and (saved.updates is None or engine.super_offload()):
        raise UserError(
            f"{checkpoint} cannot be continued from: SuperOffload neither saves nor loads the "
            "optimizer's state; start a new run in another output_dir from its weights: "
            f"--checkpoint.weights_only true --checkpoint.resume {checkpoint}"
        )
    parameters = dict(engine.module.named_parameters())
    tensor = max(1, engine.autotp_size())
    if saved.tensor != tensor:
        raise UserError(
            f"{checkpoint} was saved with tensor_parallel.autotp_size {saved.tensor}, this run's "
            f"is {tensor}; keep it, or export the checkpoint (scripts/export.py) and set "
            "model.name_or_path to the export"
        )
    shapes = {name: shape_of(p) for name, p in parameters.items()}
    for name in (*shapes, *saved.shapes):
        if saved.shapes.get(name) != shapes.get(name):
            raise UserError(
                f"{checkpoint} is of another model: {name} is {saved.shapes.get(name, 'missing')}, "
                f"in this run {shapes.get(name, 'missing')}; if only model.lora differs, export it "
                "(scripts/export.py) and set model.name_or_path to the export"
            )
    trained = {name for name, p in parameters.items() if p.requires_grad}
    if not weights_only and (other := trained.symmetric_difference(saved.trained)):
        raise UserError(
            f"{checkpoint} was saved with other trained parameters: {min(other)}; resume with the "
            "same model.trainable"
        )
    left_out = not all(map(shards.holds, saved.shapes))
    if left_out and (base is None or not is_same_base(saved.base, base)):
        raise UserError(
            f"{checkpoint} has only the weights that were trained; the others are those of "
            f"{saved.base['name_or_path']}, and this run has other weights; set "
            "model.name_or_path and model.revision to that model"
        )


def _fill(engine: "DeepSpeedEngine", shards: Shards, weights_only: bool) -> None:
    """Copy this rank's part of everything, without communication."""
    stage = engine.zero_optimization_stage()
    saved = shards.first
    parameters = dict(engine.module.named_parameters())
    restores_optimizer = not weights_only and bool(saved.updates)
    if restores_optimizer:
        for flat in flat_weights(engine):
            _prepare_state(engine, flat, saved)
    for at in fragments(engine):
        tensors = {"fp32": at.flat}
        if restores_optimizer:
            tensors |= engine.basic_optimizer.state[at.flat]
        for key in saved.states if restores_optimizer else ["fp32"]:
            if shards.holds(at.name):
                at.of(tensors[key]).copy_(shards.read(at.name, key, at.start, at.numel))
        if stage == 0:
            parameters[at.name].view(-1).copy_(at.of(at.flat))
    for name, p in parameters.items():
        if not p.requires_grad and shards.holds(name):
            start, weight = frozen_part(p, stage)
            weight.copy_(shards.read(name, "fp32", start, len(weight)))
    for name, values in saved.buffers.items():
        engine.module.get_buffer(name).copy_(values)
    if engine.fp16_enabled() and not weights_only:
        vars(engine.optimizer.loss_scaler).update(saved.loss_scaler)


def _prepare_state(engine: "DeepSpeedEngine", flat: torch.Tensor, saved: Shard) -> None:
    """Make the optimizer's state of a flat tensor, which torch makes at the first update, and set
    the number of updates.
    """
    state = engine.basic_optimizer.state[flat]
    optimizer = engine.basic_optimizer
    state["step"] = saved.updates
    if isinstance(optimizer, torch.optim.Adam):  # DeepSpeed's have a number
        on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
        state["step"] = torch.tensor(
            float(saved.updates), device=flat.device if on_device else "cpu"
        )
    for key in saved.states[1:]:
        if key not in state:
            state[key] = torch.zeros_like(flat)
