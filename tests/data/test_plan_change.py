"""A change of the global batch within an epoch.    pytest tests/data/test_plan_change.py"""

import re
from collections import Counter, defaultdict

import numpy as np
import pytest
from harness.inputs import read_config
from harness.runs import read_metrics, stop_after_one_step

from zerotrain.data.data_plan import PlanRecord, PlanStart, continue_plan
from zerotrain.tools.open_plans import open_plans

PLANS = (
    {"train__global_batch_size": 12},
    {"train__global_batch_size": 31},
    {"train__global_batch_size": None, "train__global_batch_tokens": 900},
    {"train__global_batch_size": 4},
)


@pytest.mark.parametrize("steps, repeat", [(1, 1), (2, 0.7), (5, 2.5)])
def test_each_example_comes_equally_often_through_changes(tiny_config, tmp_path, steps, repeat):
    """The global batch changes every few steps, also in an epoch that was already split again.
    Continuing with the same plan changes nothing. The test follows plans as train.py does, without
    a model.
    """
    rows = {"path": tmp_path / "train.jsonl", "repeat": repeat}
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
    assert repeat != 1 or plan.order.mix == ()


def test_a_run_resumes_with_a_different_global_batch(forks, tiny_config, tmp_path):
    """The learning rate and its schedule follow the new batch."""
    scaled = {"train__lr_scaling": "linear", "train__reference_global_batch": 12}
    config = tiny_config(**scaled)
    stop_after_one_step(tmp_path / "run")
    forks.finish(config, ranks=2)
    flags = ["--train.global_batch_size", "24"]
    line = forks.refusal(config, *flags, ranks=2)
    assert "train.global_batch_size: " in line
    flags += re.search("set (--checkpoint.allow_plan_change true) for", line)[1].split()
    forks.finish(config, *flags)
    steps = read_metrics(tmp_path / "run")
    assert [s["step"] for s in steps] == list(range(1, 8))  # 1 + 3 and 3 more
    assert sum(s["examples"] for s in steps) == 140
    assert [s["epoch"] for s in steps[3:]] == pytest.approx([1, 4 / 3, 5 / 3, 2])
    # The new batch makes 6 steps, the first of which warms up. These are the last four.
    peak = 3e-3 * (70 / 3) / 12
    assert [s["lr"] for s in steps[3:]] == pytest.approx([peak * k / 6 for k in (4, 3, 2, 1)])
