"""LoRA and frozen parameters: the same steps as plain torch with peft, under every ZeRO stage; what
checkpoints hold; resuming; exports.    pytest tests/test_lora.py
"""

import json
import re
import shutil
from types import SimpleNamespace

import bitsandbytes
import numpy as np
import peft
import pytest
import torch
import yaml
from conftest import REPO, determined, read_metrics, save_tiny_llama, strategy
from engine_logits import TOKENS
from plain_loop import train_plainly
from test_add_tokens import TEXT, VISION
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from checkpoint.export import export_adapter, export_checkpoint
from checkpoint.merge import insert_adapters
from checkpoint.run_folder import list_complete
from checkpoint.shards import Shards
from config.parse import dump_config, parse_command_line
from config.schema import LoraConfig, ModelConfig
from model.base import describe_base
from model.load import check_quantization, load_model_config, quantized
from model.memory import estimate_memory
from model.trained import Counts, adapted_parameters, trained_skeleton
from model.weights import check_weights
from runtime.errors import UserError

LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}
LAYERS, INNER = 4, 1024
WHOLE = 320 * 32 + LAYERS * (2 * 32 * 48 + 3 * 32 * INNER + 2 * 32) + 32
TRAINED = LAYERS * 4 * ((32 + 32) + (32 + 16) + (32 + INNER))  # r * (inputs + outputs)
PATTERNS = [r"layers\.1\.mlp", r"norm\.weight$"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, sample_tokenizer):
    """A folder with a tied Llama of 1.7 MB, to which LORA adds 75 kB."""
    folder = tmp_path_factory.mktemp("base")
    return save_tiny_llama(
        folder, sample_tokenizer, dropout=0.0, intermediate_size=INNER, layers=LAYERS
    )


@pytest.fixture(scope="module")
def plain():
    """The reference runs, once for all layouts."""
    return {}


@pytest.fixture
def write(tiny_config, base):
    """tiny_config with adapters: six steps."""

    def with_lora(**changes):
        defaults = {
            "model": base, "model__lora": LORA, "train__epochs": 1, "train__learning_rate": 1e-2,
            "data__micro_batch_tokens": 400,
        }  # fmt: skip
        return tiny_config(**{**defaults, **changes})

    return with_lora


def with_peft(model):
    torch.manual_seed(7)  # train.seed
    kind = peft.LoraConfig(r=4, lora_alpha=8, target_modules=LORA["target_modules"])
    return peft.get_peft_model(model, kind)


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, use_cache=False).logits


def exported(checkpoint, out, **options):
    """The logits of the exported checkpoint, as a stranger would load it."""
    export_checkpoint(checkpoint, out, **options)
    return logits_of(AutoModelForCausalLM.from_pretrained(out))


def last_checkpoint(run_folder):
    return list_complete(run_folder / "checkpoints")[-1]


def assert_equal_to(expected, run_folder, rtol=1e-5):
    losses, norms, _, (before, after), _ = expected
    steps = read_metrics(run_folder)
    np.testing.assert_allclose([s["loss"] for s in steps], losses, rtol=rtol)
    np.testing.assert_allclose([s["grad_norm"] for s in steps], norms, rtol=rtol)
    evals = [e["eval_loss"] for e in read_metrics(run_folder, "eval")]
    np.testing.assert_allclose(evals[0], before, rtol=rtol)
    np.testing.assert_allclose(evals[-1], after, rtol=rtol)


def assert_only_trained(checkpoint, bytes_trained):
    """Nothing of the base model: fp32 weights and moments, and at stages 0 to 2 the weights."""
    files = list((checkpoint / "deepspeed").iterdir())
    assert sum(file.stat().st_size for file in files) < 4 * bytes_trained + 15_000 * len(files)
    assert (checkpoint / "model" / "config.json").is_file()


# --------------------------------------------------------------------------------------------------
# LoRA


