"""Models that are refused: causality, sizes, output heads.    pytest tests/model/test_model.py"""

import copy
import json

import pytest
import torch
from harness.inputs import SMALL_SIZES, read_config
from torch._dynamo.utils import counters
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    RobertaConfig,
    RoFormerConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from zerotrain.config.schema import LoraConfig, ModelConfig
from zerotrain.model.architecture import (
    auto_class,
    check_model_fits,
    count_flops,
    meta_model,
)
from zerotrain.model.load import load_model_config
from zerotrain.model.packing import resolve_batching
from zerotrain.model.probes import check_answers, check_causal, check_end_tokens
from zerotrain.model.trained import freeze_and_adapt
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.machine import Machine
from zerotrain.tools.small_config import small_config
from zerotrain.training.engine import change_blocks

torch.set_num_threads(1)
SIZES = {**SMALL_SIZES, "max_position_embeddings": 64}


# --------------------------------------------------------------------------------------------------
# Causality

BERT = {**SMALL_SIZES, "max_position_embeddings": 300}
CAUSAL = {
    "llama": LlamaConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "mamba": MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
}  # fmt: skip
SEES_AHEAD = {
    "bert": BertConfig(**BERT),
    "roberta": RobertaConfig(**BERT),
    "roformer": RoFormerConfig(**BERT),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*CAUSAL, *SEES_AHEAD])
def test_a_model_that_sees_the_next_tokens_is_refused(name, dtype):
    torch.manual_seed(0)
    architecture = (CAUSAL | SEES_AHEAD)[name]
    model = AutoModelForCausalLM.from_config(architecture, dtype=dtype).train()
    if name in CAUSAL:
        check_causal(model, range(5, 64))
    else:
        with pytest.raises(UserError, match=rf"{type(model).__name__} is not causal .*is_decoder"):
            check_causal(model, range(5, 64))
        decoder = type(architecture)(**BERT, is_decoder=True)
        check_causal(AutoModelForCausalLM.from_config(decoder, dtype=dtype), range(5, 64))
    assert model.training


def test_the_checks_of_a_compiled_model_compile_nothing():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    change_blocks(model, ModelConfig("x", compile=True), 0)
    counters["frames"].clear()
    check_causal(model, range(5, 64))
    assert not counters["frames"]
    with torch.compiler.set_stance("default", force_backend="eager"):
        model(torch.zeros(1, 8, dtype=torch.int64))
    assert counters["frames"]["ok"]


def test_the_attention_of_a_models_config_is_kept():
    skeleton = meta_model(LlamaConfig(**SIZES, attn_implementation="eager"), False)
    assert skeleton.config._attn_implementation == "eager"


def test_a_config_json_gets_no_code_of_the_hub_and_no_million_layers(tmp_path):
    """Qwen3's config has a list of layers, and the vision tower's number has another name."""
    hub = LlamaConfig(**SIZES, attn_implementation="kernels-community/flash-attn")
    missing = LlamaConfig(**SIZES, attn_implementation="flash_attention_2")
    for config in (hub, missing):
        with pytest.raises(UserError, match=r"set model\.attn_implementation to sdpa"):
            meta_model(copy.deepcopy(config), False)
        assert meta_model(config, False, "sdpa").config._attn_implementation == "sdpa"
    file = tmp_path / "config.json"
    for number in (2**63, 10**7):
        for config in (
            {"model_type": "qwen3", "num_hidden_layers": number},
            {"model_type": "gpt2", "n_layer": number},
            {"model_type": "qwen2_5_vl", "vision_config": {"depth": number}},
        ):
            file.write_text(json.dumps(config))
            with pytest.raises(UserError, match=f"is {number:,}"):
                load_model_config(ModelConfig(str(tmp_path)))


def test_a_frozen_head_that_cannot_tell_the_end_of_answers_is_refused(sample_tokenizer):
    end = sample_tokenizer.eos_token_id
    head_too = ["embed_tokens", "lm_head"]
    for settings in (
        {}, {"lora": LoraConfig(modules_to_save=head_too)}, {"trainable": head_too},
    ):  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
        head = model.get_output_embeddings().requires_grad_(False)
        check_end_tokens(model, sample_tokenizer, [end])
        head.weight[7] = head.weight[end]
        with pytest.raises(
            UserError, match=r"of id 7: .*lora\.modules_to_save or model\.trainable"
        ):
            check_end_tokens(model, sample_tokenizer, [end])
        head.requires_grad_(True)
        freeze_and_adapt(model, ModelConfig("", **settings))
        check_end_tokens(model, sample_tokenizer, [end])


