"""The step plan: examples of each step, and their ranks.    pytest tests/data/test_plan.py"""

import tracemalloc

import numpy as np
import pytest
from harness.inputs import read_config
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotrain.data.epoch_order import PLAN_VERSION, EpochOrder, derive_key, permute
from zerotrain.data.plan import Budget, plan_step
from zerotrain.runtime.errors import UserError
from zerotrain.tools.open_plans import open_plans

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 1003).astype(np.int32).clip(2, 900)


def epoch_of(order, epoch=0):
    return [order.examples(epoch, step) for step in range(order.steps_per_epoch)]


def groups_of(step_plan):
    return [group for micro_step in step_plan.micro_batches for group in micro_step]


def slowest_costs(step_plan, lengths, budget):
    """Sum over micro-steps of the slowest rank's cost."""

    def cost(group):
        size = lengths[group].astype(np.int64)
        return budget.cost(size if budget.packed else np.full_like(size, size.max(initial=0))).sum()

    return sum(max(map(cost, ranks)) for ranks in step_plan.micro_batches)


# --------------------------------------------------------------------------------------------------
# The examples of each step

GOLDEN = [
    ({"global_batch_size": 96}, [2129882, 2084669]),
    ({"global_batch_tokens": 9000}, [2469861, 3183095]),
    ({"global_batch_size": 96, "shuffle": False}, [251160, 632086]),
]


def test_permute_is_a_permutation():
    for size in (*range(1, 18), 1000, 4097):
        assert sorted(permute(np.arange(size), size, 7)) == list(range(size))


def test_a_step_of_a_billion_examples_takes_no_memory():
    order = EpochOrder(np.broadcast_to(np.int32(9), 10**9), seed=3, global_batch_size=64)
    tracemalloc.start()
    steps = [order.examples(epoch=7, step=k) for k in (0, 1, order.steps_per_epoch - 1)]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len(step) for step in steps] == [64, 64, 64] and peak_bytes < 1 << 20


@settings(max_examples=200, deadline=None)
@given(
    sources=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 90)), min_size=1, max_size=4),
    batch=st.integers(1, 70),
    by_tokens=st.booleans(),
    is_mix=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 1000),
)
def test_any_epochs_in_a_row_have_every_example_as_often(
    sources, batch, by_tokens, is_mix, seed, epoch
):
    """Of n with m places k*m/n times in k epochs, rounded down or up; once per epoch if m is n. The
    number of steps is that of a mean epoch.
    """
    n, m = np.array([(n, m if is_mix else n) for n, m in sources for _ in range(n)]).T
    lengths = np.random.default_rng(seed).integers(2, 64, len(n)).astype(np.int32)
    size = {"global_batch_tokens": 30 * batch} if by_tokens else {"global_batch_size": batch}
    order = EpochOrder(lengths, seed, **size, mix=tuple(sources) if is_mix else ())
    assert abs(order.tokens_per_epoch - (lengths * m / n).sum()) < 4  # rounded for each source
    so_far = 0
    for k in range(1, 4):
        steps = epoch_of(order, epoch + k)
        so_far += np.bincount(np.concatenate(steps), minlength=len(lengths))
        assert (abs(so_far * n - k * m) < n).all()
        sizes = [*map(len, steps)]
        assert min(sizes) > 0 and (by_tokens or max(sizes) <= min(batch, min(sizes) + 1))


def test_the_examples_of_a_step_are_those_of_plan_version():
    """A change here makes resumed runs lose and repeat examples: increase the version with it."""
    assert PLAN_VERSION == 4
    for options, sums in GOLDEN:
        steps = epoch_of(EpochOrder(LENGTHS, 5, **options), 2)[:2]
        assert [rows @ np.arange(1, len(rows) + 1) for rows in steps] == sums


# The actual mean global batch


def test_the_mean_batch_is_that_of_the_steps(tiny_config):
    for batch, steps, mean in ((12, 6, 70 / 6), (70, 1, 70)):
        plan = plan_of(tiny_config(train__global_batch_size=batch))
        assert (plan.steps_per_epoch, plan.mean_batch) == (steps, mean)
    by_tokens = {"train__global_batch_size": None, "train__warmup_examples": None}
    plan = plan_of(tiny_config(train__global_batch_tokens=900, **by_tokens))
    tokens = [plan.step(k).tokens for k in range(plan.steps_per_epoch)]
    assert plan.mean_batch == np.mean(tokens) < 900

    with pytest.raises(UserError, match=r"is larger than the epoch"):
        plan_of(tiny_config(train__global_batch_size=71))


