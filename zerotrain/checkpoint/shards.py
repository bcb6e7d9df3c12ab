"""What each rank writes into a checkpoint, and how it gets into an engine of any layout.

DeepSpeed keeps fp32 weights and AdamW's moments in flat tensors, whose layout depends on ZeRO
stage, precision and world size. Each rank's file has its part of each parameter by the parameter's
name, as views of these tensors, which torch.save writes once. So a checkpoint is loaded into a run
of any layout without a conversion; where the layout is the same, each rank reads its own file only.
Only the parts of a tensor-parallel group stay as they are: a run of another size starts from an
export.

DeepSpeed's public `safe_get_local_fp32_param` and `safe_get_local_optimizer_state` are for stage 3
alone and copy what they return to the GPU, where offloaded state does not fit; with NVMe they read
a group of parameters for each one. So the flat tensors are used at every stage.

Reading runs no code of the checkpoint's: torch unpickles only tensors and plain types, and only
files that the manifest names are opened.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from pydantic import AfterValidator, ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter

from zerotrain.checkpoint.manifest import read_manifest, stat_inside
from zerotrain.checkpoint.run_folder import is_shard, shard_name
from zerotrain.checkpoint.start import Start
from zerotrain.config.ds_config import offload_devices
from zerotrain.model.hub import Base, is_same_base, source_of
from zerotrain.model.partitions import computed_part, partition
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
"""Consecutive elements of a flattened parameter: the number of the first one, and a tensor of them
for each state: `fp32`, the weights, and MOMENTS. A frozen parameter has only `fp32`, in its own
precision.
"""
MOMENTS = ("exp_avg", "exp_avg_sq")
LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Shard:
    """The content of one rank's file."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)  # tensors

    parts: dict[str, Part]
    """This rank's part of each parameter that it has elements of, by name; of a split parameter, a
    part of its piece.
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
    """LOSS_SCALER, of fp16."""
    base: Base | None
    """The files that have the frozen weights; None: the checkpoint has them."""
    rng: dict[str, Any]
    """zerotrain.runtime.seeding.rng_state."""


# --------------------------------------------------------------------------------------------------
# Of a running engine


def flat_weights(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    """The fp32 tensors that this rank's optimizer updates: flat tensors, or at stage 0 single
    parameters.
    """
    if engine.zero_optimization_stage() == 3:
        # its param_groups have them only during an update
        return engine.optimizer.fp32_partitioned_groups_flat
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def saved_states(engine: DeepSpeedEngine, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """`fp32` and MOMENTS of one of flat_weights, as far as they exist; of what is on NVMe,
    DeepSpeed's files, mapped into memory.
    """
    state = engine.basic_optimizer.state[flat]  # no moments before the first update
    states = {"fp32": flat.detach(), **{key: state[key] for key in MOMENTS if key in state}}
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    on_nvme = swapper and swapper.swap_params_info.get(flat.ds_id)
    if not on_nvme:
        return states
    paths = zip(states, on_nvme.get_swap_paths(), strict=True)  # in the order of the states
    return {key: torch.from_file(path, size=on_nvme.numel()) for key, path in paths}


def local_parts(engine: DeepSpeedEngine) -> Iterator[tuple[str, torch.Tensor, Part]]:
    """This rank's part of each parameter, after its name and itself, as views of the tensors in
    use: first of the trained parameters, then of the frozen ones.
    """
    names = {p: name for name, p in engine.module.named_parameters()}
    states = [saved_states(engine, flat) for flat in flat_weights(engine)]
    # parameter, number of the flat tensor, where it begins there, and (start, numel) of it
    places = []
    if engine.zero_optimization_stage() in (1, 2):  # groups are concatenated, then partitioned
        for p in names:
            # None where this rank's partition has no element of it
            if at := getattr(p, "_hp_mapping", None):
                in_flat = at.hp_fragment_address
                start = at.lp_fragment_address.start
                places.append((p, at.param_group_index, in_flat.start, start, in_flat.numel))
    else:
        # the parameters of each flat tensor: DeepSpeed replaces those of param_groups by its own
        # under ZeRO-3 and at stage 0 in 16 bits
        groups = getattr(engine.optimizer, "fp16_groups", None) or [
            group["params"] for group in engine.basic_optimizer.param_groups
        ]
        if len(states) > len(groups):  # a flat tensor is a single parameter, not a group of them
            groups = [[p] for group in groups for p in group]
        for i, group in enumerate(groups):
            offset = 0
            for p in group:
                places.append((p, i, offset, *partition(p)))
                # under ZeRO-3 with padding, so that all ranks have as many elements
                offset += p.ds_tensor.ds_numel if hasattr(p, "ds_tensor") else p.numel()
    for p, i, offset, start, numel in places:
        tensors = {key: flat.view(-1)[offset : offset + numel] for key, flat in states[i].items()}
        yield names[p], p, (start, tensors)
    for p, name in names.items():
        if not p.requires_grad:
            yield name, p, (partition(p)[0], {"fp32": computed_part(p)})


@torch.no_grad()
def collect(engine: DeepSpeedEngine, has_whole: bool, base: Base | None) -> Shard:
    """What this rank has to save; tensors are those in use, not copies.

    Args:
        has_whole: save what is not partitioned, which one rank does for each disk.
        base: the files that have the frozen weights, which are then left out.
    """
    stage = engine.zero_optimization_stage()
    counts = [int(state.get("step", 0)) for state in engine.basic_optimizer.state.values()]
    parameters = dict(engine.module.named_parameters())
    parts = {}
    for name, p, (start, tensors) in local_parts(engine):
        # trained ones from stage 1 on, at least their fp32 copy; frozen ones at stage 3 alone
        is_partitioned = stage > (0 if p.requires_grad else 2)
        if (is_partitioned or has_whole) and (p.requires_grad or base is None):
            if stage == 3 and not p.requires_grad:
                # torch.save would write all that its storage has
                tensors = {"fp32": tensors["fp32"].clone()}
            parts[name] = start, tensors
    in_state = engine.module.state_dict()  # without buffers that are not persistent
    scaler = vars(engine.optimizer.loss_scaler) if engine.fp16_enabled() else {}
    return Shard(
        parts=parts,
        # under ZeRO-3 parameters are empty tensors whose full shape is ds_shape
        shapes={name: list(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()},
        tensor=max(1, engine.autotp_size()),
        split={
            name: dimension
            for name, p in parameters.items()
            if (dimension := getattr(p, DS_AUTOTP_UC_META, {}).get("partition_dim")) is not None
        },
        trained=[name for name, p in parameters.items() if p.requires_grad],
        # contiguous: of an expanded one the file would lack elements
        buffers={n: b.contiguous() for n, b in engine.module.named_buffers() if n in in_state},
        updates=max(counts, default=0),
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
        """`rank`: whose file is looked into first, and whose pieces of split parameters count."""
        self.checkpoint = checkpoint
        self._shard = functools.cache(functools.partial(read_shard, checkpoint))
        names = sorted(filter(is_shard, read_manifest(checkpoint).files))
        self.world_size = len(names)
        here = [name for name in names if (checkpoint / name).exists()]
        if not here:
            raise UserError(f"{checkpoint} has no weights; use another checkpoint")
        own = shard_name(rank)
        self.has_own = own in here
        tensor = self._shard(here[0]).tensor
        # Of each tensor-parallel group, the rank with the same pieces of split parameters. The
        # others are needed too: ZeRO-3 partitions what is not split among all ranks.
        self._same = names[rank % tensor :: tensor]
        self._names = sorted(here, key=lambda name: (name != own, name not in self._same, name))
        self.first = self._shard(self._names[0])

    def holds(self, name: str) -> bool:
        """Whether the weight is in the checkpoint, and not only in the files of `first.base`."""
        return self.first.base is None or name in self.first.trained

    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of one of the flattened states of a parameter, in fp32.
        Do not modify them: they may be the mapped file.

        Args:
            key: `fp32` or one of MOMENTS.
        """
        end = start + numel
        # a part of this rank's may have been cut elsewhere by the layout that wrote it
        found = [torch.empty(0)]  # for a partition that is all padding
        while start < end:
            first, values = self._find(name, key, start)
            found.append(values[start - first : end - first].float())
            start += len(found[-1])
        # one part, as in the same layout, is not copied
        return found[-1] if len(found) < 3 else torch.cat(found)

    def _find(self, name: str, key: str, position: int) -> tuple[int, torch.Tensor]:
        """What the first file with this element of a flattened state has of it: the number of its
        first element, and its elements.
        """
        for file in self._names:
            shard = self._shard(file)
            if name in shard.split and file not in self._same:
                continue
            start, tensors = shard.parts.get(name, (0, {}))
            if key in tensors and start <= position < start + len(tensors[key]):
                return start, tensors[key]
        raise UserError(
            f"{self.checkpoint}: {key} of {name} is not in the files of {len(self._names)} of "
            f"{self.world_size} ranks that are on this node; resume with the same ranks on the "
            "same nodes, or gather the files of all nodes"
        )


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
def load_start(
    engine: DeepSpeedEngine, start: Start, ranks: Ranks, base: Base | None, seed: int
) -> Base | None:
    """Load what a run starts from, if it is a checkpoint: weights and buffers, and unless
    `weights_only` AdamW's state and the state of random numbers; called by all ranks. Parameter
    groups keep this run's settings. What the checkpoint leaves out stays as it was read from the
    model's files, `base`.

    Returns:
        The files that hold the frozen weights from now on; None: checkpoints have to hold them.

    Raises:
        UserError: the checkpoint is of another model, or damaged.
    """
    if start.checkpoint is None:
        return base
    stage = engine.zero_optimization_stage()
    optimizer = engine.optimizer
    # Each step ends on all ranks before the next one begins: a rank that fails alone would leave
    # the others waiting in DeepSpeed's collectives below.
    shards = ranks.run_on_all(lambda: Shards(start.checkpoint, ranks.rank))
    ranks.run_on_all(lambda: check_model(engine, shards, base, start.weights_only))
    if stage == 3:
        optimizer.checkpoint_event_prologue()  # releases all gathered parameters
    ranks.run_on_all(lambda: _fill(engine, shards, start.weights_only))
    if stage == 3:
        optimizer.invalidate_secondary_tensor()  # the copies of hpZ
        optimizer.checkpoint_event_epilogue()
    elif stage > 0:
        optimizer.update_lp_params()  # from the fp32 weights of all ranks
    is_same = shards.has_own and shards.world_size == ranks.world_size
    if not (start.weights_only or (is_same and set_rng_state(shards.first.rng))):
        # another seed than at step 0, whose random numbers would be repeated
        seed_everything(rank_seed(seed, ranks.replica, start.progress.step))
    frozen = (name for name, p in engine.module.named_parameters() if not p.requires_grad)
    return None if any(map(shards.holds, frozen)) else base