@pytest.mark.parametrize(
    "name, ranks, checkpointing",
    [
        ("zero0", 2, False),
        ("zero1", 1, True),
        ("zero2", 2, False),
        ("zero3", 2, True),
        ("zero2_offload", 1, True),
        ("zero3_offload", 2, False),
    ],
)
def test_lora_equals_a_plain_loop_with_peft(
    forks, write, tmp_path, base, sample_tokenizer, plain, name, ranks, checkpointing
):
    changes = {}
    if name == "zero3":  # so that nothing stays gathered because it will be needed again
        keys = ("max_reuse_distance", "max_live_parameters", "prefetch_bucket_size")
        changes = {f"stage3_{key}": 0 for key in keys}
    file = strategy(tmp_path, name)
    block = json.loads(file.read_text())
    block["zero_optimization"] |= changes
    if name == "zero2_offload" and shutil.which("g++"):  # DeepSpeed's CPU Adam
        del block["optimizer"]["params"]["torch_adam"]
    file.write_text(json.dumps(block))
    config = write(ds_config=str(file), model__activation_checkpointing=checkpointing)
    if "lora" not in plain:
        plain["lora"] = train_plainly(config, sample_tokenizer, with_peft)
    module = "gathered" if name == "zero3" else "engine_logits"
    finished = forks.train(config, ranks=ranks, module=module)
    assert finished.code == 0, finished.output
    assert_equal_to(plain["lora"], tmp_path / "run")
    proof = re.search(r"(\d+) tensors on \d ranks equal .* files \(.*\)$", finished.output, re.M)
    assert int(proof[1]) == 2 + 9 * LAYERS, finished.output
    share = f"trained        {TRAINED:,} of {WHOLE + TRAINED:,} parameters (4.30%): LoRA of rank 4"
    assert share in finished.output, finished.output
    checkpoint = last_checkpoint(tmp_path / "run")
    assert_only_trained(checkpoint, 4 * TRAINED)

    if module == "gathered":
        for file in (tmp_path / "run").glob("gathered_*.json"):
            counts = json.loads(file.read_text())
            assert counts["after_backward"] == counts["after_a_step"] == 0, "frozen ones too"
            # a layer whose activations are recomputed has all its weights for that time
            assert counts["largest"] < counts["in_a_pass"] < counts["whole"] / LAYERS
        return
    trained = torch.load(tmp_path / "run" / "logits.pt")
    merged = exported(checkpoint, tmp_path / "merged")
    torch.testing.assert_close(merged, trained, rtol=0, atol=1e-5)
    export_adapter(checkpoint, tmp_path / "adapter")
    files = {file.name: file.stat().st_size for file in (tmp_path / "adapter").iterdir()}
    assert files["adapter_model.safetensors"] < 4 * TRAINED + 6000 and "config.json" not in files
    model = AutoModelForCausalLM.from_pretrained(base)
    assert (logits_of(model) - trained).abs().max() > 0.1, "the adapters should matter"
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(model), trained, rtol=0, atol=1e-6)


