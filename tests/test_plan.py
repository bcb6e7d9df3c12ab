"""The plan is pure: who trains on what, when.    pytest tests/test_plan.py"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.plan import Budget, deal_step, epoch_key, permute, step_rows, steps_per_epoch

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 1003).astype(np.int32).clip(2, 900)
SUPERVISED = (LENGTHS // 2).astype(np.int32)


def deal_epoch(lengths, world_size, batch, seed=1, epoch=0, budget=1024):
    budget = Budget(world_size, budget)
    for step in range(steps_per_epoch(len(lengths), batch)):
        rows = step_rows(len(lengths), batch, seed, epoch, step)
        yield rows, deal_step(rows, lengths, lengths, budget)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 64])
def test_an_epoch_delivers_every_row_once(world_size):
    seen = []
    for _, deal in deal_epoch(LENGTHS, world_size, batch=96):
        for micro_step in deal.micro_batches:
            assert len(micro_step) == world_size, "a rank without a micro-batch would hang the rest"
            seen += np.concatenate(micro_step).tolist()
    assert sorted(seen) == list(range(len(LENGTHS)))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 64), min_size=1, max_size=200),
    world_size=st.integers(1, 9),
    batch=st.integers(1, 70),
    cap=st.integers(64, 300),
    multiple=st.sampled_from([1, 8]),
    seed=st.integers(0, 2**31),
)
def test_any_epoch_is_exactly_once_and_within_budget(
    lengths, world_size, batch, cap, multiple, seed
):
    lengths = np.array(lengths, np.int32)
    seen = []
    sizes = []
    for step in range(steps_per_epoch(len(lengths), batch)):
        rows = step_rows(len(lengths), batch, seed, 3, step)
        deal = deal_step(rows, lengths, lengths, Budget(world_size, cap, multiple))
        groups = [group for micro_step in deal.micro_batches for group in micro_step]
        assert sorted(np.concatenate(groups)) == sorted(rows)
        assert len(groups) % world_size == 0
        padded = [
            len(g) * (-(-int(lengths[g].max()) // multiple) * multiple) for g in groups if len(g)
        ]
        assert max(padded) <= cap and sum(padded) == deal.padded_tokens
        assert deal.supervised_tokens == deal.tokens == lengths[rows].sum()
        seen += rows.tolist()
        sizes.append(len(rows))
    assert sorted(seen) == list(range(len(lengths)))
    assert max(sizes) - min(sizes) <= 1 and max(sizes) <= batch


def test_contents_of_a_step_depend_on_seed_epoch_and_step_alone():
    contents = [
        [sorted(np.concatenate(list(itertools.chain(*deal.micro_batches))))
         for _, deal in deal_epoch(LENGTHS, world_size, 96, budget=budget)]
        for world_size, budget in ((1, 1024), (7, 1024), (2, 4096))
    ]  # fmt: skip
    assert contents[0] == contents[1] == contents[2]
    for other in ({"seed": 2}, {"epoch": 1}):
        rows = next(deal_epoch(LENGTHS, 1, 96, **other))[0]
        assert sorted(rows) != contents[0][0]


def test_the_deal_does_not_depend_on_the_order_of_the_rows():
    rows = step_rows(len(LENGTHS), 96, 1, 0, 0)
    deals = [deal_step(r, LENGTHS, SUPERVISED, Budget(3, 1024)) for r in (rows, rows[::-1])]
    for a, b in zip(*(itertools.chain(*d.micro_batches) for d in deals), strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 1000, 4097])
def test_permute_is_a_permutation(size):
    index = np.arange(size, dtype=np.int64)
    assert sorted(permute(index, size, key=7)) == list(range(size))


def test_permute_looks_random():
    n = 20_000
    order = permute(np.arange(n, dtype=np.int64), n, epoch_key(0, 0))
    other = permute(np.arange(n, dtype=np.int64), n, epoch_key(0, 1))
    # correlation of a random permutation has standard deviation 1 / sqrt(n) = 0.007
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.03
    assert abs(np.corrcoef(order, other)[0, 1]) < 0.03
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03


def test_any_step_of_a_billion_rows_without_a_table():
    rows = step_rows(10**9, 512, seed=0, epoch=3, step=1_234_567)
    assert len(set(rows.tolist())) == len(rows) and rows.min() >= 0 and rows.max() < 10**9


def brute_force_largest_cost(lengths, groups, cap, k):
    """Smallest possible largest cost over every way to cut the sorted rows into `groups`."""
    lengths = sorted(lengths, reverse=True)
    best = None
    for cuts in itertools.combinations(range(1, len(lengths)), groups - 1):
        bounds = [0, *cuts, len(lengths)]
        parts = list(itertools.pairwise(bounds))
        if all((b - a) * lengths[a] <= cap for a, b in parts):
            cost = max((b - a) * lengths[a] * (k + lengths[a]) for a, b in parts)
            best = cost if best is None else min(best, cost)
    return best


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=9),
    world_size=st.integers(1, 3),
    k=st.sampled_from([1, 30, 1000]),
)
def test_the_largest_cost_is_the_smallest_possible(lengths, world_size, k):
    lengths = np.array(lengths, np.int32)
    budget = Budget(world_size, micro_batch_tokens=60, linear_cost=k)
    deal = deal_step(np.arange(len(lengths)), lengths, lengths, budget)
    groups = [g for step in deal.micro_batches for g in step if len(g)]
    found = max(len(g) * int(lengths[g].max()) * (k + int(lengths[g].max())) for g in groups)
    assert found == brute_force_largest_cost(lengths.tolist(), len(groups), 60, k)


def test_fewest_micro_steps_that_fit_the_budget():
    lengths = np.full(64, 100, np.int32)
    for budget, micro_steps in ((6400, 1), (3200, 1), (1600, 2), (800, 4), (100, 32)):
        deal = deal_step(np.arange(64), lengths, lengths, Budget(2, budget))
        assert len(deal.micro_batches) == micro_steps


def test_more_ranks_than_rows_get_empty_micro_batches():
    deal = deal_step(np.arange(3), LENGTHS, SUPERVISED, Budget(8, 2048))
    assert [len(rows) for rows in deal.micro_batches[0]].count(0) == 5


def test_a_row_over_the_budget_is_named():
    with pytest.raises(ValueError, match="row 2 has 1000 padded tokens, over the budget of 512"):
        lengths = np.array([5, 6, 1000], np.int32)
        deal_step(np.arange(3), lengths, lengths, Budget(1, 512))
