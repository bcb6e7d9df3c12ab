"""The table printed at start-up, and the resolved configs written to the run folder."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from zerotrain.checkpoint.run_folder import RESOLVED_CONFIG, RESOLVED_DS_CONFIG
from zerotrain.config.ds_config import zero_stage
from zerotrain.config.parse import dump_config
from zerotrain.data.data_plan import DataPlan, total_steps
from zerotrain.data.render import OUTCOMES
from zerotrain.runtime.files import replace_text
from zerotrain.runtime.process_group import Ranks
from zerotrain.training.optimizer import Schedule
from zerotrain.training.setup import Setup

SAMPLED_STEPS = 100  # of the first epoch, from which the table counts micro-steps and padding


def startup_table(
    setup: Setup,
    plan: DataPlan,
    eval_plans: dict[str, DataPlan],
    schedule: Schedule,
    ranks: Ranks,
) -> dict[str, str]:
    """What the run is about to do: a text by name, with units."""
    config = setup.config
    counts = setup.architecture.counts
    meta = plan.data.meta
    data = config.data
    train = config.train
    first = plan.start.step  # earlier steps are of another plan
    sampled = [plan.step(first + k) for k in range(min(SAMPLED_STEPS, plan.steps_per_epoch))]
    tokens = sum(step.tokens for step in sampled)
    padding = sum(step.padded_tokens for step in sampled) / tokens - 1
    supervised = sum(step.supervised_tokens for step in sampled) / tokens
    changed = [f"{meta[name]:,} {text}" for name, text in OUTCOMES.items() if meta[name]]
    steps = total_steps(train, plan)
    rate = f"{schedule.peak:.3g}"
    if train.lr_scaling != "none":
        ratio = f"{plan.mean_batch:,.6g} / {train.reference_global_batch}"
        rate += f" = {train.learning_rate:g} x {train.lr_scaling}({ratio})"
    shared = "ranks"
    if ranks.data_size < ranks.world_size:
        shared = f"groups of {ranks.world_size // ranks.data_size} ranks"
    rows = {
        "model": f"{config.model.name_or_path}, {counts.total:,} parameters, "
        f"{counts.trained:,} of them trained",
        "ranks": f"{ranks.world_size} on {ranks.device.type}, {setup.precision}, ZeRO stage "
        f"{zero_stage(setup.ds_config)} ({config.ds_config})",
        "data": f"{meta['rows_read']:,} rows, {len(plan.data):,} training examples; over "
        f"data.max_length {data.max_length:,}: {', '.join(changed) or 'none'}",
    }
    is_slow = ranks.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    if is_slow and setup.precision != "fp32":
        rows["precision"] = f"{setup.precision} is very slow on this CPU, without AVX-512; use fp32"
    for i, name in enumerate(meta["sources"]):
        count = f"{meta['source_examples'][i]:,} examples"
        rows[f"source {i + 1}"] = f"{name}, read as {meta['formats'][i]}: {count}"
    for name, each in eval_plans.items():
        rows[f"held out: {name}"] = f"{len(each.data):,} examples"
    unprompted = Counter()
    for each in {p.data.folder: p.data for p in (plan, *eval_plans.values())}.values():
        for reason, count in each.meta["rejected"].items():
            rows[f"rejected: {reason}"] = f"{count:,} rows, listed in {each.rejected_rows}"
        unprompted.update(each.meta["unprompted"])
    for text, count in unprompted.items():
        rows[f"WARNING: {text!r}"] = (
            f"ends the generation prompt, but {count:,} rows have no such text before an answer: "
            "the trained model would be asked for what it has not seen; see Reasoning in "
            "data/README.md"
        )
    return {
        **rows,
        "supervised": f"{supervised:.0%} of {plan.order.tokens_per_epoch:,} tokens per epoch; "
        f"{meta['masks']}",
        "batch": f"{ranks.data_size} {shared} x {span([len(s.micro_batches) for s in sampled])} "
        f"micro-steps x <= {plan.budget.micro_batch_tokens:,} tokens = "
        f"{span([s.examples for s in sampled])} examples per step",
        "batching": f"{data.batching}: {setup.why_batching}; padding adds {padding:.1%}",
        "learning rate": f"{rate}, {schedule.name}, warm-up {train.warmup_examples:,} examples = "
        f"{schedule.warmup_steps:,} steps",
        "memory": f"{setup.states}, and activations on top: train.py --rehearse measures them",
        "steps": f"{steps:,} = {plan.epochs_at(steps):.3g} epochs of {plan.steps_per_epoch:,}; "
        f"seed {train.seed}",
        "output": config.output_dir,
    }


def span(values: Sequence[int]) -> str:
    low = min(values)
    high = max(values)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def write_resolved_configs(setup: Setup) -> None:
    """Write the run config and the merged DeepSpeed config into output_dir, where the former alone
    starts the same run again.
    """
    folder = Path(setup.config.output_dir)
    resolved = folder / RESOLVED_DS_CONFIG
    text = dump_config(replace(setup.config, ds_config=str(resolved.resolve())))
    replace_text(resolved, json.dumps(setup.ds_config, indent=2) + "\n")
    replace_text(folder / RESOLVED_CONFIG, text)
