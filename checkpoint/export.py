"""Export a checkpoint as a Hugging Face folder, one file of weights at a time."""

import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint.find import checkpoint_problem
from checkpoint.manifest import read_manifest
from checkpoint.shards import Shards
from checkpoint.state import read_state
from runtime.errors import UserError, describe
from runtime.files import new_folder

MAX_SHARD_SIZE = "5GB"


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer) that `from_pretrained` loads.

    The fp32 master weights are written as `dtype` (float32, bfloat16 ...), by default the
    precision of the run. transformers writes them as it writes a model whose weights are offloaded
    to disk: names, ties and files are those of `save_pretrained`, and memory holds the tensors of
    one file at a time.

    Args:
        max_shard_size: of a file of weights; a larger tensor has a file of its own.
        finish: called with the complete folder before it gets its name; if it raises, there is no
            `out`.

    Raises:
        UserError: the checkpoint is not usable, `out` is not empty or cannot be written, or
            `max_shard_size` is not a size.
    """
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", max_shard_size, re.IGNORECASE):
        raise UserError(
            f"--max_shard_size: {max_shard_size!r} is not a size; use e.g. 5GB or 500MB"
        )
    if problem := checkpoint_problem(checkpoint):
        raise UserError(f"{checkpoint} is not a usable checkpoint: {problem}")
    state, named = read_state(checkpoint), read_manifest(checkpoint).files
    default = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[state.run.precision]
    small = [checkpoint / name for name in named if name.startswith("model/")]
    with new_folder(out) as draft:
        for file in small:  # the config is read from the copy: a file of no manifest is not read
            shutil.copyfile(file, draft / file.name)
        model = empty_model(draft, getattr(torch, dtype or default))
        weights = MasterWeights(Shards(checkpoint), model)
        check_fit(model, weights)
        check_room(model, draft)
        save_streaming(model, weights, draft, max_shard_size)
        for file in small:  # again: transformers has written a generation config of its own
            if file.name != "config.json":  # has the dtype of the weights now
                shutil.copyfile(file, draft / file.name)
        if finish is not None:
            finish(draft)


def empty_model(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model of a Hugging Face folder, on the meta device.

    Raises:
        UserError: its config.json cannot be used.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # whatever a config of any content leads to
        raise UserError(
            f"the checkpoint's model/config.json cannot be used ({describe(error)}); use another "
            "checkpoint"
        ) from error


class MasterWeights(Mapping[str, torch.Tensor]):
    """The fp32 parameters and the persistent buffers of a checkpoint by their names in the model's
    state_dict, assembled on access. Tied parameters are found under each of their names.
    """

    def __init__(self, shards: Shards, model: nn.Module) -> None:
        self._shards, self._buffers = shards, shards.buffers()
        saved, ties = set(shards.names()), {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            ties.setdefault(id(parameter), []).append(name)
        # {name in the model: name in the shards}
        self._names = {name: name for name in saved}
        for names in ties.values():
            if found := saved.intersection(names):
                self._names.update(dict.fromkeys(names, min(found)))

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor in its shape. Do not modify it."""
        if name in self._buffers:
            return self._buffers[name]
        return self._shards.weight(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter([*self._names, *self._buffers])

    def __len__(self) -> int:
        return len(self._names) + len(self._buffers)


def check_fit(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Check that `weights` have the names of `model`, which may be on the meta device.

    Raises:
        UserError: names the missing and the unexpected ones.
    """
    expected, found = set(model.state_dict()), set(weights)
    if expected != found:
        raise UserError(
            f"weights do not fit {type(model).__name__}: missing {sorted(expected - found)}, "
            f"unexpected {sorted(found - expected)}; use another checkpoint"
        )


def check_room(model: nn.Module, folder: Path) -> None:
    """Check that the disk of `folder` has room for the weights.

    Raises:
        OSError: names the bytes needed and free.
    """
    needed = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))  # tied ones once
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"it needs {needed:,} bytes, the disk has {free:,} free")


def save_streaming(
    model: nn.Module, weights: Mapping[str, torch.Tensor], folder: Path, max_shard_size: str
) -> None:
    """`save_pretrained` of a model on the meta device, whose weights are fetched file by file.

    transformers takes it for a model whose weights accelerate offloads to disk, and reads each
    weight from the hook's mapping when it writes its file.
    """
    add_hook_to_module(model, AlignDevicesHook(weights_map=_Cast(weights, model.state_dict())))
    model.hf_device_map = {"": "disk"}
    with warnings.catch_warnings(
        action="ignore"
    ):  # says that the tensors of a file must fit into memory
        try:
            model.save_pretrained(folder, max_shard_size=max_shard_size)
        except SafetensorError as error:  # e.g. a full disk
            raise OSError(describe(error)) from error


class _Cast(Mapping[str, torch.Tensor]):
    """`weights` cast to the dtypes of `like`."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> None:
        self._weights, self._like = weights, like

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[name].to(self._like[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)
