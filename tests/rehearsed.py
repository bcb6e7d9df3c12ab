"""What a rehearsal changes in an engine, for tests/test_rehearsal.py: nothing."""

import json
import os
from dataclasses import replace

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils._pytree import tree_leaves, tree_map

from zerotrain.checkpoint.shards import collect
from zerotrain.config.schema import Config
from zerotrain.model.engine import build_engine
from zerotrain.model.rehearsal import rehearse
from zerotrain.model.setup import describe_run, load_plans
from zerotrain.runtime.process_group import Ranks, process_group


def main(config: Config, dry_run: bool) -> None:
    """Rehearses with each [ds_config, precision] of CASES, and compares what it leaves."""
    get_accelerator().is_fp16_supported = lambda: True
    with process_group(config.distributed.timeout_seconds) as ranks:
        for ds_config, precision in json.loads(os.environ["CASES"]):
            train = replace(config.train, precision=precision)
            compare(replace(config, train=train, ds_config=ds_config), ranks)


def compare(config: Config, ranks: Ranks) -> None:
    setup = describe_run(config, ranks)
    plan, _ = load_plans(setup, setup.ranks)
    engine, loss, _ = build_engine(setup, plan, setup.ranks)
    before = tree_map(copied, state_of(engine))
    budget = rehearse(engine, loss, setup, plan, search=False)
    after = state_of(engine)
    case = f"{config.ds_config} {config.train.precision}"
    assert budget == plan.budget
    for name, (start, tensors) in after["parts"].items():
        for key, tensor in tensors.items():  # moments may be allocated by the first update
            was = before["parts"][name][1].get(key, torch.zeros_like(tensor))
            assert start == before["parts"][name][0] and is_same(tensor, was), (case, name, key)
    for key in after.keys() - {"parts", "states"}:
        leaves = [tree_leaves(state[key]) for state in (before, after)]
        assert all(map(is_same, *leaves)), (case, key)
    assert after["updates"] == 0 and set(after["states"]) == {"fp32", "exp_avg", "exp_avg_sq"}
    assert all(p.grad is None for p in engine.module.parameters()), case
    engine.destroy()

    print(f"rank {ranks.rank} has the same: {case}", flush=True)


def state_of(engine) -> dict:
    """Of this rank: what a checkpoint would have, and what the model computes with."""
    parameters = dict(engine.module.named_parameters())
    return {
        **vars(collect(engine, True, None)),
        "weights": {name: getattr(p, "ds_tensor", p.detach()) for name, p in parameters.items()},
        "learning_rates": [group["lr"] for group in engine.basic_optimizer.param_groups],
    }


def copied(value):
    return value.clone() if torch.is_tensor(value) else value


def is_same(value, other) -> bool:
    """Bit for bit, if they are tensors."""
    if not torch.is_tensor(value):
        return value == other
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (value, other)]
    return value.dtype == other.dtype and torch.equal(*bits)
