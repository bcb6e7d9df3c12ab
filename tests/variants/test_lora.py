"""LoRA and frozen parameters: steps equal plain torch with peft; contents of checkpoints;
resuming.    pytest tests/variants/test_lora.py
"""

import json
import re
import shutil

import peft
import pytest
import torch
from harness.inputs import SMALL_SIZES, save_tiny_llama, strategy
from harness.runs import assert_same, checkpoints, export, plainly, stop_after_one_step
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    MixtralConfig,
    Qwen3MoeConfig,
)

from zerotrain.checkpoint.run_folder import SHARDS
from zerotrain.config.schema import LoraConfig, ModelConfig
from zerotrain.model.architecture import Counts, count_parameters
from zerotrain.model.load import quantized
from zerotrain.model.trained import skeleton_to_train
from zerotrain.runtime.errors import UserError
from zerotrain.tools.small_config import small_config

LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}
LAYERS, INNER = 4, 1024
WHOLE = 320 * 32 + LAYERS * (2 * 32 * 48 + 3 * 32 * INNER + 2 * 32) + 32
TRAINED = LAYERS * 4 * ((32 + 32) + (32 + 16) + (32 + INNER))  # r * (inputs + outputs)


@pytest.fixture(scope="module")
def base(tmp_path_factory, sample_tokenizer):
    """A folder with a tied Llama of 1.7 MB, to which LORA adds 75 kB."""
    folder = tmp_path_factory.mktemp("base")
    return save_tiny_llama(
        folder, sample_tokenizer, intermediate_size=INNER, num_hidden_layers=LAYERS
    )


@pytest.fixture
def write(tiny_config, base):
    """A function like tiny_config, for six steps with adapters."""

    def with_lora(**changes):
        defaults = {
            "model": base, "model__lora": LORA, "train__epochs": 1, "train__learning_rate": 1e-2,
            "data__micro_batch_tokens": 400, "eval__every_steps": 1000,
        }  # fmt: skip
        return tiny_config(**{**defaults, **changes})

    return with_lora


def with_peft(model, **options):
    torch.manual_seed(7)  # train.seed
    kind = {"r": 4, "lora_alpha": 8, "target_modules": LORA["target_modules"], **options}
    return peft.get_peft_model(model, peft.LoraConfig(**kind))


def assert_same_as_peft(run_folder, config, tokenizer, load=lambda model: model, **options):
    """A run, and its export, must equal a plain loop with peft.

    Args:
        load: gets the loop's model, and returns it or another.
        options: of peft's LoraConfig.
    """
    models = []

    def prepare(model):
        models.append(with_peft(load(model), **options))
        return models[0]

    assert_same(run_folder, plainly(config, tokenizer, prepare))
    folder = export(run_folder, run_folder / "hf")
    models.append(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with torch.no_grad():
        expected, merged = (model(torch.arange(40)[None]).logits for model in models)
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-4)


def assert_only_trained(checkpoint, bytes_trained):
    """A checkpoint holds trained weights and moments only, and nothing of the base model."""
    files = list((checkpoint / SHARDS).iterdir())
    assert sum(file.stat().st_size for file in files) < 4 * bytes_trained + 15_000 * len(files)


@pytest.mark.parametrize(
    "name, ranks, checkpointing, options",
    [
        ("zero1", 1, True, {"init_lora_weights": "gaussian"}),
        ("zero1", 2, False, {"init_lora_weights": "olora", "use_rslora": True}),
        ("zero2", 2, False, {"init_lora_weights": "orthogonal", "use_dora": True}),
        ("zero3", 2, True, {"init_lora_weights": "pissa", "use_dora": True}),
    ],
)
def test_lora_equals_a_plain_loop_with_peft(
    forks, write, tmp_path, sample_tokenizer, name, ranks, checkpointing, options
):
    # ZeRO-3 shall keep no weights gathered for a later use.
    keys = ("max_reuse_distance", "max_live_parameters", "prefetch_bucket_size")
    file = strategy(tmp_path, name, {f"zero_optimization.stage3_{key}": 0 for key in keys})
    config = write(
        ds_config=file, model__activation_checkpointing=checkpointing,
        model__lora={**LORA, "options": options},
    )  # fmt: skip
    module = "train"
    if name == "zero3":  # its checkpoint has the weights that PiSSA changes
        stop_after_one_step(tmp_path / "run")
        forks.finish(config, ranks=ranks)
        module = "gathered"
    forks.finish(config, ranks=ranks, module=module)
    assert_same_as_peft(tmp_path / "run", config, sample_tokenizer, **options)
    if ranks == 1:
        assert_only_trained(checkpoints(tmp_path / "run")[-1], 4 * TRAINED)
    for counted in (tmp_path / "run").glob("gathered_*.json"):
        counts = json.loads(counted.read_text())
        assert counts["after_backward"] == counts["after_a_step"] == 0, "frozen ones too"
        # A layer that recomputes its activations has all its weights for that time.
        assert counts["largest"] < counts["in_a_pass"] < counts["whole"] / LAYERS