def test_lora_resumes_with_other_ranks_and_stages_and_only_on_its_base(
    forks, write, tmp_path, base, sample_tokenizer, plain
):
    config = write(train__learning_rate=1e-2)
    if "lora" not in plain:
        plain["lora"] = train_plainly(config, sample_tokenizer, with_peft)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    legs = [("zero2", 2), ("zero2", 2), ("zero3", 3), ("zero0", 1)]
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)  # the same weights at another place
    for k, (name, ranks) in enumerate(legs):
        is_last = k == len(legs) - 1
        if not is_last:
            (run_folder / "stop").touch()  # seen after the first step
        where = () if k < 2 else ("--model.name_or_path", moved)
        finished = forks.train(config, "--ds_config", strategy(tmp_path, name), *where, ranks=ranks)
        assert finished.code == 0, finished.output
        assert ("converted in" in finished.output) == (k > 1)
        assert_only_trained(last_checkpoint(run_folder), 4 * TRAINED)
    assert_equal_to(plain["lora"], run_folder)

    last = last_checkpoint(run_folder)
    other = tmp_path / "other"
    shutil.copytree(base, other)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(other)
    weights_only = ("--checkpoint.weights_only", "true", "--checkpoint.resume", last,
                    "--output_dir", tmp_path / "next")  # fmt: skip

    finished = forks.train(config, *weights_only, "--model.name_or_path", other)
    assert finished.code == 2 and len(finished.errors) == 1, finished.output
    line = finished.errors[0]
    assert f"has only the weights that were trained; the others are those of {moved}" in line
    assert f"this run's model is {other}, with other weights; set model.name_or_path" in line
    finished = forks.train(config, *weights_only, "--model.lora.alpha", "16")
    assert finished.code == 2 and "alpha 8, and 16 would scale them otherwise" in finished.output
    (tmp_path / "next").mkdir(exist_ok=True)
    (tmp_path / "next" / "stop").touch()
    finished = forks.train(config, *weights_only)
    assert finished.code == 0 and "starting with the weights of" in finished.output
    ended, began = (
        read_metrics(folder, "eval")[i]["eval_loss"]
        for folder, i in ((run_folder, -1), (tmp_path / "next", 0))
    )
    assert began == pytest.approx(ended, rel=1e-6)

    shutil.rmtree(moved)
    with pytest.raises(UserError, match=f"cannot load {moved}: .*give the model .* with --base"):
        exported(last, tmp_path / "merged")
    with pytest.raises(UserError, match=f"{other} has other weights than those that were frozen"):
        exported(last, tmp_path / "merged", base=str(other))
    assert not (tmp_path / "merged").exists()
    exported(last, tmp_path / "merged", base=str(base))


def test_lora_with_dropout_resumes_bit_for_bit(forks, write, tmp_path):
    config = write(model__lora={**LORA, "dropout": 0.2}, ds_config=str(strategy(tmp_path, "zero3")))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert (finished := forks.train(config, "--output_dir", whole, ranks=2)).code == 0
    cut.mkdir()
    (cut / "stop").touch()
    assert forks.train(config, "--output_dir", cut, ranks=2).code == 0
    finished = forks.train(config, "--output_dir", cut, ranks=2)
    assert finished.code == 0 and "resuming from" in finished.output, finished.output
    assert determined(whole) == determined(cut) and len(determined(cut)) == 6


def test_a_tied_head_with_an_adapter_is_untied_and_a_random_base_is_saved(
    forks, write, tmp_path, base
):
    """Embeddings trained as a whole, an adapter on the head, random weights in no file."""
    lora = {"r": 4, "target_modules": ["lm_head", "q_proj"], "modules_to_save": ["embed_tokens"]}
    config = write(
        model__lora=lora, model__from_config=True, ds_config=str(strategy(tmp_path, "zero3"))
    )
    finished = forks.train(config, ranks=2, module="engine_logits")
    assert finished.code == 0, finished.output
    checkpoint, out = last_checkpoint(tmp_path / "run"), tmp_path / "merged"
    trained = torch.load(tmp_path / "run" / "logits.pt")
    torch.testing.assert_close(exported(checkpoint, out), trained, rtol=0, atol=1e-5)
    assert AutoConfig.from_pretrained(base).tie_word_embeddings
    assert not AutoConfig.from_pretrained(out).tie_word_embeddings
    export_adapter(checkpoint, tmp_path / "adapter")
    names = peft.load_peft_weights(tmp_path / "adapter")
    assert "base_model.model.model.embed_tokens.weight" in names


