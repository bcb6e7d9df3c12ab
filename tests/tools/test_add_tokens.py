"""Tokens added to a model: rows, ties, files.    pytest tests/tools/test_add_tokens.py"""

import shutil

import pytest
import torch
from harness.inputs import strategy
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from scripts import add_tokens
from zerotrain.config.parse import parse_command_line
from zerotrain.model.architecture import check_model_fits, meta_model
from zerotrain.model.load import load_model_config
from zerotrain.runtime.errors import UserError
from zerotrain.tools.vocabulary import resize_vocabulary

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
    "qwen3, tied": {**TEXT, "tie_word_embeddings": True},
    "phi": {**TEXT, "num_key_value_heads": 4},  # its head has a bias
    # sizes in text_config; embeddings of a class of its own, which scales them
    "gemma3": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4},
}


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits


@pytest.mark.parametrize("name", MODELS)
def test_old_rows_stay_and_new_ones_are_the_mean(name, tmp_path):
    """300 ids have been trained, 330 are to have rows: ten new ones among the 20 unused rows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split(",")[0], **MODELS[name])
    model = AutoModelForCausalLM.from_config(config)
    before = logits_of(model)
    tensors = [model.get_input_embeddings().weight.detach().clone()]
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tensors += [t.detach().clone() for t in model.get_output_embeddings().parameters()]
    assert resize_vocabulary(model, 300, 310) == 320
    assert torch.equal(model.get_input_embeddings().weight[310:], tensors[0][310:]), "unused rows"
    assert resize_vocabulary(model, 310, 330) == 384
    head = model.get_output_embeddings()
    assert (head.weight is model.get_input_embeddings().weight) == is_tied
    new_tensors = [model.get_input_embeddings().weight, *head.parameters()]
    for old, new in zip(tensors, new_tensors, strict=True):
        assert torch.equal(new[:300], old[:300])
        torch.testing.assert_close(new[300:310], old[:300].mean(0).expand(10, *old.shape[1:]))
        torch.testing.assert_close(new[310:], new[:310].mean(0).expand(74, *old.shape[1:]))
    torch.testing.assert_close(logits_of(model)[..., :300], before[..., :300])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(model))


@pytest.fixture
def command(monkeypatch):
    """Runs scripts/add_tokens.py in this process."""

    def call(*args):
        monkeypatch.setattr("sys.argv", ["add_tokens.py", *map(str, args)])
        add_tokens.main()

    return call


def test_a_base_model_gets_the_marks_of_a_chat_and_trains(
    command, forks, tiny_config, tmp_path, tiny_model
):
    out = tmp_path / "deep" / "out"
    tokens = ["<|im_start|>", "<|im_end|>", "<|end|>"]
    command(tiny_model, out, "--tokens", *tokens, "--special", "--chat_template", "chatml")
    first = len(AutoTokenizer.from_pretrained(tiny_model))
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("x<|im_end|>y", add_special_tokens=False)["input_ids"]
    assert ids[1:-1] == [first + 1] and tokenizer.decode(ids, skip_special_tokens=True) == "xy"
    assert "<|im_start|>" in tokenizer.chat_template
    weights = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in weights, "tied"
    rows = weights["model.embed_tokens.weight"]
    torch.testing.assert_close(rows[first + 1], rows[:first].mean(0))

    steps = {"train__epochs": None, "train__steps": 1}
    config = tiny_config(model=out, ds_config=str(strategy(tmp_path, "zero3")), **steps)
    finished = forks.train(config, ranks=2)
    assert finished.code == 0, finished.output


def test_mistakes(command, tmp_path, tiny_model, tiny_config):
    larger = AutoTokenizer.from_pretrained(tiny_model)
    larger.add_tokens([f"<|{i}|>" for i in range(400 - len(larger))])
    config = parse_command_line(["--config", str(tiny_config())]).config
    with pytest.raises(UserError, match=r"has 400 token ids, .* 320; .*rows for its new tokens"):
        check_model_fits(config, meta_model(load_model_config(config), False), larger)

    def refuse(message, *args, model=tiny_model, tokens=("<|new|>",), out=tmp_path / "out"):
        with pytest.raises(UserError, match=message) as error:
            command(model, out, "--tokens", *tokens, *args)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))

    refuse("exists; choose a new folder", out=tiny_model)
    refuse("has all of these tokens already", tokens=("<|end|>",))
    changed = tmp_path / "changed"
    shutil.copytree(tiny_model, changed)
    weights = load_file(tiny_model / "model.safetensors")
    save_file(weights | {"vision.weight": torch.ones(3)}, changed / "model.safetensors")
    refuse("a copy would lack: vision.weight", model=changed)
