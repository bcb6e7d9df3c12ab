"""Where each parameter lies in DeepSpeed's shards, and a reader that reassembles it.

DeepSpeed keeps fp32 weights and AdamW's moments in flat tensors, whose layout depends on ZeRO
stage, precision and world size. `layout` describes those of a running engine. Each shard of a
checkpoint contains the description of the engine that wrote it, so it can be read without one.

Reading runs no code of the checkpoint's: torch unpickles only tensors, plain types and the types in
DEEPSPEED_TYPES, and only files that the manifest names are opened.
"""

import re
from collections.abc import Callable
from functools import cached_property, lru_cache, wraps
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from checkpoint.manifest import read_manifest
from checkpoint.run_folder import SHARDS
from runtime.errors import UserError, describe

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

STATES = ("fp32", "exp_avg", "exp_avg_sq")  # of each parameter: weight and AdamW's moments


def _zero_stage(kind: type, name: str) -> ZeroStageEnum:
    """In place of getattr, by which Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickle members
    of enumerations.
    """
    if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise UnpicklingError("GLOBAL getattr")
    return ZeroStageEnum[name]


DEEPSPEED_TYPES = [
    fragment_address, ZeroStageEnum, LossScaler, DynamicLossScaler,
    (_zero_stage, "builtins.getattr"),
]  # fmt: skip
"""What DeepSpeed's files hold besides tensors and plain types; none runs code when it is read."""
ADAMS = {"Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam"}  # the optimizers with these states


class Fragment(NamedTuple):
    """Consecutive elements of a parameter in a rank's flat tensors. All numbers count elements."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    flat: int  # index of the flat tensor in flat_weights
    offset: int  # first element in the flat tensor
    start: int  # first element in the flattened parameter
    numel: int


def flat_weights(engine: "DeepSpeedEngine") -> list[torch.Tensor]:
    """The fp32 tensors that this rank's optimizer updates, in the order in which it saves their
    states: flat tensors, or at stage 0 single parameters.
    """
    if engine.zero_optimization_stage() == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def layout(engine: "DeepSpeedEngine") -> dict[str, Any]:
    """What this rank's flat tensors hold, in plain types. States can be loaded without conversion
    if the layouts are equal.
    """
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    fragments: list[tuple] = []

    def add(p: torch.Tensor, *where: int) -> None:
        shape = tuple(getattr(p, "ds_shape", p.shape))
        fragments.append((engine.param_names[p], shape, *where))

    if stage == 3:  # each parameter partitioned into equal parts, the last ones padded
        for flat, group in enumerate(optimizer.fp16_groups):
            offset = 0
            for p in group:
                add(p, flat, offset, *partition(p))
                offset += p.ds_tensor.ds_numel
    elif stage > 0:  # each group concatenated, then partitioned
        groups = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
        for flat, group in enumerate(groups):
            for p in group:
                if (at := p._hp_mapping) is not None:
                    in_flat, in_parameter = at.hp_fragment_address, at.lp_fragment_address
                    add(p, flat, in_flat.start, in_parameter.start, in_flat.numel)
    elif hasattr(optimizer, "fp32_groups_flat"):  # 16 bits with FusedAdam: each group concatenated
        for flat, group in enumerate(optimizer.fp16_groups):
            offset = 0
            for p in group:
                add(p, flat, offset, 0, p.numel())
                offset += p.numel()
    else:
        groups = getattr(optimizer, "fp16_groups", None) or [
            group["params"] for group in engine.basic_optimizer.param_groups
        ]
        for flat, p in enumerate(p for group in groups for p in group):
            add(p, flat, 0, 0, p.numel())
    frozen = [p for p in engine.module.parameters() if not p.requires_grad]
    return {
        "zero_stage": int(stage),
        "shards": engine.dp_world_size if stage else 1,
        "wrapper": type(optimizer).__name__,
        "optimizer": type(engine.basic_optimizer).__name__,
        "fragments": fragments,
        "frozen": {engine.param_names[p]: tuple(getattr(p, "ds_shape", p.shape)) for p in frozen},
    }


def partition(p: torch.Tensor) -> tuple[int, int]:
    """(start, numel) of this rank's partition of a flattened ZeRO-3 parameter, without padding."""
    size = p.ds_tensor.ds_numel
    start = min(size * torch.distributed.get_rank(p.ds_process_group), p.ds_numel)
    return start, min(size, p.ds_numel - start)


def is_on_nvme(engine: "DeepSpeedEngine") -> bool:
    """Whether weights or optimizer states are on NVMe, out of reach of flat_weights."""
    swapped = ("swap_optimizer", "params_in_nvme_and_cpu")
    return any(getattr(engine.optimizer, name, False) for name in swapped)