def test_adapters_of_experts_equal_a_plain_loop(forks, write, tmp_path, sample_tokenizer):
    folder = tmp_path / "base"
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
    architecture = Qwen3MoeConfig(**SMALL_SIZES, **experts, initializer_range=0.1)
    AutoModelForCausalLM.from_config(architecture).save_pretrained(folder)
    sample_tokenizer.save_pretrained(folder)
    options = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    lora = {**LORA, "target_modules": ["q_proj"], "options": options}
    config = write(model=folder, model__lora=lora, ds_config=strategy(tmp_path, "zero3"))
    forks.finish(config, ranks=2)
    options |= {"target_modules": ["q_proj"]}
    assert_same_as_peft(tmp_path / "run", config, sample_tokenizer, **options)


def test_lora_resumes_with_other_ranks_and_stages_and_only_on_its_base(
    forks, write, tmp_path, base, plain_once
):
    config, run_folder, moved = write(), tmp_path / "run", tmp_path / "moved"
    plain = plain_once(config, with_peft)
    stop_after_one_step(run_folder)
    forks.finish(config, "--ds_config", strategy(tmp_path, "zero2"), ranks=2)
    shutil.copytree(base, moved)  # the same weights in a different folder
    flags = ("--ds_config", strategy(tmp_path, "zero3"), "--model.name_or_path", moved)
    forks.finish(config, *flags, ranks=3)
    assert_same(run_folder, plain)
    last = checkpoints(run_folder)[-1]
    assert_only_trained(last, 4 * TRAINED)

    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    shutil.copytree(base, tmp_path / "other")
    model.save_pretrained(tmp_path / "other")
    weights_only = ("--checkpoint.weights_only", "true", "--checkpoint.resume", last,
                    "--output_dir", tmp_path / "next")  # fmt: skip
    for change, named in (
        (("--model.name_or_path", tmp_path / "other"), str(moved)),
        (("--model.lora.alpha", "16"), '"alpha": 8'),
    ):
        assert named in forks.refusal(config, *weights_only, *change)
    one_step = "--train.epochs", "null", "--train.steps", "1"
    forks.finish(config, *weights_only, "--model.name_or_path", moved, *one_step)
    out = "--model.name_or_path", export(run_folder, tmp_path / "hf"), "--output_dir"
    forks.finish(config, *out, tmp_path / "new", "--model.lora.alpha", "16", *one_step)


@pytest.mark.parametrize("options", [{}, {"use_dora": True, "use_rslora": True}])
def test_adapters_of_weights_in_4_bits_equal_a_plain_loop(
    forks, write, tmp_path, base, sample_tokenizer, monkeypatch, options
):
    def in_4_bits(_model):
        in_nf4 = quantized(torch.float32, "cpu")
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **in_nf4)

    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    config = write(
        model__quantization="nf4", ds_config=strategy(tmp_path, "zero2"),
        train__precision="fp32", model__lora={**LORA, "options": options},
        train__learning_rate=2e-3,  # at 1e-2 rounding grows to 1e-5 on CPUs without AVX-512
    )  # fmt: skip
    allowed = {
        "zerotrain.training.setup.check_machine": "lambda *_: None",
        # packing for evaluation on CPUs with AVX-512
        "bitsandbytes.nn.modules.has_avx512bf16": "lambda: False",
    }
    forks.finish(config, ranks=2, module="engine_logits", patches=allowed)
    assert_same_as_peft(tmp_path / "run", config, sample_tokenizer, in_4_bits, **options)
    if not options:
        assert_only_trained(checkpoints(tmp_path / "run")[-1], 4 * TRAINED)
    assert "model.quantization: needs an NVIDIA GPU" in forks.refusal(config)


