"""The file that each rank writes into a checkpoint, and loading such files into any layout.

A rank's file has its part of each parameter, by the parameter's name. The parts are views of flat
tensors, which torch.save writes once. So a checkpoint is loaded at any ZeRO stage, precision and
number of ranks without a conversion. In the same layout each rank reads its own file only. The
pieces of a tensor-parallel group stay as they are: a run with another `autotp_size` starts from an
export.

Reading runs no code of a checkpoint: torch unpickles only tensors and plain types, and only files
that the manifest names are opened.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any

import torch
from deepspeed import DeepSpeedEngine
from pydantic import AfterValidator, ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter

from zerotrain.checkpoint.manifest import read_manifest, stat_inside
from zerotrain.checkpoint.run_folder import is_shard, shard_name
from zerotrain.checkpoint.start import Start
from zerotrain.checkpoint.zero_state import (
    LOSS_SCALER,
    MOMENTS,
    full_shape,
    local_parts,
    loss_scaler,
    prepare_moments,
    rewritten,
    split_dimension,
    update_count,
)
from zerotrain.config.ds_config import offload_devices
from zerotrain.model.hub import Base, is_same_base, source_of
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.ranks import Ranks
from zerotrain.runtime.seeding import rank_seed, rng_state, seed_everything, set_rng_state


def check_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor of a file whose bytes are all in that file.

    Raises:
        ValueError: it has no storage, or repeats elements by a stride of 0: a copy could take any
            memory.
        NotImplementedError: it is sparse.
    """
    if not tensor.is_cpu or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ValueError("a tensor has no storage, or less than its elements need")
    return tensor


SavedTensor = Annotated[torch.Tensor, AfterValidator(check_tensor)]
Part = tuple[NonNegativeInt, dict[str, SavedTensor]]
"""`start` and `states` of a zero_state.LocalPart."""


@dataclass(frozen=True)
class Shard:
    """The content of one rank's file."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)  # tensors

    parts: dict[str, Part]
    """This rank's part of each parameter that it has elements of, by name. For a parameter that
    tensor parallelism has split, it is a part of this rank's piece.
    """
    shapes: dict[str, list[NonNegativeInt]]
    """Shape of every parameter of the model; of a split one, the shape of this rank's piece."""
    tensor: PositiveInt
    """tensor_parallel.autotp_size: as many consecutive ranks have the pieces of split parameters.
    """
    split: dict[str, int]
    """Parameters that tensor parallelism has split: the dimension to concatenate pieces along."""
    trained: list[str]
    """Names of the parameters that are not frozen."""
    buffers: dict[str, SavedTensor]
    """The model's persistent buffers."""
    updates: int
    """Finished updates, for AdamW's bias correction."""
    loss_scaler: dict[str, Any]
    """LOSS_SCALER; empty unless in fp16."""
    base: Base | None
    """The files that have the frozen weights; None: the checkpoint has them."""
    rng: dict[str, Any]
    """zerotrain.runtime.seeding.rng_state."""


@torch.no_grad()
def collect(engine: DeepSpeedEngine, has_whole: bool, base: Base | None) -> Shard:
    """Return what this rank has to save. Its tensors are those in use, not copies.

    Args:
        has_whole: save what every rank has too; one rank for each disk does.
        base: the files that have the frozen weights, which are then left out.
    """
    parameters = dict(engine.module.named_parameters())
    parts = {}
    for name, p, start, states, is_partition in local_parts(engine):
        if (is_partition or has_whole) and (p.requires_grad or base is None):
            if is_partition and not p.requires_grad:
                # torch.save would write all that its storage has
                states = {"fp32": states["fp32"].clone()}
            parts[name] = start, states
    persistent = engine.module.state_dict()
    scaler = loss_scaler(engine)
    return Shard(
        parts=parts,
        shapes={name: full_shape(p) for name, p in parameters.items()},
        tensor=max(1, engine.autotp_size()),
        split={
            name: dimension
            for name, p in parameters.items()
            if (dimension := split_dimension(p)) is not None
        },
        trained=[name for name, p in parameters.items() if p.requires_grad],
        # contiguous: the file would lack elements of an expanded one
        buffers={n: b.contiguous() for n, b in engine.module.named_buffers() if n in persistent},
        updates=update_count(engine),
        loss_scaler={name: scaler[name] for name in LOSS_SCALER if name in scaler},
        base=base,
        rng=rng_state(),
    )


