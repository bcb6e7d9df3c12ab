"""Tools that a copy can leave out: the sample, answers that match.
pytest tests/tools/test_tools.py"""

import json
import re
import shutil

from harness.inputs import write_rows
from harness.repository import REPO, SAMPLE


def test_the_sample_is_what_its_script_writes(forks, tmp_path):
    finished = forks.script("data.sample.make_sample", tmp_path, code=0)
    counts = re.search(r"(\S+) training rows, (\S+) held-out rows, (\d+) tokens", finished.output)
    readme = (REPO / "data" / "README.md").read_text()
    assert all(count in readme for count in counts.groups()), "data/README.md states the counts"
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        shipped = SAMPLE / path.relative_to(tmp_path)
        assert path.read_bytes() == shipped.read_bytes(), path.name


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
    assert swapped.code == 2 and f"{file} is not the folder" in swapped.errors[0]
