"""Model FLOPs against what torch counts.    pytest tests/test_flops.py"""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from zerotrain.config.schema import LoraConfig, ModelConfig
from zerotrain.model.architecture import meta_model
from zerotrain.model.flops import causal_pairs, count_flops
from zerotrain.model.trained import choose_trained

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
          "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
          "moe_intermediate_size": 24, "first_k_dense_replace": 1}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=16, layer_types=[
        "sliding_attention", "sliding_attention", "full_attention"]),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS, num_local_experts=6),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_experts=6, head_dim=8, moe_intermediate_size=24
    ),
    "deepseek_v3": DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4}, **EXPERTS, **LATENT),
}  # fmt: skip
ALL = ModelConfig(name_or_path="")
EXAMPLES, LENGTH = 3, 40


def flops_of(options, architecture):
    skeleton = meta_model(architecture, False)
    with torch.device("meta"):
        choose_trained(skeleton, options)
    return count_flops(skeleton, architecture)


def counted_by_torch(architecture, options) -> float:
    """Forward and backward with eager attention, which computes the whole square of scores."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation="eager")
    choose_trained(model, options)
    ids = torch.arange(EXAMPLES * LENGTH).view(EXAMPLES, LENGTH)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def counted_here(architecture, options) -> float:
    """With the whole square too, and all tokens supervised."""
    flops, tokens = flops_of(options, architecture), EXAMPLES * LENGTH
    return tokens * (flops.token + flops.supervised_token + LENGTH * sum(flops.pair.values()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_is_trained_as_a_whole(family):
    architecture = FAMILIES[family]
    assert counted_here(architecture, ALL) == counted_by_torch(architecture, ALL)


def test_frozen_weights_have_no_gradient_of_their_own():
    """4 FLOPs for a frozen weight behind something trained, 2 before that."""
    architecture = FAMILIES["llama"]
    layer = flops_of(ModelConfig("", trainable=[r"layers\.1\."]), architecture)
    whole = flops_of(ALL, architecture)
    of_layer = 6 * 2 * 32 * (32 + 16) + 6 * 3 * 32 * 48  # whole; of three layers
    assert whole.token == 3 * of_layer
    first = 2 * 32 * 32  # the first query's input needs no gradient
    assert layer.token == of_layer * (1 / 3 + 1 + 2 / 3) - first
    adapters = flops_of(ModelConfig("", lora=LoraConfig(r=4)), architecture)
    assert 2 / 3 * whole.token < adapters.token < whole.token


def test_pairs_are_those_that_a_causal_window_allows():
    lengths = np.array([1, 5, 16, 17, 40], dtype=np.int32)
    for window in (None, 1, 16, 100):
        i, j = np.indices((40, 40))
        seen = (j <= i) & (i - j < (window or 1000))
        expected = sum(int(seen[:n, :n].sum()) for n in lengths)
        assert causal_pairs(lengths, window) == expected
