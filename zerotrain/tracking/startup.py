"""The table printed at start-up, and the resolved configs written to the run folder."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zerotrain.checkpoint.run_folder import REJECTED_ROWS, RESOLVED_CONFIG, RESOLVED_DS_CONFIG
from zerotrain.checkpoint.state import RunIdentity
from zerotrain.config.batch_math import scaled_learning_rate, warmup_steps
from zerotrain.config.parse import dump_config
from zerotrain.config.schema import CheckpointConfig, ModelConfig, TrainConfig
from zerotrain.data.data_plan import DataPlan, total_steps
from zerotrain.data.render import OUTCOMES
from zerotrain.model.setup import Setup
from zerotrain.model.trained import Counts
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.files import replace_text
from zerotrain.runtime.process_group import Ranks
from zerotrain.runtime.table import show_rows

GROUP_STARTS = ("data", "batching", "steps")
SAMPLED_STEPS = 100  # of the first epoch, from which the table counts micro-steps and padding


def show_startup(
    setup: Setup,
    plan: DataPlan,
    eval_plans: dict[str, DataPlan],
    identity: RunIdentity,
    ranks: Ranks,
) -> None:
    """Print what the run is about to do: a row per name, with units."""
    config, counts = setup.config, setup.counts
    model, train = config.model, config.train
    weights = "random weights" if model.from_config else "pretrained"
    steps = total_steps(train, plan)
    rows = {
        "model": f"{model.name_or_path}, {counts.total / 1e6:,.1f} M parameters, {weights}",
        "trained": _trained(model, counts),
        "ranks": f"{identity.world_size} on {ranks.device.type}, {identity.precision}, "
        f"ZeRO stage {identity.zero_stage} ({config.ds_config})",
        "tokenizer": _tokenizer(setup),
        **_data(setup, plan, eval_plans),
        **_batches(setup, plan),
        "learning rate": _learning_rate(train, plan),
        "steps": f"{steps:,} = {steps / plan.steps_per_epoch:.3g} epochs of "
        f"{plan.steps_per_epoch:,}; seed {train.seed}",
        "checkpoints": _checkpoints(config.checkpoint),
        "output": config.output_dir,
    }
    show_rows({name: text for name, text in rows.items() if text}, GROUP_STARTS)


def _trained(model: ModelConfig, counts: Counts) -> str:
    """What is trained, if it is not everything."""
    if counts.trained == counts.total:
        return ""
    text = f"{counts.trained:,} of {counts.total:,} parameters"
    text += f" ({counts.trained / counts.total:.2%})"
    if model.lora:
        targets = model.lora.target_modules
        where = targets if isinstance(targets, str) else ", ".join(targets)
        text += f": LoRA of rank {model.lora.r}, alpha {model.lora.alpha}, on {where}"
    return text


def _tokenizer(setup: Setup) -> str:
    tokenizer, template = setup.tokenizer, setup.config.model.chat_template
    if template is None:
        template = "its own" if tokenizer.chat_template else "none"
    return (
        f"{len(tokenizer):,} tokens; eos {tokenizer.eos_token or 'none'}; "
        f"pad {tokenizer.pad_token or 'none'}; chat template: {template}"
    )


def _data(setup: Setup, plan: DataPlan, eval_plans: dict[str, DataPlan]) -> dict[str, str]:
    """Rows, examples and tokens; sources, if there are several; and what was left out."""
    data, meta = setup.config.data, plan.data.meta
    long_rows = [f"{meta[name]:,} {text}" for name, text in OUTCOMES.values() if meta[name]]
    rows = {
        "data": f"{meta['rows_read']:,} rows read as {', '.join(dict.fromkeys(meta['formats']))}, "
        f"{len(plan.data):,} training examples; over data.max_length {data.max_length:,}: "
        f"{', '.join(long_rows) or 'none'}"
    }
    for i, name in enumerate(meta["sources"] if len(meta["sources"]) > 1 else ()):
        text = f"{name} ({meta['formats'][i]}): {meta['source_examples'][i]:,} examples"
        rows[f"source {i + 1}"] = text
    metas = [each.data.meta for each in (plan, *eval_plans.values())]
    rejected: Counter[str] = Counter()
    for counts in {id(m["rejected"]): m["rejected"] for m in metas}.values():
        rejected.update(counts)
    if rejected:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in rejected.most_common())
        rows["bad rows"] = f"{rejected.total():,} left out: {reasons} ({REJECTED_ROWS})"
    for name, key in (("special text", "special_text"), ("prompts", "prompts")):
        rows[name] = "; ".join(dict.fromkeys(m[key] for m in metas if m.get(key)))
    sizes = (f"{name} {len(each.data):,} examples" for name, each in eval_plans.items())
    rows["held out"] = ", ".join(sizes) or "none: no evaluation"
    return rows


def _batches(setup: Setup, plan: DataPlan) -> dict[str, str]:
    """The arithmetic of a step, from the first steps of the first epoch."""
    data, train, meta = setup.config.data, setup.config.train, plan.data.meta
    first = [plan.step(k) for k in range(min(SAMPLED_STEPS, plan.steps_per_epoch))]
    tokens = sum(step.tokens for step in first)
    padding = sum(step.padded_tokens for step in first) / tokens - 1
    supervised = sum(step.supervised_tokens for step in first) / tokens
    masks = f"; {meta['masks']}" if meta.get("masks") else ""
    unit = "examples" if train.global_batch_tokens is None else "tokens"
    return {
        "tokens": f"{plan.order.tokens_per_epoch:,} per epoch, {supervised:.0%} of them "
        f"supervised{masks}; padding adds {padding:.1%}",
        "batching": f"{data.batching}: {setup.why_batching}",
        "batch": f"{plan.budget.world_size} ranks x {_span([len(s.micro_batches) for s in first])} "
        f"micro-steps x <= {data.micro_batch_tokens:,} tokens = "
        f"{_span([s.examples for s in first])} examples per step, on average "
        f"{plan.mean_batch:,.6g} {unit} of at most {train.global_batch:,}",
    }


def _learning_rate(train: TrainConfig, plan: DataPlan) -> str:
    rate = f"{scaled_learning_rate(train, plan.mean_batch):.3g}"
    if train.lr_scaling != "none":
        ratio = f"{plan.mean_batch:,.6g} / {train.reference_global_batch}"
        rate += f" ({train.learning_rate:g} x {train.lr_scaling}({ratio}))"
    clipping = f"clipping {train.gradient_clipping:g}" if train.gradient_clipping else "no clipping"
    return (
        f"{rate}, {train.lr_schedule}, warm-up {train.warmup_examples:,} examples = "
        f"{warmup_steps(train, plan.mean_examples):,} steps, {clipping}"
    )


def _checkpoints(config: CheckpointConfig) -> str:
    when = f"every {config.every_steps:,} steps and " if config.every_steps else ""
    if config.every_minutes:
        when = f"every {config.every_minutes:,} minutes and "
    after = f"; after each: {config.after_save}" if config.after_save else ""
    return f"{when}at the end, the last {config.keep_last:,} kept{after}"


def write_resolved_configs(setup: Setup, plans: Sequence[DataPlan]) -> None:
    """Write the run config and the merged DeepSpeed config into output_dir, where the former alone
    starts the same run again, and the list of rejected rows if there are any.

    Raises:
        UserError: output_dir cannot be written.
    """
    config, folder = setup.config, Path(setup.config.output_dir)
    resolved = folder / RESOLVED_DS_CONFIG
    text = dump_config(replace(config, ds_config=str(resolved.resolve())))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(resolved, json.dumps(setup.ds_config, indent=2) + "\n")
        replace_text(folder / RESOLVED_CONFIG, text)
        lists = dict.fromkeys(p.data.rejected_rows for p in plans if p.data.meta["rejected"])
        if lists:
            rows = "".join(path.read_text(encoding="utf-8") for path in lists)
            replace_text(folder / REJECTED_ROWS, rows)
    except OSError as error:
        raise UserError(f"output_dir: cannot write {folder}: {error.strerror}") from error


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"
