"""End marks of answers are reported, missing ones refused; named templates.

pytest tests/test_end_marks.py
"""

import copy
import json
import shutil

import pytest
from conftest import SAMPLE
from datasets import Dataset

from config.parse import parse_command_line
from config.schema import CHAT_TEMPLATES, DataConfig
from data.end_marks import describe_masks
from data.options import RenderOptions
from data.render import render
from model.load import load_tokenizer
from runtime.errors import UserError

CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4"},
]
GLM = (  # generation stops at the next header
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT_MARKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
MARKED_SHORT = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def described(tokenizer, kind="messages", row=None, **changes):
    config = DataConfig(train_sources=["x"], **{"max_length": 100, **changes})
    options = RenderOptions(kind, {}, False, config.supervise, 1000, "truncate")
    ids, mask = render(row or {"messages": CHAT}, tokenizer, options)
    n = config.max_length
    rows = Dataset.from_dict({"input_ids": [ids[:n]] * 2, "loss_mask": [mask[:n]] * 2})
    return describe_masks(rows, tokenizer, config, kind == "messages")


def with_template(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("supervise", ["answers", "last", "all"])
def test_the_end_tokens_are_reported(sample_tokenizer, supervise):
    meta = described(sample_tokenizer, supervise=supervise)
    assert meta["end_tokens"] == [sample_tokenizer.eos_token_id]
    assert "answers end in '<|end|>'" in meta["masks"]
    text = described(sample_tokenizer, "text", {"text": "1+1=2"})
    assert text == {"masks": "answers end in '<|end|>'", "end_tokens": meta["end_tokens"]}


def test_a_mark_within_answers_does_not_end_them(sample_tokenizer):
    """As <|end|> of gpt-oss: behind an earlier answer, and within the last one behind reasoning."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.thinking %}{{ m.thinking }}<|tool|>"
        "{% endif %}{{ m.content }}"
        "<|{{ 'end' if m.role == 'assistant' and loop.last else 'tool' }}|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = with_template(sample_tokenizer, template)
    last = {"role": "assistant", "content": "4", "thinking": "Two twos."}
    found = described(tokenizer, row={"messages": [*CHAT[:2], CHAT[0], last]})
    assert found["end_tokens"] == [sample_tokenizer.eos_token_id]
    found = described(tokenizer, row={"messages": [*CHAT[:2], CHAT[0], CHAT[1]]})
    assert len(found["end_tokens"]) == 2, "nothing says that one of them does not end answers"


def test_an_end_that_was_cut_off_is_no_end_mark(sample_tokenizer):
    meta = described(sample_tokenizer, max_length=5)
    assert meta["end_tokens"] == [] and "every row is truncated at data.max_length" in meta["masks"]


def test_data_that_would_never_stop_is_refused(sample_tokenizer):
    for template, message in (
        (GLM, r"writes no end mark .*model\.eos_token"),
        (MARKED_SHORT, r"marks leave out the end mark '<\|end\|>'.*model\.chat_template"),
    ):
        with pytest.raises(UserError, match=message):
            described(with_template(sample_tokenizer, template))
    endless = copy.deepcopy(sample_tokenizer)
    endless.eos_token = None
    row = {"prompt": "1+1=", "completion": "2"}
    with pytest.raises(UserError, match=r"has no eos token.*model\.eos_token"):
        described(endless, "prompt_completion", row)
    assert described(endless)["end_tokens"], "the template's own mark is a token"


def test_an_end_mark_of_plain_text_is_reported(sample_tokenizer):
    meta = described(with_template(sample_tokenizer, TEXT_MARKS))
    assert meta["end_tokens"] == []
    assert "answers end in '<|im_end|>', which is not a token" in meta["masks"]
    assert "plain text: <|im_start|>, <|im_end|>" in meta["masks"]


@pytest.fixture
def loaded(tiny_config, tmp_path):
    """load_tokenizer with the sample's tokenizer, its template and eos token changed."""

    def load(template, eos="<|end|>", **model):
        folder = tmp_path / "tokenizer"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(SAMPLE / "model", folder)
        (folder / "chat_template.jinja").unlink()
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["eos_token"] = eos
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if "{" in template:
            (tmp_path / "t.jinja").write_text(template)
            template = tmp_path / "t.jinja"
        flags = {"tokenizer": folder, "chat_template": template, **model}
        config = parse_command_line(
            ["--config", str(tiny_config())]
            + [part for key, value in flags.items() for part in (f"--model.{key}", str(value))]
        ).config
        return load_tokenizer(config)

    return load


def supervised(tokenizer, messages=CHAT):
    options = RenderOptions("messages", {}, False, "answers", 1000, "truncate")
    ids, mask = render({"messages": messages}, tokenizer, options)
    return tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m])


def test_model_eos_token_ends_answers(loaded):
    for template in (GLM, TEXT_MARKS):
        tokenizer = loaded(template, eos_token="<|system|>")
        meta = described(tokenizer)
        assert meta["end_tokens"] == [tokenizer.convert_tokens_to_ids("<|system|>")]
        assert supervised(tokenizer).endswith("<|system|>")
        prompt = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
        assert "<|system|>" not in prompt
    row = {"prompt": "1+1=", "completion": "2"}
    endless = loaded(GLM, eos=None, eos_token="<|end|>")
    assert described(endless, "prompt_completion", row)["end_tokens"]
    with pytest.raises(UserError, match=r"model\.eos_token: '<none>' is not a token"):
        loaded(GLM, eos_token="<none>")


NAMED = {
    "chatml": "2<|end|>4<|end|>",
    "llama3": "2<|end|>4<|end|>",
    "zephyr": "2<|end|>4<|end|>",
    "alpaca": "2<|end|>4<|end|>",
    "plain": " 2<|end|> 4<|end|>",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_template_teaches_an_end_that_the_tokenizer_has(loaded, name):
    tokenizer = loaded(name)
    assert supervised(tokenizer) == NAMED[name]
    assert supervised(tokenizer, [{"role": "system", "content": "Be kind."}, *CHAT]) == NAMED[name]
    meta = described(tokenizer)
    assert meta["end_tokens"] == [tokenizer.eos_token_id]
    assert ("<|im_start|>" in meta["masks"]) == (name == "chatml")
    prompt = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(CHAT[:2], tokenize=False)
    assert whole.startswith(prompt)


def test_the_named_templates_are_these_and_an_unknown_name_lists_them(loaded):
    assert {file.stem for file in CHAT_TEMPLATES.glob("*.jinja")} == set(NAMED)
    listed = "alpaca, chatml, llama3, plain, zephyr"
    with pytest.raises(UserError, match=rf"model\.chat_template: .*chatlm.*{listed}"):
        loaded("chatlm")
