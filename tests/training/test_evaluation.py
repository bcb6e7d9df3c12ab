"""Held-out sets and answers.
pytest tests/training/test_evaluation.py"""

import json
import math
import signal
import time

import pytest
from harness.inputs import write_rows
from harness.runs import logged, read_metrics

from zerotrain.data.questions import exact_match


def test_one_and_two_ranks_measure_the_same_losses_and_answers(
    forks, tiny_config, tmp_path, chat_rows
):
    short = sorted(chat_rows, key=lambda row: len(json.dumps(row)))
    sets = {
        "first": [write_rows(tmp_path / "first.jsonl", chat_rows[:9])],
        "second": [write_rows(tmp_path / "second.jsonl", short[:5])],
    }
    config = tiny_config(
        data__eval_sources=sets, train__steps=3, train__learning_rate=0.02,
        eval={"every_steps": 9, "generate": 3, "max_new_tokens": 12},
    )  # fmt: skip
    found = {}
    for ranks, stage in ((1, 0), (2, 3)):
        folder = tmp_path / f"on_{ranks}"
        flags = ["--output_dir", folder, "--ds_config", f"ds_configs/zero{stage}.json"]
        forks.finish(config, *flags, ranks=ranks)
        found[ranks] = read_metrics(folder, "eval"), read_metrics(folder, "generations")
    (alone, alone_texts), (shared, shared_texts) = found.values()
    names = [f"{kind}/{name}" for name in sets for kind in ("loss", "perplexity", "exact_match")]
    assert [e["step"] for e in alone] == [e["step"] for e in shared] == [0, 3]
    for one, other in zip(alone, shared, strict=True):
        assert [key for key in one if "/" in key] == names
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=1e-5)
        assert one["eval_loss"] == one["loss/first"] != one["loss/second"]
        assert one["perplexity/second"] == pytest.approx(math.exp(one["loss/second"]))
    assert [line["rows"] for line in alone_texts] == [line["rows"] for line in shared_texts]
    assert [t["set"] for t in alone_texts] == [*sets, *sets]


def test_it_learns_to_answer(forks, tiny_config, tmp_path, chat_rows):
    """Training on one short row, many times, raises exact match from 0 to 1."""
    row = min(chat_rows, key=lambda row: len(json.dumps(row)))
    one, same = (write_rows(tmp_path / name, [row]) for name in ("one.jsonl", "same.jsonl"))
    config = tiny_config(
        data__train_sources=[one], data__eval_sources=[same], train__epochs=60,
        train__global_batch_size=1, train__warmup_examples=0, train__learning_rate=0.01,
        eval={"every_steps": 60, "generate": 1},
    )  # fmt: skip
    forks.finish(config)
    assert [e["exact_match/held_out"] for e in read_metrics(tmp_path / "run", "eval")] == [0, 1]
    [last] = read_metrics(tmp_path / "run", "generations")[-1]["rows"]
    assert exact_match("", row["messages"][-1]["content"], last["answer"]) == 1


def test_preempted_while_it_generates(forks, tiny_config, tmp_path, chat_rows):
    """One of two ranks is preempted. Both stop after the same token and save. The resumed run
    begins with the evaluation.
    """
    one = write_rows(tmp_path / "one.jsonl", chat_rows[:1])
    config = tiny_config(
        data__eval_sources=[one], train__steps=2,
        eval={"generate": 1, "max_new_tokens": 400}, ds_config="ds_configs/zero3.json",
    )  # fmt: skip
    process, folder = forks.start(config, ranks=2), tmp_path / "run"
    process.until(lambda: len(logged(folder)) == 2)
    time.sleep(0.1)  # the loss on one row takes 0.01 s
    process.kill(1, signal.SIGTERM)
    finished = process.wait(75)
    assert "preempted: step 2, " in finished.output, finished.output
    assert str(folder / "checkpoints" / "step_00000002") in finished.output
    assert not read_metrics(folder, "eval") and not read_metrics(folder, "generations")
    finished = forks.finish(config, "--eval.max_new_tokens", "4", ranks=2)
    assert "finished: step 2, " in finished.output
    assert [line["step"] for line in read_metrics(folder, "generations")] == [2]
    assert [line["step"] for line in read_metrics(folder)] == [1, 2]
