"""What DeepSpeed keeps of each parameter on this rank: the one file that knows its private names.

DeepSpeed keeps fp32 weights and AdamW's moments in flat tensors, whose layout depends on ZeRO
stage, precision and world size. Its public `safe_get_local_fp32_param` and
`safe_get_local_optimizer_state` work at stage 3 alone. They copy what they return to the GPU, where
offloaded state does not fit, and with NVMe they read a group of parameters for each parameter. So
this file takes views of the flat tensors, at every stage.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject.layers import DS_TENSOR_MODEL_PARALLEL

from zerotrain.model.partitions import computed_part, partition
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of fp16's loss scaler that change during a run."""


class LocalPart(NamedTuple):
    """Consecutive elements of a flattened parameter that this rank has."""

    name: str
    parameter: torch.nn.Parameter
    start: int
    """Index of the first element in the flattened parameter."""
    states: dict[str, torch.Tensor]
    """`fp32` (the weights) and MOMENTS, as views of the tensors in use. Moments are missing before
    the first update. A frozen parameter has only `fp32`, in its own precision.
    """
    is_partition: bool
    """Whether other ranks have the other elements; otherwise every rank has the same part."""


def local_parts(engine: DeepSpeedEngine) -> Iterator[LocalPart]:
    """Yield this rank's part of each parameter: first the trained parameters, then the frozen."""
    stage = engine.zero_optimization_stage()
    names = {p: name for name, p in engine.module.named_parameters()}
    flat_states = [_states(engine, flat) for flat in _flat_weights(engine)]
    for p, i, offset, start, numel in _slices(engine, len(flat_states)):
        states = {
            key: flat.view(-1)[offset : offset + numel] for key, flat in flat_states[i].items()
        }
        yield LocalPart(names[p], p, start, states, stage > 0)
    for p, name in names.items():
        if not p.requires_grad:
            yield LocalPart(name, p, partition(p)[0], {"fp32": computed_part(p)}, stage == 3)


@contextmanager
def rewritten(engine: DeepSpeedEngine) -> Iterator[None]:
    """A context in which the states of `local_parts` may be overwritten. After it the model
    computes with them. All ranks enter and leave it together.
    """
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        optimizer.checkpoint_event_prologue()  # releases all gathered parameters
    yield
    if stage in (1, 2):
        optimizer.update_lp_params()  # gathers the fp32 weights of all ranks
        return
    for part in local_parts(engine):
        if part.parameter.requires_grad:
            computed_part(part.parameter).copy_(part.states["fp32"])
    if stage == 3:
        optimizer.checkpoint_event_epilogue()  # gathers small parameters, forgets hpZ's copies


def update_count(engine: DeepSpeedEngine) -> int:
    """Return the number of finished updates, from which AdamW's bias correction follows."""
    states = engine.basic_optimizer.state.values()
    return max((int(state.get("step", 0)) for state in states), default=0)


def prepare_moments(engine: DeepSpeedEngine, updates: int) -> None:
    """Set the number of updates, and allocate the moments as the first update would do."""
    optimizer = engine.basic_optimizer
    for flat in _flat_weights(engine):
        state = optimizer.state[flat]
        state["step"] = updates
        if isinstance(optimizer, torch.optim.Adam):  # DeepSpeed's optimizers have a plain number
            on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
            device = flat.device if on_device else "cpu"
            state["step"] = torch.tensor(float(updates), device=device)
        for key in MOMENTS:
            if key not in state:
                state[key] = torch.zeros_like(flat)


