"""The costliest micro-batch before the first step.    pytest tests/test_rehearsal.py"""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from conftest import REPO, determined, read_metrics, save_tiny_llama, strategy

from zerotrain.config.parse import parse_command_line
from zerotrain.data.plan import Budget
from zerotrain.model.rehearsal import (
    Memory,
    costliest,
    describe_micro_batch,
    explain_out_of_memory,
    growth,
    largest_budget,
)
from zerotrain.runtime.errors import UserError
from zerotrain.tools.open_plans import open_plans


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_no_planned_micro_batch_exceeds_the_costliest(tiny_config, batching):
    """In its tokens, and in the sum of its squared lengths."""
    path = tiny_config(data__batching=batching, train__global_batch_size=24)
    for tokens in (224, 300, 500, 1024, 1900, 100_000):
        for world_size in (1, 3):
            flags = ["--data.micro_batch_tokens", str(tokens)]
            config = parse_command_line(["--config", str(path), *flags]).config
            _, _, plan, _ = open_plans(config, world_size)
            bounds = np.max([costs(plan, chosen) for chosen in costliest(plan)], axis=0)
            assert bounds[0] <= tokens
            for step in range(6):
                for of_ranks in plan.step(step).micro_batches:
                    for examples in of_ranks:
                        assert (costs(plan, examples) <= bounds).all()


def costs(plan, examples):
    """Tokens, and the sum of squared lengths: padded, or cut to the budget."""
    lengths = plan.data.lengths[examples].astype(np.int64)
    if plan.budget.packed:
        ends = np.minimum(np.cumsum(lengths), plan.budget.micro_batch_tokens)
        lengths = np.diff(ends, prepend=0)
    elif len(lengths):
        lengths[:] = plan.budget.padded(lengths.max())
    return np.array([lengths.sum(), (lengths**2).sum()])


STATES = [
    ("zero0", "fp32"), ("zero0", "bf16"), ("zero1", "fp32"), ("zero1", "bf16"), ("zero2", "bf16"),
    ("zero2", "fp16"), ("zero2_offload", "fp32"), ("zero3", "fp16"), ("zero3", "fp32"),
    ("zero3_offload", "bf16"), ("zeropp", "bf16"), ("ulysses", "fp32"), ("zero1_autotp", "fp32"),
    ("zero3_autotp", "fp32"),
]  # fmt: skip


def test_it_leaves_everything_as_it_was(forks, tiny_config, tmp_path, tiny_model_with_dropout):
    """With DeepSpeed's CPU Adam where g++ can compile it."""
    cases = []
    for name, precision in STATES:
        ds_config = strategy(tmp_path, name)
        if "offload" in name and shutil.which("g++"):
            ds_config = REPO / "ds_configs" / f"{name}.json"
        cases.append([str(ds_config), precision])
    config = tiny_config(model=tiny_model_with_dropout, data__batching="packed")
    finished = forks.train(config, ranks=2, module="rehearsed", CASES=json.dumps(cases))
    assert finished.code == 0, finished.output
    assert finished.output.count("has the same") == 2 * len(cases), finished.output


def test_auto_takes_what_a_step_needs_and_leaves_the_curve_as_it_was(
    forks, tiny_config, tmp_path, tiny_model_with_dropout
):
    """A resumed run keeps it, and is rehearsed before its checkpoint is loaded."""
    config = tiny_config(
        model=tiny_model_with_dropout, ds_config=str(strategy(tmp_path, "zero3")),
        data__batching="packed", data__micro_batch_tokens="auto", train__epochs=None,
        train__steps=4, checkpoint__every_steps=2,
    )  # fmt: skip
    run = tmp_path / "run"
    for start in ("rehearsed", "step_00000002"):
        finished = forks.train(config, ranks=2)
        assert start in finished.output and finished.code == 0, finished.output
        resolved = yaml.safe_load((run / "resolved_config.yaml").read_text())
        found = resolved["data"]["micro_batch_tokens"]
        _, _, plan, _ = open_plans(parse_command_line(["--config", str(config)]).config, 2)
        assert found == 6 * plan.budget.padded(plan.data.lengths.max())
        shutil.rmtree(run / "checkpoints" / "step_00000004")
    flags = ["--output_dir", tmp_path / "plain", "--data.micro_batch_tokens", found]
    assert forks.train(config, *flags, ranks=2).code == 0
    assert determined(run) == determined(tmp_path / "plain")
    assert {step["micro_steps"] for step in read_metrics(run)} == {1}


