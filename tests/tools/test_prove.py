"""scripts/prove.py: an epoch has each example once, a mask is right; wrong ones are found.
pytest tests/tools/test_prove.py
"""

import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from harness.inputs import write_rows
from harness.processes import run
from harness.repository import REPO

import zerotrain.data.loader
import zerotrain.data.tokenize
from zerotrain.runtime.errors import UserError

sys.path.insert(0, str(REPO / "scripts"))
import prove


def test_prove_epoch_on_two_world_sizes(forks, tiny_config):
    flags = ["--data.batching", "packed"]
    finished = forks.script(
        "scripts/prove.py", "epoch", "--config", tiny_config(), "--world", "3", "--then", "5",
        "--cut", "0.5", *flags,
    )  # fmt: skip
    assert finished.code == 0, finished.output
    lines = finished.output.splitlines()
    assert lines[-1] == "proved"
    assert sum("70 examples once, 0 missing, 0 repeated" in line for line in lines) == 2


def test_a_proof_can_fail(tiny_config, monkeypatch, capsys):
    """A loader that drops a micro-batch, and one that yields the first one twice."""

    argv = ["prove.py", "epoch", "--config", str(tiny_config()), "--world", "2", "--then", "3"]
    monkeypatch.setattr(sys, "argv", argv)
    collate = zerotrain.data.loader.collate
    for wrong, said in ((0, "missing: "), (2, "repeated: ")):
        calls = Counter()

        def spoiled(rows, picked, budget, wrong=wrong, calls=calls):
            calls["n"] += 1
            if calls["n"] == 1:
                picked = np.concatenate([picked] * wrong) if wrong else picked[:0]
            return collate(rows, picked, budget)

        monkeypatch.setattr(zerotrain.data.loader, "collate", spoiled)
        with pytest.raises(SystemExit) as ended:
            prove.main()
        out = capsys.readouterr().out
        assert ended.value.code == 1 and "REFUTED" in out and said in out
        assert "train.jsonl:" in out


# --------------------------------------------------------------------------------------------------
# prove.py data


def edges(mask, after):
    """The first supervised token of each answer, or the last."""
    return np.flatnonzero(np.diff(mask.astype(int), append=0) == (-1 if after else 1)) + 1 - after


def marked(mask, places, value):
    changed = mask.copy()
    changed[np.minimum(places, len(mask) - 1)] = value
    return changed


WRONG = {
    "shifted": (lambda mask: np.roll(mask, 1), " is not supervised"),
    "the token before an answer": (
        lambda mask: marked(mask, edges(mask, False) - 1, True), "is supervised"
    ),
    "no end mark": (lambda mask: marked(mask, edges(mask, True), False), "is supervised up to"),
    "more than the end mark": (
        lambda mask: marked(mask, edges(mask, True) + 1, True), "is supervised"
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", WRONG)
def test_right_masks_are_proved_and_a_wrong_one_in_the_cache_is_not(
    tiny_config, tmp_path, chat_rows, monkeypatch, capsys, defect
):
    wrong, said = WRONG[defect]
    rows = [{"messages": a["messages"] + b["messages"][-2:]} for a, b in pairwise(chat_rows[:21])]
    rows = write_rows(tmp_path / "answers.jsonl", rows)
    config = tiny_config(
        data__train_sources=[str(rows)], data__eval_sources=None, data__max_length=1000
    )
    monkeypatch.setattr(sys, "argv", ["prove.py", "data", "--config", str(config)])
    with pytest.raises(SystemExit) as ended:
        prove.main()
    assert ended.value.code == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "20 rows, 20 compared with their text" in out and "  40 answers, compared" in out
    fetch = zerotrain.data.tokenize.TokenizedRows.fetch

    def shifted(self, rows):
        ids, masks = fetch(self, rows)
        return ids, [wrong(mask) for mask in masks]

    monkeypatch.setattr(zerotrain.data.tokenize.TokenizedRows, "fetch", shifted)
    with pytest.raises(SystemExit) as ended:
        prove.main()
    out = capsys.readouterr().out
    assert ended.value.code == 1 and "REFUTED" in out and "answers.jsonl:1: " in out and said in out


def test_rows_that_cannot_be_compared_prove_nothing(tiny_config, monkeypatch, capsys):
    config = str(tiny_config(data__supervise="all"))
    monkeypatch.setattr(sys, "argv", ["prove.py", "data", "--config", config])
    with pytest.raises(UserError, match="no row could be compared"):
        prove.main()
    assert "proved" not in capsys.readouterr().out


@pytest.mark.parametrize("script", ["prove", "scaling_test"])
def test_a_folder_of_the_user_is_left_as_it_is(tiny_config, tmp_path, script):
    """What these tools write and remove is in folders that carry their mark."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "precious").write_text("x")
    config = ["--config", tiny_config()]
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n")
    command = ["scripts/prove.py", "equivalence", "--work", tmp_path / "work", *config]
    if script == "scaling_test":
        options = ["--nodes", 1, "--hostfile", hosts, "--output", tmp_path / "work"]
        command = ["scripts/scaling_test.py", *options, "--", "train.py", *config]
    finished = run([sys.executable, *command])
    assert finished.code == 2 and "choose a new folder" in finished.errors[0], finished.output
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["precious"]
