"""Export a checkpoint as a Hugging Face folder, or its adapters as a folder for peft.

A checkpoint is untrusted: only the regular files of its manifest are read, and reading them runs no
code.
"""

import copy
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import CHAT_TEMPLATE_DIR

from zerotrain.checkpoint.manifest import inspect, read_manifest
from zerotrain.checkpoint.shards import Shards
from zerotrain.checkpoint.state import RunIdentity, read_state
from zerotrain.config.schema import LoraConfig, ModelConfig
from zerotrain.model.architecture import auto_class, is_multimodal, read_config
from zerotrain.model.hub import (
    describe_base,
    is_same_base,
    load_pretrained,
    source_of,
    split_revision,
)
from zerotrain.model.load import DTYPES, quantized
from zerotrain.model.trained import ADAPTER, insert_adapters
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.machine import GIB
from zerotrain.tools.new_folder import new_folder
from zerotrain.tools.older_transformers import add_class, add_rope, edit_json
from zerotrain.tools.saved import whole_weight

if TYPE_CHECKING:
    from peft import LoraModel

PROCESSOR_FILES = "*processor_config.json"
SMALL_FILE = re.compile(
    r"model/(((generation_|tokenizer_)?config|tokenizer|special_tokens_map|added_tokens"
    r"|(entity_)?vocab|emoji|byte_maps)\.json|chat_template\.jinja|(vocab|merges|dict)\.txt"
    rf"|[\w.]+\.model|{CHAT_TEMPLATE_DIR}/[^/]+\.jinja)"
)
"""Files that save_pretrained writes for a config and a tokenizer. Other files could be code, or
lead from_pretrained to different weights.
"""
FINITE = "export with --dtype float32 or bfloat16, or an earlier checkpoint"
MAX_SHARD_SIZE = "5GB"  # A larger tensor has a file to itself.


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    base: str | None = None,
    only_adapters: bool = False,
    finish: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer) that `from_pretrained` loads.

    The fp32 master weights are written as `dtype` (float32, bfloat16 ...), by default the run's
    precision. The whole model is held in memory in that precision. With adapters, which are merged,
    it is held in fp32.

    Args:
        base: folder or hub id of the frozen weights, if they have moved since the run.
        only_adapters: write only the adapters of a run with model.lora, and the tokenizer, for
            `peft.PeftModel.from_pretrained`.
        finish: called with the complete folder before it gets its name. If it raises an exception,
            `out` is not created.

    Raises:
        UserError: the checkpoint is not usable, it has no adapters, its frozen weights are missing,
            or `out` is not empty or cannot be written.
    """
    _, problems = inspect(checkpoint)
    if problems:
        name, problem = next(iter(problems.items()))
        raise UserError(f"{checkpoint} is not a usable checkpoint: {name} {problem}")
    run = read_state(checkpoint).run
    has_adapters = run.settings.get("model.lora") is not None
    if only_adapters and not has_adapters:
        raise UserError(f"{checkpoint} has no adapters, only whole weights; omit --adapter")
    shards = Shards(checkpoint)
    if only_adapters and shards.first.base is None:
        raise UserError(
            f"{checkpoint}: its adapters belong to weights that only the checkpoint has (random "
            "ones, or as init_lora_weights changed them); omit --adapter"
        )
    files = filter(SMALL_FILE.fullmatch, read_manifest(checkpoint).files)
    names = [file.removeprefix("model/") for file in files]
    target = getattr(torch, dtype) if dtype else DTYPES[run.precision]
    working = torch.float32 if has_adapters else target
    with new_folder(out) as draft:
        _copy(names, checkpoint / "model", draft)
        # An empty model takes no memory. It shows whether the checkpoint has the right shapes.
        expected = _empty_model(draft, working)
        if has_adapters:
            with torch.device("meta"):
                _insert_adapters(expected, run, shards)
        _check_shapes(expected, shards)
        if only_adapters:
            (draft / "config.json").unlink()  # It describes the base model.
            _write_adapters(draft, expected, shards, target)
        else:
            _check_memory(expected)
            if all(map(shards.holds, shards.first.shapes)):
                model = _empty_model(draft, working).to_empty(device="cpu")
                model.tie_weights()
            else:
                model = _load_base(shards, run, base, draft, expected.config).to(working)
            adapters = _insert_adapters(model, run, shards) if has_adapters else None
            _fill(model, shards)
            if adapters is not None:
                model = _merge(model, adapters).to(target)
            for name, p in model.named_parameters():
                _check_finite(name, p)
            with warnings.catch_warnings(action="ignore"):
                model.save_pretrained(draft, max_shard_size=MAX_SHARD_SIZE)
            # transformers has overwritten files of the checkpoint. Only its config.json stays,
            # which has the dtype of the weights.
            names.remove("config.json")
            _copy(names, checkpoint / "model", draft)
            add_rope(draft / "config.json")
        edit_json(draft / "tokenizer_config.json", add_class)
        finish(draft)


def _write_adapters(folder: Path, model: nn.Module, shards: Shards, dtype: torch.dtype) -> None:
    """Write the adapters as peft's files. The weights of `model` are not used."""
    from peft import get_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    model.peft_config[ADAPTER].save_pretrained(folder)
    trained = {name: whole_weight(shards, name) for name in shards.first.trained}
    named = get_peft_model_state_dict(model, trained, save_embedding_layers=False)
    weights = {f"base_model.model.{n}": w.to(dtype, copy=True) for n, w in named.items()}
    for name, weight in weights.items():
        _check_finite(name, weight)
    save_file(weights, folder / SAFETENSORS_WEIGHTS_NAME, {"format": "pt"})