@pytest.mark.parametrize(
    "name, precision, ranks", [("zero1", "bf16", 1), ("zero2_offload", "fp32", 2)]
)
def test_adapters_of_weights_in_4_bits_equal_a_plain_loop(
    forks, write, tmp_path, base, sample_tokenizer, plain, monkeypatch, name, precision, ranks
):
    def in_4_bits(_model):
        return with_peft(
            AutoModelForCausalLM.from_pretrained(
                base, dtype=torch.float32, **quantized(torch.float32, "cpu")
            )
        )

    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    config = write(
        model__quantization="nf4", model__activation_checkpointing=True,
        ds_config=str(strategy(tmp_path, name)), train__precision=precision,
    )  # fmt: skip
    if "nf4" not in plain:
        plain["nf4"] = train_plainly(config, sample_tokenizer, in_4_bits)
    finished = forks.train(config, ranks=ranks, module="nf4_anyway")
    assert finished.code == 0, finished.output
    assert "the frozen layers in nf4" in finished.output
    tolerance = {"fp32": 1e-5, "bf16": 5e-2}[precision]
    assert_equal_to(plain["nf4"], tmp_path / "run", tolerance)
    checkpoint = last_checkpoint(tmp_path / "run")
    assert_only_trained(checkpoint, 4 * TRAINED)
    trained = torch.load(tmp_path / "run" / "logits.pt").float()
    merged = exported(checkpoint, tmp_path / "merged", dtype="float32")
    assert (merged - trained).norm() < tolerance * trained.norm(), "into the rounded weights"


# --------------------------------------------------------------------------------------------------
# model.trainable


def freeze_others(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.1.mlp" in name or name == "model.norm.weight" or (
            name.endswith("layernorm.weight")
        )  # fmt: skip
    return model


def test_patterns_freeze_the_others(forks, write, tmp_path, base, sample_tokenizer):
    """A second run starts from the weights of the first one and trains others: what it freezes is
    then in no file, so its checkpoints hold it.
    """
    config = write(model__lora=None, model__trainable=PATTERNS, train__learning_rate=1e-3)
    expected = train_plainly(config, sample_tokenizer, freeze_others)
    first = tmp_path / "run"
    finished = forks.train(
        config, "--ds_config", strategy(tmp_path, "zero3"), ranks=2, module="engine_logits"
    )
    assert finished.code == 0, finished.output
    assert_equal_to(expected, first)
    trained = 3 * 32 * INNER + (2 * LAYERS + 1) * 32
    assert f"trained        {trained:,} of " in finished.output
    checkpoint = last_checkpoint(first)
    assert_only_trained(checkpoint, 4 * trained)
    assert "model.embed_tokens.weight" in Shards(checkpoint).missing()
    logits = torch.load(first / "logits.pt")
    torch.testing.assert_close(exported(checkpoint, tmp_path / "hf"), logits, rtol=0, atol=1e-5)

    second = tmp_path / "second"
    finished = forks.train(
        config, "--model.trainable", "[embed]", "--checkpoint.weights_only", "true",
        "--checkpoint.resume", checkpoint, "--output_dir", second, module="engine_logits",
    )  # fmt: skip
    assert finished.code == 0, finished.output
    ended, began = (
        read_metrics(folder, "eval")[i]["eval_loss"] for folder, i in ((first, -1), (second, 0))
    )
    assert began == pytest.approx(ended, rel=1e-6)
    checkpoint = last_checkpoint(second)
    assert Shards(checkpoint).read_from is None
    logits = torch.load(second / "logits.pt")
    torch.testing.assert_close(exported(checkpoint, tmp_path / "hf2"), logits, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="has no adapters, only whole weights; leave out --adapter"):
        export_adapter(checkpoint, tmp_path / "adapter")


# --------------------------------------------------------------------------------------------------
# Without training


def test_parameters_are_counted_without_weights(base):
    config = AutoConfig.from_pretrained(base)
    assert sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()) == WHOLE

    def count(**settings):
        return trained_skeleton(ModelConfig(str(base), **settings), config)[1]

    assert count() == Counts(WHOLE, WHOLE)
    assert count(lora=LoraConfig(**LORA)) == Counts(TRAINED, WHOLE + TRAINED)
    assert count(trainable=["lm_head"]) == Counts(320 * 32, WHOLE), "tied: embeddings and head"
    # q, k, v, o, gate, up and down, but not the head
    linear = (32 + 32) * 2 + (32 + 16) * 2 + 3 * (32 + INNER)
    assert count(lora=LoraConfig(r=2)).trained == LAYERS * 2 * linear


