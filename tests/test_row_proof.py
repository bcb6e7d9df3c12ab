"""scripts/prove.py data: right masks are proved, each kind of wrong one is found.
pytest tests/test_row_proof.py
"""

import sys

import datasets
import pytest
from conftest import REPO, SAMPLE, write_rows
from row_formats import TWO_TURNS, mix_of_formats
from transformers import AutoTokenizer

from data.supervision import Ends, check_turns, segments, turns_of

sys.path.insert(0, str(REPO / "scripts"))
import prove

TEXT = (
    "<|user|>What is 1+1?<|end|><|assistant|>It is 2.<|end|>"
    "<|user|>And 2+2?<|end|><|assistant|>It is 4.<|end|>"
)


@pytest.fixture
def proof(monkeypatch, capsys):
    """Runs `prove.py data` in this process: (exit code, what it printed)."""

    def run(config):
        monkeypatch.setattr(sys, "argv", ["prove.py", "data", "--config", str(config)])
        with pytest.raises(SystemExit) as ended:
            prove.main()
        return ended.value.code, capsys.readouterr().out

    return run


@pytest.mark.parametrize("settings", [
    {}, {"supervise": "last"}, {"supervise": "all"}, {"as_chat": True},
    {"max_length": 20, "on_too_long": "split"}, {"max_length": 20, "on_too_long": "truncate"},
])  # fmt: skip
def test_right_masks_are_proved(proof, tiny_config, tmp_path, chat_rows, settings):
    given = {f"data__{key}": value for key, value in settings.items()}
    sources = mix_of_formats(tmp_path, chat_rows)
    code, out = proof(tiny_config(data__train_sources=sources, **given))
    assert code == 0 and out.endswith("proved\n"), out
    assert "rows" in out and "25\n" in out and "key 'id'" in out and "9 rows, meta-data" in out
    if settings.get("supervise") != "all":
        assert "end mark '<|end|>' at the end of rows" in out


def test_a_wrong_mask_in_the_cache_is_found(proof, tiny_config, tmp_path):
    config = tiny_config()
    assert proof(config)[0] == 0
    changed = 0
    for folder in (tmp_path / "cache").glob("*/rows"):
        rows = datasets.load_from_disk(str(folder))
        if len(rows) == 70:

            def spoil(row, index):
                mask = row["loss_mask"]
                return {"loss_mask": [False, True, *mask[2:]] if index == 6 else mask}

            spoilt = rows.map(spoil, with_indices=True, keep_in_memory=True, features=rows.features)
            for file in folder.iterdir():
                file.unlink()
            spoilt.save_to_disk(folder)
            changed += 1
    assert changed == 1
    code, out = proof(config)
    assert code == 1 and out.endswith("REFUTED\n"), out
    assert "train.jsonl:7: the cache differs from the row in loss mask" in out
    assert "tokenized examples: 1 problems" in out


def test_generation_marks_around_user_text_are_found(
    proof, tiny_config, tmp_path, monkeypatch, chat_rows
):
    """Whether or not the renderer itself refuses such a template."""
    import data.render

    def spoilt(row, tokenizer, options, *rest):
        ids, mask = data.render.render(row, tokenizer, options, *rest)
        return ids, [False, *[True] * (len(ids) - 1)] if row == chat_rows[3] else mask

    monkeypatch.setattr("data.tokenize.render", spoilt)
    monkeypatch.setattr("data.row_proof.render", spoilt)
    code, out = proof(tiny_config())
    assert code == 1, out
    assert "train.jsonl:4: message 1 of 2 (user): its content is not completely outside" in out
    assert "loss masks: 1 problems" in out


def test_a_key_that_is_not_in_the_tokens_is_found(proof, tiny_config, tmp_path, chat_rows):
    row = {"prompt": "1+1?", "completion": "2", "hint": "count on your fingers"}
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}] * 11 + [row])
    code, out = proof(tiny_config(data__train_sources=[str(file)], data__on_bad_row="skip"))
    kept = "rows.jsonl:12: the text of key 'hint' is not in the tokens" in out
    assert (code == 1 and kept) or "bad rows" in out


