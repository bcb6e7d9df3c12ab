"""Load the model. Under ZeRO-3 it is partitioned while it is built."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.integrations import HfDeepSpeedConfig
from transformers.modeling_utils import load_state_dict

from zerotrain.config.ds_config import group_sizes
from zerotrain.config.schema import ModelConfig, TrainConfig
from zerotrain.model.architecture import auto_class, read_config
from zerotrain.model.hub import (
    Base,
    describe_base,
    load_pretrained,
    weight_files,
)
from zerotrain.model.partitions import computed_part
from zerotrain.model.trained import freeze_and_adapt
from zerotrain.runtime.errors import UserError, first_of
from zerotrain.runtime.progress import print_line
from zerotrain.runtime.seeding import seed_everything

LAYER = re.compile(r"\.(\d+)\.")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """Load the model's config, which gives its architecture.

    Raises:
        UserError: it cannot be loaded, its weights are quantized, or the model has an encoder.
    """
    name = config.name_or_path
    model_config = load_pretrained(
        read_config, name, "model.name_or_path", config.trust_remote_code
    )
    if getattr(model_config, "quantization_config", None) and not config.from_config:
        raise UserError(
            f"model.name_or_path: {name} has quantized weights, which cannot be trained; use the "
            "model in 16 bits, which transformers makes of FP8 or MXFP4: load with dequantize=True "
            "in quantization_config, then save_pretrained(FOLDER, save_original_format=False)"
        )
    if getattr(model_config, "is_encoder_decoder", False):
        raise UserError(f"model.name_or_path: {name} has an encoder; use a decoder-only model")
    return model_config


def load_model(
    config: ModelConfig,
    train: TrainConfig,
    model_config: PretrainedConfig,
    ds_config: dict[str, Any],
) -> tuple[nn.Module, Base | None]:
    """Load the model in train.precision, or draw random weights from the global RNG.

    Under ZeRO-3 each parameter is partitioned as soon as it is created. transformers does so while
    an HfDeepSpeedConfig exists, and holds only a weak reference to it. At the other stages each
    rank reads or draws the weights on its own device, to spare the node's CPU memory.

    Args:
        config: the run config's section model.
        train: with a precision other than auto.

    Returns:
        The model, and the files that hold its frozen weights. None instead of files means that
        checkpoints have to hold the frozen weights.

    Raises:
        UserError: weights are missing, or do not fit the architecture.
    """
    name = config.name_or_path
    trust = config.trust_remote_code
    # deepspeed.initialize splits the matrices later. With this block transformers 5.23 would take
    # them for split already, and refuse to load them.
    hf_ds_config = HfDeepSpeedConfig({**ds_config, "tensor_parallel": {}})
    dtype = DTYPES[train.precision]
    kind = auto_class(model_config)
    options = {"dtype": dtype}
    if config.attn_implementation:  # None would replace the attention of the model's config
        options["attn_implementation"] = config.attn_implementation
    device = torch.device(get_accelerator().current_device_name())
    if config.quantization:
        options |= quantized(dtype, device)
    elif hf_ds_config.is_zero3() or group_sizes(ds_config)[0] > 1:
        device = nullcontext()  # DeepSpeed moves a rank's own partitions to the device
    if config.from_config:
        base = None
        with device:
            model = kind.from_config(model_config, trust_remote_code=trust, **options)
    else:
        with device:
            model, report = load_pretrained(
                kind.from_pretrained,
                name,
                "model.name_or_path",
                trust,
                config=model_config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused in check_report
                **options,
            )
        check_report(name, report)
        _check_files(name, model)
        if hasattr(model, "peft_config"):
            raise UserError(
                f"model.name_or_path: {name} has adapters next to its weights, which transformers "
                "loads too; save the merged model in another folder, or remove adapter_config.json"
            )
        base = None if config.lora and config.lora.changes_base else describe_base(name)
    if config.quantization:  # a checkpoint's config.json describes the export, in 16 bits
        del model.config.quantization_config
    # Drawing and loading weights may have used other numbers on each rank.
    seed_everything(train.seed)
    freeze_and_adapt(model, config)
    return model, base


def check_report(name: str, report: dict[str, Any]) -> None:
    """Refuse weights that transformers reports as missing or of a different shape, since it fills
    them with random values. Tied weights, and optional ones of the model's class, are not missing.

    Raises:
        UserError: names the first of these weights.
    """
    mismatched = [key for key, *_shapes in report["mismatched_keys"]]
    if wrong := sorted([*report["missing_keys"], *mismatched]):
        raise UserError(
            f"model.name_or_path: {name} has no weights of the right shape for {len(wrong):,} of "
            f"the model's tensors: {first_of(wrong)}; complete the files, use the config.json that "
            "belongs to them, or set model.from_config to true to train from random weights"
        )
    if unused := sorted(report["unexpected_keys"]):  # e.g. a value head; empty at ZeRO-3
        print_line(f"{name}: {len(unused):,} tensors in its files are not used: {first_of(unused)}")


def _check_files(name: str, model: nn.Module) -> None:
    """Refuse files with more layers than the model, unless its class ignores them. Refuse a
    config.json that ties the output head to the embeddings if the files have a different head:
    transformers would train that head, but under ZeRO-3 the embeddings instead, and servers take
    either. Refuse weights that are infinite or NaN.
    """
    tensors = {key: file for file in weight_files(name) for key in load_state_dict(file, "meta")}
    ignored = "|".join(model._keys_to_ignore_on_load_unexpected or ["$^"])
    used = [key for key in tensors if not re.search(ignored, key)]
    own = dict(model.named_parameters())
    # A layer's number is the first in a name, as in model.layers.30.mlp.up_proj.weight.
    stored, last = (
        max((int(n) for key in keys for n in LAYER.findall(key)[:1]), default=0)
        for keys in (used, own)
    )
    if stored > last:
        raise UserError(
            f"model.name_or_path: {name} has {stored + 1:,} layers in its files, but {last + 1:,} "
            "in its config.json; use the config.json that belongs to the weights, or what "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) makes of this folder"
        )
    for key, weight in own.items():
        if not computed_part(weight).isfinite().all():
            raise UserError(f"model.name_or_path: {name}: {key} has infinite or NaN values")
    for pair in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if not tensors.keys() >= set(pair):
            continue
        if not torch.equal(*(load_state_dict(tensors[key])[key] for key in pair)):
            raise UserError(
                f"model.name_or_path: {name}: its config.json ties {pair[0]} to {pair[1]}, but "
                'they differ in its files; set "tie_word_embeddings": false in config.json to keep '
                f"both, or remove {pair[0]} from the files"
            )


def quantized(dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
    """Return from_pretrained's options for linear layers in nf4, as in QLoRA (arXiv:2305.14314).

    The scales of their blocks are quantized too.

    Args:
        dtype: type in which the layers compute.
        device: the device that quantizes and holds the weights.
    """
    kind = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": kind, "device_map": {"": device}}


def set_end_tokens(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, trained: Sequence[int]
) -> None:
    """Put the end tokens of the training data into the model's generation config, which
    checkpoints and exports keep.

    The base model's end tokens follow if they are special tokens of this tokenizer. A config's
    default ids may be ordinary words.

    Args:
        trained: ids that end the assistant's turns.
    """
    if not trained or not model.can_generate():
        return
    generation = model.generation_config
    base = generation.eos_token_id
    base = base if isinstance(base, list) else [base]
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    ends = list(dict.fromkeys([*trained, *(token for token in base if token in special)]))
    generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    pad = tokenizer.pad_token_id
    generation.pad_token_id = ends[0] if pad is None else pad
    generation._from_model_config = False  # it now differs from config.json
    # transformers validates a changed generation config on saving. Many published ones have values
    # that it rejects (a temperature without do_sample). With this hash it counts as unchanged.
    generation._original_object_hash = hash(generation)
