"""What follows from a model's config alone: parameters, width, cost per token, longest example."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from zerotrain.config.schema import Config
from zerotrain.model.hub import first_line
from zerotrain.runtime.errors import UserError


def count_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The highest id plus one: more than the number of tokens where ids are left out."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def meta_model(model_config: PretrainedConfig, trust_remote_code: bool) -> nn.Module:
    """The model on the meta device, without memory for its weights.

    Raises:
        UserError: the config is not that of a causal language model.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                model_config, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # a model's own constructor can raise anything
        if is_multimodal(model_config) and "Unrecognized configuration class" in str(error):
            raise UserError(
                f"model.name_or_path: {model_config.model_type} is a multimodal model, and "
                "transformers has no class for it that is trained on text alone; use a text model "
                "of its family"
            ) from error
        raise UserError(
            f"model.name_or_path: not a causal language model: {first_line(error)}"
        ) from error


def is_multimodal(model_config: PretrainedConfig) -> bool:
    """Whether the language model is one part of several, e.g. beside a vision tower."""
    return text_config_of(model_config) is not model_config


def other_parts(model: nn.Module) -> list[str]:
    """Names of the modules of a multimodal model that it does not use for text, e.g. its vision
    tower; not of those within them.
    """
    if not is_multimodal(model.config):
        return []
    used = {*model.get_decoder().modules(), *model.get_output_embeddings().modules()}
    found: list[str] = []
    for name, module in model.named_modules():
        is_within = any(name.startswith(f"{other}.") for other in found)
        if not is_within and used.isdisjoint(module.modules()):
            found.append(name)
    return found


def freeze_other_parts(model: nn.Module) -> None:
    """Freeze what a multimodal model does not use for text. Without a gradient, AdamW's weight
    decay alone would change it.
    """
    if is_multimodal(model.config):
        used = [*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()]
        for parameter in set(model.parameters()).difference(used):
            parameter.requires_grad_(False)


def linear_cost(model_config: PretrainedConfig) -> int:
    """K in the cost K*L + L^2 of an example of L tokens: the cost of one token's dense layers, in
    units of attention to one token.

    The matrices of a layer, with P parameters, cost 2*P*L flops; causal attention with hidden size
    h costs 2*h*L^2 (scores and weighted sum, each over half of the square). Divided by 2*h this
    gives K = P/h, about 12*h for a GPT: 24,576 for h = 2048.
    """
    hidden, queries, keys, inner, _ = layer_widths(model_config)
    if not queries:  # no attention
        return 12 * int(hidden)
    matrices = 3 if hasattr(text_config_of(model_config), "hidden_act") else 2  # gated: a third
    return max(1, int(2 * hidden * (queries + keys) + matrices * hidden * inner) // int(hidden))


def layer_widths(model_config: PretrainedConfig) -> tuple[float, float, float, float, float]:
    """Hidden size, width of all queries, width of all keys, feed-forward width of all experts that
    a token visits, and their number. Queries and keys are 0 without attention.
    """
    text = text_config_of(model_config)
    hidden, heads = hidden_size(model_config), _size(text, "num_attention_heads") or 0
    head_dim = _size(text, "head_dim") or (hidden // heads if heads else 0)
    kv_heads = _size(text, "num_key_value_heads") or heads
    names = ("moe_intermediate_size", "intermediate_size", "n_inner")
    inner = next((size for name in names if (size := _size(text, name))), 4 * hidden)
    experts = _size(text, "num_experts_per_tok") or 1
    return hidden, heads * head_dim, kv_heads * head_dim, inner * experts, experts


def hidden_size(model_config: PretrainedConfig) -> int:
    """Hidden size of the model; 1024 if its config has none, which only affects bucket sizes."""
    return int(_size(text_config_of(model_config), "hidden_size") or 1024)


def text_config_of(model_config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that describes the language model.

    Raises:
        UserError: the config has several such parts, e.g. a music model with a text encoder.
    """
    try:
        return model_config.get_text_config()
    except ValueError as error:
        raise UserError(
            f"model.name_or_path: not a causal language model: {first_line(error)}"
        ) from error


def _size(text: PretrainedConfig, name: str) -> float | None:
    """A size of the architecture: the mean if it differs between layers, None if it is missing."""
    try:
        size = getattr(text, name, None)
    except RuntimeError:  # configs with sizes per layer refuse access to the global one
        size = [getattr(layer, name, None) for layer in text.per_layer_config]
    sizes = size if isinstance(size, (list, tuple)) else [size]  # some configs have a list
    numbers = [n for n in sizes if isinstance(n, (int, float))]
    return sum(numbers) / len(numbers) if numbers else None


def check_model_fits(
    config: Config, skeleton: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse encoders, and a vocabulary or data.max_length that is too large for the model.

    Args:
        skeleton: the model on the meta device.

    Raises:
        UserError: names the two sizes, or the model.
    """
    # An early error for models with these flags; probes.check_causal tests the behaviour itself.
    flags = {m.is_causal for m in skeleton.modules() if hasattr(m, "is_causal")}
    if getattr(skeleton.config, "is_decoder", None) is False and flags == {False}:
        raise not_causal(skeleton)
    text = text_config_of(skeleton.config)
    if (ids := count_ids(tokenizer)) > text.vocab_size:
        raise UserError(
            f"model.tokenizer: {config.tokenizer_source[0]} has {ids:,} token ids, but the model's "
            f"vocabulary has {text.vocab_size:,}; use the tokenizer that belongs to the model, or "
            "a model whose embeddings have rows for its new tokens"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < config.data.max_length:
        raise UserError(
            f"data.max_length: {config.data.max_length:,} exceeds the model's "
            f"max_position_embeddings ({positions:,})"
        )


def not_causal(model: nn.Module) -> UserError:
    """The error for a model whose tokens attend to later ones."""
    return UserError(
        f"model.name_or_path: {type(model).__name__} is not causal as it is configured: its tokens "
        "attend to the tokens that they have to predict; if it can be a decoder (BERT-like models),"
        ' set "is_decoder": true in its config.json'
    )
