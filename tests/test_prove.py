"""scripts/prove.py epoch: an epoch has each example once; a wrong loader is found.
pytest tests/test_prove.py
"""

import sys
from collections import Counter

import numpy as np
import pytest
from conftest import REPO, write_rows

from runtime.errors import UserError

sys.path.insert(0, str(REPO / "scripts"))
import prove


def test_prove_epoch_on_two_world_sizes(forks, tiny_config):
    flags = ["--data.batching", "packed", "--data.window", "2"]
    finished = forks.script(
        "scripts/prove.py", "epoch", "--config", tiny_config(), "--world", "3", "--then", "5",
        "--cut", "0.5", *flags,
    )  # fmt: skip
    assert finished.code == 0, finished.output
    lines = finished.output.splitlines()
    assert lines[-1] == "proved"
    assert sum("70 examples once, 0 missing, 0 repeated" in line for line in lines) == 2
    assert "the same examples in 6 of 6 steps on 3 and 5" in finished.output


def test_prove_epoch_of_a_mix(forks, tiny_config, tmp_path, chat_rows):
    small = write_rows(tmp_path / "small.jsonl", chat_rows[:9])
    sources = [{"path": str(tmp_path / "train.jsonl"), "weight": 3},
               {"path": str(small), "weight": 1}]  # fmt: skip
    config = tiny_config(data__train_sources=sources)
    finished = forks.script("scripts/prove.py", "epoch", "--epoch", "3", "--config", config)
    assert finished.code == 0, finished.output
    assert "train.jsonl: 27 of 27 examples due" in finished.output
    assert "small.jsonl: 9 of 9 examples due" in finished.output
    assert "train.jsonl: an example repeated before all others appeared in 0 of 12 steps" in (
        finished.output
    )


def test_a_proof_can_fail(tiny_config, monkeypatch, capsys):
    """A loader that drops a micro-batch, and one that yields the first one twice."""
    import data.loader

    argv = ["prove.py", "epoch", "--config", str(tiny_config()), "--world", "2", "--then", "3"]
    monkeypatch.setattr(sys, "argv", argv)
    collate = data.loader.collate
    for wrong, said in ((0, "missing: "), (2, "repeated: ")):
        calls = Counter()

        def spoilt(rows, picked, budget, wrong=wrong, calls=calls):
            calls["n"] += 1
            if calls["n"] == 1:
                picked = np.concatenate([picked] * wrong) if wrong else picked[:0]
            return collate(rows, picked, budget)

        monkeypatch.setattr(data.loader, "collate", spoilt)
        with pytest.raises(SystemExit) as ended:
            prove.main()
        out = capsys.readouterr().out
        assert ended.value.code == 1 and "REFUTED" in out and said in out
        assert "train.jsonl:" in out


@pytest.fixture
def mix_config(tiny_config, tmp_path, chat_rows):
    """A run config with two sources that have weights."""
    small = write_rows(tmp_path / "small.jsonl", chat_rows[:9])
    sources = [{"path": str(tmp_path / "train.jsonl"), "weight": 3},
               {"path": str(small), "weight": 1}]  # fmt: skip
    return tiny_config(data__train_sources=sources)


def test_a_mix_with_a_row_in_place_of_another_is_refuted(mix_config, monkeypatch, capsys):
    from data.plan import Contents

    right = Contents._mixed
    monkeypatch.setattr(
        Contents, "_mixed", lambda self, *args: (rows := right(self, *args)) - rows % 2
    )
    monkeypatch.setattr(sys, "argv", ["prove.py", "epoch", "--config", str(mix_config)])
    with pytest.raises(SystemExit) as ended:
        prove.main()
    assert ended.value.code == 1 and "REFUTED" in capsys.readouterr().out


def test_a_mix_in_which_a_row_comes_too_early_is_refuted(mix_config, monkeypatch, capsys):
    """An epoch in which a pass ends, reversed: each source has its share of the right rows."""
    from data.plan import Contents

    ordered = Contents._ordered

    def backwards(self, epoch, start, stop):
        rows = ordered(self, epoch, 0, self.rows_per_epoch)
        return (rows[::-1] if epoch == 2 else rows)[start:stop]

    monkeypatch.setattr(Contents, "_ordered", backwards)
    argv = ["prove.py", "epoch", "--epoch", "2", "--config", str(mix_config)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        prove.main()
    out = capsys.readouterr().out
    assert ended.value.code == 1 and "REFUTED" in out and "27 of 27 examples due" in out


@pytest.mark.parametrize(("args", "said"), [
    (["--world", "0"], "--world and --then must be at least 1"),
    (["--train.sedd", "1"], "did you mean train.seed?"),
])  # fmt: skip
def test_mistakes_are_one_line(tiny_config, monkeypatch, args, said):
    argv = ["prove.py", "epoch", "--config", str(tiny_config()), *args]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(UserError) as mistake:
        prove.main()
    assert said in str(mistake.value) and "\n" not in str(mistake.value)