def freeze_others(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.1.mlp" in name or name == "model.norm.weight"
    return model


def test_patterns_freeze_the_others(forks, write, tmp_path, sample_tokenizer):
    """The first block is frozen. ZeRO-3 reduces a block once it has the gradient of its input. With
    activation checkpointing a gradient of zeros would not show.
    """
    config = write(
        model__lora=None, model__trainable=[r"layers\.1\.mlp", r"model\.norm"],
        train__learning_rate=1e-3, ds_config=strategy(tmp_path, "zero3"),
    )  # fmt: skip
    expected = plainly(config, sample_tokenizer, freeze_others)
    forks.finish(config, ranks=2)
    assert_same(tmp_path / "run", expected)
    assert_only_trained(checkpoints(tmp_path / "run")[-1], 4 * (3 * 32 * INNER + 32))


# --------------------------------------------------------------------------------------------------
# Without training


def skeleton(architecture, **settings):
    return skeleton_to_train(architecture, ModelConfig("", **settings))


def test_parameters_are_counted_without_weights(base):
    config = AutoConfig.from_pretrained(base)

    def count(**settings):
        return count_parameters(skeleton(config, **settings))

    assert count() == Counts(WHOLE, WHOLE)
    assert count(lora=LoraConfig(**LORA)) == Counts(TRAINED, WHOLE + TRAINED)
    assert count(trainable=["lm_head"]) == Counts(320 * 32, WHOLE), "tied: embeddings and head"
    # q, k, v, o, gate, up and down, but not the head
    linear = (32 + 32) * 2 + (32 + 16) * 2 + 3 * (32 + INNER)
    assert count(lora=LoraConfig(r=2)).trained == LAYERS * 2 * linear


@pytest.mark.parametrize("key", ["lora.target_modules", "lora.modules_to_save", "trainable"])
@pytest.mark.parametrize("name, meant", [("q_prj", "q_proj"), ("embedtokens", "embed_tokens")])
def test_names_that_the_model_does_not_have_are_one_line(base, key, name, meant):
    def name_modules(name):
        _, lora, setting = key.rpartition("lora.")
        settings = {setting: [name]}
        settings = {"lora": LoraConfig(**settings)} if lora else settings
        skeleton(AutoConfig.from_pretrained(base), **settings)

    with pytest.raises(UserError, match=rf"^model\.{key}: .* {name}; .*did you mean {meant}\?$"):
        name_modules(name)
    name_modules(meant)


def test_options_are_refused_on_the_head_and_on_small_matrices(base):
    pissa = {"init_lora_weights": "pissa"}
    for name, options in (("lm_head", {"use_dora": True}), ("lm_head", pissa), ("k_proj", pissa)):
        lora = LoraConfig(r=17, target_modules=[name], options=options)
        with pytest.raises(UserError, match=f"{name} cannot have an adapter"):
            skeleton(AutoConfig.from_pretrained(base), lora=lora)


def test_experts_and_routers_have_no_adapters():
    mixtral = MixtralConfig(**SMALL_SIZES, num_local_experts=6)
    trained = count_parameters(skeleton(mixtral, lora=LoraConfig(r=2))).trained
    assert trained == 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16)), "attention alone"
    qwen = Qwen3MoeConfig(
        **SMALL_SIZES, moe_intermediate_size=24, num_experts=6, mlp_only_layers=[0]
    )
    with pytest.raises(UserError, match=r"^model\.lora\.target_modules: .* router") as refused:
        skeleton(qwen, lora=LoraConfig(target_modules=["q_proj", "gate"]))
    layers = re.search(r"name only layers such as \[(.*)\]", str(refused.value))[1].split(", ")
    named = adapted(qwen, target_modules=layers)
    # peft would take the names of a dense layer's matrices for the experts of other layers.
    assert named == adapted(qwen) and {name.split(".")[-1] for name in named} == {*layers}


def adapted(architecture, **settings):
    """The modules that have adapters, in the order in which their weights are drawn."""
    named = skeleton(architecture, lora=LoraConfig(r=2, **settings)).named_modules()
    return [name for name, module in named if hasattr(module, "lora_A")]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "mistral"])
def test_by_default_each_matrix_of_a_layer_has_an_adapter(kind):
    layer = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = AutoConfig.for_model(kind, **SMALL_SIZES)
    assert adapted(config) == adapted(config, target_modules=layer)
    assert len(adapted(config)) == 2 * len(layer)


@pytest.mark.parametrize("kind, mixer, expected, without", [
    ("qwen3_5_text", "linear_attn", "in_proj_a in_proj_b in_proj_qkv in_proj_z out_proj", []),
    ("lfm2", "conv", "in_proj out_proj", []),
    # A kernel gets out_proj.weight, and so no adapter of it.
    ("granitemoehybrid", "mamba", "in_proj", ["out_proj"]),
    ("falcon_h1", "mamba", "in_proj", ["out_proj"]),
])  # fmt: skip
def test_mixers_have_adapters_where_kernels_use_them(kind, mixer, expected, without):
    config = small_config(AutoConfig.for_model(kind))
    if kind == "lfm2":
        config.layer_types = ["conv", "full_attention"]
    of_mixer = [name for name in adapted(config) if f".{mixer}." in name]
    assert {name.split(".")[-1] for name in of_mixer} == {*expected.split()}
    for name in without:
        with pytest.raises(UserError, match=rf"{mixer}\.{name} cannot have an adapter"):
            adapted(config, target_modules=["in_proj", name])


@pytest.mark.parametrize("kind", ["llama4_text", "phimoe", "jetmoe", "gemma4_text", "deepseek_v32"])
def test_routers_and_indexers_that_are_linear_layers_have_no_adapters(kind):
    sizes = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
    gemma = {"enable_moe_block": True, **sizes} if kind == "gemma4_text" else {}
    config = small_config(AutoConfig.for_model(kind, **gemma))
    assert adapted(config)
    assert not any(re.search("router|indexer", name) for name in adapted(config))


def test_a_vision_tower_gets_no_adapters():
    """They would be frozen, in no checkpoint, and missing when an export merges them."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    text = {**SMALL_SIZES, "head_dim": 8}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    named = dict(skeleton(config, lora=LoraConfig(4, 8)).named_parameters())
    adapters = {name for name in named if ".lora_" in name}
    assert adapters == {name for name, p in named.items() if p.requires_grad}
    assert not any("vision" in name for name in adapters)
    with pytest.raises(UserError, match="name modules of the language model"):
        skeleton(config, trainable=["vision"])
    skeleton(config, trainable=["language_model"])
