"""scripts/rehearse.py.    pytest tests/tools/test_rehearsal.py"""

import numpy as np
import pytest
from harness.inputs import read_config, save_tiny_llama, strategy

from zerotrain.tools.open_plans import open_plans
from zerotrain.tools.rehearsal import MeasuredMemory, costliest, growth
from zerotrain.training.out_of_memory import describe_micro_batch


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_no_planned_micro_batch_exceeds_the_costliest(tiny_config, batching):
    """In its tokens, and in the sum of its squared lengths."""
    path = tiny_config(data__batching=batching, train__global_batch_size=24)
    for tokens in (224, 300, 500, 1024, 1900, 100_000):
        for world_size in (1, 3):
            flags = ["--data.micro_batch_tokens", str(tokens)]
            config = read_config(path, *flags)
            _, _, plan, _ = open_plans(config, world_size)
            bounds = np.max([costs(plan, chosen) for chosen in costliest(plan)], axis=0)
            assert bounds[0] <= tokens
            for step in range(6):
                for of_ranks in plan.step(step).micro_batches:
                    for examples in of_ranks:
                        assert (costs(plan, examples) <= bounds).all()


def test_a_rehearsal_out_of_memory_is_one_line(forks, tiny_config, tmp_path, sample_tokenizer):
    model = save_tiny_llama(tmp_path / "wide", sample_tokenizer, intermediate_size=16384)
    config = tiny_config(
        model=model, ds_config="ds_configs/zero0.json", data__micro_batch_tokens=8192,
        train__global_batch_size=70,
    )  # fmt: skip
    rehearsal = "zerotrain.tools.rehearsal:open_and_rehearse"
    line = forks.refusal(config, module="little_memory", MAIN=rehearsal)
    assert "train.jsonl:8 (199 tokens)" in line and "set it to 4,096," in line


def costs(plan, examples):
    """Tokens, and the sum of squared lengths: padded, or cut to the budget."""
    lengths = plan.data.lengths[examples].astype(np.int64)
    if plan.budget.packed:
        ends = np.minimum(np.cumsum(lengths), plan.budget.micro_batch_tokens)
        lengths = np.diff(ends, prepend=0)
    elif len(lengths):
        lengths[:] = plan.budget.padded(lengths.max())
    return np.array([lengths.sum(), (lengths**2).sum()])


@pytest.mark.parametrize("name", ["zero2", "zero3_offload", "ulysses", "zero3_autotp"])
def test_a_rehearsal_says_what_fits_and_writes_nothing(forks, tiny_config, tmp_path, name):
    """What it says fits is run by it: more than planned, up to a step of one micro-step."""
    config = tiny_config(ds_config=strategy(tmp_path, name), data__batching="packed")
    finished = forks.finish(config, ranks=2, module="scripts.rehearse")
    parsed = read_config(config)
    *_, plan, _ = open_plans(parsed, 1 if name in ("ulysses", "zero3_autotp") else 2)
    longest = plan.budget.padded(plan.data.lengths.max())
    # no number that is too small for the longest example
    assert "set it to" not in describe_micro_batch(plan.with_budget(1), np.array([0]))
    whole_step = -(-parsed.train.global_batch_size // plan.budget.world_size) * longest
    printed = " ".join(finished.output.split())
    assert f"micro_batch_tokens {plan.budget.micro_batch_tokens:,} fits" in printed, printed
    assert f" {whole_step:,} is the most" in printed, printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "constant, per_token, available", [(0, 1, 5000), (800, 3, 10_000), (10, 7, 100)]
)
def test_no_attempt_takes_more_than_nine_tenths_of_the_memory(constant, per_token, available):
    """With memory that is constant plus a part in proportion to the micro-batch."""
    multiple = 1
    for _ in range(30):
        full = 500 + constant + 16 * per_token * multiple
        assert multiple == 1 or full <= 0.9 * (500 + available)
        ranks = MeasuredMemory(0, 1, 10**9), MeasuredMemory(500, full, 500 + available)
        multiple = max(multiple, int(multiple * growth(ranks)))
    assert multiple > (0.9 * (500 + available) - 500 - constant) / (16 * per_token) / 1.1 - 1
    half_used = [MeasuredMemory(0, 1, 10**9), MeasuredMemory(100, 500, 1000)]
    assert growth(half_used) == pytest.approx((0.9 * 1000 - 100) / 400)
