"""Tokens added to a model: rows, ties, files; what a tokenizer lacks is said.
pytest tests/test_add_tokens.py
"""

import copy
import json
import re
import shlex
import shutil

import pytest
import torch
from conftest import strategy, write_rows
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from config.schema import Config, DataConfig, ModelConfig, TrainConfig
from model.architecture import check_model_fits
from model.load import load_model_config, load_tokenizer
from model.probes import check_end_tokens
from model.vocabulary import resize_vocabulary
from runtime.errors import UserError
from scripts import add_tokens

TEXT = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
MODELS = {
    "llama": {**TEXT, "tie_word_embeddings": False},
    "qwen3, tied": {**TEXT, "tie_word_embeddings": True},
    "phi": {**TEXT, "num_key_value_heads": 4},  # its head has a bias
    "gpt2": {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    # sizes in text_config; embeddings of a class of its own, which scales them
    "gemma3": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4},
}


def tiny(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name.split(",")[0], **MODELS[name])
    ).eval()


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits


@pytest.mark.parametrize("name", MODELS)
def test_old_rows_stay_and_new_ones_are_the_mean(name, tmp_path):
    """300 ids have been trained, 310 are to have rows: ten new ones among the 20 unused rows."""
    model = tiny(name)
    before = logits_of(model)
    tensors = [model.get_input_embeddings().weight.detach().clone()]
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tensors += [t.detach().clone() for t in model.get_output_embeddings().parameters()]
    assert resize_vocabulary(model, 300, 310, 64) == 320
    unused = model.get_input_embeddings().weight[310:].detach().clone()
    assert torch.equal(unused, tensors[0][310:]), "rows that no token has"
    assert resize_vocabulary(model, 310, 330, 64) == 384

    head = model.get_output_embeddings()
    assert (head.weight is model.get_input_embeddings().weight) == is_tied
    for old, new in zip(
        tensors, [model.get_input_embeddings().weight, *head.parameters()], strict=True
    ):
        assert torch.equal(new[:300], old[:300])
        torch.testing.assert_close(new[300:310], old[:300].mean(0).expand(10, *old.shape[1:]))
        torch.testing.assert_close(new[310:], new[:310].mean(0).expand(74, *old.shape[1:]))
    torch.testing.assert_close(logits_of(model)[..., :300], before[..., :300])

    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.get_text_config().vocab_size == 384
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_a_second_table_of_tokens_is_refused():
    model = tiny("llama")
    model.model.second = torch.nn.Embedding(320, 4)
    with pytest.raises(UserError, match=r"new tokens would have no row in model\.second"):
        resize_vocabulary(model, 320, 330, 1)


# --------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs scripts/add_tokens.py in this process; returns what it prints."""

    def call(*args):
        monkeypatch.setattr("sys.argv", ["add_tokens.py", *map(str, args)])
        add_tokens.main()
        return capsys.readouterr().out

    return call


def test_a_base_model_gets_the_marks_of_a_chat_and_trains(
    command, forks, tiny_config, tmp_path, tiny_model
):
    base, out = tmp_path / "base", tmp_path / "deep" / "out"
    shutil.copytree(tiny_model, base)
    generation = {"temperature": 0.7, "do_sample": False, "eos_token_id": 3}  # as published ones
    (base / "generation_config.json").write_text(json.dumps(generation))
    tokens = ["<|im_start|>", "<|im_end|>", "<|end|>"]
    said = command(
        base, out, "--tokens", *tokens, "--special", "--chat_template", "chatml",
        "--pad_to_multiple_of", 32,
    )  # fmt: skip
    old = AutoTokenizer.from_pretrained(base)
    first = len(old)
    assert f"'<|im_start|>' gets id {first}" in said and f"'<|im_end|>' gets id {first + 1}" in said
    assert f"'<|end|>' exists already, with id {old.eos_token_id}" in said
    assert re.search(rf"{first + 2} token ids, 320 -> \d+ rows", said)

    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("x<|im_end|>y", add_special_tokens=False)["input_ids"]
    assert ids[1:-1] == [first + 1] and tokenizer.decode(ids, skip_special_tokens=True) == "xy"
    assert "<|im_start|>" in tokenizer.chat_template
    assert {path.name for path in out.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.7
    assert list(out.parent.iterdir()) == [out], "no draft is left"
    weights = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in weights, "tied"
    rows = weights["model.embed_tokens.weight"]
    assert len(rows) % 32 == 0 and len(rows) >= first + 2
    torch.testing.assert_close(rows[first + 1], rows[:first].mean(0))
    before, after = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (base, out))
    old_rows = slice(first)
    torch.testing.assert_close(logits_of(after)[..., old_rows], logits_of(before)[..., old_rows])

    check_a_frozen_head(before, after, tokenizer, first + 1)
    config = tiny_config(
        model=out, ds_config=str(strategy(tmp_path, "zero3")), train__epochs=None, train__steps=2
    )
    finished = forks.train(config, "--model.lora.r", "4")
    assert finished.code == 2 and "would never learn to stop" in finished.output, finished.output
    finished = forks.train(config, ranks=2)
    assert finished.code == 0 and "answers end in '<|im_end|>'" in finished.output, finished.output


