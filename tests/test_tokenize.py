"""Rows -> tokens and masks, by hand-made rows; the cache.    pytest tests/test_tokenize.py"""

import dataclasses
import os

import numpy as np
import pytest
from conftest import write_rows

from data.sources import parse_row
from data.tokenize import RenderOptions, cache_path, hold_out, open_cache, render, tokenize_files
from finetune.config import DataConfig
from finetune.errors import UserError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4"},
]


def options(format, **changes):
    base = RenderOptions(format, {}, False, "answers", 1000, "truncate")
    return dataclasses.replace(base, **changes)


def supervised_text(tokenizer, row, opts):
    ids, mask = render(row, tokenizer, opts)
    assert len(ids) == len(mask) and not mask[0]
    return tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m]), tokenizer.decode(ids)


def test_messages_supervise_every_assistant_turn_and_its_end(sample_tokenizer):
    masked, whole = supervised_text(sample_tokenizer, {"messages": CHAT}, options("messages"))
    assert masked == "2<|end|>4<|end|>"
    assert whole == (
        "<|system|>Be brief.<|end|><|user|>1+1?<|end|><|assistant|>2<|end|>"
        "<|user|>And 2+2?<|end|><|assistant|>4<|end|>"
    )


def test_prompt_completion_supervises_the_completion_and_the_end(sample_tokenizer):
    row = {"prompt": "1+1=", "completion": "2"}
    masked, whole = supervised_text(sample_tokenizer, row, options("prompt_completion"))
    assert (masked, whole) == ("2<|end|>", "1+1=2<|end|>")


def test_instruction_rows_join_instruction_and_input(sample_tokenizer):
    row = {"instruction": "Add.", "input": "1 1", "output": "2"}
    masked, whole = supervised_text(sample_tokenizer, row, options("instruction"))
    assert (masked, whole) == ("2<|end|>", "Add.\n\n1 1\n\n2<|end|>")
    del row["input"]
    assert supervised_text(sample_tokenizer, row, options("instruction"))[1] == "Add.\n\n2<|end|>"


def test_text_supervises_all_but_the_first_token(sample_tokenizer):
    masked, whole = supervised_text(sample_tokenizer, {"text": "1+1=2"}, options("text"))
    assert (masked, whole) == ("+1=2<|end|>", "1+1=2<|end|>")


def test_supervise_all_and_as_chat(sample_tokenizer):
    row = {"prompt": "1+1=", "completion": "2"}
    opts = options("prompt_completion", supervise="all")
    assert supervised_text(sample_tokenizer, row, opts)[0] == "+1=2<|end|>"
    opts = options("prompt_completion", as_chat=True)
    masked, whole = supervised_text(sample_tokenizer, row, opts)
    assert (masked, whole) == ("2<|end|>", "<|user|>1+1=<|end|><|assistant|>2<|end|>")


def test_columns_rename_keys():
    row = parse_row(
        '{"question": "q", "answer": "a"}', {"prompt": "question", "completion": "answer"}
    )
    assert row == {"prompt": "q", "completion": "a"}


# --------------------------------------------------------------------------------------------------
# The cache


def data_config(tmp_path, rows, **changes):
    file = write_rows(tmp_path / "rows.jsonl", rows)
    base = {"train_files": [str(file)], "cache_dir": str(tmp_path / "cache"), "max_length": 64}
    return DataConfig(**{**base, **changes})


def build(tmp_path, tokenizer, rows, **changes):
    config = data_config(tmp_path, rows, **changes)
    return open_cache(tokenize_files(config.train_files, tokenizer, config))


LONG = {"prompt": "p" * 10, "completion": "c" * 100}  # 111 tokens with the end
SHORT = {"prompt": "p" * 10, "completion": "c" * 5}


@pytest.mark.parametrize(
    ("on_too_long", "lengths", "supervised", "count"),
    [
        ("truncate", [64, 16], [54, 6], {"truncated": 1}),
        # 111 tokens as 64 + 48: the second piece begins with the first one's last token as context
        ("split", [64, 48, 16], [54, 47, 6], {"split": 2}),
        ("drop", [16], [6], {"dropped": 1}),
    ],
)
def test_rows_over_max_length(tmp_path, sample_tokenizer, on_too_long, lengths, supervised, count):
    data = build(tmp_path, sample_tokenizer, [LONG, SHORT], on_too_long=on_too_long)
    assert data.lengths.tolist() == lengths
    assert data.supervised.tolist() == supervised
    assert {k: data.meta[k] for k in count} == count and data.meta["rows_read"] == 2
    assert data.supervised.tolist() == [int(mask.sum()) for mask in data.rows["loss_mask"][:]]


def test_split_keeps_every_target_once(tmp_path, sample_tokenizer):
    whole = build(tmp_path, sample_tokenizer, [LONG], max_length=200)
    pieces = build(tmp_path, sample_tokenizer, [LONG], max_length=20, on_too_long="split")
    assert pieces.meta["supervised_tokens"] == whole.meta["supervised_tokens"] == 101


def test_a_row_that_loses_its_answer_is_dropped_and_counted(tmp_path, sample_tokenizer):
    rows = [{"prompt": "p" * 100, "completion": "c"}, SHORT]
    data = build(tmp_path, sample_tokenizer, rows)
    assert len(data) == 1 and data.meta["without_answer"] == 1


