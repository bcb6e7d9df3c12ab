"""A changed step plan: every example once per epoch.    pytest tests/test_plan_change.py"""

import json
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
from conftest import read_metrics, write_rows
from pydantic import TypeAdapter

from zerotrain.config.parse import parse_command_line
from zerotrain.data.data_plan import PlanChange, PlanRecord, continue_plan
from zerotrain.runtime.errors import UserError
from zerotrain.tools.open_plans import open_plans

PLANS = {
    "batch": {"train__global_batch_size": 12},
    "batch of 31": {"train__global_batch_size": 31},
    "tokens": {"train__global_batch_size": None, "train__global_batch_tokens": 900},
    "another seed": {"train__seed": 8, "train__global_batch_size": 4},
}


class Run:
    """Walks plans as train.py does, without a model; counts each epoch's examples."""

    def __init__(self):
        self.step, self.changes, self.before = 0, [], None
        self.trained, self.opened = {}, {}

    def go(self, config, steps):
        text = config.read_text()
        if text not in self.opened:
            parsed = parse_command_line(["--config", str(config)]).config
            *_, self.opened[text], _ = open_plans(parsed, 2)
        plan = self.opened[text]
        now = PlanRecord.of(plan)
        plan, self.changes = continue_plan(plan, self.before or now, self.changes, self.step)
        self.before = PlanRecord(**json.loads(json.dumps(asdict(now))))  # as a checkpoint does
        saved = [json.dumps(asdict(change)) for change in self.changes]
        self.changes = [TypeAdapter(PlanChange).validate_json(text) for text in saved]
        for step in range(self.step, self.step + steps):
            _, epoch, _ = plan.locate(step)
            assert int(plan.epochs_at(step) + 1e-9) == epoch
            rows = [rows for ranks in plan.step(step).micro_batches for rows in ranks]
            self.trained.setdefault(epoch, Counter()).update(np.concatenate(rows).tolist())
        self.step += steps
        return plan


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_every_example_once_per_epoch_through_changes(tiny_config, steps):
    """A change every few steps, also in the rest of an epoch; the same plan again is no change."""
    run = Run()
    for name in [*PLANS, *PLANS, *list(PLANS)[::-1]]:
        plan = run.go(tiny_config(**PLANS[name]), steps)
        run.go(tiny_config(**PLANS[name]), steps)
    last_begun = plan.locate(run.step)[1]
    while plan.locate(run.step)[1] == last_begun:
        run.go(tiny_config(**PLANS[name]), 1)
    whole = {e: trained for e, trained in run.trained.items() if e < plan.locate(run.step)[1]}
    assert whole and all(trained == Counter(range(70)) for trained in whole.values())
    assert len(run.changes) == 3 * len(PLANS) - 2


def test_a_mix_keeps_its_order_through_changes(tiny_config, tmp_path, chat_rows):
    """Another batch in the middle of passes: after every step, the usage counts of the examples of
    a source differ by at most one. Other weights or another seed are refused.
    """
    paths = [write_rows(tmp_path / f"{n}.jsonl", chat_rows[a:b])
             for n, (a, b) in enumerate([(0, 9), (9, 32), (32, 70)])]  # fmt: skip
    sources = [{"path": str(path), "weight": w} for path, w in zip(paths, (3, 3, 4), strict=True)]
    run, counts = Run(), np.zeros(70, int)
    for batch, steps in [(5, 13), (4, 2), (3, 9), (6, 1), (5, 20)]:
        config = tiny_config(data__train_sources=sources, train__global_batch_size=batch)
        plan = run.go(config, steps)
        for step in range(run.step - steps, run.step):
            micro_steps = plan.step(step).micro_batches
            np.add.at(counts, np.concatenate([rows for ranks in micro_steps for rows in ranks]), 1)
            for share in plan.order.mix:
                of_source = counts[share.first : share.first + share.examples]
                assert of_source.max() - of_source.min() <= 1
    assert len(run.changes) == 4 and counts.min() > 1
    sources[0]["weight"] = 4
    with pytest.raises(UserError, match="weights_only"):
        run.go(tiny_config(data__train_sources=sources, train__global_batch_size=5), 1)


def test_other_data_is_refused(tiny_config, tmp_path, chat_rows):
    """Other rows, and with data.eval_fraction another seed, which holds out other rows."""
    held = {"data__eval_sources": None, "data__eval_fraction": 0.2}
    less = {"data__train_sources": [str(write_rows(tmp_path / "less.jsonl", chat_rows[5:]))]}
    for first, then in ((held, {**held, "train__seed": 8}), ({}, less)):
        run = Run()
        run.go(tiny_config(**first), 2)
        with pytest.raises(UserError, match=r"rows or their tokens.*checkpoint.weights_only") as e:
            run.go(tiny_config(**then), 1)
        assert "\n" not in str(e.value)


def test_a_run_resumes_with_another_global_batch(forks, tiny_config, tmp_path):
    """Learning rate and schedule are those of the new batch, from the current epoch on."""
    scaled = {"train__lr_scaling": "linear", "train__reference_global_batch": 12}
    config = tiny_config(**scaled)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "stop").touch()  # seen after the first step
    assert forks.train(config, ranks=2).code == 0
    flags = ["--train.global_batch_size", "24"]
    refused = forks.train(config, *flags, ranks=2)
    assert refused.code == 2 and "train.global_batch_size was 12, is 24" in refused.errors[0]
    flags += ["--checkpoint.allow_plan_change", "true"]
    finished = forks.train(config, *flags, ranks=1)
    assert finished.code == 0, finished.output
    steps = read_metrics(run_folder)
    assert [s["step"] for s in steps] == list(range(1, 8))  # 1 + 3 and 3 more
    assert sum(s["examples"] for s in steps) == 140
    assert [s["epoch"] for s in steps[3:]] == pytest.approx([1, 4 / 3, 5 / 3, 2])
    # of 6 steps of 24, one of which warms up, the last four
    peak = 3e-3 * (70 / 3) / 12
    assert [s["lr"] for s in steps[3:]] == pytest.approx([peak * k / 6 for k in (4, 3, 2, 1)])
