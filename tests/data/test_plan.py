"""The step plan: the examples of each step, and their ranks.    pytest tests/data/test_plan.py"""

import shutil
import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from harness.cures import refused
from harness.inputs import chat, read_config, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotrain.config.schema import MAX_INT
from zerotrain.data.epoch_order import PLAN_VERSION, EpochOrder, derive_key, permute
from zerotrain.data.loader import load_steps
from zerotrain.data.plan import Budget, plan_step
from zerotrain.data.questions import choose_questions
from zerotrain.tools.open_plans import open_plans
from zerotrain.tracking.startup import data_rows

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 1003).astype(np.int32).clip(2, 900)


def epoch_of(order, epoch=0):
    return [order.examples(epoch, step) for step in range(order.steps_per_epoch)]


def groups_of(step_plan):
    return [group for micro_step in step_plan.micro_batches for group in micro_step]


def plan_of(config_file):
    return open_plans(read_config(config_file), 2)[2]


# --------------------------------------------------------------------------------------------------
# The examples of each step

GOLDEN = [
    ({"global_batch_size": 96}, [2129882, 2084669]),
    ({"global_batch_tokens": 9000}, [2469861, 3183095]),
    ({"global_batch_size": 96, "shuffle": False}, [251160, 632086]),
]


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
def test_consecutive_epochs_have_each_example_equally_often(
    sources, batch, by_tokens, is_mix, seed, epoch
):
    """k epochs have each of n examples k*m/n times, rounded down or up, if the source has m
    positions per epoch; once per epoch without a mix.
    """
    n, m = np.array([(n, m if is_mix else n) for n, m in sources for _ in range(n)]).T
    lengths = np.random.default_rng(seed).integers(2, 64, len(n)).astype(np.int32)
    size = {"global_batch_tokens": 30 * batch} if by_tokens else {"global_batch_size": batch}
    order = EpochOrder(lengths, seed, **size, mix=tuple(sources) if is_mix else ())
    assert abs(order.tokens_per_epoch - (lengths * m / n).sum()) < 4  # each source rounds
    so_far = 0
    for k in range(1, 4):
        steps = epoch_of(order, epoch + k)
        so_far += np.bincount(np.concatenate(steps), minlength=len(lengths))
        assert (abs(so_far * n - k * m) < n).all()
        sizes = [*map(len, steps)]
        assert min(sizes) > 0 and (by_tokens or max(sizes) <= min(batch, min(sizes) + 1))


def test_the_examples_of_a_step_change_only_with_plan_version():
    """Otherwise a resumed run would lose and repeat examples."""
    assert PLAN_VERSION == 4
    for options, sums in GOLDEN:
        steps = epoch_of(EpochOrder(LENGTHS, 5, **options), 2)[:2]
        assert [rows @ np.arange(1, len(rows) + 1) for rows in steps] == sums


def test_the_mean_batch_is_the_mean_over_the_steps(tiny_config):
    for batch, steps, mean in ((12, 6, 70 / 6), (70, 1, 70)):
        plan = plan_of(tiny_config(train__global_batch_size=batch))
        assert (plan.steps_per_epoch, plan.mean_batch) == (steps, mean)
    by_tokens = {"train__global_batch_size": None, "train__warmup_examples": None}
    plan = plan_of(tiny_config(train__global_batch_tokens=900, **by_tokens))
    tokens = [plan.step(k).tokens for k in range(plan.steps_per_epoch)]
    assert plan.mean_batch == np.mean(tokens) < 900


def test_a_global_batch_over_the_epoch_is_refused(tiny_config, tmp_path, chat_rows):
    """FIXES of test_commands.py has the first cure of this line and of the next."""

    def plan(changes):
        return plan_of(tiny_config(**{"train__global_batch_size": 71} | changes))

    rows, more = tmp_path / "train.jsonl", write_rows(tmp_path / "more.jsonl", chat_rows[:1])
    refused(
        "epoch (70 after ... ); lower it, add data, or raise `repeat` of a source",
        plan,
        {},
        {"data__train_sources": [rows, more]},
        {"data__train_sources": [{"path": rows, "repeat": 1.1}]},
    )


