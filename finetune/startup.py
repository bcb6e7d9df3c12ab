"""The table printed at start-up, and the resolved configs written beside the run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from data.loader import DataPlan
from data.tokenize import OUTCOMES
from finetune.batch_math import model_state_bytes, scaled_learning_rate, total_steps, warmup_steps
from finetune.checkpoint import TrainerState
from finetune.config import Config, dump_config
from finetune.errors import UserError
from finetune.model import count_parameters

SAMPLED_STEPS = 100  # of the first epoch, for the table's counts of micro-steps and padding


def startup_table(
    config: Config,
    model_config: PretrainedConfig,
    train_plan: DataPlan,
    eval_plan: DataPlan | None,
    state: TrainerState,
    device: torch.device,
) -> str:
    """What the run is about to do, in one table of name and text, with units."""
    train, data, meta = config.train, config.data, train_plan.data.meta
    sampled = range(min(SAMPLED_STEPS, train_plan.steps_per_epoch))
    deals = [train_plan.step(k) for k in sampled]
    micro_steps = _span([len(d.micro_batches) for d in deals])
    sequences = _span([d.examples for d in deals])
    tokens = sum(d.tokens for d in deals)
    padding = sum(d.padded_tokens for d in deals) / tokens - 1
    of_steps = "" if len(deals) == train_plan.steps_per_epoch else f" (first {len(deals)} steps)"

    parameters = count_parameters(model_config, config.model.trust_remote_code)
    memory = model_state_bytes(parameters, state.world_size, state.zero_stage, state.precision)
    long_rows = ", ".join(
        f"{meta[name]:,} {text}" for name, text in OUTCOMES.values() if meta[name]
    )
    supervised = meta["supervised_tokens"] / meta["tokens"]
    steps, per_epoch = total_steps(train, train_plan.steps_per_epoch), train_plan.steps_per_epoch
    scaling = {
        "none": "as given",
        "sqrt": f"{train.learning_rate:g} x sqrt({train.global_batch_size} / "
        f"{train.reference_global_batch_size})",
        "linear": f"{train.learning_rate:g} x {train.global_batch_size} / "
        f"{train.reference_global_batch_size}",
    }[train.lr_scaling]
    weights = "random weights" if config.model.from_config else "pretrained"
    rows = {
        "model": f"{config.model.name_or_path}, {parameters / 1e6:,.1f} M parameters, {weights}",
        "ranks": f"{state.world_size} on {device.type}, {state.precision}, "
        f"ZeRO stage {state.zero_stage} ({config.ds_config})",
        "memory": f"{memory / 2**20:,.0f} MiB a rank for weights, gradients and optimizer "
        "(estimate, without activations)",
        "data": f"{meta['rows_read']:,} rows read, {len(train_plan.data):,} to train on; over "
        f"data.max_length {data.max_length:,}: {long_rows or 'none'}",
        "held out": f"{len(eval_plan.data):,} rows" if eval_plan else "none: no evaluation",
        "tokens": f"{meta['tokens']:,} an epoch, {meta['supervised_tokens']:,} supervised "
        f"({supervised:.0%}), padding adds {padding:.1%}{of_steps}",
        "batch": f"{state.world_size} ranks x {micro_steps} micro-steps x <= "
        f"{data.micro_batch_tokens:,} tokens = {sequences} sequences a step{of_steps}",
        "global batch": f"{train.global_batch_size:,} sequences",
        "learning rate": f"{scaled_learning_rate(train):.3g} ({scaling}), {train.lr_schedule}, "
        f"warm-up {train.warmup_examples:,} examples = {warmup_steps(train):,} steps",
        "clipping": f"global gradient norm {train.gradient_clipping:g}"
        if train.gradient_clipping
        else "off",
        "steps": f"{steps:,} = {steps / per_epoch:.3g} epochs of {per_epoch:,}",
        "seed": f"{train.seed} for weights and plan, {train.seed} + rank for dropout",
        "output": config.output_dir,
    }
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())


def write_resolved_configs(config: Config, ds_config: dict[str, Any]) -> None:
    """Both merged configs, into output_dir: the run config there alone starts the same run again.

    Raises:
        UserError: output_dir cannot be written.
    """
    folder = Path(config.output_dir)
    resolved = folder / "resolved_ds_config.json"
    text = dump_config(replace(config, ds_config=str(resolved.resolve())))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        resolved.write_text(json.dumps(ds_config, indent=2) + "\n")
        (folder / "resolved_config.yaml").write_text(text)
    except OSError as error:
        raise UserError(f"output_dir: cannot write {folder}: {error.strerror}") from error


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"