def loss_scaler(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the attributes of fp16's loss scaler, which a change of the dictionary changes too;
    empty in other precisions.
    """
    return vars(engine.optimizer.loss_scaler) if engine.fp16_enabled() else {}


def full_shape(p: torch.nn.Parameter) -> list[int]:
    """Return the shape of a parameter: under ZeRO-3 it is an empty tensor with a `ds_shape`."""
    return list(getattr(p, "ds_shape", p.shape))


def split_dimension(p: torch.nn.Parameter) -> int | None:
    """Return the dimension along which tensor parallelism has split a parameter, if it has."""
    return getattr(p, DS_AUTOTP_UC_META, {}).get("partition_dim")


class Piece(NamedTuple):
    """This rank's piece of a parameter that tensor parallelism has split, by DeepSpeed's record."""

    blocks: list[AffinePiece]
    """Where the blocks of the piece lie in it (`dest`), and in the whole parameter (`source`)."""

    def whole_index(self, index: torch.Tensor) -> torch.Tensor:
        """Return the indices in the flattened whole parameter of elements of the flattened piece.

        Args:
            index: int64 [n].
        """
        found = torch.empty_like(index)
        for block in self.blocks:
            rest = index - block.dest_offset
            whole = torch.full_like(index, block.source_offset)
            is_inside = torch.ones_like(index, dtype=torch.bool)
            strides = zip(block.shape, block.dest_strides, block.source_strides, strict=True)
            for size, stride, whole_stride in strides:
                position = rest.div(stride, rounding_mode="floor")
                rest = rest - position * stride
                whole += position * whole_stride
                is_inside &= (position >= 0) & (position < size)
            found = whole.where(is_inside, found)
        return found


def piece_of_whole(name: str, p: torch.nn.Parameter, ranks: Ranks) -> Piece | None:
    """Return which piece of a parameter this rank has; None if it has the whole parameter.

    Raises:
        UserError: DeepSpeed has no record of it.
    """
    if ranks.tensor == 1:
        return None
    record = getattr(p, DS_AUTOTP_UC_META, None)
    if record is None and not getattr(p, DS_TENSOR_MODEL_PARALLEL, False):
        return None
    rank = ranks.rank % ranks.tensor
    layout = record and record["conversion"].get("affine_map")
    if layout:
        of_rank = ParamAffineMap.from_dict(layout)
        blocks = of_rank.pieces_by_rank[rank]
        is_same = all(block.scale == 1 for block in blocks)
        if is_same and list(of_rank.shard_shapes[rank]) == full_shape(p):
            return Piece(blocks)
    raise UserError(
        f"tensor_parallel.autotp_size: DeepSpeed has no record of how it has split {name}; set "
        "autotp_size to 1"
    )


def _flat_weights(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    """Return the fp32 tensors that this rank's optimizer updates: flat tensors, or at stage 0
    single parameters.
    """
    if engine.zero_optimization_stage() == 3:
        # its param_groups have them only during an update
        return engine.optimizer.fp32_partitioned_groups_flat
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def _states(engine: DeepSpeedEngine, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `fp32` and MOMENTS of one of _flat_weights, as far as they exist. For a tensor on
    NVMe these are DeepSpeed's files, mapped into memory.
    """
    state = engine.basic_optimizer.state[flat]
    states = {"fp32": flat.detach(), **{key: state[key] for key in MOMENTS if key in state}}
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    on_nvme = swapper and swapper.swap_params_info.get(flat.ds_id)
    if not on_nvme:
        return states
    paths = zip(states, on_nvme.get_swap_paths(), strict=True)  # in the order of the states
    return {key: torch.from_file(path, shared=True, size=on_nvme.numel()) for key, path in paths}


def _slices(engine: DeepSpeedEngine, flat_tensors: int) -> Iterator[tuple]:
    """Yield each trained parameter, the index of its flat tensor, its offset there, and (start,
    numel) of what the flat tensor has of the flattened parameter.
    """
    if engine.zero_optimization_stage() in (1, 2):  # a group is concatenated, then partitioned
        for p in engine.module.parameters():
            # None where this rank's partition has no element of the parameter
            if at := getattr(p, "_hp_mapping", None):
                flat = at.hp_fragment_address
                yield p, at.param_group_index, flat.start, at.lp_fragment_address.start, flat.numel
        return
    # At stage 3 each parameter is partitioned, then a group is concatenated; at stage 0 nothing is.
    # param_groups have DeepSpeed's own tensors at stage 3, and at stage 0 in 16 bits.
    groups = getattr(engine.optimizer, "fp16_groups", None) or [
        group["params"] for group in engine.basic_optimizer.param_groups
    ]
    if flat_tensors > len(groups):  # each flat tensor is a single parameter, not a group
        groups = [[p] for group in groups for p in group]
    for i, group in enumerate(groups):
        offset = 0
        for p in group:
            yield p, i, offset, *partition(p)
            # padded under ZeRO-3, so that all ranks have equally many elements
            offset += p.ds_tensor.ds_numel if hasattr(p, "ds_tensor") else p.numel()
