"""Tools that a copy can leave out: the sample, answers that match.    pytest tests/test_tools.py"""

import re
import sys

from conftest import REPO, SAMPLE, run, write_rows


def test_the_sample_is_what_its_script_writes(tmp_path):
    finished = run([sys.executable, "data/sample/make_sample.py", tmp_path])
    assert finished.code == 0, finished.output
    counts = re.search(r"(\S+) training rows, (\S+) held-out rows, (\d+) tokens", finished.output)
    readme = (REPO / "data" / "README.md").read_text()
    assert all(count in readme for count in counts.groups()), "data/README.md states the counts"
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        shipped = SAMPLE / path.relative_to(tmp_path)
        assert path.read_bytes() == shipped.read_bytes(), path.name


def test_answers_are_compared_with_the_rows(forks, tiny_model, chat_rows, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", chat_rows[:5])
    counted = forks.script("scripts/exact_match.py", tiny_model, file, "--show", "1")
    assert "exact match: 0 of 5" in counted.output, counted.output
    write_rows(file, [{"messages": chat_rows[0]["messages"][:1]}])
    refused = forks.script("scripts/exact_match.py", tiny_model, file)
    assert refused.code == 2 and len(refused.errors) == 1 and "rows.jsonl:1" in refused.errors[0]
