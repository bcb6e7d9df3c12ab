"""Exports have the trained engine's logits, and run no code of a stranger's folder.
pytest tests/commands/test_export.py
"""

import copy
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import partial

import peft
import psutil
import pytest
import torch
import yaml
from engine_logits import TOKENS
from harness.cures import refused
from harness.inputs import (
    SMALL_SIZES,
    change_json,
    chat,
    copy_with_code,
    rewrite,
    save_tiny_llama,
    strategy,
    write_rows,
)
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from zerotrain.checkpoint.run_folder import list_complete
from zerotrain.config.schema import ModelConfig
from zerotrain.model.load import load_model_config
from zerotrain.tools import ask_export
from zerotrain.tools.export import export_checkpoint
from zerotrain.tools.older_transformers import add_class, add_rope, edit_json

ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
DENSE = {"vocab_size": 320, "num_hidden_layers": 2, "max_position_embeddings": 512,
         **ATTENTION, "hidden_size": 40, "intermediate_size": 52}  # fmt: skip
MODELS = {
    "llama, tied": {**DENSE, "tie_word_embeddings": True},
    # Its rotary embeddings differ by layer, and rope_scaling is another name of their parameters.
    "gemma4_text": {
        **DENSE, "head_dim": 10, "global_head_dim": 20, "vocab_size_per_layer_input": 320,
        "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
    },
    "gpt2": {"vocab_size": 320, "n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 512},
    # It has experts that save_pretrained takes apart, and a buffer.
    "deepseek_v3": {
        **DENSE, "num_key_value_heads": 4, "moe_intermediate_size": 20, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}  # fmt: skip


@pytest.fixture
def trained(forks, tiny_config, tmp_path):
    """A function that trains a model for two steps and returns its checkpoint and its logits."""

    def start(folder, stage, ranks=2, **changes):
        config = tiny_config(
            model=folder, ds_config=strategy(tmp_path, stage), train__steps=2,
            train__global_batch_size=4, data__eval_sources=None,
            train__learning_rate=1e-2, **changes,
        )  # fmt: skip
        forks.finish(config, ranks=ranks, module="engine_logits")
        checkpoint = list_complete(tmp_path / "run" / "checkpoints")[-1]
        return checkpoint, torch.load(tmp_path / "run" / "logits.pt")

    return start


def logits_of(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        return model, model(input_ids=TOKENS, use_cache=False).logits


def tensors_of(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "model, stage, precision, ranks",
    [
        ("gemma4_text", "zero1", "fp32", 1),
        ("gpt2", "zero2_offload", "fp32", 2),
        ("deepseek_v3", "zero3", "fp32", 2),
        ("llama, tied", "zero3", "bf16", 2),
    ],
)
def test_logits_are_the_trained_engines(
    trained, tmp_path, sample_tokenizer, monkeypatch, model, stage, precision, ranks
):
    folder, whole, split = (tmp_path / name for name in ("model", "whole", "split"))
    special = {n: getattr(sample_tokenizer, n) for n in ("eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(
        model.split(",")[0], **{"bos_token_id": None, **special, **MODELS[model]}
    )
    config.save_pretrained(folder)  # weights are drawn by train.py
    sample_tokenizer.save_pretrained(folder)
    checkpoint, logits = trained(
        folder, stage, ranks, model__from_config=True, train__precision=precision
    )
    export_checkpoint(checkpoint, whole)
    _, of_export = logits_of(whole)
    assert torch.equal(of_export, logits)

    monkeypatch.setattr("zerotrain.tools.export.MAX_SHARD_SIZE", "30KB")
    export_checkpoint(checkpoint, split, "float32")
    _, of_split = logits_of(split, dtype=logits.dtype)
    assert torch.equal(of_split, logits) and len(list(split.glob("*.safetensors"))) > 1
    exact, rounded = tensors_of(split), load_file(whole / "model.safetensors")
    assert exact.keys() == rounded.keys()
    is_rounded = all(torch.equal(t, t.to(logits.dtype).float()) for t in exact.values())
    assert is_rounded == (precision == "fp32"), "float32 is of the master weights"


# --------------------------------------------------------------------------------------------------
# Adapters and frozen weights


@pytest.fixture
def base(tmp_path, sample_tokenizer):
    return save_tiny_llama(tmp_path / "base", sample_tokenizer)


def test_adapters_alone_and_merged_into_the_base_wherever_it_is(trained, tmp_path, base):
    lora = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}
    checkpoint, logits = trained(base, "zero2", model__lora=lora)
    export_checkpoint(checkpoint, tmp_path / "merged")
    _, merged = logits_of(tmp_path / "merged")
    torch.testing.assert_close(merged, logits, rtol=0, atol=1e-5)
    export_checkpoint(checkpoint, tmp_path / "adapter", only_adapters=True)
    model, before = logits_of(base)
    assert (before - logits).abs().max() > 0.01, "the adapters should matter"
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        found = model(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)
    assert not (tmp_path / "adapter" / "config.json").exists()
    for folder in (tmp_path / "run", checkpoint, tmp_path / "adapter"):
        refused("scripts.export", load_model_config, ModelConfig(str(folder)))

    moved = tmp_path / "moved"
    shutil.move(base, moved)
    export = partial(export_checkpoint, checkpoint, tmp_path / "again", None)
    refused(f"cannot load {base}: ... ; give --base with the model that", export, None)
    assert not (tmp_path / "again").exists()
    export(str(moved))


MIXERS = {
    "qwen3_5_text": {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                     "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                     "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16,
                         "shared_intermediate_size": 48, "num_local_experts": 0,
                         "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip


@pytest.mark.parametrize("kind", MIXERS)
def test_adapters_of_mixers_are_merged(trained, tmp_path, sample_tokenizer, kind):
    special = {n: getattr(sample_tokenizer, n) for n in ("eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(
        kind, **{"bos_token_id": None, **special, **SMALL_SIZES, **MIXERS[kind]}
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    sample_tokenizer.save_pretrained(tmp_path / "base")
    checkpoint, logits = trained(tmp_path / "base", "zero2", model__lora={"r": 4})
    export_checkpoint(checkpoint, tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged")[1], logits, rtol=0, atol=1e-5)
    export_checkpoint(checkpoint, tmp_path / "adapter", only_adapters=True)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(".in_proj" in name and tensor.any() for name, tensor in tensors.items())
    model, _ = logits_of(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        found = model(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)


def test_a_tied_head_with_an_adapter_is_untied(trained, tmp_path, base):
    """Embeddings are trained as a whole. No file has the random weights."""
    lora = {"r": 4, "target_modules": ["lm_head", "q_proj"], "modules_to_save": ["embed_tokens"]}
    checkpoint, logits = trained(base, "zero3", model__lora=lora, model__from_config=True)
    out = tmp_path / "merged"
    export_checkpoint(checkpoint, out)
    torch.testing.assert_close(logits_of(out)[1], logits, rtol=0, atol=1e-5)
    assert not AutoConfig.from_pretrained(out).tie_word_embeddings


def test_frozen_weights_come_from_the_base(trained, tmp_path, base):
    checkpoint, logits = trained(base, "zero3", model__trainable=[r"layers\.1\.mlp"])
    export_checkpoint(checkpoint, tmp_path / "hf")
    torch.testing.assert_close(logits_of(tmp_path / "hf")[1], logits, rtol=0, atol=1e-5)
    export = partial(export_checkpoint, checkpoint, tmp_path / "out", None, None)
    refused("has no adapters, only whole weights; omit --adapter", export, True, False)


# --------------------------------------------------------------------------------------------------
# Models with vision


@pytest.mark.parametrize(
    "outer, text, stage, lora",
    [
        ("mistral3", {**DENSE, "model_type": "mistral"}, "zero2", None),
        ("mistral3", {**MODELS["deepseek_v3"], "model_type": "mistral4"}, "zero3", None),
        (
            "kimi_k25",
            {**MODELS["deepseek_v3"], "num_hidden_layers": 3},
            "zero1",
            {"r": 4, "modules_to_save": ["lm_head"]},
        ),
    ],
    ids=["Mistral Small 3", "Mistral Small 4", "Kimi K2.5"],
)
def test_the_original_class_loads_the_trained_text_and_the_same_vision(
    trained, tmp_path, sample_tokenizer, outer, text, stage, lora
):
    base, out = tmp_path / "base", tmp_path / "hf"
    special = {n: getattr(sample_tokenizer, n) for n in ("eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(outer, text_config={**text, "bos_token_id": None, **special})
    for key, value in {**SMALL_SIZES, "num_hidden_layers": 1, "image_size": 28}.items():
        if hasattr(config.vision_config, key):
            setattr(config.vision_config, key, value)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(base)
    # Published configs leave it out, and the default is to tie.
    edit_json(base / "config.json", lambda values: values.pop("tie_word_embeddings"))
    sample_tokenizer.save_pretrained(base)
    (base / "preprocessor_config.json").write_text("{}")

    checkpoint, logits = trained(base, stage, model__lora=lora)
    export_checkpoint(checkpoint, out)
    model, report = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not {*report["missing_keys"], *report["unexpected_keys"]}
    with torch.no_grad():
        found = model.eval()(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)
    before, after = tensors_of(base), tensors_of(out)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert {name for name in before if re.search("vision|visual|projector", name)} <= same
    assert before.keys() - same, "the text part should be trained"
    assert (out / "preprocessor_config.json").exists()


# --------------------------------------------------------------------------------------------------
# End tokens


def test_generation_config_gets_the_trained_end_token(forks, tiny_config, tmp_path, tiny_model):
    """The base model ends with <|end|>, the rows with <|stop|>."""
    folder, out = tmp_path / "base", tmp_path / "hf"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|stop|>"})
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|stop|>")
    tokenizer.save_pretrained(folder)
    end, stop = tokenizer.convert_tokens_to_ids(["<|end|>", "<|stop|>"])
    given = {"eos_token_id": end, "temperature": 0.7, "do_sample": False}  # as published ones are
    (folder / "generation_config.json").write_text(json.dumps(given))
    rows = [chat(question, "yes") for question in ("a", "bb", "c c", "dd d")]
    file = write_rows(tmp_path / "few.jsonl", rows)
    config = tiny_config(
        model=folder, data__train_sources=[file], data__eval_sources=None,
        train__global_batch_size=4, train__steps=1,
    )  # fmt: skip
    forks.finish(config)
    export_checkpoint(list_complete(tmp_path / "run" / "checkpoints")[-1], out)
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [stop, end] and generation["temperature"] == 0.7


# --------------------------------------------------------------------------------------------------
# Readers of an export


def test_rows_with_tools_have_the_same_template_in_the_export(
    forks, tiny_config, tmp_path, base, chat_rows
):
    """The tokenizer has named templates, as transformers 4 has saved it."""
    template, file = base / "chat_template.jinja", base / "tokenizer_config.json"
    names = {"default": template.read_text(), "tool_use": "{{ tools }}" + template.read_text()}
    template.unlink()
    named = [{"name": name, "template": text} for name, text in names.items()]
    change_json(file, chat_template=named)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    rows = write_rows(tmp_path / "tools.jsonl", [row | {"tools": [tool]} for row in chat_rows])
    config = tiny_config(
        model=base, train__steps=1, data__train_sources=[rows],
        data__eval_sources=None, data__max_length=512,
    )  # fmt: skip
    forks.finish(config)
    out = tmp_path / "hf"
    forks.script("scripts.export", tmp_path / "run", out, "--verify", code=0)
    assert AutoTokenizer.from_pretrained(out).chat_template == names
    assert "4.57" in (out / "README.md").read_text()


# A model type, transformers 5's rotary embeddings, and the keys for transformers 4.
ROPES = yaml.safe_load("""
- - llama
  - &local {rope_type: default, rope_theta: 7000.0}
  - {rope_theta: 7000.0, rope_scaling: null}
- - llama
  - {<<: &long {original_max_position_embeddings: 4096, <<: &factors {
      short_factor: [1.0, 1.0, 1.0, 1.0], long_factor: [2.0, 2.0, 2.0, 2.0]}},
     rope_type: longrope, factor: 16.0}
  - rope_scaling: {<<: *long, type: longrope, factor: 16.0, attention_factor: 1.1547005383792517}
- - phi3
  - {<<: *long, rope_type: longrope}
  - original_max_position_embeddings: 4096
    rope_scaling: {<<: *factors, type: longrope}
- - gpt_neox
  - {<<: *local, partial_rotary_factor: 0.5}
  - {rotary_emb_base: 7000.0, rotary_pct: 0.5}
- - gemma3_text
  - full_attention: {rope_theta: 900000.0, <<: &yarn {
      rope_type: yarn, factor: 4.0, original_max_position_embeddings: 64}}
    sliding_attention: *local
  - {rope_theta: 900000.0, rope_local_base_freq: 7000.0, rope_scaling: *yarn}
- - olmo3
  - full_attention: {<<: *local, rope_theta: 900000.0}
    sliding_attention: *local
  - {rope_theta: null}
""")


@pytest.mark.parametrize("model, rope, older", ROPES)
def test_transformers_4_reads_the_same_rotary_embeddings(
    model, rope, older, tmp_path, sample_tokenizer
):
    """The keys in the files; if TRANSFORMERS_4 names a folder with that version, also its loss. It
    must fail where it has no keys for the model.
    """
    sizes = {**SMALL_SIZES, "max_position_embeddings": 8192, "bos_token_id": 1, "pad_token_id": 0}
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if model == "olmo3" else {}
    config = AutoConfig.for_model(
        model, **sizes, **layers, initializer_range=0.2, rope_parameters=copy.deepcopy(rope)
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    sample_tokenizer.save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", add_class)
    add_rope(tmp_path / "config.json")
    values = json.loads((tmp_path / "config.json").read_text())
    assert values == values | older
    read = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert read == read | rope
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "local_files_only" not in tokenizer and "Backend" not in tokenizer["tokenizer_class"]
    if folder := os.environ.get("TRANSFORMERS_4"):
        asked = {"prompts": [{"text": "a 1?"}], "examples": [[[*range(3, 67)], [*range(1, 64)]]]}
        command = ["env", f"PYTHONPATH={folder}", sys.executable, ask_export.__file__, tmp_path]
        told = subprocess.run(command, input=json.dumps(asked), text=True, stdout=subprocess.PIPE)
        assert (told.returncode == 0) == (older.get("rope_theta", 0) is not None)
        if told.returncode == 0:
            expected, found = ask_export.answer(str(tmp_path), asked), json.loads(told.stdout)
            assert found["prompts"] == expected["prompts"]
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_a_config_of_every_type_is_read_as_before_the_keys_for_transformers_4(tmp_path):
    """Some have an alias of rope_parameters, none for some layers, or a key of an older name."""
    file = tmp_path / "config.json"
    kinds = {*MODEL_FOR_CAUSAL_LM_MAPPING.keys(), *MODEL_FOR_MULTIMODAL_LM_MAPPING.keys()}
    edited = 0
    for kind in kinds:
        with suppress(StrictDataclassError):  # Gemma 4's assistant has no valid defaults.
            kind().to_json_file(file)
        text = file.read_text()
        if "rope_parameters" in text:
            was = AutoConfig.from_pretrained(file).to_dict()
            add_rope(file)
            now = AutoConfig.from_pretrained(file).to_dict()
            assert {name: now[name] for name in was} == was
            edited += file.read_text() != text
    assert edited > 100, "most types have keys for transformers 4"


# --------------------------------------------------------------------------------------------------
# Mistakes, and folders of others


def test_mistakes_and_strangers_folders_are_one_line(trained, forks, tmp_path, base):
    weights = load_file(base / "model.safetensors")
    weights["model.embed_tokens.weight"][-1, 0] = 1e5  # No row has this token.
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    checkpoint, _ = trained(base, "zero2", ranks=1)
    out = tmp_path / "deep" / "hf"

    def refuse(named, dtype=None, at=checkpoint):
        refused(named, lambda at: export_checkpoint(at, out, dtype), at)
        assert not out.exists()

    refuse("embed_tokens.weight has infinite ... --dtype float32 or bfloat16", "float16")
    export_checkpoint(checkpoint, tmp_path / "bf16", "bfloat16")
    for folder in (tmp_path / "run", checkpoint):
        refused("give what python -m", load_model_config, ModelConfig(str(folder)))
    load_model_config(ModelConfig(str(tmp_path / "bf16")))
    refuse("step_7 is not a usable checkpoint", at=tmp_path / "step_7")
    # A link could copy a file of the user who exports.
    secret = tmp_path / "token"
    template = checkpoint / "model" / "chat_template.jinja"
    text = template.read_text()
    secret.write_text("s" * len(text))
    template.unlink()
    template.symlink_to(secret)
    refuse("chat_template.jinja")
    template.unlink()
    template.write_text(text)

    # These files are code, or lead to other weights.
    for name in ("tokenizer.py", "adapter_config.json", "model.safetensors.index.json"):
        rewrite(checkpoint, f"model/{name}", b"{}")
    export_checkpoint(checkpoint, tmp_path / "clean")
    assert {path.name for path in (tmp_path / "clean").iterdir()} == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert "output_dir of a run" in forks.script("scripts.export", base, out, code=2).error

    # The config allows code of the model, and the model has code.
    evil = copy_with_code(base, tmp_path / "evil", tmp_path / "ran")
    config = tmp_path / "run" / "resolved_config.yaml"
    values = yaml.safe_load(config.read_text())
    for trusted in (True, False):
        values["model"] |= {"name_or_path": str(evil), "trust_remote_code": trusted}
        config.write_text(yaml.safe_dump(values))
        assert forks.script("scripts.export", tmp_path / "run", out, "--verify", code=2).error
    assert not (tmp_path / "ran").exists() and not out.exists()
    config.write_text("".join(f"key_{i}: {i}\n" for i in range(60_000)))
    finished = forks.script("scripts.export", tmp_path / "run", out, code=0)
    assert "no model card: resolved_config.yaml has more than" in finished.output


EMBED = "model.embed_tokens.weight"


HOSTILE_WEIGHTS = {  # They replace the embedding's tensor and shape.
    "broadcast": (torch.ones(1), [1]),
    "a negative shape": (torch.ones(320, 40), [-320, -40]),
    "sparse": (torch.ones(320, 40).to_sparse(), [320, 40]),
    "of no device": (torch.ones(9, device="meta"), [3, 3]),
    "2^40 elements of one byte": (torch.ones(1, dtype=torch.int8).expand(2**40), [2**40]),
}
HOSTILE_KEYS = (  # They replace keys of a shard.
    {"buffers": {"model.rotary_emb.inv_freq": torch.ones(3)}},
    {"buffers": {"model.x": torch.ones(3)}},
    {"base": {}, "trained": []},
    {"trained": ["model.x"]},
)
LORA = {"r": 2_000_000, "target_modules": ["q_proj"]}
HOSTILE_JSON = {
    "trainer_state.json": lambda tree: tree["run"]["settings"].update({"model.lora": LORA}),
    "model/config.json": lambda tree: tree.update(num_hidden_layers=2**63),
}


def test_hostile_weights_are_one_line_and_take_no_memory(trained, tmp_path, base):
    checkpoint, _ = trained(base, "zero2", ranks=1)
    before = psutil.Process().memory_info().rss

    def refuse(name, content):
        saved = (checkpoint / name).read_bytes()
        rewrite(checkpoint, name, content)
        refused("", partial(export_checkpoint, checkpoint), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        rewrite(checkpoint, name, saved)

    name = "shards/rank_00000.pt"
    shard = torch.load(checkpoint / name, weights_only=True)
    hostile = [shard | keys for keys in HOSTILE_KEYS]
    for tensor, shape in HOSTILE_WEIGHTS.values():
        parts = shard["parts"] | {EMBED: (0, {"fp32": tensor})}
        hostile.append(shard | {"parts": parts, "shapes": shard["shapes"] | {EMBED: shape}})
    for changed in hostile:
        out = io.BytesIO()
        torch.save(changed, out)
        refuse(name, out.getvalue())
    for name, change in HOSTILE_JSON.items():
        tree = json.loads((checkpoint / name).read_text())
        change(tree)
        refuse(name, json.dumps(tree).encode())
    assert psutil.Process().memory_info().rss - before < 1 << 30
    export_checkpoint(checkpoint, tmp_path / "out")
