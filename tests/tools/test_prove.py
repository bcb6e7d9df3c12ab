"""scripts/prove.py: an epoch has each example once, a mask is right; wrong ones are found.
pytest tests/tools/test_prove.py
"""

import re
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from harness.cures import refused
from harness.inputs import read_config, write_rows
from harness.tokenizers import small_tokenizer

import zerotrain.data.cache
import zerotrain.data.loader
import zerotrain.rows.readers
import zerotrain.rows.render
from zerotrain.rows.tokenize import make_caches


@pytest.mark.parametrize("batching", ["packed", "bucketed"])
def test_prove_epochs_of_a_mix_on_two_world_sizes(
    prove, tiny_config, tmp_path, chat_rows, batching
):
    sources = [
        {"path": write_rows(tmp_path / f"{times}.jsonl", rows), "repeat": times}
        for times, rows in ((0.3, chat_rows[:40]), (2.5, chat_rows[40:60]), (1, chat_rows[60:]))
    ]
    config = tiny_config(data__train_sources=sources)
    code, out = prove("epoch", config, "--epochs", 3, "--data.batching", batching)
    assert code == 0 and out.count("216 examples, 0 missing, 0 too often") == 2


@pytest.mark.parametrize("times, said", [(0, "missing: "), (2, "too often: ")])
def test_a_proof_can_fail(prove, tiny_config, monkeypatch, times, said):
    """A loader that drops a micro-batch, and one that yields the first one twice."""
    collate = zerotrain.data.loader.collate
    is_first = iter([True])

    def spoiled(rows, picked, budget):
        return collate(rows, np.tile(picked, times) if next(is_first, False) else picked, budget)

    monkeypatch.setattr(zerotrain.data.loader, "collate", spoiled)
    code, out = prove("epoch", tiny_config(), "--world", 2, "--then", 3)
    assert code == 1 and "REFUTED" in out and said in out and "train.jsonl:" in out


# --------------------------------------------------------------------------------------------------
# prove.py data


WRONG = {
    "no begin": (0, 0, False, " is not supervised"),
    "the token before an answer": (0, -1, True, "is supervised"),
    "no end token": (1, -1, False, "is supervised up to"),
    "more than the end token": (1, 0, True, "is supervised"),
}
"""Begin (0) or end (1) of answers, shift from it, wrong value of the mask, part of the message."""


@pytest.mark.parametrize("defect", WRONG)
def test_right_masks_are_proved_and_a_wrong_one_in_the_cache_is_not(
    prove, tiny_config, tmp_path, chat_rows, monkeypatch, defect
):
    edge, shift, value, said = WRONG[defect]
    rows = [{"messages": a["messages"] + b["messages"][-2:]} for a, b in pairwise(chat_rows[:21])]
    rows = write_rows(tmp_path / "answers.jsonl", rows)
    config = tiny_config(data__train_sources=[rows], data__eval_sources=None, data__max_length=1000)
    code, out = prove("data", config)
    assert code == 0, out
    assert "20 rows, 20 compared with their text" in out and "  40 answers, compared" in out
    fetch = zerotrain.data.cache.TokenizedRows.fetch

    def spoiled(self, rows):
        examples = fetch(self, rows)
        for _, mask in examples:
            edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
            np.put(mask, edges[edge::2] + shift, value, mode="clip")
        return examples

    monkeypatch.setattr(zerotrain.data.cache.TokenizedRows, "fetch", spoiled)
    code, out = prove("data", config)
    assert code == 1 and "REFUTED" in out and "answers.jsonl:1: " in out and said in out


def test_rows_of_tokens_are_compared_token_by_token(prove, tiny_config, tmp_path, monkeypatch):
    row = {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}
    rows = write_rows(tmp_path / "tokens.jsonl", [row] * 12)
    config = tiny_config(data__train_sources=[rows], data__eval_sources=None)
    code, out = prove("data", config)
    assert code == 0 and "12 rows, 12 compared" in out, out
    fetch = zerotrain.data.cache.TokenizedRows.fetch
    for part in (0, 1):  # ids, mask

        def spoiled(self, rows, part=part):
            examples = fetch(self, rows)
            examples[0][part, 1] = 0
            return examples

        monkeypatch.setattr(zerotrain.data.cache.TokenizedRows, "fetch", spoiled)
        code, out = prove("data", config)
        assert code == 1 and "tokens.jsonl:1: its " in out


def test_a_space_between_prompt_and_completion_is_not_proved(
    prove, tiny_config, tmp_path, monkeypatch
):
    tokenizer = tmp_path / "tokenizer"
    small_tokenizer("Llama 2, Phi-3").save_pretrained(tokenizer)
    rows = [{"prompt": "foo(", "completion": f"self{i})"} for i in range(12)]
    config = tiny_config(
        data__train_sources=[write_rows(tmp_path / "code.jsonl", rows)],
        data__eval_sources=None,
        model__tokenizer=tokenizer,
    )
    code, out = prove("data", config)
    assert code == 0 and "12 compared" in out, out

    def encoded_apart(prompt, ids, completion, encode):
        return encode(completion)[1:]  # without bos

    monkeypatch.setattr(zerotrain.rows.render, "_continuation", encoded_apart)
    code, out = prove("data", config, "--data.cache_dir", tmp_path / "other")
    assert code == 1 and "code.jsonl:1: " in out


def test_nulls_that_a_table_adds_are_not_trained_as_arguments(
    prove, tiny_config, tmp_path, monkeypatch
):
    call = {"name": "add", "arguments": {"a": 1, "b": None}}
    turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "tool_calls": [call]}]
    rows = write_rows(tmp_path / "nulls.jsonl", [{"messages": turns}] * 12)
    template = tmp_path / "calls.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    config = tiny_config(
        data__train_sources=[rows], data__eval_sources=None, model__chat_template=template
    )
    code, out = prove("data", config)
    assert code == 0, out
    monkeypatch.setattr(zerotrain.rows.readers, "_object", dict)  # keeps them
    code, out = prove("data", config, "--data.cache_dir", tmp_path / "other")
    assert code == 1 and "nulls.jsonl:1: " in out


def test_rows_that_cannot_be_compared_prove_nothing(forks, prove, tiny_config, capsys):
    cache, *_ = make_caches(read_config(tiny_config()))
    for changes in ({"data__supervise": "all"}, {"data__train_sources": [cache]}):
        config = tiny_config(data__eval_sources=None, **changes)
        line = refused("no row could be compared", partial(prove, "data"), config)
        command = re.search(r"python -m (\S+) shows them with their masks", line)[1]
        assert "[[" in forks.script(command, "--config", config, code=0).output
    assert "proved" not in capsys.readouterr().out


@pytest.mark.parametrize("script", ["prove", "scaling_test"])
def test_a_folder_of_the_user_is_left_as_it_is(forks, tiny_config, tmp_path, script):
    """These tools write and remove files only in folders with their mark."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "precious").write_text("x")
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n")
    flags = {
        "prove": ["equivalence", "--work", work, "--epochs={}"],
        "scaling_test": ["--hostfile", hosts, "--output", work, "--nodes={}", "--", "train.py"],
    }[script]
    for number, named in ((0, "1"), (1, "choose a new folder")):
        given = [str(flag).format(number) for flag in flags]
        refusal = forks.script(f"scripts.{script}", *given, "--config", tiny_config(), code=2)
        assert named in refusal.error
    assert [path.name for path in work.iterdir()] == ["precious"]
