"""Load tokenizer and model, partitioning the model as it is built under ZeRO-3."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.integrations import HfDeepSpeedConfig
from transformers.utils import is_bitsandbytes_available

from zerotrain.config.schema import CHAT_TEMPLATES, Config, chat_template_file
from zerotrain.data.end_marks import fit_template
from zerotrain.model.architecture import is_multimodal
from zerotrain.model.base import Base, describe_base, processor_files, weight_files
from zerotrain.model.hub import first_line, load_pretrained
from zerotrain.model.trained import choose_trained
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.progress import print_line
from zerotrain.runtime.seeding import seed_everything

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def best_precision(device: torch.device) -> str:
    """The value of train.precision auto: bf16 on GPUs that support it, fp16 on older ones, fp32 on
    CPU.
    """
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The run's tokenizer, with model.chat_template, if given, instead of its own.

    Raises:
        UserError: tokenizer or template cannot be loaded.
    """
    name, revision = config.tokenizer_source
    tokenizer = load_pretrained(
        AutoTokenizer.from_pretrained,
        name,
        "model.tokenizer",
        revision,
        config.model.trust_remote_code,
    )
    if config.model.chat_template:
        set_chat_template(tokenizer, config.model.chat_template)
    return tokenizer


def set_chat_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give a tokenizer the chat template of a Jinja file, or of a name in data/chat_templates.

    Raises:
        UserError: it cannot be read.
    """
    file = chat_template_file(name)
    try:
        template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"model.chat_template: {name}: {error}") from error
    named = file.parent == CHAT_TEMPLATES
    tokenizer.chat_template = fit_template(template, tokenizer) if named else template


def load_model_config(config: Config) -> PretrainedConfig:
    """The model's config, which gives its architecture.

    Raises:
        UserError: it cannot be loaded, or is that of quantized weights.
    """
    name, revision = config.model.name_or_path, config.model.revision
    trust = config.model.trust_remote_code
    model_config = load_pretrained(
        AutoConfig.from_pretrained, name, "model.name_or_path", revision, trust
    )
    if getattr(model_config, "quantization_config", None) and not config.model.from_config:
        raise UserError(
            f"model.name_or_path: the weights of {name} are quantized (quantization_config in its "
            "config.json), and cannot be trained; use the model in 16 bits, or a copy that "
            "transformers has written after loading it with dequantize=True in its "
            "quantization_config"
        )
    return model_config


@dataclass(frozen=True)
class LoadedModel:
    """A model, and what its checkpoints have to say about where it came from."""

    model: nn.Module
    base: Base | None
    """The files that hold the frozen weights; None: checkpoints have to hold them."""
    processor_files: dict[str, str]
    """Those of a multimodal model, for its checkpoints."""
    hf_ds_config: HfDeepSpeedConfig
    """transformers loads and generates as ZeRO-3 needs it while this exists."""


def load_model(
    config: Config, model_config: PretrainedConfig, ds_config: dict[str, Any]
) -> LoadedModel:
    """The model in the run's precision, pretrained or randomly initialized from the global RNG.

    Under ZeRO-3 each parameter is partitioned as soon as it is created. transformers does so while
    an HfDeepSpeedConfig exists, to which it holds only a weak reference.

    Raises:
        UserError: no weights, or weights that do not fit the architecture.
    """
    name, revision = config.model.name_or_path, config.model.revision
    trust = config.model.trust_remote_code
    hf_ds_config = HfDeepSpeedConfig(ds_config)
    dtype = DTYPES[
        next((p for p in ("bf16", "fp16") if ds_config.get(p, {}).get("enabled")), "fp32")
    ]
    options: dict[str, Any] = {"dtype": dtype}
    if config.model.attn_implementation:
        options["attn_implementation"] = config.model.attn_implementation
    if config.model.quantization:
        options |= quantized(dtype, get_accelerator().current_device_name())
    try:
        if config.model.from_config:
            model = AutoModelForCausalLM.from_config(
                model_config, trust_remote_code=trust, **options
            )
        else:
            gib = sum(file.stat().st_size for file in weight_files(name, revision)) / 2**30
            print_line(f"loading {gib:,.2f} GiB of weights from {name}")  # ZeRO-3 shows no progress
            model = load_pretrained(
                AutoModelForCausalLM.from_pretrained,
                name,
                "model.name_or_path",
                revision,
                trust,
                config=model_config,
                **options,
            )
    except UserError:
        raise
    except Exception as error:  # e.g. flash_attention_2 without its package
        raise UserError(f"model.name_or_path: {name}: {first_line(error)}") from error
    if config.model.quantization:  # a checkpoint's config.json is that of what is exported
        del model.config.quantization_config
    # Drawing and loading weights may have used other numbers on each rank.
    seed_everything(config.train.seed)
    choose_trained(model, config.model)
    if config.model.from_config:
        return LoadedModel(model, None, {}, hf_ds_config)
    others = processor_files(name, revision) if is_multimodal(model_config) else {}
    return LoadedModel(model, describe_base(name, revision), others, hf_ds_config)


def check_quantization(config: Config, device: torch.device) -> None:
    """Refuse model.quantization where it cannot be used: bitsandbytes 0.50 trains on some CPUs only
    until the first evaluation, which packs the weights in another way.

    Raises:
        UserError: names what is missing.
    """
    lacks = "a GPU" if device.type != "cuda" else "the package bitsandbytes"
    if config.model.quantization and (device.type != "cuda" or not is_bitsandbytes_available()):
        raise UserError(
            f"model.quantization: {config.model.quantization} needs {lacks}; without it remove the "
            "key, to train adapters on weights in train.precision"
        )


def quantized(dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Options of from_pretrained for linear layers in nf4 on a device, in blocks whose scales are
    quantized too, as in the QLoRA paper (arXiv:2305.14314); they compute in `dtype`.
    """
    kind = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": kind, "device_map": {"": device}}


def end_tokens(tokenizer: PreTrainedTokenizerBase, trained: Sequence[int] | None) -> Sequence[int]:
    """The ids that end answers in the training data.

    Args:
        trained: what the data say; None for the tokenizer's eos.
    """
    if trained is not None:
        return trained
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def set_end_tokens(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, trained: Sequence[int] | None
) -> None:
    """Set the end tokens of the model's generation config, which checkpoints and exports keep, to
    those that the training data teach.

    The base model's end tokens follow the trained ones if they are special tokens of this
    tokenizer; ids that a config only has by default may be ordinary words.

    Args:
        trained: ids that end the assistant's turns; None for the tokenizer's eos.
    """
    trained = end_tokens(tokenizer, trained)
    if not trained or not model.can_generate():
        return
    generation = model.generation_config
    base = generation.eos_token_id
    base = base if isinstance(base, list) else [base]
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    ends = list(dict.fromkeys([*trained, *(token for token in base if token in special)]))
    generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    if generation.pad_token_id is None or not 0 <= generation.pad_token_id < len(tokenizer):
        pad = tokenizer.pad_token_id
        generation.pad_token_id = ends[0] if pad is None else pad
    generation._from_model_config = False  # it now differs from config.json
    # transformers validates a changed generation config on saving. Published ones often have values
    # that it rejects (a temperature without do_sample); with this hash it counts as unchanged.
    generation._original_object_hash = hash(generation)