def test_a_model_that_cannot_write_answers_is_refused_before_training():
    """The cache of BART's decoder has as many layers as its encoder."""
    sizes = {"vocab_size": 64, "d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 32}
    heads = {"encoder_layers": 1, "decoder_attention_heads": 4}
    bart = BartConfig(**sizes, **heads, is_encoder_decoder=False)
    with pytest.raises(UserError, match=r"eval\.generate: BartForCausalLM"):
        check_answers(AutoModelForCausalLM.from_config(bart), range(5, 64))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).train()
    check_answers(model, range(5, 64))
    assert model.training


# --------------------------------------------------------------------------------------------------
# Families

NONE = "not a causal language model"
# Chameleon and Idefics have images inside their language model; the others have no output head.
REFUSED = dict.fromkeys(
    ["musicgen", "resnet", "chameleon", "idefics", "qwen2_5_omni", "blip", "blt"], NONE
)
HARD = [*REFUSED, "gemma4", "gemma4_text", "gemma4_unified_text", "dots3_note_text", "gemma3n_text",
        "openelm", "mamba", "bloom", "xlnet", "deepseek_v3", "falcon_h1"]  # fmt: skip


@pytest.mark.parametrize("family", [f for f in HARD if f in CONFIG_MAPPING_NAMES])
def test_every_family_has_sizes_or_one_line(family, tiny_config, sample_tokenizer):
    """UserError is the only exception, whatever attributes a config has."""
    architecture = AutoConfig.for_model(family)
    config = read_config(tiny_config(data__max_length=64))
    try:
        skeleton = meta_model(architecture, False)
        assert count_flops(skeleton).linear_cost > 0
        check_model_fits(skeleton, sample_tokenizer, 64)
        _, why = resolve_batching(config, skeleton, Machine(1, 1))
        assert why
    except UserError as error:
        assert REFUSED[family] in str(error)
    else:
        assert family not in REFUSED


OUTER = """
    aya_vision deepseek_vl gemma3 glm4v granite_speech idefics3 internvl kimi_k25 llava mistral3
    qwen2_5_vl qwen2_audio qwen3_vl smolvlm voxtral
"""
"""Models with vision or audio around a language model."""


@pytest.mark.parametrize("kind", OUTER.split())
def test_exactly_the_weights_that_text_uses_are_trained(kind):
    config = small_config(AutoConfig.for_model(kind))
    text = config.get_text_config()
    text.vocab_size, text.pad_token_id = 320, None
    if kind in ("glm4v", "qwen2_5_vl"):
        text.rope_parameters["mrope_section"] = [2, 1, 1]
    torch.manual_seed(0)
    model = auto_class(config).from_config(config)
    freeze_and_adapt(model, ModelConfig(""))
    check_causal(model, range(5, 320))
    model(input_ids=torch.arange(5, 29)[None], use_cache=False).logits.logsumexp(
        -1
    ).sum().backward()
    named = dict(model.named_parameters())
    trained = {name for name, p in named.items() if p.requires_grad}
    assert trained == {name for name, p in named.items() if p.grad is not None} < named.keys()


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(
    tiny_config, sample_tokenizer
):
    larger = copy.deepcopy(sample_tokenizer)
    larger.add_tokens([f"<|{i}|>" for i in range(400 - len(larger))])
    architecture = load_model_config(read_config(tiny_config()).model)
    skeleton = meta_model(architecture, False)
    with pytest.raises(UserError, match=r"has 400 token ids, .* 320; .*rows for its new tokens"):
        check_model_fits(skeleton, larger, 64)
    check_model_fits(skeleton, sample_tokenizer, 64)
    architecture.vocab_size = 400
    check_model_fits(meta_model(architecture, False), larger, 64)


def test_experts_that_are_modules_are_refused(sample_tokenizer):
    skeleton = meta_model(MixtralConfig(**SIZES, num_local_experts=2), False)
    check_model_fits(skeleton, sample_tokenizer, 64)
    skeleton.model.layers[0].mlp.experts = torch.nn.ModuleList()
    with pytest.raises(UserError, match="use a model whose experts are packed"):
        check_model_fits(skeleton, sample_tokenizer, 64)


def test_blocks_that_cannot_be_changed_are_refused():
    model = meta_model(AutoConfig.for_model("ctrl"), False)
    for setting in ("compile", "activation_checkpointing"):
        with pytest.raises(UserError, match=f"model.{setting}: CTRLLMHeadModel"):
            change_blocks(model, ModelConfig("", **{setting: True}), 2)
    change_blocks(model, ModelConfig(""), 2)