def _check_finite(name: str, weight: torch.Tensor) -> None:
    """Raise a UserError if a weight has a value that is infinite or NaN."""
    if not weight.isfinite().all():
        raise UserError(f"{name} has infinite or NaN values in {weight.dtype}; {FINITE}")


def _copy(names: Iterable[str], source: Path, folder: Path) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)  # Named chat templates have a folder.
        shutil.copyfile(source / name, folder / name)


def _check_memory(model: nn.Module) -> None:
    """Raise UserError if the parameters of an empty model do not fit into memory."""
    needed = sum(p.nbytes for p in model.parameters()) / GIB
    free = psutil.virtual_memory().available / GIB
    if needed > free:
        raise UserError(
            f"the export needs {needed:,.1f} GiB of memory, but {free:,.1f} GiB are free; run it "
            "on a machine with more"
        )


def _empty_model(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return the model of a folder's config.json, on the meta device."""
    try:
        config = read_config(str(folder), trust_remote_code=False)
        # A hostile config.json could name attention from the hub, which is code.
        options = {"attn_implementation": "eager", "trust_remote_code": False}
        with torch.device("meta"):
            return auto_class(config).from_config(config, dtype=dtype, **options)
    except Exception as error:  # A hostile config can raise anything.
        raise UserError(
            f"the checkpoint's model/config.json cannot be used ({describe(error)}); use another "
            "checkpoint"
        ) from error


def _load_base(
    shards: Shards, run: RunIdentity, base: str | None, draft: Path, config: PretrainedConfig
) -> nn.Module:
    """Return the base model, which has the frozen weights, in the run's precision. Weights that the
    run had in 4 bits are rounded to 4 bits, because the adapters were trained on those.

    Args:
        base: folder or hub id of the base model; default: the run's.
        draft: folder that gets the processor files of a multimodal model. Training does not use
            them; servers do.
        config: the config of the trained model, which may be the part of the base model for text.

    Raises:
        UserError: the base model cannot be loaded, or has different weights.
    """
    was = shards.first.base
    source = base or source_of(was)
    fix = f"give --base with the model that {source_of(was)} was during the run"
    dtype = DTYPES[run.precision]
    in_4_bits = run.settings.get("model.quantization") is not None
    options = {"dtype": dtype, **(quantized(dtype, "cpu") if in_4_bits else {})}
    try:
        load = auto_class(config).from_pretrained
        model = load_pretrained(load, source, config=copy.deepcopy(config), **options)
    except UserError as error:
        raise UserError(f"the frozen weights are missing: {error}; {fix}") from error
    if not is_same_base(was, describe_base(source)):
        raise UserError(f"{source} does not have the frozen weights of the run; {fix}")
    if is_multimodal(model.config):
        folder, revision = split_revision(source)
        if not Path(folder).is_dir():
            folder = snapshot_download(folder, revision=revision, allow_patterns=PROCESSOR_FILES)
        _copy([file.name for file in Path(folder).glob(PROCESSOR_FILES)], Path(folder), draft)
    return model.dequantize(dtype) if in_4_bits else model


def _insert_adapters(model: nn.Module, run: RunIdentity, shards: Shards) -> "LoraModel":
    """Insert the adapters of a run into a model and return the adapted model."""
    base = shards.first.base or {"name_or_path": "", "revision": None}
    try:
        lora = LoraConfig(**run.settings["model.lora"])
        # The checkpoint has the adapters, and the weights that they have changed at the start.
        lora.options.pop("init_lora_weights", None)
        config = ModelConfig(source_of(base), lora=lora)
        return insert_adapters(model, config, lora)
    except UserError:
        raise
    except Exception as error:  # Hostile settings can raise anything.
        raise UserError(
            f"the checkpoint's model.lora cannot be used ({describe(error)}); use another "
            "checkpoint"
        ) from error


def _check_shapes(model: nn.Module, shards: Shards) -> None:
    """Raise UserError unless checkpoint and model have parameters of the same names and shapes. A
    split parameter has the shape of its piece in the checkpoint; `_fill` compares its whole shape.
    Frozen weights that the checkpoint leaves out may have had 4 bits, in a flat tensor.
    """
    saved = shards.first
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    for name in sorted({*shapes, *saved.shapes, *saved.trained}):
        was, now = saved.shapes.get(name), shapes.get(name)
        is_compared = shards.holds(name) and name not in saved.split
        if was is None or now is None or (was != now and is_compared):
            raise _misfit(name, was, now)


def _misfit(name: str, was: object, now: object) -> UserError:
    return UserError(
        f"the checkpoint does not fit its model/config.json: {name} is {was or 'missing'} in the "
        f"checkpoint and {now or 'missing'} in the model; use another checkpoint"
    )


@torch.no_grad()
def _fill(model: nn.Module, shards: Shards) -> None:
    """Copy the weights and buffers of a checkpoint into a model.

    Raises:
        UserError: the model lacks a tensor, or a shape differs.
    """
    targets = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    held = filter(shards.holds, dict(model.named_parameters()))
    weights = ((name, whole_weight(shards, name)) for name in held)
    for name, values in chain(shards.first.buffers.items(), weights):
        target = targets.get(name)
        if target is None or values.shape != target.shape:  # `copy_` would broadcast.
            raise _misfit(name, [*values.shape], target is not None and [*target.shape])
        target.copy_(values)


def _merge(model: nn.Module, adapters: "LoraModel") -> nn.Module:
    """Return the model with its adapters added to its weights. Embeddings and output head are no
    longer tied if one of them has an adapter or was trained as a whole.
    """
    from peft.tuners.lora import LoraLayer

    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(module, LoraLayer):  # A merge in place would also change the tied weight.
            layer = module.get_base_layer()
            layer.weight = nn.Parameter(layer.weight.detach().clone())
    merged = adapters.merge_and_unload()
    if merged.get_input_embeddings().weight is not merged.get_output_embeddings().weight:
        for config in (merged.config, merged.config.get_text_config()):  # servers read either
            config.tie_word_embeddings = False
    return merged
