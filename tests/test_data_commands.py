"""scripts/inspect_data.py, and all options of the data pipeline in one real run.
pytest tests/test_data_commands.py
"""

import importlib
import json
import sys

import numpy as np
import pytest
from conftest import REPO, read_metrics, run, write_rows

from runtime.errors import UserError


@pytest.fixture
def call(monkeypatch):
    """A script's main, called in this process since torch takes seconds to import."""
    monkeypatch.syspath_prepend(REPO / "scripts")

    def main(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        importlib.import_module(name.removesuffix(".py")).main()

    return main


def test_ranks_with_different_plans_are_refused(forks, tiny_config):
    finished = forks.train(tiny_config(), ranks=2, module="different_plans")
    assert finished.code == 2 and "error: the data plan of rank 1 (b on " in finished.output


def test_inspect_data_tells_and_draws(forks, tiny_config, tmp_path, chat_rows):
    plot, page = tmp_path / "out.png", tmp_path / "out.html"
    row = {"messages": [
        {"role": "user", "content": "<b>bold</b> \033[31m"},
        {"role": "assistant", "content": "1 < 2 & 3"},
        {"role": "user", "content": "<script>"},
        {"role": "assistant", "content": "No."},
    ]}  # fmt: skip
    rows = write_rows(tmp_path / "rows.jsonl", [row, *chat_rows[:69]])
    config = tiny_config(data__train_sources=[str(rows)])
    inspect = "scripts/inspect_data.py"
    finished = forks.script(
        inspect, "--config", config, "--plot", plot, "--html", page, "--ranks", "2,4,64",
        "--color", "always",
    )  # fmt: skip
    assert finished.code == 0, finished.output
    assert "examples              70, of 70 rows read from" in finished.output
    assert "held-out examples" in finished.output and "99.9%: " in finished.output
    assert "\033[32m1 < 2 & 3\033[0m\033[1;35m<|end|>\033[0m<|user|>" in finished.output
    assert "\033[31m" not in finished.output, "control characters of a row reach no terminal"
    assert "rows.jsonl:1: " in finished.output and "Answer: " in finished.output
    written = page.read_text()
    assert written.count("<h2>") == 3 and f"{rows}:1: " in written and "<script>" not in written
    assert (
        '<span class="answer">1 &lt; 2 &amp; 3</span><span class="end">&lt;|end|&gt;</span>'
        '<span class="plain">&lt;|user|&gt;&lt;script&gt;'
    ) in written
    assert "http" not in written and "src=" not in written, "the page needs no other file"
    assert "64  too many ranks: a step has fewer examples" in finished.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    plain = forks.script(inspect, "--config", config, "--ranks", "2")
    assert "<|assistant|>[[1 < 2 & 3]]{{<|end|>}}<|user|>" in plain.output
    assert "\033[" not in plain.output


MISTAKES = {
    ("inspect_data.py", "--ranks", "eight"): "--ranks: 'eight' is not a list of numbers",
    ("inspect_data.py", "--plot", "/nowhere/out.png"): "--plot: no such folder: /nowhere",
    (
        "inspect_data.py",
        "--plot",
        "out.xyz",
    ): "--plot: out.xyz does not end in .png",
    (
        "inspect_data.py",
        "--html",
        "out.htm",
    ): "--html: out.htm does not end in .html",
    ("inspect_data.py", "--show", "-1"): "--show: -1 is negative",
}


@pytest.mark.parametrize("args", MISTAKES)
def test_mistakes_are_one_line(call, tiny_config, args):
    with pytest.raises(UserError) as mistake:
        call(*args, "--config", tiny_config())
    assert MISTAKES[args] in str(mistake.value) and "\n" not in str(mistake.value)


@pytest.mark.parametrize("args", list(MISTAKES)[::4])
def test_a_mistake_exits_2(tiny_config, args):
    name, *rest = args
    finished = run([sys.executable, REPO / "scripts" / name, *rest, "--config", tiny_config()])
    assert finished.code == 2, finished.output
    assert len(finished.errors) == 1 and MISTAKES[args] in finished.errors[0]


def test_every_option_of_the_pipeline_in_one_run(forks, tiny_config, tmp_path, chat_rows):
    """Two weighted sources of two kinds, bad rows, steps by tokens, a window, packing."""
    bad = [{"messages": []}, {"messages": [{"role": "user", "content": "x"}]}]
    first = write_rows(tmp_path / "first.jsonl", [*chat_rows[:40], *bad])
    second = tmp_path / "second.json"
    second.write_text(json.dumps(chat_rows[40:70]))
    config = tiny_config(
        data__train_sources=[{"path": str(first), "weight": 1}, {"path": str(second), "weight": 2}],
        data__on_bad_row="skip", data__window=2, data__batching="packed",
        data__micro_batch_tokens=400, train__global_batch_size=None,
        train__global_batch_tokens=900, train__warmup_examples=None, train__warmup_tokens=1000,
        train__epochs=None, train__steps=12,
    )  # fmt: skip
    finished = forks.train(config, ranks=2)
    assert finished.code == 0, finished.output
    table = finished.output
    assert "40 examples, 15 of them per epoch, 33.3% of its examples" in table
    assert "30 examples, 30 of them per epoch, 66.7% of its examples" in table
    assert "2 left out: 1 wrong type, 1 empty answer (rejected_rows.jsonl)" in table
    assert (
        "packed: as configured; window of 2 steps" in table and "of at most 900 for the" in table
    ), table
    rejected = (tmp_path / "run" / "rejected_rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["place"] for line in rejected] == [41, 42]
    steps = read_metrics(tmp_path / "run")
    assert len(steps) == 12 and all(600 < s["tokens"] < 1100 for s in steps)
    assert np.median([s["data_seconds"] for s in steps[1:]]) < 0.01