class Shards:
    """The ranks' files of a checkpoint that this node has. They are memory-mapped: only what is
    used is read.

    Every method raises UserError if a file cannot be read, or no file has what is asked for.
    """

    def __init__(self, checkpoint: Path, rank: int = 0) -> None:
        """`rank`: its file is searched first, and its pieces of split parameters are returned."""
        self.checkpoint = checkpoint
        self._shard = functools.cache(functools.partial(read_shard, checkpoint))
        names = sorted(filter(is_shard, read_manifest(checkpoint).files))
        self.world_size = len(names)
        here = [name for name in names if (checkpoint / name).exists()]
        if not here:
            raise UserError(f"{checkpoint}: has no weights; use another checkpoint")
        own = shard_name(rank)
        self.has_own = own in here
        tensor = self._shard(here[0]).tensor
        # In each tensor-parallel group, one rank has the same pieces of split parameters. Other
        # ranks are searched too, because ZeRO-3 partitions unsplit parameters over all ranks.
        self._same = names[rank % tensor :: tensor]
        self._names = sorted(here, key=lambda name: (name != own, name not in self._same, name))
        self.first = self._shard(self._names[0])

    def holds(self, name: str) -> bool:
        """Whether the weight is in the checkpoint, and not only in the files of `first.base`."""
        return self.first.base is None or name in self.first.trained

    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """Return elements [start, start + numel) of a flattened state of a parameter, in fp32.
        Do not modify them: they may be the mapped file.

        Args:
            key: `fp32` or one of MOMENTS.
        """
        end = start + numel
        # several, if the layout that wrote the checkpoint cut the parameter elsewhere
        found = [torch.empty(0)]  # for a partition that is all padding
        while start < end:
            first, values = self._find(name, key, start)
            found.append(values[start - first : end - first].float())
            start += len(found[-1])
        # one part, as in the same layout, is not copied
        return found[-1] if len(found) < 3 else torch.cat(found)

    def _find(self, name: str, key: str, position: int) -> tuple[int, torch.Tensor]:
        """Return the part of a flattened state that has the element `position`, of the first file
        that has it: the index of the part's first element, and its elements.
        """
        for file in self._names:
            shard = self._shard(file)
            if name in shard.split and file not in self._same:
                continue
            start, states = shard.parts.get(name, (0, {}))
            if key in states and start <= position < start + len(states[key]):
                return start, states[key]
        raise UserError(
            f"{self.checkpoint}: {key} of {name} is not in the files of {len(self._names)} of "
            f"{self.world_size} ranks that are on this node; resume with the same ranks on the "
            "same nodes, or gather the files of all nodes"
        )


def read_shard(checkpoint: Path, name: str) -> Shard:
    """Return a file of a checkpoint that may be untrusted, memory-mapped.

    Raises:
        UserError: it cannot be read, or holds anything but the tensors and plain types of a Shard.
    """
    path = checkpoint / name
    try:
        stat_inside(checkpoint, name)
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        shard = TypeAdapter(Shard).validate_python(content)
        if any(t.is_complex() for _, states in shard.parts.values() for t in states.values()):
            raise ValueError("it has complex numbers")  # read() would drop the imaginary parts
        return shard
    except Exception as error:  # torch raises many kinds for a damaged file
        problem = f"cannot be read: {describe(error)[:200]}"
        if isinstance(error, UnpicklingError):
            problem = "holds objects other than tensors and plain types, which could run code"
        raise UserError(f"{path}: {problem}; use another checkpoint") from error