def check_a_frozen_head(old, new, tokenizer, end):
    """Two new tokens are the same to it, and so are two that no training has touched."""

    def check(model, ends):
        check_end_tokens(model, tokenizer, ends, torch.device("cpu"))

    check(new, [end])
    untrained = copy.deepcopy(old)
    with torch.no_grad():
        untrained.get_output_embeddings().weight[[0, 2]] = 1e-6 * torch.randn(2, 32)
    for model in (old, new, untrained):
        model.requires_grad_(False)
    check(old, [1, 2])
    check(untrained, [1])
    with pytest.raises(UserError, match=r"cannot tell '<\|system\|>', .*, from '<\|pad\|>': the"):
        check(untrained, [1, 2])
    with pytest.raises(UserError, match=r"cannot tell '<\|im_end\|>', .*, from '<\|im_start\|>'"):
        check(new, [end])


def test_a_model_with_a_vision_tower_keeps_it(command, tmp_path, sample_tokenizer):
    base, out = tmp_path / "base", tmp_path / "out"
    model = tiny("gemma3")
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    model.save_pretrained(base)
    sample_tokenizer.save_pretrained(base)
    command(base, out, "--tokens", *(f"<|{i}|>" for i in range(30)))
    config = json.loads((out / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == 384 and "vocab_size" not in config
    old, new = (load_file(folder / "model.safetensors") for folder in (base, out))
    changed = [name for name in old if not torch.equal(old[name], new[name])]
    assert new.keys() == old.keys() and len(changed) == 1 and "embed_tokens" in changed[0]


def test_a_model_of_the_hub(command, monkeypatch, tmp_path, tiny_model):
    commit = "c0ffee" * 6 + "c0ff"
    repo = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(tiny_model, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    command("org/tiny", tmp_path / "out", "--tokens", "<|new|>")
    assert "<|new|>" in AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    with pytest.raises(UserError, match="cannot load org/none: "):
        command("org/none", tmp_path / "other", "--tokens", "<|new|>")


def test_a_larger_tokenizer_is_refused_with_the_command_that_helps(
    command, tmp_path, tiny_model, sample_tokenizer
):
    larger = AutoTokenizer.from_pretrained(tiny_model)
    larger.add_tokens([f"<|{i}|>" for i in range(400 - len(larger))])
    larger.save_pretrained(tmp_path / "larger")

    def check(**model):
        model = ModelConfig(**{"name_or_path": str(tiny_model), **model})
        config = Config("", model, DataConfig([], max_length=64), TrainConfig(0.0))
        check_model_fits(config, load_model_config(config), load_tokenizer(config))

    check()
    with pytest.raises(
        UserError, match="has 400 token ids, but the model's vocabulary has 320"
    ) as no:
        check(tokenizer=str(tmp_path / "larger"))
    line = re.search(r"python scripts/add_tokens.py (.*)", str(no.value))[1]
    command(*shlex.split(line.replace("OUT", str(tmp_path / "out"))))
    check(name_or_path=str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"raise vocab_size in the config\.json of "):
        check(tokenizer=str(tmp_path / "larger"), from_config=True)

    other = AutoTokenizer.from_pretrained(tiny_model)
    state = json.loads(other.backend_tokenizer.to_str())
    vocab = state["model"]["vocab"]
    a, b = list(vocab)[40:42]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    shutil.copytree(tmp_path / "larger", tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=re.escape(f"token {a!r} has id")):
        command(tiny_model, tmp_path / "no", "--tokenizer", tmp_path / "other")
    assert not (tmp_path / "no").exists()


def test_mistakes_are_one_line_and_leave_nothing(command, monkeypatch, tmp_path, tiny_model):
    def refuse(message, *args, model=tiny_model, tokens=("<|new|>",), out=tmp_path / "out"):
        with pytest.raises(UserError, match=message) as error:
            command(model, out, "--tokens", *tokens, *args)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))

    refuse("exists; choose a new folder", out=tiny_model)
    refuse("has all of these tokens already", tokens=("<|end|>",))
    refuse("is empty, or has white space at an end", tokens=("<|new|> ",))
    refuse("--pad_to_multiple_of: 0 is not positive", "--pad_to_multiple_of", 0)
    refuse("cannot load .*nowhere", model=tmp_path / "nowhere")
    refuse("model.chat_template: nothing", "--chat_template", "nothing")

    changed = tmp_path / "changed"
    shutil.copytree(tiny_model, changed)
    weights = load_file(tiny_model / "model.safetensors")
    norm = "model.norm.weight"
    cases = {
        "has weights that its causal language model does not use.* vision.weight": weights
        | {"vision.weight": torch.ones(3)},
        f"has no weights for {norm}": {k: v for k, v in weights.items() if k != norm},
    }
    for message, tensors in cases.items():
        save_file(tensors, changed / "model.safetensors", {"format": "pt"})
        refuse(message, model=changed)
    (changed / "model.safetensors").unlink()
    refuse(f"cannot load {changed}: ", model=changed)

    monkeypatch.setattr(add_tokens, "available_memory", lambda: (1000, "MemAvailable"))
    refuse("needs 0.0 GiB of memory, and 0.0 GiB are free")


# --------------------------------------------------------------------------------------------------
# What a tokenizer lacks


def table_row(output):
    return next(line for line in output.splitlines() if line.startswith("  tokenizer "))


def test_what_is_used_without_pad_eos_or_template_is_said(
    forks, tiny_config, tmp_path, tiny_model, sample_tokenizer
):
    given = tiny_config()
    row = table_row(forks.train(given, "--dry_run").output)
    assert "eos '<|end|>'; pad " in row and row.endswith("; its own chat template")

    folder = tmp_path / "without"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").unlink()
    for file, names in (
        ("tokenizer_config.json", ("pad_token", "eos_token")),
        ("config.json", ("pad_token_id", "eos_token_id")),
    ):
        values = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(values | dict.fromkeys(names)))
    config = tiny_config(model=folder, train__epochs=None, train__steps=1)
    finished = forks.train(config)
    assert finished.code == 0, finished.output
    row = table_row(finished.output)
    assert "no eos token: an export's generate() stops at '<|end|>', which ends the answers" in row
    assert (
        "no pad token: training pads with id 0, hidden from attention, an export's generate() with "
        "'<|end|>'" in row
    )
    [saved] = (tmp_path / "run" / "checkpoints").glob("step_*/model/generation_config.json")
    end = sample_tokenizer.eos_token_id
    saved = json.loads(saved.read_text())
    assert (saved["eos_token_id"], saved["pad_token_id"]) == (end, end)

    shutil.copytree(tiny_model, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    rows = [{"prompt": f"{i} and one: ", "completion": f"{i + 1}"} for i in range(30)]
    data = {"data__train_sources": [str(write_rows(tmp_path / "plain.jsonl", rows))]}
    plain = tiny_config(
        model=tmp_path / "plain", data__eval_sources=None, output_dir=str(tmp_path / "p"), **data
    )
    row = table_row(forks.train(plain, "--dry_run").output)
    assert row.endswith("; no chat template")
    named = forks.train(plain, "--dry_run", "--model.chat_template", "plain").output
    assert table_row(named).endswith("; chat template plain (model.chat_template)")
