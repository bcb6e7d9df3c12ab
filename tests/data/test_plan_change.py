"""A changed step plan: every example once per epoch.    pytest tests/data/test_plan_change.py"""

from collections import Counter, defaultdict

import numpy as np
import pytest
from harness.inputs import read_config
from harness.runs import read_metrics

from zerotrain.data.data_plan import PlanRecord, PlanStart, continue_plan
from zerotrain.tools.open_plans import open_plans

PLANS = (
    {"train__global_batch_size": 12},
    {"train__global_batch_size": 31},
    {"train__global_batch_size": None, "train__global_batch_tokens": 900},
    {"train__global_batch_size": 4},
)


@pytest.mark.parametrize("steps, repeat", [(1, 1), (2, 0.7), (5, 2.5)])
def test_every_example_as_often_through_changes(tiny_config, tmp_path, steps, repeat):
    """A change every few steps, also in the rest of an epoch; the same plan again is no change.
    Plans are walked as in train.py, without a model.
    """
    rows = {"path": str(tmp_path / "train.jsonl"), "repeat": repeat}
    plans = [
        open_plans(read_config(tiny_config(data__train_sources=[rows], **changes)), 2)[2]
        for changes in PLANS
    ]
    start, before, step = PlanStart(), PlanRecord.of(plans[0]), 0
    trained = defaultdict(Counter)
    for plan in [*plans, *plans, *plans[::-1], *plans[:1] * 6]:
        for _ in range(2):
            plan = continue_plan(plan, before, start, step)
            start, before = plan.start, PlanRecord.of(plan)
            for _ in range(steps):
                epoch, _, _ = plan.locate(step)
                assert int(plan.epochs_at(step) + 1e-9) == epoch
                rows = [rows for ranks in plan.step(step).micro_batches for rows in ranks]
                trained[epoch].update(np.concatenate(rows).tolist())
                step += 1
    epochs = plan.locate(step)[0]
    so_far = sum((trained[e] for e in range(epochs)), Counter())
    assert so_far.total() == epochs * round(70 * repeat) > 0
    assert all(abs(so_far[example] - epochs * repeat) < 0.99 for example in range(70))
    assert repeat != 1 or plan.order.mix == ()  # as before there was `repeat`


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
