"""Facts from a model's config alone: the model without weights, whether it can be split, and its
cost per token.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from zerotrain.config.ds_config import offload_devices, secondary_ranks, zero_stage
from zerotrain.config.schema import MAX_INT, Config
from zerotrain.data.plan import Windows, squares
from zerotrain.model.hub import summarize
from zerotrain.runtime.errors import UserError

NOT_ARCHITECTURE = """
    _name_or_path architectures auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id
    id2label label2id output_attentions output_hidden_states problem_type return_dict torch_dtype
    transformers_version use_cache
"""
"""Keys of a config.json that do not change what is trained."""
OWN_ATTENTION = re.compile(r"eager|sdpa|flex_attention|flash_attention_\d")
"""Attention that a config.json may ask for. Other names make transformers run code of the hub."""
LAYER_COUNTS = ("layers", "layer", "depth")
"""How keys of a config.json end that are numbers of layers."""
MAX_LAYERS = 1000
"""A hostile number would make transformers build layers for minutes."""


class Counts(NamedTuple):
    """Numbers of a model's parameters, including adapters."""

    trained: int
    total: int


def describe_config(config: PretrainedConfig | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return what a model's config says of its architecture, in values of JSON types by key. The
    keys of a config in it, such as text_config, come after its own key and a dot.
    """
    values = config if isinstance(config, dict) else json.loads(config.to_json_string(False))
    found = {}
    for key, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            found |= describe_config(value, f"{prefix}{key}.")
        elif key not in NOT_ARCHITECTURE.split():
            found[prefix + key] = value
    return found


def count_parameters(model: nn.Module) -> Counts:
    """Count a model's parameters."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Counts(trained, sum(p.numel() for p in model.parameters()))


def auto_class(model_config: PretrainedConfig) -> type:
    """Return the class of transformers that makes a model from its config. If there is one for text
    alone (Qwen3.5), it leaves other parts out. Otherwise the model has them, e.g. a vision tower,
    next to its language model. Models that have them inside (Chameleon) are not supported.
    """
    kind = type(model_config)
    is_text = kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind not in MODEL_FOR_MULTIMODAL_LM_MAPPING
    is_mixed = model_config.sub_configs and not is_multimodal(model_config)
    return AutoModelForCausalLM if is_text or is_mixed else AutoModelForMultimodalLM


def meta_model(
    model_config: PretrainedConfig, trust_remote_code: bool, attention: str | None = None
) -> nn.Module:
    """Return the model on the meta device, where weights take no memory.

    Args:
        model_config: its tie_word_embeddings is corrected.
        attention: model.attn_implementation.

    Raises:
        UserError: the config does not describe one causal language model (a music model has a text
            encoder, too), or the attention is unknown or not installed.
    """
    # None would replace the attention that the model's config asks for.
    options = {"attn_implementation": attention} if attention else {}
    own = None if attention else _own_attention(model_config)
    try:
        text = model_config.get_text_config()
        if not hasattr(text, "num_hidden_layers"):
            raise ValueError("its config does not say how many layers it has")
        # Some outer configs (Mistral Small 3, Kimi K2.5) tie the output head to the embeddings by
        # default, although the head is separate. load_model gets the same object.
        tie = "tie_word_embeddings"
        if getattr(type(model_config), tie, False) and not getattr(text, tie, True):
            model_config.tie_word_embeddings = False
        with torch.device("meta"):
            model = auto_class(model_config).from_config(
                model_config, trust_remote_code=trust_remote_code, **options
            )
        if model.get_output_embeddings() is None:
            raise ValueError("it has no output head for text; use the part of it that has one")
        return model
    except Exception as error:  # a model's own constructor can raise anything
        which = f" with model.attn_implementation {attention}" if attention else ""
        if own:
            which = f" with its config.json's {own} (set model.attn_implementation to sdpa)"
        raise UserError(
            f"model.name_or_path: not a causal language model{which}: {summarize(error)}"
        ) from error


def _own_attention(model_config: PretrainedConfig) -> str | None:
    """Return the attention that a config.json asks for, if it does.

    Raises:
        UserError: transformers would load it from the hub, and run its code.
    """
    found = None
    for part in (model_config, *vars(model_config).values()):
        own = part._attn_implementation if isinstance(part, PretrainedConfig) else None
        if own and not OWN_ATTENTION.fullmatch(own):
            raise UserError(
                f"model.name_or_path: its config.json asks for the attention {own}, code of the "
                "hub; set model.attn_implementation to sdpa"
            )
        found = found or own
    return found


def read_config(name: str, **options: Any) -> PretrainedConfig:
    """Load a model's config as AutoConfig does, which would count layers one by one.

    Raises:
        ValueError: it has more than MAX_LAYERS layers.
    """
    _check_layers(PretrainedConfig.get_config_dict(name, **options)[0])
    return AutoConfig.from_pretrained(name, **options)


def _check_layers(values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _check_layers(value)
        elif key.endswith(LAYER_COUNTS) and isinstance(value, int) and value > MAX_LAYERS:
            raise ValueError(f"its {key} is {value:,}, and at most {MAX_LAYERS:,} are supported")


def is_multimodal(model_config: PretrainedConfig) -> bool:
    """Return whether the model has other parts than its language model, e.g. a vision tower."""
    return model_config.get_text_config() is not model_config


def text_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a model uses for text, so not a vision tower, for example."""
    if not is_multimodal(model.config):
        return [*model.modules()]
    return [*model.get_decoder().modules(), *model.get_output_embeddings().modules()]


def check_model_fits(
    skeleton: nn.Module, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> None:
    """Refuse a model that cannot be trained on this tokenizer and these lengths.

    Its vocabulary or its number of positions may be too small. Its experts may be modules, as in
    some code that comes with models: then ranks choose different experts, but all have to gather
    and reduce the same parameters. transformers packs a layer's experts into three-dimensional
    parameters.

    Args:
        skeleton: the model on the meta device.
        max_length: data.max_length.

    Raises:
        UserError: names the two sizes, or the module.
    """
    text = skeleton.config.get_text_config()
    # A tokenizer that skips ids has more ids than tokens.
    ids = max(tokenizer.get_vocab().values(), default=-1) + 1
    if ids > text.vocab_size:
        raise UserError(
            f"model.tokenizer: {tokenizer.name_or_path} has {ids:,} token ids, but the model's "
            f"vocabulary has {text.vocab_size:,}; use the tokenizer that belongs to the model, or "
            "a model whose embeddings have rows for its new tokens"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < max_length:
        raise UserError(
            f"data.max_length: {max_length:,} exceeds the model's "
            f"max_position_embeddings ({positions:,}); set it to at most {positions}"
        )
    for module in skeleton.modules():
        if isinstance(getattr(module, "experts", None), nn.ModuleList):
            raise UserError(
                f"model.name_or_path: each expert of {type(module).__name__} is a module, which "
                "ZeRO trains wrongly; use a model whose experts are packed, as in transformers"
            )


# --------------------------------------------------------------------------------------------------
# Tensor parallelism

# DeepSpeed's AutoTP splits a model by transformers' plan for it. Version 0.19.8 also splits models
# that it then runs or trains wrongly: Apertus, whose activations have parameters, Doge and Youtu.
SUPPORTED_TYPES = """
    arcee cohere cohere2 cwm ernie4_5 exaone4 gemma gemma2 gemma3_text granite helium jais2 llama
    ministral ministral3 mistral nanochat nemotron olmo phi qwen2 qwen3 qwen3_5_text seed_oss
    smollm3 starcoder2 vaultgemma
"""
"""Values of model_type that may be split. A test compares a split model of each type with the
whole one.
"""


def check_tensor_parallel(
    config: Config, ds_config: dict[str, Any], skeleton: nn.Module, counts: Counts, size: int
) -> None:
    """Refuse a run whose split model would fail, or would train differently from the whole one.

    Args:
        skeleton: the model on the meta device.
        size: ranks of a tensor-parallel group.

    Raises:
        UserError: says why, and what to change.
    """
    if size == 1:
        return
    name = type(skeleton).__name__
    if zero_stage(ds_config) == 0:
        problem = "is not supported at ZeRO stage 0; set the stage to 1"
    elif config.model.compile:
        problem = "is not supported together with model.compile; remove one of them"
    elif secondary_ranks(ds_config) > 1:
        problem = "is not supported together with zero_hpz_partition_size; remove one of them"
    elif "nvme" in offload_devices(ds_config).values():
        problem = "is not supported together with offload to nvme; remove one of them"
    elif counts.trained < counts.total:
        problem = "needs all weights to be trained; remove it, or model.lora and model.trainable"
    elif skeleton.config.model_type not in SUPPORTED_TYPES.split():
        problem = f"has not been tried with {name}; remove it"
    elif not heads_divide(skeleton, size):
        problem = f"does not divide the heads of keys and values of {name}; use a size that does"
    else:
        return
    raise UserError(f"{config.ds_config}: tensor_parallel.autotp_size {size} {problem}")


# --------------------------------------------------------------------------------------------------
# Cost


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations (FLOPs) of a model, forward and backward.

    They are the "model FLOPs" of PaLM (arXiv:2204.02311, appendix B): the mathematics needs them
    on any hardware. A weight of a matrix costs a token 2 forward, 2 for the gradient of its input,
    and 2 for its own gradient if it is trained: 6 if trained, 4 if frozen. A token multiplies
    num_experts_per_tok / num_experts of the experts' weights. The output head counts for supervised
    tokens only. Causal attention counts 12 x the width of all queries per layer and pair of a token
    and itself or an earlier token within the layer's window. A chunk counts as a window of its
    size; so do the tokens that an indexer chooses. Recomputed activations count once. Padding,
    look-ups, norms, activation functions, an indexer's scores, the recurrences of linear attention
    and Mamba, and the optimizer do not count.
    """

    token: float
    """FLOPs of a token in all matrices but the output head."""
    supervised_token: float
    """FLOPs of the output head for a token that is a target of the loss."""
    pair: float
    """FLOPs of attention for a pair of a token and itself or an earlier token, in all layers."""
    windows: Windows
    """The share of `pair` that the layers with each window have."""
    linear_cost: int
    """K in the cost K*L + L^2 of an example of L tokens: the cost of one token's dense layers, in
    units of attention to one token.

    Matrices with P parameters for each layer with attention cost 2*P*L FLOPs. Causal attention with
    hidden size h costs 2*h*L^2 (scores and weighted sum, each over half of the square). Dividing
    both by 2*h gives K = P/h, about 12*h for a GPT: 24,576 for h = 2048.
    """

    def of_examples(self, lengths: np.ndarray, supervised_tokens: float) -> float:
        """Return the FLOPs for examples.

        Args:
            lengths: tokens of each example, int [examples].
            supervised_tokens: supervised tokens of all of them.
        """
        length = lengths.astype(np.float64)
        pairs = (squares(length, self.windows) + length) / 2
        of_tokens = self.token * length + self.pair * pairs
        return of_tokens.sum() + self.supervised_token * supervised_tokens


def sizes_of(text: PretrainedConfig, name: str) -> list[float]:
    """Return each layer's value of a name, which may be several; empty if the config has none."""
    sizes = [getattr(layer, name, None) for layer in text.per_layer_config]
    return [n for n in np.ravel(sizes).tolist() if isinstance(n, (int, float))]


def heads_divide(skeleton: nn.Module, ranks: int) -> bool:
    """Return whether the heads of keys and values can be divided equally among ranks."""
    text = skeleton.config.get_text_config()
    heads = sizes_of(text, "num_key_value_heads") or sizes_of(text, "num_attention_heads")
    if getattr(text, "multi_query", False):
        heads = [1]
    return all(n % ranks == 0 for n in heads)


WITHOUT_ATTENTION = ("linear_attention", "conv", "moe", "mlp")
"""Values of layer_types."""
WINDOWS = {
    "sliding_attention": "sliding_window", "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size", "indexed_attention": "index_topk",
}  # fmt: skip
"""Value of layer_types -> key of the config with the number of tokens that a token attends to."""


def count_flops(skeleton: nn.Module) -> ModelFlops:
    """Return the FLOPs of a model as it is trained.

    Args:
        skeleton: the model on the meta device, with requires_grad as in training.
    """
    text = skeleton.config.get_text_config()
    hidden = hidden_size(skeleton)
    # The layers of types without layer_types have a window if the config has one.
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    attending, windows = 0, Counter()
    for kind, layer in zip(kinds, text.per_layer_config, strict=True):
        if kind not in WITHOUT_ATTENTION:
            attending += 1
            window = getattr(layer, WINDOWS.get(kind, ""), None) or MAX_INT
            heads = getattr(layer, "num_attention_heads", 1)
            size = getattr(layer, "head_dim", None) or hidden / heads
            # Queries may be wider than values. In DeepSeek's configs head_dim is something else.
            both = (getattr(layer, name, None) or size for name in ("qk_head_dim", "v_head_dim"))
            windows[window] += heads * sum(both) / 2
    of_head = set(skeleton.get_output_embeddings().modules())
    body = [m for m in text_modules(skeleton) if m not in of_head]
    in_body, token = _multiplied_weights(body, text)
    width = windows.total()
    return ModelFlops(
        token=token,
        supervised_token=_multiplied_weights(of_head, text)[1],
        pair=12 * width,
        windows=tuple((window, n / width) for window, n in windows.items()),
        linear_cost=max(1, int(in_body) // (max(1, attending) * hidden)),
    )


def hidden_size(skeleton: nn.Module) -> int:
    """Return the width of the language model's input embeddings."""
    return skeleton.get_input_embeddings().weight.shape[-1]


def _multiplied_weights(
    modules: Iterable[nn.Module], text: PretrainedConfig
) -> tuple[float, float]:
    """Count the weights that a token is multiplied with, and the FLOPs for it."""
    # The latter is Gemma 4's name.
    active, *_ = *sizes_of(text, "num_experts_per_tok"), *sizes_of(text, "top_k_experts"), 1
    total = flops = 0.0
    for module in modules:
        own = list(module.parameters(recurse=False))
        # [experts, rows, columns], not [channels, 1, size] of a convolution
        is_packed = any(p.dim() == 3 and p.shape[1] > 1 for p in own)
        for p in own:
            # Look-ups, norms, biases and the biases of packed experts multiply nothing.
            if isinstance(module, nn.Embedding) or p.dim() < (3 if is_packed else 2):
                continue
            weights = p.numel() * (active / len(p) if is_packed else 1)
            total += weights
            flops += weights * (4 + 2 * p.requires_grad)
    return total, flops
