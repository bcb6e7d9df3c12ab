"""What each rank writes into a checkpoint, and the reader that puts parameters together again.

DeepSpeed keeps fp32 weights and AdamW's moments in flat tensors, whose layout depends on ZeRO
stage, precision and world size. Each rank's file has its flat tensors and, for each fragment of a
parameter in them, the parameter's name and place. So a checkpoint is read into a run of any layout,
without a conversion; where the layout is the same, each rank reads its own file only.

Reading runs no code of the checkpoint's: torch unpickles only tensors and plain types, and only
files that the manifest names are opened.
"""

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import nn

from zerotrain.checkpoint.manifest import read_manifest
from zerotrain.checkpoint.run_folder import SHARDS
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.seeding import rng_state

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # of the engine
Count = Annotated[int, Field(ge=0)]
Shape = tuple[Count, ...]


class Fragment(NamedTuple):
    """Consecutive elements of a parameter in a flat tensor. All numbers count elements."""

    name: str
    shape: Shape  # of the whole parameter
    flat: Count  # index of the flat tensor
    offset: Count  # first element in the flat tensor
    start: Count  # first element in the flattened parameter
    numel: Count


@dataclass
class Shard:
    """The content of one rank's file."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)  # tensors

    fragments: list[Fragment]
    flats: list[dict[str, torch.Tensor]]
    """Of each flat tensor its `states`; of a frozen weight only `fp32`, in its own precision."""
    states: list[str]
    """Of each trained parameter: `fp32` and the optimizer's, such as AdamW's moments."""
    parameters: dict[str, tuple[Shape, Literal["trained", "frozen", "left out"]]]
    """Of the whole model; frozen weights that the model's files have are left out."""
    buffers: dict[str, torch.Tensor]
    """The persistent ones."""
    optimizer: str
    updates: Count
    """For AdamW's bias correction."""
    loss_scaler: dict[str, float]
    """LOSS_SCALER, of fp16."""
    counters: dict[str, int]
    base: dict[str, str | None] | None
    """zerotrain.model.base.describe_base of the files that have what is left out."""
    rng: dict[str, Any]
    """zerotrain.runtime.seeding.rng_state."""

    def check(self) -> None:
        """Raise ValueError if a fragment does not lie in its flat tensor."""
        tensors = [tensor for flat in self.flats for tensor in flat.values()]
        for tensor in (*tensors, *self.buffers.values()):
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise ValueError("a tensor has no elements in the file")
        for at in self.fragments:
            if at.start + at.numel > prod(at.shape):
                raise ValueError(f"{at.name} has {prod(at.shape):,} elements")
            sizes = [tensor.numel() for tensor in self.flats[at.flat].values()]
            if not sizes or at.offset + at.numel > min(sizes):
                raise ValueError(f"{at.name} is not in its flat tensor")


# --------------------------------------------------------------------------------------------------
# Of a running engine


def flat_weights(engine: "DeepSpeedEngine") -> list[torch.Tensor]:
    """The fp32 tensors that this rank's optimizer updates: flat tensors, or at stage 0 single
    parameters.
    """
    if engine.zero_optimization_stage() == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def optimizer_state(engine: "DeepSpeedEngine", flat: torch.Tensor) -> dict[str, Any]:
    """The optimizer's state of one of flat_weights. Under ZeRO-Offload with a ratio, DeepSpeed has
    a second optimizer for the flat tensors that stay on the GPU.
    """
    second = getattr(engine.optimizer, "backup_optimizer", None)
    if second is not None and flat in second.state:
        return second.state[flat]
    return engine.basic_optimizer.state[flat]


def shape_of(p: torch.Tensor) -> tuple[int, ...]:
    """Of the whole parameter, which ZeRO-3 partitions."""
    return tuple(getattr(p, "ds_shape", p.shape))


def partition(p: torch.Tensor) -> tuple[int, int]:
    """(start, numel) of this rank's partition of a flattened ZeRO-3 parameter, without padding."""
    size = p.ds_tensor.ds_numel
    start = min(size * torch.distributed.get_rank(p.ds_process_group), p.ds_numel)
    return start, min(size, p.ds_numel - start)