# --------------------------------------------------------------------------------------------------
# Out of memory


def test_out_of_memory_is_one_line_that_names_rows_and_key(
    forks, tiny_config, tmp_path, sample_tokenizer
):
    """Of a process that may allocate little: in the rehearsal, a step and an evaluation."""
    model = save_tiny_llama(tmp_path / "wide", sample_tokenizer, 0.0, intermediate_size=16384)
    config = tiny_config(
        model=model, ds_config="ds_configs/zero0.json", data__micro_batch_tokens=8192,
        data__eval_sources=[str(tmp_path / "held.jsonl")], train__global_batch_size=70,
    )  # fmt: skip
    shutil.copy(tmp_path / "train.jsonl", tmp_path / "held.jsonl")
    for name, flags in (
        ("train", ["--train.rehearse", "true"]),
        ("train", []),
        ("held", ["--eval.every_steps", 1]),
    ):
        finished = forks.train(config, *flags, module="little_memory")
        assert finished.code == 2, finished.output
        [line] = finished.errors
        assert f"{name}.jsonl:8 (199 tokens)" in line, line
        assert "micro_batch_tokens is 8,192" in line and "4,096" in line
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_budget_that_fits_is_half_or_what_was_measured_if_that_is_less(tiny_config):
    flags = ["--data.micro_batch_tokens", "8192"]
    config = parse_command_line(["--config", str(tiny_config()), *flags]).config
    *_, plan, _ = open_plans(config, 2)
    for largest, named in ((8192, "4,096"), (0, "4,096"), (5120, "5,120"), (300, "300")):
        text = describe_micro_batch(plan, np.array([8, 8, 3]), largest)
        assert f"is 8,192, and {named} fit" in text and text.count("jsonl:9 ") == 1
    alone = plan.with_budget(1)
    longest = int(plan.data.lengths.argmax())
    assert alone.budget.micro_batch_tokens == plan.budget.padded(plan.data.lengths[longest])
    for group in alone.step(0).micro_batches[0]:
        assert plan.data.lengths[group].sum() <= alone.budget.micro_batch_tokens
    for examples in ([longest], []):  # a rank may have none
        text = describe_micro_batch(alone, np.array(examples, int), 300)
        assert " fit" not in text and "data.max_length" in text
    lengths = f"and {alone.budget.micro_batch_tokens} fit"
    assert lengths in describe_micro_batch(plan, np.array([8]), 8)
    refused = pytest.raises(UserError, match="out of memory in an answer")
    with refused, explain_out_of_memory(str, "an answer"):
        torch.empty(1 << 60)
    half_used = [Memory(0, 1, 10**9), Memory(100, 500, 1000)]
    assert growth(half_used) == pytest.approx((0.9 * 1000 - 100) / 400)


@pytest.mark.parametrize(
    "constant, per_token, available", [(0, 1, 5000), (800, 3, 10_000), (10, 7, 100)]
)
def test_auto_stays_within_nine_tenths_of_the_memory(constant, per_token, available):
    """With memory that is constant plus a part in proportion to the budget."""
    attempted = []

    def attempt(budget):
        attempted.append(budget.micro_batch_tokens)
        full = Memory(500, 500 + constant + per_token * attempted[-1], 500 + available)
        return [Memory(0, 1, 10**9), full]

    budget, _ = largest_budget(attempt, Budget(2, 16), most=1000)
    fits = (0.9 * (500 + available) - 500 - constant) / per_token
    assert budget.micro_batch_tokens == attempted[-1] <= max(16, fits)
    assert attempted == sorted(attempted) and attempted[-1] > fits / 1.1 - 16
    assert largest_budget(attempt, Budget(2, 16), most=1)[0].micro_batch_tokens == 16