def progress(engine: "DeepSpeedEngine") -> dict[str, Any]:
    """The scalars of the optimizer: number of updates, for AdamW's bias correction, and loss scale
    of fp16.
    """
    optimizer = engine.basic_optimizer
    counts = [
        s["step"] for s in (*optimizer.state.values(), *optimizer.param_groups) if "step" in s
    ]
    loss_scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None
    # the largest: FusedAdam counts in one parameter of each group
    return {"updates": max(map(int, counts), default=0), "loss_scale": loss_scale}


def load_safely(path: Path, **options: Any) -> Any:
    """torch.load of a file that may come from anybody.

    Args:
        options: of torch.load: map_location, mmap.

    Raises:
        UserError: it cannot be read, or holds anything but tensors, plain types and
            DEEPSPEED_TYPES.
    """
    try:
        with torch.serialization.safe_globals(DEEPSPEED_TYPES):
            return torch.load(path, weights_only=True, **options)
    except UnpicklingError as error:
        foreign = re.search(r"(?:GLOBAL|global:? (?:GLOBAL )?)\s*([\w.]+)", str(error))
        what = f"an object of {foreign[1]}" if foreign else "something other than tensors"
        raise UserError(
            f"{path} holds {what}, which no checkpoint of this repository does and which could run "
            "code when it is read; use another checkpoint"
        ) from error
    except Exception as error:  # whatever torch raises for a damaged file
        raise UserError(f"{path} cannot be read ({describe(error)}); use another checkpoint") from (
            error
        )


def _damage_in_one_line(method: Callable) -> Callable:
    """Raises UserError for whatever a method of Shards meets in files of the wrong shape."""

    @wraps(method)
    def checked(shards: "Shards", *args: Any) -> Any:
        try:
            return method(shards, *args)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{shards.folder} is damaged: {type(error).__name__}: {describe(error)}; use "
                "another checkpoint"
            ) from error

    return checked