@pytest.mark.parametrize(
    "settings, line",
    [
        ({"lora": {"target_modules": ["q_prj"]}},
         "model.lora.target_modules: the model has no q_prj; did you mean q_proj"),
        ({"lora": {"modules_to_save": ["embeddings"]}},
         "model.lora.modules_to_save: the model has no embeddings; "),
        ({"lora": {"target_modules": ["self_attn"]}}, "model.lora.target_modules: Target module "),
        ({"trainable": ["norm", "expert"]}, "model.trainable: no parameter matches expert"),
    ],
)  # fmt: skip
def test_names_that_the_model_does_not_have_are_one_line(base, settings, line):
    if "lora" in settings:
        settings = {"lora": LoraConfig(**settings["lora"])}
    with pytest.raises(UserError) as refused:
        trained_skeleton(ModelConfig(str(base), **settings), AutoConfig.from_pretrained(base))
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "settings, line",
    [
        ("lora: {r: 8, alpha: x}", "model.lora.alpha: expected int >0, got 'x'"),
        ("lora: {r: 8, dropot: 0.1}", "model.lora.dropot: unknown key; did you mean model.lora.dr"),
        ("lora: 8", "model.lora: is a section, so its keys go below it"),
        ("lora: {r: null}", "model.lora.r: is null, but needs a value"),
        ("trainable: ['head(']", "model.trainable: 'head(' is not a regular expression: missing )"),
        ("{trainable: [head], lora: {}}", "model.trainable: cannot be combined with model.lora"),
        (
            "lora: {dropout: 0.1, target_parameters: [up]}",
            "model.lora.dropout: has to be 0",
        ),
        ("quantization: nf4", "model.quantization: weights in 4 bits are frozen; set model.lora"),
        ("{quantization: nf4, lora: {}}", "zero3.json has ZeRO stage 3, which cannot partition we"),
        ("{quantization: nf4, lora: {}, from_config: true}", "model.quantization: needs pretrain"),
    ],
)
def test_settings_that_contradict_each_other_are_one_line(tiny_config, base, settings, line):
    values = yaml.safe_load(settings if settings[0] == "{" else f"{{{settings}}}")
    changes = {f"model__{key}": value for key, value in values.items()}
    config = tiny_config(model=base, ds_config="ds_configs/zero3.json", **changes)
    with pytest.raises(UserError) as refused:
        parse_command_line(["--config", str(config)])
    assert line in str(refused.value) and "\n" not in str(refused.value)
    assert re.match(rf"{config}:\d+: ", str(refused.value)), "names the line"


def test_a_section_may_be_absent_null_or_changed_by_flags(tiny_config, base):
    config = tiny_config(model=base, model__lora={"r": 8})

    def parsed(*flags):
        return parse_command_line(["--config", str(config), *flags]).config

    assert parsed().model.lora == LoraConfig(r=8)
    assert parsed("--model.lora.alpha", "4").model.lora == LoraConfig(r=8, alpha=4)
    assert parsed("--model.lora", "null").model.lora is None
    with pytest.raises(UserError, match=r"command line: model\.lora\.rank: unknown key"):
        parsed("--model.lora.rank", "4")
    file = config.with_name("again.yaml")
    file.write_text(dump_config(parsed()))
    assert parse_command_line(["--config", str(file)]).config == parsed()


SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 40,
         "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 24,
         "num_experts": 6, "head_dim": 8}  # fmt: skip