@torch.no_grad()
def load_start(
    engine: DeepSpeedEngine, start: Start, ranks: Ranks, base: Base | None, seed: int
) -> Base | None:
    """Load the checkpoint that a run starts from, if there is one. All ranks call it.

    Weights and buffers are loaded and, unless `weights_only`, AdamW's state and the random number
    generators. Parameter groups keep this run's settings. Weights that the checkpoint leaves out
    stay as they were read from the model's files.

    Args:
        base: the model's files.

    Returns:
        The files that hold the frozen weights from now on; None: checkpoints have to hold them.

    Raises:
        UserError: the checkpoint is damaged, or its model differs.
    """
    if start.checkpoint is None:
        return base
    # Each step ends on all ranks before the next one begins: a rank that fails alone would leave
    # the others waiting in DeepSpeed's collectives below.
    shards = ranks.run_on_all(lambda: Shards(start.checkpoint, ranks.rank))
    ranks.run_on_all(lambda: check_model(engine, shards, base, start.weights_only))
    with rewritten(engine):
        ranks.run_on_all(lambda: _fill(engine, shards, start.weights_only))
    if not start.weights_only:
        # a seed for this step, because step 0's random numbers would be repeated
        seed_everything(rank_seed(seed, ranks.replica, start.progress.step))
        if shards.has_own and shards.world_size == ranks.world_size:
            set_rng_state(shards.first.rng)
    frozen = (name for name, p in engine.module.named_parameters() if not p.requires_grad)
    return None if any(map(shards.holds, frozen)) else base


def check_model(
    engine: DeepSpeedEngine, shards: Shards, base: Base | None, weights_only: bool
) -> None:
    """Check that a checkpoint has the engine's model.

    Args:
        base: the files that the engine's weights were read from.

    Raises:
        UserError: names the first parameter that differs.
    """
    checkpoint = shards.checkpoint
    saved = shards.first
    if "nvme" in offload_devices(engine.config).values():
        raise UserError(
            f"{checkpoint}: cannot be loaded into a run with its optimizer or parameters on NVMe; "
            "continue with --ds_config ds_configs/zero3.json"
        )
    own = collect(engine, has_whole=False, base=base)  # what this run would save
    saved_shapes, own_shapes = (
        shard.shapes | {name: list(b.shape) for name, b in shard.buffers.items()}
        for shard in (saved, own)
    )
    for name in own_shapes | saved_shapes:
        was, now = (shapes.get(name, "missing") for shapes in (saved_shapes, own_shapes))
        if was != now:
            raise UserError(
                f"{checkpoint}: {name} is {was} in the checkpoint, {now} in this run; use a "
                "checkpoint of this model; if only model.lora or tensor_parallel.autotp_size "
                "differs, keep it, or export the checkpoint (python -m scripts.export) and start a "
                "new run in another output_dir with the export as model.name_or_path"
            )
    if not weights_only and (other := {*own.trained}.symmetric_difference(saved.trained)):
        raise UserError(
            f"{checkpoint}: was saved with other trained parameters: {min(other)}; resume with the "
            "same model.trainable"
        )
    # What the checkpoint leaves out has to be in this run's model files, value for value: other
    # frozen weights below the same adapters would train without an error.
    left_out = not all(map(shards.holds, saved.shapes))
    if left_out and (base is None or not is_same_base(saved.base, base)):
        raise UserError(
            f"{checkpoint}: has only the trained weights; the frozen weights must come from "
            f"{source_of(saved.base)}, and this run's differ; set model.name_or_path to that model"
        )


def _fill(engine: DeepSpeedEngine, shards: Shards, weights_only: bool) -> None:
    """Copy this rank's part of everything from a checkpoint, without communication."""
    saved = shards.first
    keys = ["fp32"]
    if saved.updates and not weights_only:
        prepare_moments(engine, saved.updates)  # before local_parts, which has what exists
        keys += MOMENTS
    for name, p, start, states, _ in local_parts(engine):
        if shards.holds(name):
            for key in keys if p.requires_grad else keys[:1]:
                states[key].copy_(shards.read(name, key, start, len(states[key])))
    for name, values in saved.buffers.items():
        engine.module.get_buffer(name).copy_(values)
    if not weights_only:
        loss_scaler(engine).update(saved.loss_scaler)
