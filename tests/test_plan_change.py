"""A changed step plan: every example once per epoch.    pytest tests/test_plan_change.py"""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import read_metrics, write_rows
from pydantic import TypeAdapter

from config.parse import parse_command_line
from data.plan_change import PlanChange, PlanRecord, continue_plan, row_hashes
from runtime.errors import UserError
from runtime.seeding import rank_seed
from tracking.startup import open_plans

PLANS = {
    "batch": {"train__global_batch_size": 12},
    "batch of 31": {"train__global_batch_size": 31},
    "tokens": {
        "train__global_batch_size": None, "train__global_batch_tokens": 900,
        "train__warmup_examples": None,
    },
    "window": {"data__window": 3},
    "another seed": {"data__window": 5, "train__seed": 8, "train__global_batch_size": 4},
}  # fmt: skip


class Run:
    """Walks plans as train.py does, without a model; counts each epoch's examples by tokens."""

    def __init__(self, cache_dir):
        self.cache_dir, self.step, self.changes, self.before = cache_dir, 0, [], None
        self.trained, self.opened = {}, {}

    def go(self, config, steps):
        text = config.read_text()
        if text not in self.opened:
            parsed = parse_command_line(["--config", str(config)]).config
            self.opened[text] = open_plans(parsed, 2)
        config, _, plan, _ = self.opened[text]
        now = PlanRecord.of(plan, config.data.eval_fraction)
        before = now if self.before is None else self.before
        plan, self.changes = continue_plan(
            plan, now, before, self.changes, self.step, self.cache_dir
        )
        self.before = PlanRecord(**json.loads(json.dumps(asdict(now))))  # as a checkpoint does
        saved = [json.dumps(asdict(change)) for change in self.changes]
        self.changes = [TypeAdapter(PlanChange).validate_json(text) for text in saved]
        hashes = row_hashes(plan.data)
        for step in range(self.step, self.step + steps):
            _, epoch, _ = plan.locate(step)
            assert int(plan.epochs_at(step) + 1e-9) == epoch
            rows = [rows for ranks in plan.step(step).micro_batches for rows in ranks]
            self.trained.setdefault(epoch, Counter()).update(hashes[np.concatenate(rows)].tolist())
        self.step += steps
        return plan, Counter(hashes.tolist())


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_every_example_once_per_epoch_through_changes(tiny_config, tmp_path, steps):
    """A change every few steps, also in the rest of an epoch; the same plan again is no change."""
    run = Run(tmp_path / "cache")
    for name in [*PLANS, *PLANS, *list(PLANS)[::-1]]:
        plan, everything = run.go(tiny_config(**PLANS[name]), steps)
        run.go(tiny_config(**PLANS[name]), steps)
    missing = run.step
    while plan.locate(run.step)[1] == plan.locate(missing)[1]:
        run.go(tiny_config(**PLANS[name]), 1)
    whole = {e: trained for e, trained in run.trained.items() if e < plan.locate(run.step)[1]}
    assert whole and all(trained == everything for trained in whole.values())
    assert len(run.changes) == 3 * len(PLANS) - 2


def test_a_mix_keeps_its_order_through_changes(tiny_config, tmp_path, chat_rows):
    """Another batch or window in the middle of passes: after every step, the usage counts of the
    examples of a source differ by at most one.
    """
    paths = [write_rows(tmp_path / f"{n}.jsonl", chat_rows[a:b])
             for n, (a, b) in enumerate([(0, 9), (9, 32), (32, 70)])]  # fmt: skip
    sources = [{"path": str(path), "weight": w} for path, w in zip(paths, (3, 3, 4), strict=True)]
    run, counts = Run(tmp_path / "cache"), np.zeros(70, int)
    for window, batch, steps in [(3, 5, 13), (4, 4, 2), (4, 3, 9), (2, 6, 1), (4, 5, 20)]:
        config = tiny_config(data__train_sources=sources, data__window=window,
                             train__global_batch_size=batch)  # fmt: skip
        plan, _ = run.go(config, steps)
        for step in range(run.step - steps, run.step):
            micro_steps = plan.step(step).micro_batches
            np.add.at(counts, np.concatenate([rows for ranks in micro_steps for rows in ranks]), 1)
            for share in plan.contents.mix:
                of_source = counts[share.first : share.first + share.rows]
                assert of_source.max() - of_source.min() <= 1
    assert len(run.changes) == 4 and counts.min() > 1