MIXTURES = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=6),
    "qwen3_moe": Qwen3MoeConfig(**SIZES),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=6),
    "a dense layer": Qwen3MoeConfig(**SIZES, mlp_only_layers=[0]),
}
ATTENTION = 2 * (2 * (32 + 32) + 2 * (32 + 16))  # of two layers, per unit of rank
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_and_routers_have_adapters_only_where_they_are_named(name):
    def adapted(**settings):
        lora = LoraConfig(r=2, **settings)
        model, counts = trained_skeleton(ModelConfig("", lora=lora), MIXTURES[name])
        return counts.trained, {key.split(".", 3)[3] for key in adapted_parameters(model)}

    trained, names = adapted()
    assert trained == 2 * ATTENTION and names == {f"self_attn.{x}_proj.weight" for x in "qkvo"}
    inner = 24 if name == "qwen3_moe" else 40
    more, names_now = adapted(target_parameters=EXPERTS)
    assert names_now - names == {f"mlp.{end}" for end in EXPERTS}
    assert more - trained == 2 * 2 * 6 * ((32 + 2 * inner) + (inner + 32)), "rank 2 per expert"


@pytest.mark.parametrize(
    "name, settings, line",
    [
        ("a dense layer", {}, "model.lora.target_modules: peft takes names of Qwen3MoeForCausalLM "
         "for down_proj, gate_up_proj, which are experts or a router; name those in model.lora.ta"),
        ("qwen3_moe", {"target_modules": ["q_proj", "gate"]}, "model.lora.target_modules: peft "
         "takes names of Qwen3MoeForCausalLM for gate.weight, which are"),
        ("mixtral", {"target_modules": ["w1", "w2"]}, "model.lora.target_modules: the model has no "
         "w1; its names have "),
        ("gpt_oss", {"target_parameters": ["expert.gate_up_proj"]}, "model.lora.target_parameters: "
         "the model has no expert.gate_up_proj; did you mean gate_up_proj"),
        ("gpt_oss", {"target_parameters": ["q_proj.weight"]}, "model.lora.target_parameters: model."
         "layers.0.self_attn.q_proj.weight is of a layer; name that in target_modules"),
        ("mixtral", {"target_parameters": ["norm.weight"]}, "model.lora.target_parameters: model."
         "norm.weight is no matrix"),
    ],
)  # fmt: skip
def test_names_that_are_not_of_experts_are_one_line(name, settings, line):
    with pytest.raises(UserError) as refused:
        trained_skeleton(ModelConfig("", lora=LoraConfig(**settings)), MIXTURES[name])
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_peft_takes_names_of_dense_layers_for_experts():
    """Why they are refused; should this fail, peft has been mended."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MIXTURES["a dense layer"])
    kind = peft.LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"])
    peft.inject_adapter_in_model(kind, model)
    assert set(adapted_parameters(model)) == {f"model.layers.1.mlp.{end}" for end in EXPERTS}


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "fc1", "lm_head"]])
def test_a_vision_tower_gets_no_adapters(targets):
    """They would be frozen, in no checkpoint, and missing when an export merges them."""
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**TEXT, "num_hidden_layers": 2},
        vision_config={**VISION, "num_hidden_layers": 1},
        mm_tokens_per_image=4,
    )
    skeleton, _ = trained_skeleton(ModelConfig("x", lora=LoraConfig(4, 8, 0, targets)), config)
    adapters = {name for name, p in skeleton.named_parameters() if ".lora_" in name}
    assert adapters == {name for name, p in skeleton.named_parameters() if p.requires_grad}
    with pytest.raises(UserError, match=r"model\.trainable: names only parts of Gemma3For"):
        trained_skeleton(ModelConfig("x", trainable=["vision_tower"]), config)
    layers = 7 if targets == "all-linear" else 1
    assert len(adapters) == 2 * (2 * layers + ("lm_head" in targets))


def test_adapters_next_to_the_weights_are_refused(base, tiny_config, tmp_path):
    """transformers would load and freeze all of it, or add this run's adapters to them."""
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    model = AutoModelForCausalLM.from_pretrained(base)
    with_peft(model).save_pretrained(folder)
    config = parse_command_line(["--config", str(tiny_config(model=folder))]).config
    with pytest.raises(UserError, match=f"{folder} has adapters next to its weights"):
        check_weights(config, load_model_config(config))