# Masks by hand


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(SAMPLE / "model")


def problems_of(tokenizer, *supervised, messages=TWO_TURNS, text=TEXT, supervise="answers"):
    """Of one row in which these consecutive parts of the text are supervised."""
    spans, at = [], 0
    for part in supervised:
        at = text.index(part, at)
        spans.append((at, at + len(part)))
        at += len(part)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [
        any(a <= first and last <= b for a, b in spans) for first, last in encoded["offset_mapping"]
    ]
    pieces = segments(encoded["input_ids"], mask, tokenizer)
    assert "".join(piece.text for piece in pieces) == text
    found, runs = check_turns(turns_of({"messages": messages}, supervise), pieces)
    ends = Ends()
    ends.add(runs, "rows.jsonl:1")
    return found or list(ends.problems())


RIGHT = ("It is 2.<|end|>", "It is 4.<|end|>")


def test_a_right_mask_has_no_problem(tokenizer):
    assert problems_of(tokenizer, *RIGHT) == []
    assert problems_of(tokenizer, RIGHT[1], supervise="last") == []
    weighted = [*TWO_TURNS[:3], {**TWO_TURNS[3], "weight": 0}]
    assert problems_of(tokenizer, RIGHT[0], messages=weighted) == []
    same = [*TWO_TURNS[:2], {"role": "user", "content": "It is 2."}, *TWO_TURNS[3:]]
    text = TEXT.replace("And 2+2?", "It is 2.")
    assert problems_of(tokenizer, *RIGHT, messages=same, text=text) == []
    code = {"function": {"name": "add", "arguments": '{"first": "two"}'}}
    call = [TWO_TURNS[0], {"role": "assistant", "content": "", "tool_calls": [code]}]
    text = TEXT[: TEXT.index("It is 2.")] + 'call add {"first": "two"}<|end|>'
    assert problems_of(tokenizer, '{"first": "two"}<|end|>', messages=call, text=text)
    part = 'call add {"first": "two"}<|end|>'
    assert problems_of(tokenizer, part, messages=call, text=text) == []


WRONG = {
    "the user's turn too": ((TEXT[TEXT.index("It is 2.") :],), "message 3 of 4 (user): its"),
    "part of the user's turn": ((RIGHT[0], "+2?<|end|>", RIGHT[1]), "message 3 of 4 (user)"),
    "the next turn's header": (
        ("It is 2.<|end|><|user|>", RIGHT[1]), "'<|end|><|user|>', which is more than an end mark"),
    "the header and mark before": (
        ("<|end|><|assistant|>" + RIGHT[0], RIGHT[1]), "begins with '<|end|><|assistant|>'"),
    "a missing end mark": (("It is 2.", RIGHT[1]), "1 supervised turns without their end mark"),
    "no end mark": (("It is 2.", "It is 4."), "nothing would stop generation"),
    "part of an answer": (("is 2.<|end|>", RIGHT[1]), "message 2 of 4 (assistant): its content is"),
    "one answer of two": ((RIGHT[1],), "message 2 of 4 (assistant): its content is not completely"),
    "nothing": ((), "message 2 of 4 (assistant): its content is not completely"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_mask_is_reported(tokenizer, case):
    supervised, said = WRONG[case]
    found = problems_of(tokenizer, *supervised)
    assert any(said in problem for problem in found), found


def test_an_answer_with_weight_0_that_is_trained_on_is_reported(tokenizer):
    messages = [TWO_TURNS[0], {**TWO_TURNS[1], "weight": 0}, *TWO_TURNS[2:]]
    found = problems_of(tokenizer, *RIGHT, messages=messages)
    assert found == ["supervised text that belongs to no assistant turn: 'Itis2.<|end|>'"]
    found = problems_of(tokenizer, *RIGHT, supervise="last")
    assert found == ["supervised text that belongs to no assistant turn: 'Itis2.<|end|>'"]