def test_every_first_position_is_equally_likely():
    """Chi-square of the image of 0 in 20 under 10,000 keys. With 19 degrees of freedom, chance
    exceeds 43.8 in 0.1 % of cases.
    """
    firsts = [int(permute(np.zeros(1, np.int64), 20, derive_key(0, e))[0]) for e in range(10_000)]
    counts = np.bincount(firsts, minlength=20)
    assert ((counts - 500) ** 2 / 500).sum() < 43.8


# --------------------------------------------------------------------------------------------------
# Assignment to ranks


FULL = Budget(1, 1).windows


def test_the_cost_of_attention_is_that_of_each_layer():
    """Twice the pairs of a query and a key, minus the length; in integers for full attention."""
    lengths = np.arange(1, 64)
    full = Budget(2, 64, linear_cost=100)
    assert (full.cost(lengths) == lengths * (100 + lengths)).all()
    assert (replace(full, windows=()).cost(lengths) == 100 * lengths).all()
    three_of_four = replace(full, windows=((16, 0.75), (MAX_INT, 0.25)))
    for length in lengths:
        in_window = 2 * sum(min(query, 16) for query in range(1, length + 1)) - length
        attention = 0.75 * in_window + 0.25 * length**2
        assert three_of_four.cost(np.array([length])) == 100 * length + int(attention)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=150),
    world_size=st.integers(1, 9),
    cap=st.integers(64, 300),
    packed=st.booleans(),
    k=st.sampled_from([1, 100, 24_576]),
    windows=st.sampled_from([FULL, ((16, 0.75), (MAX_INT, 0.25)), ()]),
)
def test_a_plan_has_every_example_once_within_budget(lengths, world_size, cap, packed, k, windows):
    lengths = np.array(lengths, np.int32)
    rows = np.arange(len(lengths))
    budget = Budget(world_size, cap, k, packed, windows)
    step_plan, other = (plan_step(r, lengths, lengths, budget) for r in (rows, rows[::-1]))
    groups = groups_of(step_plan)
    for one, of_another_order in zip(groups, groups_of(other), strict=True):
        assert one.tolist() == of_another_order.tolist()
    assert all(len(micro_step) == world_size for micro_step in step_plan.micro_batches)
    assert sorted(np.concatenate(groups)) == sorted(rows)
    if packed:
        tokens = [lengths[g].sum() for g in groups]
    else:
        tokens = [len(g) * (-(-lengths[g].max(initial=0) // 8) * 8) for g in groups]
    assert max(tokens) <= cap and sum(tokens) == step_plan.padded_tokens
    assert step_plan.supervised_tokens == step_plan.tokens == lengths.sum()


@pytest.mark.parametrize(
    "budget, least",
    [
        (Budget(4, 4096), 0.8),
        (Budget(4, 4096, packed=True), 0.99),
        (Budget(4, 2048, linear_cost=100, packed=True), 0.98),  # attention costs most
    ],
)
def test_ranks_that_wait_for_each_other_do_equal_work(budget, least):
    """Each micro-step takes as long as its slowest rank. Useful is the cost without padding. The
    first micro-step costs most.
    """
    order, packed = EpochOrder(LENGTHS, 1, 500), budget.packed
    useful = taken = 0
    for rows in epoch_of(order):
        useful += budget.cost(LENGTHS[rows].astype(np.int64)).sum()
        slowest = []
        for ranks in plan_step(rows, LENGTHS, LENGTHS, budget).micro_batches:
            sizes = [LENGTHS[group].astype(np.int64) for group in ranks]
            widths = [budget.padded(s.max(initial=0)) for s in sizes]
            computed = (
                sizes if packed else [len(s) * [w] for s, w in zip(sizes, widths, strict=True)]
            )
            slowest.append(max(budget.cost(np.array(c, np.int64)).sum() for c in computed))
        assert slowest == sorted(slowest, reverse=True)
        taken += 4 * sum(slowest)
    assert least < useful / taken <= 1


def test_fewest_micro_steps_that_fit_the_budget():
    lengths = np.full(64, 96, np.int32)
    for packed in (False, True):
        for budget, micro_steps in ((6144, 1), (3072, 1), (1536, 2), (768, 4), (96, 32)):
            step_plan = plan_step(np.arange(64), lengths, lengths, Budget(2, budget, packed=packed))
            assert len(step_plan.micro_batches) == micro_steps


def test_packed_bins_are_the_same_for_every_world_size_that_divides_them():
    rows = EpochOrder(LENGTHS, 1, 900).examples(0, 0)
    for tokens in (1024, 2048, 9000):
        bins = {}
        for world_size in (1, 2, 3, 4, 5, 6, 8, 10, 16, 20, 32, 64):
            step_plan = plan_step(rows, LENGTHS, LENGTHS, Budget(world_size, tokens, packed=True))
            bins[world_size] = [group.tolist() for group in groups_of(step_plan)]
        dividing = [bins[size] for size in bins if len(bins[1]) % size == 0]
        assert len(dividing) >= 2 and all(same == bins[1] for same in dividing)


def test_an_example_over_the_budget_is_refused(tiny_config):
    def plan(changes):
        return plan_of(tiny_config(**{"data__micro_batch_tokens": 72} | changes))

    named = (
        "(72); raise it, or lower data.max_length and let data.on_too_long truncate, split or drop"
    )
    ways = [
        {"data__max_length": 72, "data__on_too_long": how} for how in ("truncate", "split", "drop")
    ]
    refused(named, plan, {}, *ways)


def test_rows_that_occur_several_times_are_counted(tiny_config, tmp_path):
    rows = [{"prompt": f"{i}?", "completion": "yes"} for i in range(12)]
    config = tiny_config(
        data__train_sources=[write_rows(tmp_path / "own.jsonl", [*rows[:3] * 2, *[rows[3]] * 50])],
        data__eval_sources={
            "seen": [write_rows(tmp_path / "seen.jsonl", rows[3:6])],
            "new": [write_rows(tmp_path / "new.jsonl", rows[6:])],
        },
    )
    config, _, *plans = open_plans(read_config(config), 1)
    rows = data_rows(config.data, *plans)
    assert "56 training examples, 52 of them repeat others" in rows["data"]
    assert rows["WARNING: seen"].startswith("1 of its 3 examples are also training examples")
    assert rows["held-out set: new"] == "6 examples" and "WARNING: new" not in rows
    assert not any(key.startswith("not read") for key in rows)


def test_a_repeat_is_rounded_to_the_nearest_number_of_rows(tiny_config):
    def places(repeat):
        return plan_of(
            tiny_config(data__train_sources=[{"path": path, "repeat": repeat}])
        ).order.places

    path = read_config(tiny_config()).data.train_sources[0].path
    assert [places(repeat) for repeat in (0.7, 0.255, 1.01, 0.5)] == [49, 18, 71, 35]


def test_a_question_ends_before_the_last_answer(tiny_config, tmp_path):
    rows = write_rows(tmp_path / "rounds.jsonl", [chat("1+1?", "2", "2+2?", "4")] * 12)
    config, tokenizer, plan, _ = open_plans(read_config(tiny_config(data__train_sources=[rows])), 1)
    [question] = choose_questions("held_out", plan.data, config.data.max_length, 1)
    texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in question]
    assert "2+2?" in texts[0] and texts[1] == "4"


def test_questions_need_a_whole_answer(tiny_config):
    def questions(length):
        plan = plan_of(tiny_config(data__max_length=length))
        assert len(choose_questions("own", plan.data, length, 3)) == 3

    refused("set own ... ; set eval.generate to 0, or raise data.max_length", questions, 30, 256)


def test_a_cache_whose_counts_differ_from_its_masks_is_refused(tiny_config):
    config = tiny_config()
    folder = plan_of(config).data.folder
    examples = folder / "examples.arrow"
    table = pa.ipc.open_stream(examples.read_bytes()).read_all()
    columns = table.to_pydict()
    columns["supervised"][7] += 1
    with pa.ipc.new_stream(str(examples), table.schema) as file:
        file.write_table(pa.table(columns, table.schema))

    def load(is_cured):
        if is_cured:
            shutil.rmtree(folder)
        plan = plan_of(config)
        for rank in (0, 1):
            list(load_steps(plan, rank, 0, plan.steps_per_epoch))

    refused(
        f"data.cache_dir: {folder} is damaged: ... ; delete it, and the rows", load, False, True
    )