@pytest.mark.parametrize("lora", [8, {"r": "8"}, {"rank": 8}, {"target_modules": 7}])
def test_damaged_settings_of_a_checkpoint_are_one_line(base, lora):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    with pytest.raises(UserError, match=r"the checkpoint's model\.lora cannot be used"):
        insert_adapters(model, SimpleNamespace(lora=lora))


def test_4_bits_need_a_gpu(write, tmp_path):
    config = parse_command_line(["--config", str(write(model__quantization="nf4"))]).config
    with pytest.raises(
        UserError, match=r"^model\.quantization: nf4 needs a GPU; without it remove"
    ):
        check_quantization(config, torch.device("cpu"))


def test_memory_of_what_is_frozen_is_only_its_weights(write, base):
    config = parse_command_line(["--config", str(write())]).config
    skeleton, counts = trained_skeleton(config.model, AutoConfig.from_pretrained(base))
    whole = WHOLE + TRAINED
    assert counts == Counts(TRAINED, whole)

    def states(stage, quantized=0):
        ds_config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        memory = estimate_memory(config, skeleton, quantized, ds_config, ranks=4, local_ranks=4)
        return {part.name: part.size for part in memory.states}

    for stage, weights, gradients, optimizer in (
        (0, 2 * whole, 2 * TRAINED, 12 * TRAINED),
        (2, 2 * whole, 2 * TRAINED / 4, 12 * TRAINED / 4),
        (3, 2 * whole / 4, 2 * TRAINED / 4, 12 * TRAINED / 4),
    ):
        expected = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        assert {name: states(stage)[name] for name in expected} == expected
    in_4_bits = states(2, quantized=WHOLE)["weights"]
    assert in_4_bits == pytest.approx(2 * TRAINED + WHOLE * 4.127 / 8)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_of_experts_with_adapters_has_their_sums(write, checkpointing):
    """peft keeps the sum of weights and adapter for the backward pass, which has its gradient."""
    backward = []
    for names in ([], EXPERTS):
        config = write(
            model__lora={"r": 2, "target_parameters": names},
            model__activation_checkpointing=checkpointing,
        )
        config = parse_command_line(["--config", str(config)]).config
        skeleton, _ = trained_skeleton(config.model, MIXTURES["qwen3_moe"])
        ds_config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
        memory = estimate_memory(config, skeleton, 0, ds_config, ranks=1, local_ranks=1)
        backward.append({part.name: part.size for part in memory.backward})
    without, with_them = backward
    of_layer = 2 * 6 * 3 * 32 * 24  # bytes of the experts
    more = {name: with_them[name] - without[name] for name in without}
    if checkpointing:  # one layer at a time, else all of them, and the logits come first
        assert more == {"layer inputs": 0, "one layer": 2 * of_layer}
    else:
        assert more == {"activations": 2 * of_layer, "logits": 0}


def test_a_fingerprint_is_of_the_weights_wherever_they_are(base, tmp_path):
    shutil.copytree(base, tmp_path / "copy")
    one, copy = (describe_base(str(folder), None) for folder in (base, tmp_path / "copy"))
    assert one["fingerprint"] == copy["fingerprint"] and one["name_or_path"] == str(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "split", max_shard_size="100KB")
    assert (tmp_path / "split" / "model.safetensors.index.json").is_file()
    assert describe_base(str(tmp_path / "split"), None)["fingerprint"] is not None
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1e-3)
    model.save_pretrained(tmp_path / "copy")
    assert describe_base(str(tmp_path / "copy"), None)["fingerprint"] != one["fingerprint"]
    assert describe_base(str(REPO / "data/sample/model"), None)["fingerprint"] is None
