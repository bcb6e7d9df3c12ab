"""Export a checkpoint as a Hugging Face folder, one file of weights at a time, or its adapters as
peft saves them.
"""

import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from checkpoint.find import checkpoint_problem
from checkpoint.manifest import read_manifest
from checkpoint.merge import MasterWeights, has_own_head, insert_adapters, load_frozen
from checkpoint.prefixes import give_back_prefixes
from checkpoint.shards import Shards
from checkpoint.state import RunIdentity, read_state
from model.load import DTYPES
from runtime.errors import UserError, describe
from runtime.files import new_folder
from runtime.progress import progress

MAX_SHARD_SIZE = "5GB"


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    base: str | None = None,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer) that `from_pretrained` loads.

    The fp32 master weights are written as `dtype` (float32, bfloat16 ...), by default the
    precision of the run. transformers writes them as it writes a model whose weights are offloaded
    to disk: names, ties and files are those of `save_pretrained`, and memory holds the tensors of
    one file at a time. Frozen weights that the checkpoint lacks are in memory too, all of them, in
    the run's precision. LoRA's adapters are added to them in fp32.

    Args:
        max_shard_size: of a file of weights; a larger tensor has a file of its own.
        base: folder or hub id of those frozen weights, if they have moved.
        finish: called with the complete folder before it gets its name; if it raises, there is no
            `out`.

    Raises:
        UserError: the checkpoint is not usable, its frozen weights are not found, `out` is not
            empty or cannot be written, or `max_shard_size` is not a size.
    """
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", max_shard_size, re.IGNORECASE):
        raise UserError(
            f"--max_shard_size: {max_shard_size!r} is not a size; use e.g. 5GB or 500MB"
        )
    run, small = _open(checkpoint)
    with new_folder(out) as draft:
        for file in small:  # the config is read from the copy: a file of no manifest is not read
            shutil.copyfile(file, draft / file.name)
        config, shards = read_config(draft), Shards(checkpoint)
        adapted = empty_model(config, torch.float32)
        insert_adapters(adapted, run)
        if has_own_head(adapted):
            config.tie_word_embeddings = False
        frozen = load_frozen(shards, run, base)
        model = empty_model(config, getattr(torch, dtype) if dtype else DTYPES[run.precision])
        weights = MasterWeights(shards, adapted, frozen)
        check_fit(model, weights)
        check_room(model, draft)
        give_back_prefixes(model, shards.prefixes)
        save_streaming(model, weights, draft, max_shard_size)
        for file in small:  # again: transformers has written a generation config of its own
            if file.name != "config.json":  # has the dtype of the weights now
                shutil.copyfile(file, draft / file.name)
        if finish is not None:
            finish(draft)


def export_adapter(
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write the adapters of a run with model.lora, and its tokenizer, as a folder that
    `peft.PeftModel.from_pretrained` loads, as `dtype`, by default the precision of the run.

    Args:
        finish: as of export_checkpoint.

    Raises:
        UserError: the checkpoint is not usable or has no adapters, or `out` is not empty or cannot
            be written.
    """
    run, small = _open(checkpoint)
    if run.lora is None:
        raise UserError(f"{checkpoint} has no adapters, only whole weights; leave out --adapter")
    from peft import get_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    with new_folder(out) as draft:
        for file in small:
            shutil.copyfile(file, draft / file.name)
        shards, model = Shards(checkpoint), empty_model(read_config(draft), torch.float32)
        (draft / "config.json").unlink()  # that of the base model
        insert_adapters(model, run, shards.read_from)
        model.peft_config["default"].save_pretrained(draft)
        trained = {name: shards.weight(name) for name in shards.trained}
        named = get_peft_model_state_dict(model, trained, save_embedding_layers=False)
        target = getattr(torch, dtype) if dtype else DTYPES[run.precision]
        weights = {f"base_model.model.{n}": w.to(target, copy=True) for n, w in named.items()}
        save_file(weights, draft / SAFETENSORS_WEIGHTS_NAME, {"format": "pt"})
        if finish is not None:
            finish(draft)


def _open(checkpoint: Path) -> tuple[RunIdentity, list[Path]]:
    """The run of a usable checkpoint, and the checkpoint's small files: model config, tokenizer."""
    if problem := checkpoint_problem(checkpoint):
        raise UserError(f"{checkpoint} is not a usable checkpoint: {problem}")
    named = read_manifest(checkpoint).files
    small = [checkpoint / name for name in named if name.startswith("model/")]
    return read_state(checkpoint).run, small


def read_config(folder: Path) -> PretrainedConfig:
    """The config.json of a Hugging Face folder.

    Raises:
        UserError: it cannot be used.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a config of any content leads to
        raise _bad_config(error) from error


def empty_model(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model of a config, on the meta device.

    Raises:
        UserError: the config cannot be used.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:
        raise _bad_config(error) from error


def _bad_config(error: Exception) -> UserError:
    return UserError(
        f"the checkpoint's model/config.json cannot be used ({describe(error)}); use another "
        "checkpoint"
    )


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
    like = model.state_dict()
    with (
        progress("exporting", len(like), "tensors") as report,
        warnings.catch_warnings(action="ignore"),  # the tensors of a file must fit into memory
    ):
        cast = _Cast(weights, like, report)
        add_hook_to_module(model, AlignDevicesHook(weights_map=cast))
        model.hf_device_map = {"": "disk"}
        try:
            model.save_pretrained(folder, max_shard_size=max_shard_size)
        except SafetensorError as error:  # e.g. a full disk
            raise OSError(describe(error)) from error


class _Cast(Mapping[str, torch.Tensor]):
    """`weights` cast to the dtypes of `like`; `report` gets the number of those that were read."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        like: Mapping[str, torch.Tensor],
        report: Callable[[int], None],
    ) -> None:
        self._weights, self._like, self._report = weights, like, report
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self._read.add(name)
        self._report(len(self._read))
        return self._weights[name].to(self._like[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)
