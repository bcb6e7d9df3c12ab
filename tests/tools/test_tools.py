"""scripts/exact_match.py.    pytest tests/tools/test_tools.py"""

import json
import shutil

from harness.inputs import write_rows


def test_answers_are_compared_with_the_rows(forks, tiny_model, chat_rows, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", chat_rows[:5])
    counted = forks.script("scripts.exact_match", tiny_model, file, "--show", "1")
    assert "exact match: 0 of 5" in counted.output, counted.output
    question, answer = chat_rows[0]["messages"][-2:]
    no_ends = shutil.copytree(tiny_model, tmp_path / "no_ends")
    generation = json.loads((no_ends / "generation_config.json").read_text())
    generation["eos_token_id"] = None
    (no_ends / "generation_config.json").write_text(json.dumps(generation))
    for rows, model, named in (
        ([{"messages": [question]}], tiny_model, "rows.jsonl:1"),
        ([{"messages": [answer]}], tiny_model, "rows.jsonl:1"),
        ([{"messages": "x"}], tiny_model, "rows.jsonl:1"),
        ([chat_rows[0], []], tiny_model, "rows.jsonl:2"),
        ([], tiny_model, "no rows"),
        (chat_rows[:1], no_ends, "eos_token_id"),
    ):
        write_rows(file, rows)
        refused = forks.script("scripts.exact_match", model, file)
        assert refused.code == 2 and len(refused.errors) == 1, refused.output
        assert named in refused.errors[0]
    swapped = forks.script("scripts.exact_match", file, tiny_model)
    assert swapped.code == 2 and f"{file} is not a model folder" in swapped.errors[0]
