"""Model FLOPs equal torch's count.    pytest tests/model/test_flops.py"""

import copy

import numpy as np
import pytest
import torch
from harness.inputs import SMALL_SIZES
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from zerotrain.config.schema import LoraConfig, ModelConfig
from zerotrain.model.architecture import count_flops
from zerotrain.model.trained import freeze_and_adapt, skeleton_to_train
from zerotrain.tools.small_config import small_config

SIZES = {**SMALL_SIZES, "num_hidden_layers": 3}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=16, layer_types=[
        "sliding_attention", "sliding_attention", "full_attention"]),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS, num_local_experts=6),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_experts=6, head_dim=8, moe_intermediate_size=24
    ),
}  # fmt: skip
ALL = ModelConfig(name_or_path="")
EXAMPLES, LENGTH = 3, 40


def flops_of(options, architecture):
    return count_flops(skeleton_to_train(architecture, options))


def counted_by_torch(architecture, options) -> float:
    """Forward and backward with eager attention, which computes the whole square of scores."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation="eager")
    freeze_and_adapt(model, options)
    ids = torch.arange(EXAMPLES * LENGTH).view(EXAMPLES, LENGTH)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def counted_here(architecture, options) -> float:
    """The same with count_flops: the whole square of scores, and all tokens supervised."""
    flops, tokens = flops_of(options, architecture), EXAMPLES * LENGTH
    return tokens * (flops.token + flops.supervised_token + LENGTH * flops.pair)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_is_trained_as_a_whole(family):
    architecture = FAMILIES[family]
    assert counted_here(architecture, ALL) == counted_by_torch(architecture, ALL)


KINDS = ["mistral", "gpt_oss", "gemma4_text", "lfm2", "lfm3", "qwen3_5_text", "olmo_hybrid",
         "nemotron_h", "deepseek_v32"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_windows_and_layers_without_attention(kind):
    """The numbers of attention weights above 0, and of torch's operations in linear layers. Torch
    counts a convolution of each channel alone as one of all channels.
    """
    torch.manual_seed(0)
    config = small_config(AutoConfig.for_model(kind, pad_token_id=None))
    for key in ("sliding_window", "index_topk", "vocab_size_per_layer_input"):
        setattr(config, key, 16)
    config.vocab_size, config._experts_implementation = LENGTH + 1, "eager"
    flops = flops_of(ALL, copy.deepcopy(config))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.arange(LENGTH)[None] % 16
    attentions = model(ids, use_cache=False, output_attentions=True).attentions
    weights = [(a[0, 0, :, -LENGTH:] > 0).sum().item() for a in attentions if a is not None]
    counted = flops.of_examples(np.array([LENGTH]), 0) - LENGTH * flops.token
    assert counted == pytest.approx(flops.pair * sum(weights) / len(weights))
    if kind != "deepseek_v32":  # The loss has no gradient for an indexer.
        with FlopCounterMode(display=False) as counter:
            model.train()(ids, use_cache=False).logits.sum().backward()
        operations = counter.get_flop_counts()["Global"]
        linear = sum(n for name, n in operations.items() if str(name) in ("aten.mm", "aten.addmm"))
        convolved = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Conv1d))
        assert LENGTH * (flops.token + flops.supervised_token - 6 * convolved) == linear


def test_frozen_weights_have_no_gradient_of_their_own():
    """4 FLOPs for a frozen weight, 6 for a trained one."""
    architecture = FAMILIES["llama"]
    layer = flops_of(ModelConfig("", trainable=[r"layers\.1\."]), architecture)
    whole = flops_of(ALL, architecture)
    of_layer = 6 * 2 * 32 * (32 + 16) + 6 * 3 * 32 * 48  # for a trained layer
    assert whole.token == 3 * of_layer
    assert layer.token == of_layer / 6 * (4 + 6 + 4)
    adapters = flops_of(ModelConfig("", lora=LoraConfig(r=4)), architecture)
    assert 2 / 3 * whole.token < adapters.token < whole.token
