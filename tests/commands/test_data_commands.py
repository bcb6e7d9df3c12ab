"""scripts/inspect_data.py, and plans that differ.    pytest tests/commands/test_data_commands.py"""

from harness.inputs import chat, write_rows


def test_ranks_with_different_plans_are_refused(forks, tiny_config):
    refused = forks.refusal(tiny_config(), ranks=2, module="different_plans")
    assert "the data plan: 'b' on this rank, but 'a' on rank 0" in refused


def test_inspect_data(forks, tiny_config, tmp_path, chat_rows):
    row = chat("bold \033[31m", "1 < 2 & 3", "And?", "No.")
    rows = write_rows(tmp_path / "rows.jsonl", [row, *chat_rows[:69]])
    inspect = ["scripts.inspect_data", "--config", tiny_config(data__train_sources=[rows])]
    finished = forks.script(*inspect, "--rank", 2, 64, code=0, FORCE_COLOR="1")
    assert "rows.jsonl, read as messages: 70 examples, repeat 1" in finished.output
    assert "\033[32m1 < 2 & 3\033[0m\033[1;35m<|end|>\033[0m<|user|>" in finished.output
    assert "\033[31m" not in finished.output, "control characters of a row reach no terminal"
    plain = forks.script(*inspect)
    assert "<|assistant|>[[1 < 2 & 3]]{{<|end|>}}<|user|>" in plain.output
    assert "\033[" not in plain.output
    assert "--ranks" in forks.script(*inspect, "--ranks", 0, code=2).error
