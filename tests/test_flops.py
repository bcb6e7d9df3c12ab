"""Model FLOPs against what torch counts.    pytest tests/test_flops.py"""

import copy

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from config.schema import LoraConfig, ModelConfig
from model.flops import causal_pairs, count_flops
from model.trained import choose_trained, trained_skeleton
from runtime.gpu import peak_flops_per_s

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
          "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
          "moe_intermediate_size": 24, "first_k_dense_replace": 1}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
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
    return count_flops(trained_skeleton(options, architecture)[0], architecture)


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
    return flops.of_pairs(tokens, tokens, dict.fromkeys(flops.pair, tokens * LENGTH))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_is_trained_as_a_whole(family):
    architecture = FAMILIES[family]
    assert counted_here(architecture, ALL) == counted_by_torch(architecture, ALL)


def weights_of(architecture, *names) -> int:
    model = AutoModelForCausalLM.from_config(architecture)
    return sum(model.get_parameter(f"model.layers.{name}.weight").numel() for name in names)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_frozen_weights_have_no_gradient_of_their_own(family):
    """But for what stands beside the first trained matrix: there the order of the parameters does
    not tell whether the gradient of an input is needed.
    """
    architecture, tokens = FAMILIES[family], EXAMPLES * LENGTH
    layer = ModelConfig(name_or_path="", trainable=[r"layers\.1\."])
    beside = 2 * tokens * weights_of(architecture, "1.self_attn.q_proj")  # behind a trained norm
    theirs = counted_by_torch(architecture, layer)
    assert counted_here(architecture, layer) == theirs - beside
    assert theirs < 0.7 * counted_by_torch(architecture, ALL)

    adapters = ModelConfig(name_or_path="", lora=LoraConfig(r=4))
    beside = 2 * tokens * weights_of(architecture, "0.self_attn.k_proj", "0.self_attn.v_proj")
    beside += 2 * tokens * 2 * 4 * architecture.hidden_size  # and their A
    assert counted_here(architecture, adapters) == counted_by_torch(architecture, adapters) + beside

    whole = ModelConfig(name_or_path="", lora=LoraConfig(r=4, modules_to_save=["lm_head"]))
    if not architecture.tie_word_embeddings:
        head = architecture.vocab_size * architecture.hidden_size
        more = counted_here(architecture, whole) - counted_here(architecture, adapters)
        assert more == 2 * tokens * head, "its copy, which peft keeps, is not multiplied"


def test_a_token_uses_the_adapters_of_its_own_experts():
    """peft adds those of all experts to their weights, so torch would count something else."""
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    lora = [LoraConfig(r=4, target_parameters=names) for names in ([], experts)]
    without, with_them = (
        flops_of(ModelConfig("", lora=one), FAMILIES["qwen3_moe"]).token for one in lora
    )
    visited, rank, widths = 2, 4, (32 + 2 * 24) + (24 + 32)
    assert with_them - without == 3 * 6 * visited * rank * widths


def test_the_other_parts_of_a_multimodal_model_do_not_count():
    text = FAMILIES["gemma3"]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    whole = Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    assert flops_of(ALL, whole) == flops_of(ALL, text)


def test_pairs_are_those_that_a_causal_window_allows():
    lengths = np.array([1, 5, 16, 17, 40], dtype=np.int32)
    for window in (None, 1, 16, 100):
        i, j = np.indices((40, 40))
        seen = (j <= i) & (i - j < (window or 1000))
        expected = sum(int(seen[:n, :n].sum()) for n in lengths)
        assert causal_pairs(lengths, window) == expected
    flops = flops_of(ALL, FAMILIES["gemma3"])
    assert set(flops.pair) == {16, None} and flops.pair[16] == 2 * flops.pair[None]
    pairs = {w: causal_pairs(lengths, w) for w in (16, None)}
    assert flops.of_examples(lengths, 7) == flops.of_pairs(79, 7, pairs)


def test_published_sizes():
    """6 FLOPs per parameter but those of the input embedding and the norms."""
    llama_8b = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    flops = flops_of(ALL, llama_8b)
    parameters, norms, embedding = 8_030_261_248, 65 * 4096, 128256 * 4096
    assert flops.token + flops.supervised_token == 6 * (parameters - norms - embedding)
    assert flops.pair == {None: 12 * 32 * 32 * 128}
    deep = copy.deepcopy(llama_8b)
    deep.sliding_window = 512
    assert set(flops_of(ALL, deep).pair) == {512}


NAMES = {
    "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989,
    "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A10G": 70, "NVIDIA A10": 125, "NVIDIA L40S": 362,
    "Tesla V100-SXM2-16GB": 125, "NVIDIA B200": 2250, "AMD Instinct MI300X": 1307,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None, "NVIDIA GeForce GTX 1080": None,
}  # fmt: skip


def test_the_peak_is_found_by_the_device_name():
    assert {name: peak_flops_per_s(name) for name in NAMES} == {
        name: None if peak is None else peak * 1e12 for name, peak in NAMES.items()
    }
