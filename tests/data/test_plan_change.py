"""A changed step plan: every example once per epoch.    pytest tests/data/test_plan_change.py"""

from collections import Counter

import numpy as np
import pytest
from harness.inputs import read_config
from harness.runs import read_metrics

from zerotrain.data.data_plan import PlanRecord, PlanStart, continue_plan
from zerotrain.tools.open_plans import open_plans

PLANS = {
    "batch": {"train__global_batch_size": 12},
    "batch of 31": {"train__global_batch_size": 31},
    "tokens": {"train__global_batch_size": None, "train__global_batch_tokens": 900},
    "batch of 4": {"train__global_batch_size": 4},
}


class Run:
    """Walks plans as train.py does, without a model; counts each epoch's examples."""

    def __init__(self):
        self.step, self.start, self.before = 0, PlanStart(), None
        self.trained, self.opened = {}, {}

    def go(self, config, steps):
        text = config.read_text()
        if text not in self.opened:
            parsed = read_config(config)
            *_, self.opened[text], _ = open_plans(parsed, 2)
        plan = self.opened[text]
        now = PlanRecord.of(plan)
        plan = continue_plan(plan, self.before or now, self.start, self.step)
        self.before, self.start = now, plan.start
        for step in range(self.step, self.step + steps):
            epoch, _, _ = plan.locate(step)
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
    last_begun = plan.locate(run.step)[0]
    while plan.locate(run.step)[0] == last_begun:
        run.go(tiny_config(**PLANS[name]), 1)
    whole = {e: trained for e, trained in run.trained.items() if e < plan.locate(run.step)[0]}
    assert whole and all(trained == Counter(range(70)) for trained in whole.values())


def test_a_run_resumes_with_another_global_batch(forks, tiny_config, tmp_path):
    """Learning rate and schedule are those of the new batch, from the current epoch on."""
    scaled = {"train__lr_scaling": "linear", "train__reference_global_batch": 12}
    config = tiny_config(**scaled)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "stop").touch()  # seen after the first step
    forks.finish(config, ranks=2)
    flags = ["--train.global_batch_size", "24"]
    assert "train.global_batch_size was 12" in forks.refusal(config, *flags, ranks=2)
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