BAD_ROWS = {
    "too long": ([LONG], {"on_too_long": "error"}, ":1: 111 tokens are over data.max_length (64)"),
    "not JSON": ('{"prompt": "a", "completion": "b"}\n{"prompt": \n', {}, ":2: not JSON"),
    "no object": ('{"prompt": "a", "completion": "b"}\n[1]\n', {}, ":2: a row is a JSON object"),
    "missing key": ([SHORT, {"prompt": "p"}], {}, ":2: key 'completion' is missing"),
    "wrong type": ([SHORT, {"prompt": "p", "completion": 3}], {}, "'completion' is a int"),
    "no format": ([{"a": 1}], {}, ":1: keys ['a'] fit no row format"),
    "no answer": ([{"messages": CHAT[:2]}], {}, ":1: no token is supervised"),
    "no role": ([{"messages": [{"content": "x"}]}], {}, ":1: a message has no role"),
    "no content": ([{"messages": [{"role": "user", "content": None}]}], {}, "is not a string"),
    "empty file": ("\n\n", {}, "has no rows"),
    "not UTF-8": (b'{"text": "\xff"}\n', {}, ":1: not UTF-8"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_named_by_file_and_line(tmp_path, sample_tokenizer, case):
    rows, changes, message = BAD_ROWS[case]
    config = data_config(tmp_path, rows if isinstance(rows, list) else [], **changes)
    if not isinstance(rows, list):
        (tmp_path / "rows.jsonl").write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    with pytest.raises(UserError) as caught:
        tokenize_files(config.train_files, sample_tokenizer, config)
    assert message in str(caught.value) and "rows.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"], "half a cache"


def test_bom_blank_lines_and_crlf_are_read(tmp_path, sample_tokenizer):
    config = data_config(tmp_path, [])
    text = '\ufeff{"text": "1"}\r\n\r\n{"text": "2"}\r\n'
    (tmp_path / "rows.jsonl").write_text(text, newline="")
    data = open_cache(tokenize_files(config.train_files, sample_tokenizer, config))
    assert data.rows["line"][:].tolist() == [1, 3]


def test_a_template_that_marks_no_assistant_token_is_refused(tmp_path, sample_tokenizer):
    import copy

    tokenizer = copy.deepcopy(sample_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(UserError, match=r"marks no assistant token.*model\.chat_template"):
        build(tmp_path, tokenizer, [{"messages": CHAT}])
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        build(tmp_path, tokenizer, [{"messages": CHAT}])


def test_the_cache_is_reused_and_keyed_by_what_matters(tmp_path, sample_tokenizer):
    config = data_config(tmp_path, [SHORT])
    path = tokenize_files(config.train_files, sample_tokenizer, config)
    before = (path / "meta.json").stat().st_mtime_ns
    assert tokenize_files(config.train_files, sample_tokenizer, config) == path
    assert (path / "meta.json").stat().st_mtime_ns == before

    other = dataclasses.replace(config, max_length=12)
    assert cache_path(config.train_files, sample_tokenizer, other) != path
    budget = dataclasses.replace(config, micro_batch_tokens=99999)
    assert cache_path(config.train_files, sample_tokenizer, budget) == path
    write_rows(tmp_path / "rows.jsonl", [SHORT, SHORT])
    os.utime(tmp_path / "rows.jsonl", ns=(1, 1))
    assert cache_path(config.train_files, sample_tokenizer, config) != path


def test_several_processes_give_the_same_tokens_as_one(tmp_path, sample_tokenizer):
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(3000)]
    (tmp_path / "two").mkdir()
    one = build(tmp_path, sample_tokenizer, rows, workers=1)
    two = build(tmp_path / "two", sample_tokenizer, rows, workers=2)
    assert one.meta["content"] == two.meta["content"]
    assert one.rows["input_ids"][2500].tolist() == two.rows["input_ids"][2500].tolist()


def test_the_pieces_of_a_split_row_are_held_out_together(tmp_path, sample_tokenizer):
    rows = [{"text": "x" * 50} for _ in range(40)]
    data = build(tmp_path, sample_tokenizer, rows, max_length=20, on_too_long="split")
    assert len(data) == 120
    train, held = hold_out(data, 0.25, seed=3)
    lines = [set(part.rows["line"][:].tolist()) for part in (train, held)]
    assert not lines[0] & lines[1] and len(held) == 30
    with pytest.raises(UserError, match="one row cannot be divided"):
        hold_out(build(tmp_path, sample_tokenizer, rows[:1]), 0.5, seed=3)


def test_hold_out_splits_without_loss_or_overlap(tmp_path, sample_tokenizer):
    data = build(tmp_path, sample_tokenizer, [{"text": f"{i}"} for i in range(200)])
    train, held = hold_out(data, 0.1, seed=3)
    lines = train.rows["line"][:].tolist(), held.rows["line"][:].tolist()
    assert len(held) == 20 and sorted(lines[0] + lines[1]) == list(range(1, 201))
    assert train.meta["content"] != data.meta["content"]
    for part in (train, held):
        assert [len(ids) for ids in part.rows["input_ids"][:]] == np.asarray(part.lengths).tolist()
