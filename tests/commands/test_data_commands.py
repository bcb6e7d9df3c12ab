"""scripts/inspect_data.py, and all options of the data pipeline in one real run.
pytest tests/commands/test_data_commands.py
"""

import json
import re
from pathlib import Path

from harness.inputs import chat, write_rows
from harness.runs import read_metrics


def test_ranks_with_different_plans_are_refused(forks, tiny_config):
    refused = forks.refusal(tiny_config(), ranks=2, module="different_plans")
    assert "the data plan: 'b' on this rank, but 'a' on rank 0" in refused


def test_inspect_data(forks, tiny_config, tmp_path, chat_rows):
    row = chat("bold \033[31m", "1 < 2 & 3", "And?", "No.")
    rows = write_rows(tmp_path / "rows.jsonl", [row, *chat_rows[:69]])
    inspect = ["scripts.inspect_data", "--config", tiny_config(data__train_sources=[str(rows)])]
    finished = forks.script(*inspect, "--rank", 2, 64, code=0, FORCE_COLOR="1")
    assert "rows.jsonl, read as messages: 70 examples, repeat 1" in finished.output
    assert "\033[32m1 < 2 & 3\033[0m\033[1;35m<|end|>\033[0m<|user|>" in finished.output
    assert "\033[31m" not in finished.output, "control characters of a row reach no terminal"
    plain = forks.script(*inspect)
    assert "<|assistant|>[[1 < 2 & 3]]{{<|end|>}}<|user|>" in plain.output
    assert "\033[" not in plain.output
    assert "--ranks" in forks.script(*inspect, "--ranks", 0, code=2).error


def test_every_option_of_the_pipeline_in_one_run(forks, tiny_config, tmp_path, chat_rows):
    """Two sources of two kinds, one of them repeated, bad rows, steps by tokens, packing."""
    bad = [{"messages": []}, chat("x")]
    first = write_rows(tmp_path / "first.jsonl", [*chat_rows[:40], *bad])
    second = tmp_path / "second.json"
    second.write_text(json.dumps(chat_rows[40:70]))
    config = tiny_config(
        data__train_sources=[
            {"path": str(first), "on_bad_row": "skip"}, {"path": str(second), "repeat": 2.5},
        ],
        data__batching="packed",
        data__micro_batch_tokens=400, train__global_batch_size=None,
        train__global_batch_tokens=900, train__warmup_examples=0,
        train__steps=12,
    )  # fmt: skip
    table = forks.finish(config, ranks=2).output
    assert "first.jsonl, read as messages: 40 examples" in table, table
    assert "second.json, read as messages: 30 examples, repeat 2.5" in table, table
    [file] = set(re.findall(r"1 row, listed in (\S+)", table))
    rejected = Path(file).read_text().splitlines()
    assert [json.loads(line)["place"] for line in rejected] == [41, 42]
    steps = read_metrics(tmp_path / "run")
    assert len(steps) == 12 and all(600 < s["tokens"] < 1100 for s in steps)
