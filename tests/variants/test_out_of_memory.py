"""Errors of runs that are out of memory.    pytest tests/variants/test_out_of_memory.py"""

import re
import shutil

import numpy as np
import pytest
import torch
from harness.inputs import read_config, save_tiny_llama

from zerotrain.runtime.errors import UserError
from zerotrain.tools.open_plans import open_plans
from zerotrain.training.out_of_memory import describe_micro_batch, explain_out_of_memory


def test_out_of_memory_is_one_line_that_names_rows_and_key(
    forks, tiny_config, tmp_path, sample_tokenizer
):
    """A process may allocate little, and fails in a step and in an evaluation."""
    model = save_tiny_llama(tmp_path / "wide", sample_tokenizer, intermediate_size=16384)
    config = tiny_config(
        model=model, ds_config="ds_configs/zero0.json", data__micro_batch_tokens=8192,
        data__eval_sources=[tmp_path / "held.jsonl"], train__global_batch_size=70,
    )  # fmt: skip
    shutil.copy(tmp_path / "train.jsonl", tmp_path / "held.jsonl")
    for name, flags in (("train", []), ("held", ["--eval.every_steps", 1])):
        line = forks.refusal(config, *flags, module="little_memory")
        assert f"{name}.jsonl:8 (199 tokens)" in line, line
        assert "micro_batch_tokens is 8,192: set it to 4,096," in line
    assert not (tmp_path / "run" / "checkpoints").exists()
    tokens, code = "1024", 2  # two halvings further, to save time
    while code:
        flags = ["--data.micro_batch_tokens", tokens, "--train.epochs", 1]
        finished = forks.train(config, *flags, module="little_memory")
        code = finished.code
        tokens = code and re.search("set it to ([^ ]*),", finished.error)[1].replace(",", "")


def test_the_suggested_budget_is_half_but_holds_the_longest_example(tiny_config):
    flags = ["--data.micro_batch_tokens", "8192"]
    config = read_config(tiny_config(), *flags)
    *_, plan, _ = open_plans(config, 2)
    longest = int(plan.data.lengths.argmax())
    alone = plan.with_budget(1)
    tokens = alone.budget.micro_batch_tokens
    assert tokens == plan.budget.padded(plan.data.lengths[longest])
    for given, named in ((8192, 4096), (tokens + 8, tokens)):
        text = describe_micro_batch(plan.with_budget(given), np.array([8, 8, 3]))
        assert f"is {given:,}: set it to {named:,}," in text and text.count("jsonl:9 ") == 1
    for examples in ([longest], []):  # a rank may have no example
        text = describe_micro_batch(alone, np.array(examples, int))
        assert "set it to" not in text and "data.max_length" in text


def test_only_allocation_errors_are_explained_as_out_of_memory():
    explained = pytest.raises(UserError, match="out of memory in an answer")
    with explained, explain_out_of_memory(lambda: "an answer"):
        torch.empty(1 << 60)
    with pytest.raises(RuntimeError, match="size"), explain_out_of_memory(lambda: "an answer"):
        torch.ones(2) + torch.ones(3)