def check_model(
    engine: DeepSpeedEngine, shards: Shards, base: Base | None, weights_only: bool
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
    own = collect(engine, has_whole=False, base=base)  # what this run would save
    of_saved, of_own = (
        {**shard.shapes, **{name: list(b.shape) for name, b in shard.buffers.items()}}
        for shard in (saved, own)
    )
    for name in (*of_own, *of_saved):
        was, now = (shapes.get(name, "missing") for shapes in (of_saved, of_own))
        if was != now:
            raise UserError(
                f"{checkpoint} is of another model: {name} is {was}, in this run {now}; if only "
                "model.lora or tensor_parallel.autotp_size differs, keep it, or export the "
                "checkpoint (python -m scripts.export) and set model.name_or_path to the export"
            )
    if not weights_only and (other := {*own.trained}.symmetric_difference(saved.trained)):
        raise UserError(
            f"{checkpoint} was saved with other trained parameters: {min(other)}; resume with the "
            "same model.trainable"
        )
    # What the checkpoint leaves out has to be in this run's model files, value for value: other
    # frozen weights below the same adapters would train without an error.
    left_out = not all(map(shards.holds, saved.shapes))
    if left_out and (base is None or not is_same_base(saved.base, base)):
        raise UserError(
            f"{checkpoint} has only the weights that were trained; the others are those of "
            f"{source_of(saved.base)}, and this run has other weights; set model.name_or_path to "
            "that model"
        )


def _fill(engine: DeepSpeedEngine, shards: Shards, weights_only: bool) -> None:
    """Copy this rank's part of everything, without communication."""
    stage = engine.zero_optimization_stage()
    saved = shards.first
    keys = ["fp32"]
    if saved.updates and not weights_only:
        _prepare_states(engine, saved.updates)  # before local_parts, which takes what exists
        keys += MOMENTS
    for name, p, (start, tensors) in local_parts(engine):
        if not shards.holds(name):
            continue
        for key in keys if p.requires_grad else keys[:1]:
            tensors[key].copy_(shards.read(name, key, start, len(tensors[key])))
        if p.requires_grad and stage in (0, 3):
            # what the model computes with; at stages 1 and 2 update_lp_params gathers it
            computed_part(p).copy_(tensors["fp32"])
    for name, values in saved.buffers.items():
        engine.module.get_buffer(name).copy_(values)
    if engine.fp16_enabled() and not weights_only:
        vars(engine.optimizer.loss_scaler).update(saved.loss_scaler)


def _prepare_states(engine: DeepSpeedEngine, updates: int) -> None:
    """Set the number of updates, and allocate the moments, which the optimizer would do at its
    first update.
    """
    optimizer = engine.basic_optimizer
    for flat in flat_weights(engine):
        state = optimizer.state[flat]
        state["step"] = updates  # the bias correction follows from it
        if isinstance(optimizer, torch.optim.Adam):  # DeepSpeed's optimizers have a plain number
            on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
            device = flat.device if on_device else "cpu"
            state["step"] = torch.tensor(float(updates), device=device)
        for key in MOMENTS:
            if key not in state:
                state[key] = torch.zeros_like(flat)