def fragments(engine: "DeepSpeedEngine") -> list[Fragment]:
    """What this rank's flat_weights hold."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    found: list[Fragment] = []

    def add(p: torch.Tensor, *where: int) -> None:
        found.append(Fragment(engine.param_names[p], shape_of(p), *where))

    if stage in (1, 2):  # each group concatenated, then partitioned
        groups = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
        for flat, group in enumerate(groups):
            for p in group:
                if (at := p._hp_mapping) is not None:
                    in_flat, in_parameter = at.hp_fragment_address, at.lp_fragment_address
                    add(p, flat, in_flat.start, in_parameter.start, in_flat.numel)
    elif stage == 3 or hasattr(optimizer, "fp32_groups_flat"):
        # stage 3: each parameter partitioned into equal parts, the last ones padded;
        # stage 0 in 16 bits with FusedAdam: each group concatenated
        for flat, group in enumerate(optimizer.fp16_groups):
            offset = 0
            for p in group:
                start, numel = partition(p) if stage == 3 else (0, p.numel())
                add(p, flat, offset, start, numel)
                offset += p.ds_tensor.ds_numel if stage == 3 else numel
    else:
        groups = getattr(optimizer, "fp16_groups", None) or [
            group["params"] for group in engine.basic_optimizer.param_groups
        ]
        for flat, p in enumerate(p for group in groups for p in group):
            add(p, flat, 0, 0, p.numel())
    return found


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    saved = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


@torch.no_grad()
def collect(
    engine: "DeepSpeedEngine", has_whole: bool, base: dict[str, str | None] | None
) -> Shard:
    """What this rank has to save; tensors are those in use, not copies.

    Args:
        has_whole: save what is not partitioned, which one rank of each node does.
        base: of the weights of the model; frozen ones are then left out.
    """
    stage = engine.zero_optimization_stage()
    places, flats, updates, states = [], [], 0, ["fp32"]
    for flat in flat_weights(engine):
        state = optimizer_state(engine, flat)
        updates = max(updates, int(state.get("step", 0)))
        of_elements = {
            name: value
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == flat.shape
        }
        states = max(states, ["fp32", *of_elements], key=len)
        flats.append({"fp32": flat.detach(), **of_elements})
    if stage > 0 or has_whole:
        places = fragments(engine)
    else:
        flats = []
    parameters = dict(engine.module.named_parameters())
    kinds = {
        name: "trained" if p.requires_grad else "frozen" if base is None else "left out"
        for name, p in parameters.items()
    }
    for name, p in parameters.items():
        if kinds[name] == "frozen" and (stage == 3 or has_whole):
            weight = p.detach()
            start = 0
            if stage == 3:
                start, numel = partition(p)
                weight = p.ds_tensor.detach().view(-1)[:numel].clone()
            places.append(Fragment(name, shape_of(p), len(flats), 0, start, weight.numel()))
            flats.append({"fp32": weight})
    scaler = vars(engine.optimizer.loss_scaler) if engine.fp16_enabled() else {}
    return Shard(
        fragments=places,
        flats=flats,
        states=states,
        parameters={name: (shape_of(p), kinds[name]) for name, p in parameters.items()},
        buffers=persistent_buffers(engine.module),
        optimizer=type(engine.basic_optimizer).__name__,
        updates=updates,
        loss_scaler={name: scaler[name] for name in LOSS_SCALER if name in scaler},
        counters={name: getattr(engine, name) for name in COUNTERS},
        base=base if "left out" in kinds.values() else None,
        rng=rng_state(),
    )


# --------------------------------------------------------------------------------------------------
# Of a checkpoint


def shard_name(rank: int) -> str:
    return f"{SHARDS}/rank_{rank:05d}.pt"


def load_safely(path: Path) -> Any:
    """A file of torch.save that may come from anybody, memory-mapped.

    Raises:
        UserError: it cannot be read, or holds anything but tensors and plain types.
    """
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except UnpicklingError as error:
        raise UserError(
            f"{path} holds something other than tensors and plain types, which could run code when "
            "it is read; use another checkpoint"
        ) from error
    except Exception as error:  # whatever torch raises for a damaged file
        why = describe(error)
        raise UserError(f"{path} cannot be read ({why}); use another checkpoint") from error


@lru_cache
def _shape_of_a_file() -> TypeAdapter:
    return TypeAdapter(Shard)


class Shards:
    """The ranks' files of a checkpoint. They are memory-mapped: only what is used is read.

    Every method raises UserError if a file is missing, cannot be read, or has another shape.
    """

    def __init__(self, checkpoint: Path, rank: int = 0) -> None:
        """`rank`: whose file is looked into first, where it exists."""
        self.checkpoint = checkpoint
        try:
            names = read_manifest(checkpoint).files
        except (OSError, ValueError) as error:
            raise UserError(f"{checkpoint}: {describe(error)}; use another checkpoint") from error
        found = [re.fullmatch(rf"{SHARDS}/rank_([0-9]{{5,7}})\.pt", name) for name in names]
        self.ranks = sorted((int(name[1]) for name in found if name), key=lambda r: (r != rank, r))
        if not self.ranks:
            raise UserError(f"{checkpoint}: its manifest names no weights; use another checkpoint")
        self._files: dict[int, tuple[Shard, dict[str, list[Fragment]]]] = {}

    @cached_property
    def first(self) -> Shard:
        """The file that is looked into first."""
        return self._file(self.ranks[0])[0]

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that an optimizer updated."""
        return [name for name, (_, kind) in self.first.parameters.items() if kind == "trained"]

    @property
    def read_from(self) -> dict[str, str | None] | None:
        """describe_base of the files that hold the weights that are left out, if any are."""
        base = self.first.base
        if base is not None and not (base.get("name_or_path") and {*base} >= {"fingerprint"}):
            raise UserError(f"{self.checkpoint} names no base model; use another checkpoint")
        return base

    def holds(self, name: str) -> bool:
        """Whether the weight is in the checkpoint, and not only in the files of `read_from`."""
        return self.first.parameters[name][1] != "left out"

    def missing(self) -> list[str]:
        """Names of the frozen weights that it does not hold."""
        return [name for name in self.first.parameters if not self.holds(name)]

    def names(self) -> list[str]:
        """Names of all parameters as in named_parameters(), which lists tied ones once."""
        return list(self.first.parameters)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.first.parameters[name][0]

    def weight(self, name: str) -> torch.Tensor:
        """A parameter in fp32 and its shape, on the CPU."""
        shape = self.shape(name)
        return self.read(name, "fp32", 0, prod(shape)).view(shape)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers."""
        return self.first.buffers

    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of one of the flattened states of a parameter, in fp32.
        Do not modify them: they may be the mapped file.
        """
        parts: dict[int, torch.Tensor] = {}
        missing = numel
        for rank in self.ranks if numel else ():
            shard, places = self._file(rank)
            for at in places.get(name, ()):
                first, end = max(start, at.start), min(start + numel, at.start + at.numel)
                if first < end and first not in parts and key in shard.flats[at.flat]:
                    begin = at.offset + first - at.start
                    values = shard.flats[at.flat][key].flatten()
                    parts[first] = values[begin : begin + end - first].float()
                    missing -= end - first
            if missing <= 0:
                break
        if missing:
            raise UserError(
                f"{self.checkpoint}: {key} of {name} is not, or not once, in the files of its "
                f"{len(self.ranks)} ranks here: a damaged checkpoint, or one of several nodes', "
                "which gather_checkpoint.py combines"
            )
        values = [parts[first] for first in sorted(parts)]
        return values[0] if len(values) == 1 else torch.cat([torch.empty(0), *values])

    def _file(self, rank: int) -> tuple[Shard, dict[str, list[Fragment]]]:
        if rank not in self._files:
            path = self.checkpoint / shard_name(rank)
            content = load_safely(path)
            try:
                shard = _shape_of_a_file().validate_python(content)
                shard.check()
            except (ValidationError, ValueError, IndexError) as error:
                line = describe(error)[:200]
                raise UserError(f"{path} is damaged: {line}; use another checkpoint") from error
            places: dict[str, list[Fragment]] = {}
            for at in shard.fragments:
                places.setdefault(at.name, []).append(at)
            self._files[rank] = shard, places
        return self._files[rank]
