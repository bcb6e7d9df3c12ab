"""Held-out sets and answers.
pytest tests/training/test_evaluation.py"""

import json
import math
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness.inputs import read_config, weighted, write_rows
from harness.runs import logged, read_metrics
from torch import nn
from transformers import AutoModelForCausalLM

from zerotrain.data.questions import choose_questions, exact_match
from zerotrain.runtime.ranks import Ranks
from zerotrain.tools.open_plans import open_plans
from zerotrain.tools.plain_loop import mean_loss, read_rows
from zerotrain.training.evaluate import HeldOutSets, Preempted
from zerotrain.training.loss import SupervisedLoss


class Engine(nn.Module):
    """A model where an engine is expected."""

    def __init__(self, model):
        super().__init__()
        self.module, self.device = model, model.device

    def forward(self, **inputs):
        return self.module(**inputs)


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stop = SimpleNamespace(signal=None)
    yield Ranks(0, 0, 1, 1, torch.device("cpu"), dist.group.WORLD, stop)
    dist.destroy_process_group()


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_an_evaluation_has_no_dropout_and_leaves_the_mode_as_it_was(
    alone, tiny_config, tmp_path, chat_rows, tiny_model_with_dropout, batching
):
    """It has no weights, either."""
    rows = write_rows(tmp_path / "weighted.jsonl", weighted(chat_rows[:9]))
    config = tiny_config(
        model=tiny_model_with_dropout, data__batching=batching, data__eval_sources=[rows]
    )
    config, tokenizer, _, plans = open_plans(read_config(config), 1)
    attention = config.model.attn_implementation
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_with_dropout, attn_implementation=attention
    )
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9  # would change answers, too
    [plan] = plans.values()
    questions = {name: choose_questions(name, plan.data, 256, 2) for name in plans}
    sets = HeldOutSets(
        plans, questions, 8, tokenizer, Engine(model), SupervisedLoss(model), alone
    )  # fmt: skip
    prompt = torch.from_numpy(questions["held_out"][0].prompt)[None]
    answer = model.generate(prompt, do_sample=False, max_new_tokens=8)[0, prompt.shape[1] :]
    assert plan.data.is_weighted
    rows = [(ids, (weights > 0).float()) for ids, weights in read_rows(plan.data)]
    expected = mean_loss(model, rows), tokenizer.decode(answer)

    def failing(*_):
        assert not model.training
        raise MemoryError

    failing.router_loss = sets.loss.router_loss

    for is_training in (True, False):
        sets.engine.train(is_training)
        values, answers = sets.measure()
        found = values["loss/held_out"], answers["held_out"][0]["answer"]
        assert found == (pytest.approx(expected[0], rel=1e-6), expected[1])
        with pytest.raises(MemoryError):
            replace(sets, loss=failing).measure()
        alone.stop.signal = signal.SIGTERM
        with pytest.raises(Preempted):
            sets.measure()
        alone.stop.signal = None
        assert {module.training for module in sets.engine.modules()} == {is_training}


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
