"""The loss and every gradient of one step, over chunks and from whole logits, in the same engine,
for tests/test_loss.py.
"""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import safe_get_full_grad

from config.schema import Config
from data.loader import collate, load_steps
from model import engine as engines
from model.optimizer import set_learning_rate
from model.setup import describe_run, load_plans
from runtime.agreement import sum_over_ranks
from runtime.process_group import process_group


def with_lora_on_the_head(load):
    """load_model, with LoRA on the output head and everything else trained."""
    from peft import LoraConfig, inject_adapter_in_model

    def load_it(*args):
        model = load(*args)
        lora = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
        inject_adapter_in_model(lora, model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("base_layer" not in name)
        return model

    return load_it


def count_gathers(weight) -> Counter:
    """How often the weight is gathered from here on, in forward and in backward passes."""
    gathers, fetch = Counter(), PartitionedParameterCoordinator._fetch_sub_module_impl

    def count(self, module, forward, is_leaf):
        missing = weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
        fetch(self, module, forward, is_leaf)
        if missing and weight.ds_status != ZeroParamStatus.NOT_AVAILABLE:
            gathers["forward" if forward else "backward"] += 1

    PartitionedParameterCoordinator._fetch_sub_module_impl = count
    return gathers


def one_step(engine, loss, batches, device):
    """(cross entropy over all ranks, gradients); the weights stay as they are."""
    total = torch.zeros((), dtype=torch.float64)
    for i, batch in enumerate(batches):
        engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
        value = loss(engine, batch.to(device)).cross_entropy
        total += value.detach()
        engine.backward(value / 100, scale_wrt_gas=False)
    gradients = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
    set_learning_rate(engine.basic_optimizer, 0.0)
    engine.step()
    return sum_over_ranks(total).item(), gradients


def main(config: Config, dry_run: bool) -> None:
    if "LORA" in os.environ:
        engines.load_model = with_lora_on_the_head(engines.load_model)
    found = {}
    with process_group() as ranks:
        setup = describe_run(config, ranks)
        plan, _ = load_plans(setup, ranks)
        engine, loss = engines.build_engine(setup, plan, ranks)
        engines.check_engine(engine, loss, setup, plan, ranks)
        chunks, device = loss._chunks, ranks.device
        assert chunks is not None and chunks.tokens == config.model.loss_chunk_tokens
        batches = next(load_steps(plan, ranks.rank, 0, 1)).micro_batches
        assert max(len(batch.targets) for batch in batches) > 3 * chunks.tokens
        if ranks.rank == 1:  # a filler, without targets
            batches[0] = collate(plan.data, np.zeros(0, np.int64), plan.budget)
        head = engine.module.get_output_embeddings()
        weight = max(head.parameters(), key=lambda p: getattr(p, "ds_numel", p.numel()))
        gathers = count_gathers(weight) if config.ds_config.endswith("zero3.json") else Counter()
        results = {}
        for kind in ("chunked", "whole"):
            loss._chunks = chunks if kind == "chunked" else None
            engine.train()
            losses, gradients = one_step(engine, loss, batches, device)
            found[kind] = dict(gathers)
            gathers.clear()
            engine.eval()
            with torch.no_grad():
                evaluated = [loss(engine, batch.to(device)).cross_entropy for batch in batches]
            results[kind] = losses, torch.stack(evaluated), gradients
            gathers.clear()
        (one, evals, ours), (other, its_evals, theirs) = results.values()
        assert torch.allclose(evals, its_evals, rtol=1e-6, atol=0)
        found["loss"] = abs(one / other - 1)
        largest = max(g.norm() for g in theirs.values() if g is not None)
        found["gradients"] = {
            n: None if g is None else float((ours[n] - g).norm() / max(g.norm(), 1e-3 * largest))
            for n, g in theirs.items()
        }
        if ranks.is_first:
            found["micro_batches"] = len(batches)
            folder = Path(config.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "found.json").write_text(json.dumps(found))
