"""scripts/rehearse.py.    pytest tests/tools/test_rehearsal.py"""

import re

import numpy as np
import pytest
from harness.inputs import read_config, save_tiny_llama, strategy

from zerotrain.tools.open_plans import open_plans
from zerotrain.tools.rehearsal import MeasuredMemory, costliest, find_largest


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


def attempts_in(output):
    """Tokens and peak in GiB of each attempt, and its percentage of the memory."""
    line = r"micro_batch_tokens (\S+): (\S+) of \S+ GiB \((\S+)%\)"
    return [[float(x.replace(",", "")) for x in found] for found in re.findall(line, output)]


def test_a_rehearsal_names_what_fits_or_is_one_line(forks, tiny_config, tmp_path, sample_tokenizer):
    """On a machine with 600 MiB, and in a process with a limit of memory."""
    model = save_tiny_llama(tmp_path / "wide", sample_tokenizer, intermediate_size=16384)
    config = tiny_config(
        model=model, ds_config="ds_configs/zero0.json", data__micro_batch_tokens=8192,
        train__global_batch_size=70,
    )  # fmt: skip
    little = {"module": "little_memory", "MAIN": "zerotrain.tools.rehearsal:rehearse"}
    line = forks.refusal(config, **little)
    assert "train.jsonl:8 (199 tokens)" in line and "set it to 4,096," in line
    for planned in (256, 2048):  # more than fits
        flags = ("--data.micro_batch_tokens", planned)
        output = forks.finish(config, *flags, **little, MORE_MIB="9999").output
        assert "estimated GiB per rank" in output
        [_, (tokens, peak, used), *more] = attempts_in(output)
        assert tokens == planned and (used > 90) == (planned == 2048)
        named = float(re.search(r"\n(\S+) is the largest", output)[1].replace(",", ""))
        used_by = {tokens: used for tokens, _, used in attempts_in(output)[1:]}
        assert used_by[named] <= 90
        assert all(used >= 90 for tokens, used in used_by.items() if tokens > named)
        assert (more[-1][1] > peak) == (planned == 256), "a peak of its own"
    unknown = ("--model.name_or_path", "./nowhere")
    assert "no such folder" in forks.refusal(config, *unknown, ranks=2, module="scripts.rehearse")


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
    whole_step = -(-parsed.train.global_batch_size // plan.budget.world_size) * longest
    attempts = attempts_in(finished.output)
    assert attempts[1][0] == plan.budget.micro_batch_tokens and attempts[-1][0] == whole_step
    assert f"\n{whole_step:,} is the largest" in finished.output, finished.output
    assert not (tmp_path / "run").exists()


BYTES = {
    "in proportion": (lambda tokens: 800 + 3 * tokens, True),
    "squares": (lambda tokens: tokens**2 / 100, True),
    "a jump": (lambda tokens: 10 + 9000 * (tokens > 600), True),
    "too much": (lambda tokens: 9000 + tokens, False),
}
"""Bytes of a micro-batch by its tokens, and whether one of 16 tokens fits into 10,000 bytes."""


@pytest.mark.parametrize("planned", [16, 500, 2600, 30_000])
@pytest.mark.parametrize("kind", BYTES)
def test_the_size_named_is_the_largest_that_was_measured_to_fit(kind, planned):
    peaks = {}

    def attempt(tokens):
        peaks[tokens] = 500 + BYTES[kind][0](tokens)
        return MeasuredMemory(0, 1, 10**9), MeasuredMemory(500, peaks[tokens], 10_000)

    named = find_largest(attempt, 16, planned, 3200)
    fitting = [tokens for tokens, peak in peaks.items() if peak <= 9000]
    assert named == max(fitting, default=None) and bool(named) == BYTES[kind][1]
    if planned in fitting:  # then it grows until one does not fit
        assert [*peaks] == sorted(peaks) and len(peaks) <= len(fitting) + 1
    if kind == "in proportion" and planned < 2600:
        assert named > (8500 - 800) / 3 / 1.1 - 16
