"""The table printed at start-up, and the resolved configs written to the run folder."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from zerotrain.checkpoint.run_folder import RESOLVED_CONFIG, RESOLVED_DS_CONFIG
from zerotrain.checkpoint.start import Start
from zerotrain.config.ds_config import zero_stage
from zerotrain.config.parse import dump_config
from zerotrain.config.schema import DataConfig
from zerotrain.data.data_plan import DataPlan
from zerotrain.model.architecture import is_multimodal
from zerotrain.model.stored import fp32_weights
from zerotrain.runtime.files import replace_text
from zerotrain.training.optimizer import Schedule
from zerotrain.training.setup import Setup

FEW_STEPS = 100  # Epochs with fewer steps get a warning.


def startup_table(
    setup: Setup, start: Start, eval_plans: dict[str, DataPlan], schedule: Schedule
) -> dict[str, str]:
    """Say what the run is about to do: name of a fact -> text with units."""
    config = setup.config
    train = config.train
    plan = start.plan
    architecture = setup.architecture
    counts = architecture.counts
    steps = schedule.total_steps
    first = plan.step(plan.start.step)  # Earlier steps may belong to another plan.
    supervised = plan.data.supervised.sum() / plan.data.lengths.sum()  # A low share: wrong masks.
    rate = f"{schedule.peak:.3g}"
    if train.lr_scaling != "none":
        ratio = f"{plan.mean_batch:,.6g} / {train.reference_global_batch}"
        rate += f" = {train.learning_rate:g} x {train.lr_scaling}({ratio})"
    weights = "random" if config.model.from_config else "pretrained"
    rows = {
        "model": f"{config.model.name_or_path}, {weights} weights, {counts.total:,} parameters, "
        f"{counts.trained:,} of them trained",
        "ranks": f"{setup.machine.ranks} on {setup.machine.device}, {train.precision}, ZeRO stage "
        f"{zero_stage(setup.ds_config)} ({config.ds_config})",
        **data_rows(config.data, plan, eval_plans),
        "supervised": f"{supervised:.0%} of tokens supervised, {plan.order.tokens_per_epoch:,} "
        f"tokens per epoch; {plan.data.meta.masks}",
        "batch": f"{counted(plan.mean_examples, 'example')} per step; first step: "
        f"{counted(len(first.micro_batches), 'micro-step')} x "
        f"{counted(plan.budget.world_size, 'data rank')} x at most "
        f"{plan.budget.micro_batch_tokens:,} tokens",
        "batching": f"{config.data.batching}: {setup.why_batching}; padding adds "
        f"{first.padded_tokens / first.tokens - 1:.1%} to the first step",
        "learning rate": f"{rate}, {train.lr_schedule}, warm-up "
        f"{counted(train.warmup_examples, 'example')} = {counted(schedule.warmup_steps, 'step')}",
        "steps": f"{steps:,} = {counted(plan.epochs_at(steps), 'epoch')} of "
        f"{plan.steps_per_epoch:,}; seed {train.seed}",
        "output": config.output_dir,
    }
    if config.model.lora:
        named = architecture.skeleton.named_parameters()
        adapted = sum(p.numel() for name, p in named if ".base_layer." in name)
        rows["adapters"] = f"on {adapted / counts.total:.0%} of the weights"
    if is_multimodal(architecture.model_config):
        is_whole = is_multimodal(architecture.skeleton.config)
        rows["images and audio"] = "their modules are frozen" if is_whole else "left out"
    if train.precision != "fp32" and start.checkpoint is None:
        rows["masters begin"] = masters_begin(setup)
    # A user's own rows are often few, and the recipes are made for many. train.steps is meant.
    enough = train.steps or max(steps, FEW_STEPS)
    if steps < max(enough, schedule.warmup_steps):
        # About as many examples as now, or more if each rank needs one in every step.
        batch = max(plan.budget.world_size, round(plan.mean_batch * steps / enough))
        warmup = min(train.warmup_examples, int(plan.mean_examples * steps / 10))
        rows["WARNING: few steps"] = (
            f"{steps:,}, with a warm-up of {schedule.warmup_steps:,}: the rate reaches "
            f"{max(map(schedule.rate, range(steps))) / schedule.peak:.1%} of its peak; for "
            f"{enough:,} steps, set --train.{train.global_batch_key} {batch} --train.epochs null "
            f"--train.steps {enough} --train.warmup_examples {warmup} "
            f"({enough * batch / plan.epoch_size:,.2g} epochs)"
        )
    return rows


def masters_begin(setup: Setup) -> str:
    """Say where the masters of a new run in 16 bits begin, and how many tensors where."""
    config = setup.config
    begin = f"at the {config.train.precision} weights"
    if config.train.masters == "loaded":
        return begin
    points = f"at random points that round to the {config.train.precision} weights"
    if config.model.lora:
        return f"{begin}; of model.lora.modules_to_save, at random points that round to them"
    if config.model.from_config:
        return points
    skeleton = setup.architecture.skeleton
    trained = {name for name, p in skeleton.named_parameters() if p.requires_grad}
    try:
        files = fp32_weights(skeleton, config.model.name_or_path, "meta", download=False)
        exact = trained & {name for weights in files for name in weights}
    except Exception:  # They are not here yet, or damaged, which loading reports.
        return f"at the numbers that the model's files have in fp32, otherwise {points}"
    if not exact:
        return points
    return (
        f"at the numbers of the model's fp32 files in {counted(len(exact), 'tensor')}, {points} in "
        f"{len(trained - exact):,}"
    )


def data_rows(
    config: DataConfig, plan: DataPlan, eval_plans: dict[str, DataPlan]
) -> dict[str, str]:
    """Say where the rows came from, and which of them are not trained on."""
    meta = plan.data.meta
    too_long = [f"{n:,} {text}" for text, n in meta.over_length.items()]
    trained = pa.array(plan.data.column("content"))
    repeated = len(trained) - pc.count_distinct(trained).as_py()
    rows = {
        "data": f"{counted(meta.rows_read, 'row')}, "
        f"{counted(len(plan.data), 'training example')}"
        f"{f', {repeated:,} of them repeat others' if repeated else ''}; over data.max_length "
        f"{config.max_length:,}: {', '.join(too_long) or 'none'}"
    }
    found = zip(meta.sources, meta.formats, meta.source_examples, strict=True)
    for source, (name, kind, count) in zip(config.train_sources, found, strict=True):
        rows[f"source {len(rows)}"] = (
            f"{name}, read as {kind}: {counted(count, 'example')}, repeat {source.repeat:g}"
        )
    for name, each in eval_plans.items():
        rows[f"held-out set: {name}"] = counted(len(each.data), "example")
        same = pc.sum(pc.is_in(pa.array(each.data.column("content")), trained)).as_py()
        if same:
            rows[f"WARNING: {name}"] = (
                f"{same:,} of its {counted(len(each.data), 'example')} are also training examples; "
                "its loss says less about new text. Remove them from one of the two"
            )
    # Each cache once: the rows that eval_fraction holds out are in the training data's cache.
    tokenized = {each.data.folder: each.data for each in (plan, *eval_plans.values())}
    for i, data in enumerate(tokenized.values(), start=1):  # The training data is number 1.
        if data.unread:
            rows[f"not read {i}"] = data.unread
        for reason, count in data.meta.rejected.items():
            text = f"{counted(count, 'row')}, listed in {data.folder}/rejected_rows.jsonl"
            rows[f"rejected {i}: {reason}"] = text
        for text, count in data.meta.unprompted.items():
            rows[f"WARNING {i}: {text!r}"] = (
                f"ends the generation prompt, but {counted(count, 'row')} have no such text before "
                "an answer, or an empty thinking block. At inference the model would see an "
                "unfamiliar prompt; see Reasoning in data/README.md"
            )
    return rows


def counted(count: float, noun: str) -> str:
    """Return a number with its noun, such as "1 row", "2,000 rows" or "1.57 epochs"."""
    number = f"{count:,.3g}" if count < 100 else f"{count:,.0f}"
    return f"{number} {noun}{'s' * (number != '1')}"


def write_resolved_configs(setup: Setup) -> None:
    """Write the run config and the merged DeepSpeed config into output_dir. The former names the
    latter, so that it alone starts the same run again.
    """
    folder = Path(setup.config.output_dir)
    resolved = folder / RESOLVED_DS_CONFIG
    text = dump_config(replace(setup.config, ds_config=str(resolved.resolve())))
    replace_text(resolved, json.dumps(setup.ds_config, indent=2) + "\n")
    replace_text(folder / RESOLVED_CONFIG, text)
