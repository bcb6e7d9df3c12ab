"""scripts/exact_match.py.    pytest tests/tools/test_tools.py"""

import shutil

from harness.inputs import change_json, write_rows


def test_answers_are_compared_with_the_rows(forks, tiny_model, chat_rows, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", chat_rows[:5])
    counted = forks.script("scripts.exact_match", tiny_model, file, "--show", "1")
    assert "exact match: 0 of 5" in counted.output, counted.output
    question, answer = chat_rows[0]["messages"][-2:]
    no_ends = shutil.copytree(tiny_model, tmp_path / "no_ends")
    change_json(no_ends / "generation_config.json", eos_token_id=None)
    for rows, model, named in (
        ([{"messages": [question]}], tiny_model, "rows.jsonl:1"),
        ([{"messages": [answer]}], tiny_model, "rows.jsonl:1"),
        ([{"messages": "x"}], tiny_model, "rows.jsonl:1"),
        ([chat_rows[0], []], tiny_model, "rows.jsonl:2"),
        ([], tiny_model, "no rows"),
        (chat_rows[:1], no_ends, "eos_token_id"),
    ):
        write_rows(file, rows)
        assert named in forks.script("scripts.exact_match", model, file, code=2).error
    swapped = forks.script("scripts.exact_match", file, tiny_model, code=2)
    assert f"{file} is not a model folder" in swapped.error