def test_examples_are_identified_in_other_data(tiny_config, tmp_path, chat_rows):
    """Some rows are gone, some are new, one occurs twice, and the order has changed."""
    run = Run(tmp_path / "cache")
    run.go(tiny_config(), 3)
    trained = run.trained[0].copy()
    new_rows = (
        chat_rows[60:20:-1]
        + [
            {
                "messages": [
                    {"role": "user", "content": "new"},
                    {"role": "assistant", "content": str(i)},
                ]
            }
            for i in range(9)
        ]
        + chat_rows[:12]
        + chat_rows[:1]
    )
    path = write_rows(tmp_path / "new.jsonl", new_rows)
    config = tiny_config("new.yaml", data__train_sources=[str(path)], train__global_batch_size=7)
    run.go(config, 1)
    while run.changes[-1].at_step + run.changes[-1].remaining_steps > run.step:
        plan, new = run.go(config, 1)
    assert run.trained[0] - trained == new - trained, "the new ones that were not trained on"
    assert sum((trained & new).values()) and sum((trained - new).values()), "of both kinds"
    run.go(config, plan.steps_per_epoch)
    assert run.trained[1] == new and len(run.changes) == 1


def test_a_rest_that_cannot_be_determined_is_refused(tiny_config, tmp_path, chat_rows):
    def refusal(first, then):
        run = Run(tmp_path / "cache")
        run.go(tiny_config(**first), 2)
        with pytest.raises(UserError) as error:
            run.go(tiny_config(**then), 1)
        assert "\n" not in str(error.value)
        return str(error.value)

    held = {"data__eval_sources": None, "data__eval_fraction": 0.2}
    assert "holds out other rows" in refusal(held, {**held, "train__seed": 8})
    paths = [write_rows(tmp_path / f"{i}.jsonl", chat_rows[i::2]) for i in (0, 1)]
    mixes = [
        {
            "data__train_sources": [
                {"path": str(paths[0]), "weight": 1},
                {"path": str(paths[1]), "weight": weight},
            ]
        }
        for weight in (1, 2)
    ]
    assert "mixed by weight" in refusal(*mixes)
    run = Run(tmp_path / "cache")
    run.go(tiny_config(), 2)
    (Path(tmp_path) / "cache" / run.before.cache).rename(tmp_path / "gone")
    path = write_rows(tmp_path / "less.jsonl", chat_rows[5:])
    with pytest.raises(UserError, match="without the previous tokenized data"):
        run.go(tiny_config(data__train_sources=[str(path)]), 1)


def test_a_run_resumes_with_another_global_batch(forks, tiny_config, tmp_path):
    """Learning rate and schedule are those of the new batch, from the current epoch on; a rank that
    did not exist at the save gets a random stream that no rank had.
    """
    scaled = {"train__lr_scaling": "linear", "train__reference_global_batch_size": 12}
    config = tiny_config(**scaled)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "stop").touch()  # seen after the first step
    assert forks.train(config, ranks=2).code == 0
    resolved = json.loads((run_folder / "resolved_ds_config.json").read_text())
    mean_rate = 3e-3 * (70 / 6) / 12
    assert resolved["optimizer"]["params"]["lr"] == pytest.approx(mean_rate)
    again = parse_command_line(["--config", str(run_folder / "resolved_config.yaml")]).config
    assert again.train.global_batch_size == 12, "the resolved files alone can restart the run"
    assert streams(run_folder, 1) == [generator_state(rank_seed(7, rank)) for rank in (0, 1)]
    flags = ["--train.global_batch_size", "24"]
    refused = forks.train(config, *flags, ranks=2)
    line = (
        "train.global_batch_size was 12, is 24; resume with the old plan, or set --checkpoint.allow"
    )
    assert refused.code == 2 and line in refused.errors[0], refused.output
    flags += ["--checkpoint.allow_plan_change", "true"]
    finished = forks.train(config, *flags, ranks=1)
    assert finished.code == 0, finished.output
    assert "train.global_batch_size was 12, is 24: the rest of the epoch takes 3 steps\n" in (
        finished.output
    )
    steps = read_metrics(run_folder)
    assert [s["step"] for s in steps] == list(range(1, 8))  # 1 + 3 and 3 more
    assert sum(s["examples"] for s in steps) == 140
    assert [s["epoch"] for s in steps[3:]] == pytest.approx([1, 4 / 3, 5 / 3, 2])
    # of 6 steps of 24, one of which warms up, the last four
    peak = 3e-3 * (70 / 3) / 12
    assert [s["lr"] for s in steps[3:]] == pytest.approx([peak * k / 6 for k in (4, 3, 2, 1)])
    assert streams(run_folder, 7) == [generator_state(rank_seed(7, 0, 1))]


def streams(run_folder, step):
    """State of each rank's torch generator in a checkpoint; the tiny model never advances it."""
    files = sorted((run_folder / "checkpoints" / f"step_{step:08d}" / "rng").glob("*.pt"))
    return [torch.load(file, weights_only=True)["torch"].tolist() for file in files]


def generator_state(seed):
    return torch.Generator().manual_seed(seed).get_state().tolist()