def plan_of(config_file):
    return open_plans(read_config(config_file), 2)[2]


# The permutation


def test_every_first_place_is_equally_likely():
    """Chi-square over 10,000 keys of the image of 0 in 20: 19 degrees of freedom, 0.1 % > 43.8."""
    places = [int(permute(np.zeros(1, np.int64), 20, derive_key(0, e))[0]) for e in range(10_000)]
    counts = np.bincount(places, minlength=20)
    assert ((counts - 500) ** 2 / 500).sum() < 43.8


# --------------------------------------------------------------------------------------------------
# Assignment to ranks


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=150),
    world_size=st.integers(1, 9),
    cap=st.integers(64, 300),
    packed=st.booleans(),
    k=st.sampled_from([1, 100, 24_576]),
)
def test_a_plan_has_every_example_once_within_budget(lengths, world_size, cap, packed, k):
    lengths = np.array(lengths, np.int32)
    rows = np.arange(len(lengths))
    step_plan, other = (
        plan_step(r, lengths, lengths, Budget(world_size, cap, k, packed))
        for r in (rows, rows[::-1])
    )
    groups = groups_of(step_plan)
    for one, of_another_order in zip(groups, groups_of(other), strict=True):
        assert one.tolist() == of_another_order.tolist()
    assert all(len(micro_step) == world_size for micro_step in step_plan.micro_batches)
    assert sorted(np.concatenate(groups)) == sorted(rows)
    if packed:
        held = [int(lengths[g].sum()) for g in groups]
    else:
        held = [len(g) * (-(-int(lengths[g].max(initial=0)) // 8) * 8) for g in groups]
    assert max(held) <= cap and sum(held) == step_plan.padded_tokens
    assert step_plan.supervised_tokens == step_plan.tokens == lengths.sum()


def test_ranks_that_wait_for_each_other_do_equal_work():
    """Useful cost over ranks x the slowest of each micro-step, against equal numbers per rank."""
    order = EpochOrder(LENGTHS, 1, 500)
    efficiency = {}
    for name, packed in (("bucketed", False), ("packed", True)):
        budget = Budget(4, 4096, packed=packed)
        useful = waited = by_number = 0
        for rows in epoch_of(order):
            step_plan = plan_step(rows, LENGTHS, LENGTHS, budget)
            size = -np.sort(-LENGTHS[rows].astype(np.int64))
            useful += (size * (24_576 + size)).sum()
            waited += 4 * slowest_costs(step_plan, LENGTHS, budget)
            for part in np.array_split(size, len(step_plan.micro_batches)):
                by_number += 4 * -(-len(part) // 4) * budget.cost(part[0])
        efficiency[name], efficiency["by number"] = useful / waited, useful / by_number
    assert efficiency["packed"] > 0.99
    assert efficiency["bucketed"] > 1.5 * efficiency["by number"]


def test_fewest_micro_steps_that_fit_the_budget():
    lengths = np.full(64, 96, np.int32)
    for packed in (False, True):
        for budget, micro_steps in ((6144, 1), (3072, 1), (1536, 2), (768, 4), (96, 32)):
            step_plan = plan_step(np.arange(64), lengths, lengths, Budget(2, budget, packed=packed))
            assert len(step_plan.micro_batches) == micro_steps


def test_packed_bins_are_the_same_for_every_world_size_that_divides_them():
    rows = EpochOrder(LENGTHS, 1, 900).examples(0, 0)
    tokens = int(LENGTHS[rows].sum())
    for budget in (1024, 2048, 9000):
        bins = {}
        for world_size in (1, 2, 3, 4, 5, 6, 8, 10, 16, 20, 32, 64):
            step_plan = plan_step(rows, LENGTHS, LENGTHS, Budget(world_size, budget, packed=True))
            bins[world_size] = [g.tolist() for g in groups_of(step_plan)]
        canonical = bins[1]
        assert len(canonical) * budget >= tokens
        dividing = [w for w in bins if len(canonical) % w == 0]
        assert len(dividing) >= 2 and all(bins[w] == canonical for w in dividing)
        assert all(len(groups) % world_size == 0 for world_size, groups in bins.items())


def test_an_example_over_the_budget_is_refused(tiny_config):
    with pytest.raises(UserError, match=r"train.jsonl:\d+: .*data.micro_batch_tokens \(40\)"):
        plan_of(tiny_config(data__micro_batch_tokens=40))