class Shards:
    """DeepSpeed's files of a checkpoint. They are memory-mapped: only what is used is read.

    Every method raises UserError if a file cannot be read or has another shape.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.folder = checkpoint / SHARDS
        try:
            names = [name for name in read_manifest(checkpoint).files if name.startswith(SHARDS)]
        except (OSError, ValueError) as error:
            raise UserError(f"{checkpoint}: {describe(error)}; use another checkpoint") from error
        self._files = {checkpoint / name for name in names}

        def by_rank(ending: str) -> dict[int, Path]:
            paths = sorted(path for path in self._files if path.name.endswith(ending))
            ranks = ((re.search("rank_([0-9]+)", path.name), path) for path in paths)
            return dict(sorted((int(rank[1]), path) for rank, path in ranks if rank))

        self._models = by_rank("model_states.pt")
        self._optimizers = by_rank("optim_states.pt") or self._models  # stage 0 has one file
        if not self._models:
            raise UserError(f"{checkpoint}: its manifest names no weights; use another checkpoint")
        self._map = lru_cache(maxsize=None)(lambda path: self.load(path, "cpu", mmap=True))

    def load(self, path: Path, map_location: Any, mmap: bool = False) -> dict[str, Any]:
        """The content of one of the files."""
        if path not in self._files:
            raise UserError(f"{path} is not in the manifest of its checkpoint; remove it")
        content = load_safely(path, map_location=map_location, mmap=mmap)
        if not isinstance(content, dict):
            raise UserError(f"{path} holds no state; use another checkpoint")
        return content

    @_damage_in_one_line
    def layout(self, rank: int) -> dict[str, Any]:
        """layout() of the engine that wrote the shard of `rank`, or the first if there is none."""
        return self._map(self._optimizers.get(rank, _first(self._optimizers)))["layout"]

    @property
    @_damage_in_one_line
    def progress(self) -> dict[str, Any]:
        """progress() of the engine that wrote the shards."""
        saved = self._map(_first(self._optimizers))["progress"]
        scale = saved["loss_scale"]
        loss_scale = None if scale is None else float(scale)
        return {"updates": int(saved["updates"]), "loss_scale": loss_scale}

    @property
    @_damage_in_one_line
    def model(self) -> dict[str, Any]:
        """What DeepSpeed saves once: schedule, counters, buffers, at stages 0 to 2 all weights."""
        return self._map(_first(self._models))

    @property
    @_damage_in_one_line
    def trained(self) -> list[str]:
        """Names of the parameters that have `STATES`."""
        return list(self._fragments)

    @property
    @_damage_in_one_line
    def read_from(self) -> dict[str, str | None] | None:
        """model.base.describe_base of the files that hold the frozen weights; None if the
        checkpoint holds them.
        """
        found = self.model.get("read_from")
        if found is None:
            return None
        texts = {key: found[key] for key in ("name_or_path", "revision", "fingerprint")}
        if not all(isinstance(v, str | None) for v in texts.values()) or not texts["name_or_path"]:
            raise ValueError("read_from does not name a model")
        return texts

    @property
    @_damage_in_one_line
    def prefixes(self) -> list[str]:
        """changed_prefixes of the model; none in checkpoints of older versions."""
        return [str(change) for change in self.model.get("prefixes", [])]

    @_damage_in_one_line
    def holds(self, name: str) -> bool:
        """Whether the weight is in the checkpoint, and not only in the files of `read_from`."""
        return name in self._fragments or self.read_from is None

    @_damage_in_one_line
    def missing(self) -> list[str]:
        """Names of the frozen weights that it does not hold."""
        return [] if self.read_from is None else list(self._frozen)

    @_damage_in_one_line
    def names(self) -> list[str]:
        """Names of all parameters as in named_parameters(), which lists tied ones once."""
        return [*self._fragments, *self._frozen]

    @_damage_in_one_line
    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._fragments:
            return self._fragments[name][0][1].shape
        return self._frozen[name]

    @_damage_in_one_line
    def weight(self, name: str) -> torch.Tensor:
        """A parameter in fp32 and its shape, on the CPU. Frozen ones were saved in the model's
        precision.
        """
        if name in self._fragments:
            shape = self.shape(name)
            return self.read(name, "fp32", 0, prod(shape)).view(shape)
        if self.layout(0)["zero_stage"] < 3:
            return self.model["module"][name].float()
        parts = [self._map(path)["frozen_param_fragments"][name] for path in self._models.values()]
        shape = self.shape(name)
        return torch.cat([part.flatten() for part in parts])[: prod(shape)].view(shape).float()

    @_damage_in_one_line
    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers."""
        return {name: self.model["module"][name] for name in self.model["buffer_names"]}

    @_damage_in_one_line
    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of one of the flattened STATES of a parameter, in fp32.
        Do not modify them: they may be the mapped file.
        """
        if key == "fp32" and name in self._frozen:
            return self.weight(name).flatten()[start : start + numel]
        parts = []
        for rank, at in self._fragments[name]:
            first, last = max(start, at.start), min(start + numel, at.start + at.numel)
            if first < last:
                flat = self._flats(rank)[at.flat].get(key)
                begin = at.offset + first - at.start
                if flat is None or flat.numel() < begin + last - first:
                    raise UserError(
                        f"{self._optimizers[rank]} does not hold {key} of {name}; states that were "
                        "on NVMe are not in the shards"
                    )
                parts.append((first, flat.flatten()[begin : begin + last - first].float()))
        values = [part for _, part in sorted(parts, key=lambda part: part[0])]
        found = sum(part.numel() for part in values)
        if found != numel:
            raise RuntimeError(f"{name}: {found:,} of {numel:,} elements are in the shards")
        return values[0] if len(values) == 1 else torch.cat(values)

    @cached_property
    def _fragments(self) -> dict[str, list[tuple[int, Fragment]]]:
        fragments: dict[str, list[tuple[int, Fragment]]] = {}
        for rank in self._optimizers:
            for values in self.layout(rank)["fragments"]:
                fragments.setdefault(values[0], []).append((rank, Fragment(*values)))
        return fragments

    @property
    def _frozen(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters that are not trained."""
        return self.layout(0)["frozen"]

    def _flats(self, rank: int) -> list[dict[str, torch.Tensor]]:
        """STATES of each flat tensor of a shard, whose keys depend on the stage."""
        shard = self._map(self._optimizers[rank])
        inner = shard.get("optimizer_state_dict") or shard["optimizer"]
        if "fp32_flat_groups" in inner:  # stage 3
            weights = inner["fp32_flat_groups"]
        elif "single_partition_of_fp32_groups" in inner:  # stages 1 and 2
            weights = inner["single_partition_of_fp32_groups"]
        elif "fp32_groups_flat" in inner:  # stage 0 in 16 bits, with FusedAdam
            weights = inner["fp32_groups_flat"]
        elif "fp32_groups" in inner:  # and with another optimizer
            weights = [weight for group in inner["fp32_groups"] for weight in group]
        else:  # stage 0 in fp32
            weights = [shard["module"][values[0]] for values in self.layout(0)["fragments"]]
        of_torch = inner.get("base_optimizer_state") or inner.get("optimizer_state_dict") or inner
        moments = of_torch["state"]
        return [{"fp32": weight, **moments.get(i, {})} for i, weight in enumerate(weights)]


def _first(paths: dict[int, Path]) -> Path:
    return next(iter(paths.values()))
