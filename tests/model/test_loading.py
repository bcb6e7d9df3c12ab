"""Missing, unused and misshapen pretrained weights are reported before the first step.
pytest tests/model/test_loading.py
"""

import json

import peft
import pytest
import torch
from harness.inputs import SMALL_SIZES, read_config
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Mxfp4Config,
)

from zerotrain.config.schema import ModelConfig
from zerotrain.model.load import load_model, load_model_config
from zerotrain.model.tokenizer import load_tokenizer
from zerotrain.runtime.errors import UserError

SIZES = {**SMALL_SIZES, "initializer_range": 0.2}
TIED = LlamaConfig(**SIZES, tie_word_embeddings=True)
EXPERTS = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
EMBEDDINGS = "model.embed_tokens.weight"
NORM, HEAD, GATE = "model.norm.weight", "lm_head.weight", "model.layers.0.mlp.gate_proj.weight"


def save_model(folder, config=None, **options):
    """Save random weights of a small Llama, or of another architecture, in a folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or LlamaConfig(**SIZES))
    model.save_pretrained(folder, **options)
    return folder


def edit_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


def edit_weights(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.fixture
def check(tiny_config):
    """A function that loads the model of a folder."""

    def of(folder, *flags):
        config = read_config(tiny_config(model=folder, train__precision="fp32"), *flags)
        ds_config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
        load_model(config.model, config.train, load_model_config(config.model), ds_config)

    return of


def refusal(check, folder):
    with pytest.raises(UserError) as refused:
        check(folder)
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)
    return str(refused.value)


WRONG = {
    NORM: lambda tensors: tensors.pop(NORM),
    HEAD: lambda tensors: tensors.pop(HEAD),
    GATE: lambda tensors: tensors.update({GATE: tensors[GATE][:40].clone()}),
}


@pytest.mark.parametrize("name", WRONG)
def test_weights_that_do_not_fit_are_refused_by_name(name, check, tmp_path):
    folder = save_model(tmp_path / "model")
    check(folder)
    line = refusal(check, edit_weights(folder, WRONG[name]))
    assert f"for 1 of the model's tensors: {name};" in line
    assert "model.from_config to true" in line
    check(folder, "--model.from_config", "true")


def test_weights_that_are_not_numbers_are_refused(check, tmp_path):
    folder = edit_weights(save_model(tmp_path / "nan"), lambda t: t[GATE][1].fill_(float("nan")))
    assert f"{GATE} has infinite or NaN" in refusal(check, folder)


def test_a_config_with_fewer_layers_than_the_files_is_refused(check, tmp_path):
    folder, smaller = save_model(tmp_path / "model"), tmp_path / "smaller"
    edit_config(folder, num_hidden_layers=1)
    assert "has 2 layers in its files, but 1 in its config" in refusal(check, folder)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(smaller)
    check(smaller)
    check(edit_config(folder, num_hidden_layers=2))


def test_adapters_beside_the_weights_are_refused(check, tmp_path):
    folder = save_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(folder)
    assert "adapter_config.json" in refusal(check, folder)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    check(tmp_path / "merged")
    (folder / "adapter_config.json").unlink()
    check(folder)


def test_a_folder_without_weights_or_tokenizer_says_what_it_lacks(
    check, tmp_path, tiny_model, sample_tokenizer
):
    folder = save_model(tmp_path / "model")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 8\n"
    (folder / "model.safetensors").write_text(pointer)
    assert "model.safetensors is a pointer of Git LFS" in refusal(check, folder)
    bytes_of_words = {"vocab.json": '{"a": 0}', "merges.txt": "#version: 0.2\n"}
    # transformers makes no tokenizer, an empty one, and one in Python.
    for model, files in {"llama": {}, "qwen2": {}, "ctrl": bytes_of_words}.items():
        folder = tmp_path / model
        AutoConfig.for_model(model).save_pretrained(folder)
        for name, text in files.items():
            (folder / name).write_text(text)
        assert "model.tokenizer" in refusal(lambda f: load_tokenizer(ModelConfig(str(f))), folder)
        load_tokenizer(ModelConfig(str(folder), tokenizer=str(tiny_model)))
        sample_tokenizer.save_pretrained(folder)
        load_tokenizer(ModelConfig(str(folder)))


def test_unused_weights_are_one_line(check, tmp_path, capsys):
    folder = save_model(tmp_path / "model")
    value_head = {"v_head.summary.weight": torch.ones(1, 32)}
    check(edit_weights(folder, lambda t: t.update(value_head)))
    assert "1 tensors in its files are not used: v_head.summary" in capsys.readouterr().err


def test_files_of_every_kind_are_read(check, tmp_path):
    folder = save_model(tmp_path / "split", max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    check(folder)
    pickled = save_model(tmp_path / "pickled")
    tensors = load_file(pickled / "model.safetensors")
    (pickled / "model.safetensors").unlink()
    torch.save(tensors, pickled / "pytorch_model.bin")
    check(pickled)
    experts = save_model(tmp_path / "experts", EXPERTS)
    check(experts)
    expert = next(n for n in load_file(experts / "model.safetensors") if "experts.3." in n)
    refusal(check, edit_weights(experts, lambda t: t.pop(expert)))


def test_a_different_head_contradicts_a_tie(check, tmp_path):
    """transformers trains that head, and under ZeRO-3 the embeddings instead."""
    folder = save_model(tmp_path / "tied", TIED)
    edit_weights(folder, lambda t: t.update({HEAD: t[EMBEDDINGS] + 1}))
    assert f"ties {HEAD} to {EMBEDDINGS}" in refusal(check, folder)
    check(edit_config(folder, tie_word_embeddings=False))
    edit_config(folder, tie_word_embeddings=True)
    check(edit_weights(folder, lambda t: t.pop(HEAD)))


def to_fp8(tensors):
    for name in [name for name in tensors if "proj" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)


def to_mxfp4(tensors):
    for name in [name for name in tensors if name.endswith("proj")]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.ones(*shape, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.ones(shape, dtype=torch.uint8)


@pytest.mark.parametrize("model, change, how", [
    (LlamaConfig(**SIZES), to_fp8, FineGrainedFP8Config(dequantize=True)),
    (GptOssConfig(**{**SIZES, "intermediate_size": 64}, num_local_experts=4), to_mxfp4,
     Mxfp4Config(dequantize=True)),
])  # fmt: skip
def test_quantized_weights_are_refused(check, tmp_path, model, change, how):
    folder = edit_weights(save_model(tmp_path / "model", model), change)
    edit_config(folder, quantization_config={"quant_method": how.quant_method})
    line = refusal(check, folder)
    assert "dequantize=True" in line and "save_original_format=False" in line
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how)
    loaded.save_pretrained(tmp_path / "wide", save_original_format=False)
    check(tmp_path / "wide")


def test_an_encoder_decoder_is_refused(check, tmp_path):
    folder = tmp_path / "bart"
    AutoConfig.for_model("bart").save_pretrained(folder)
    assert "use a decoder-only model" in refusal(check, folder)
