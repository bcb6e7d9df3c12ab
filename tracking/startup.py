"""The table printed at start-up, and the resolved configs written to the run folder."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from checkpoint.run_folder import REJECTED_ROWS, RESOLVED_CONFIG, RESOLVED_DS_CONFIG
from checkpoint.save_interval import SaveInterval, count_hosts
from checkpoint.state import RunIdentity
from config.batch_math import scaled_learning_rate, warmup_steps
from config.ds_config import DEEPSPEED_SCHEDULERS
from config.parse import dump_config
from config.schema import HELD_OUT, Config, DataConfig, ModelConfig, TrainConfig
from data.data_plan import DataPlan, make_budget, make_plans, total_steps
from data.render import OUTCOMES
from data.sources import shared_files
from model.architecture import check_model_fits, linear_cost
from model.load import load_model_config, load_tokenizer
from model.packing import resolve_batching
from model.setup import Setup
from model.trained import Counts, adapted_parameters
from runtime.errors import UserError
from runtime.files import replace_text
from runtime.process_group import Ranks
from runtime.table import show_rows

GROUP_STARTS = ("data", "batching", "seed")
SAMPLED_STEPS = 100  # of the first epoch, from which the table counts micro-steps and padding


def open_plans(
    config: Config, world_size: int
) -> tuple[Config, PreTrainedTokenizerBase, DataPlan, dict[str, DataPlan]]:
    """The config with data.batching resolved as on CPU, the tokenizer, the training plan and that
    of each held-out set of a run on `world_size` ranks: to inspect the data without a process
    group.

    Raises:
        UserError: whatever train.py would refuse.
    """
    tokenizer, model_config = load_tokenizer(config), load_model_config(config)
    check_model_fits(config, model_config, tokenizer)
    config, _ = resolve_batching(config, model_config, torch.device("cpu"), "fp32")
    budget = make_budget(config.data, world_size, linear_cost(model_config))
    return config, tokenizer, *make_plans(config, tokenizer, budget)


def show_startup(
    setup: Setup,
    train_plan: DataPlan,
    eval_plans: dict[str, DataPlan],
    identity: RunIdentity,
    ranks: Ranks,
) -> None:
    """Print what the run is about to do: a row per name, with units."""
    config = setup.config
    train, data, meta = config.train, config.data, train_plan.data.meta
    after_save = config.checkpoint.after_save
    sampled = range(min(SAMPLED_STEPS, train_plan.steps_per_epoch))
    first = [train_plan.step(k) for k in sampled]
    micro_steps = _span([len(step.micro_batches) for step in first])
    examples = _span([step.examples for step in first])
    tokens = sum(step.tokens for step in first)
    padding = sum(step.padded_tokens for step in first) / tokens - 1
    busy = sum(step.useful_cost for step in first) / sum(step.waited_cost for step in first)
    of_steps = "" if len(first) == train_plan.steps_per_epoch else f" (first {len(first)} steps)"

    counts = setup.counts
    states = setup.memory(identity.world_size).states
    memory = ", ".join(f"{part.name} {part.size / 2**20:,.0f}" for part in states)
    long_rows = ", ".join(
        f"{meta[name]:,} {text}" for name, text in OUTCOMES.values() if meta[name]
    )
    of_epoch, supervised = _tokens_of_epoch(train_plan)
    masks = f"; {meta['masks']}" if meta["masks"] else ""
    steps, per_epoch = total_steps(train, train_plan), train_plan.steps_per_epoch
    mean_batch = train_plan.mean_batch
    ratio = f"{mean_batch:,.6g} / {train.reference_global_batch}"
    scaling = {
        "none": "as given",
        "sqrt": f"{train.learning_rate:g} x sqrt({ratio})",
        "linear": f"{train.learning_rate:g} x {ratio}",
    }[train.lr_scaling]
    weights = "random weights" if config.model.from_config else "pretrained"
    rows = {
        "model": f"{config.model.name_or_path}, {counts.total / 1e6:,.1f} M parameters, {weights}",
        **_trained(config.model, counts, setup.skeleton),
        "ranks": f"{identity.world_size} on {ranks.device.type}, {identity.precision}, "
        f"ZeRO stage {identity.zero_stage} ({config.ds_config})",
        "memory": f"{sum(part.size for part in states) / 2**20:,.0f} MiB per rank: {memory} "
        "(estimate, without activations)",
        "tokenizer": _tokenizer(setup, meta["end_tokens"]),
        "data": f"{meta['rows_read']:,} rows read as {', '.join(dict.fromkeys(meta['formats']))}, "
        f"{len(train_plan.data):,} training examples; over "
        f"data.max_length {data.max_length:,}: {long_rows or 'none'}" + _shared_files(data),
        **_sources(train_plan),
        **_rejected(train_plan, *eval_plans.values()),
        **_texts(train_plan, *eval_plans.values()),
        "held out": _held_out(eval_plans),
        "tokens": f"{of_epoch:,} per epoch, {round(supervised * of_epoch):,} supervised "
        f"({supervised:.0%}{masks}), padding adds {padding:.1%}{of_steps}",
        "batching": f"{data.batching}: {setup.why_batching}"
        + (f"; window of {data.window} steps" if data.window > 1 else ""),
        "batch": f"{identity.world_size} ranks x {micro_steps} micro-steps x <= "
        f"{data.micro_batch_tokens:,} tokens = {examples} examples per step{of_steps}",
        "balance": f"{busy:.1%} of the ranks' time is neither padding nor waiting for the slowest "
        f"rank, by the cost model{of_steps}",
        "global batch": _global_batch(train_plan),
        "learning rate": f"{scaled_learning_rate(train, mean_batch):.3g} ({scaling}), "
        f"{_schedule(train)}, warm-up {train.warmup:,} "
        f"{train.warmup_key.removeprefix('warmup_')} = {warmup_steps(train, mean_batch):,} steps",
        "clipping": f"global gradient norm {train.gradient_clipping:g}"
        if train.gradient_clipping
        else "off",
        "steps": f"{steps:,} = {steps / per_epoch:.3g} epochs of {per_epoch:,}",
        "seed": f"{train.seed} for weights and plan, a hash of it and the rank for dropout",
        "checkpoints": SaveInterval(config.checkpoint, count_hosts(ranks), None).text(),
        **({"after a save": after_save} if after_save else {}),
        "output": config.output_dir,
    }
    show_rows(rows, GROUP_STARTS)


def _tokenizer(setup: Setup, trained: Sequence[int] | None) -> str:
    """Which eos, padding and template are used, also where the tokenizer has none.

    Args:
        trained: ids that end answers in the data; None for the tokenizer's eos.
    """
    tokenizer, model = setup.tokenizer, setup.config.model
    ends = [tokenizer.eos_token_id] if trained is None else trained
    end = tokenizer.convert_ids_to_tokens(ends[0]) if ends and ends[0] is not None else None
    if tokenizer.eos_token is not None:
        eos = f"eos {tokenizer.eos_token!r}" + (" (model.eos_token)" if model.eos_token else "")
    elif end is not None:
        eos = f"no eos token: an export's generate() stops at {end!r}, which ends the answers"
    else:
        eos = "no eos token"
    if tokenizer.pad_token is not None:
        pad = f"pad {tokenizer.pad_token!r}"
    else:
        pad = "no pad token: training pads with id 0, hidden from attention"
        if end is not None:
            pad += f", an export's generate() with {end!r} if the model names no other"
    if model.chat_template:
        template = f"chat template {model.chat_template} (model.chat_template)"
    else:
        template = "its own chat template" if tokenizer.chat_template else "no chat template"
    return f"{len(tokenizer):,} tokens; {eos}; {pad}; {template}"


def _trained(model: ModelConfig, counts: Counts, skeleton: nn.Module) -> dict[str, str]:
    """If parameters are frozen, a line about those that are trained."""
    if not (model.lora or model.trainable) and counts.trained == counts.total:
        return {}
    what = f"those with {', '.join(model.trainable)}" if model.trainable else "those of text"
    if lora := model.lora:
        adapted = [name.removesuffix(".weight") for name in adapted_parameters(skeleton)]
        where = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in adapted))
        what = f"LoRA of rank {lora.r}, scaled by {lora.alpha} / {lora.r}, on {where}"
        what += f"; {', '.join(lora.modules_to_save)} as a whole" if lora.modules_to_save else ""
        what += f"; the frozen layers in {model.quantization}" if model.quantization else ""
    share = f"{counts.trained:,} of {counts.total:,} parameters"
    return {"trained": f"{share} ({counts.trained / counts.total:.2%}): {what}"}


def _schedule(train: TrainConfig) -> str:
    """Its name, and of one of DeepSpeed's what its parameters are."""
    if train.lr_schedule not in DEEPSPEED_SCHEDULERS:
        return train.lr_schedule
    params = "".join(f", {name} {value}" for name, value in train.lr_schedule_args.items())
    return f"DeepSpeed's {train.lr_schedule} (ds_config's scheduler{params})"


def _tokens_of_epoch(plan: DataPlan) -> tuple[int, float]:
    """Tokens of the mean epoch, and the fraction of them that is supervised."""
    tokens, mix = plan.contents.tokens_per_epoch, plan.contents.mix
    if not mix:
        return tokens, plan.data.meta["supervised_tokens"] / tokens
    parts = [plan.data.supervised[s.first : s.first + s.rows] for s in mix]
    supervised = sum(
        int(p.sum(dtype=int)) * s.per_epoch / s.rows for p, s in zip(parts, mix, strict=True)
    )
    return tokens, supervised / tokens


def _global_batch(plan: DataPlan) -> str:
    """The mean global batch of the steps, which learning rate and warm-up are computed for."""
    contents = plan.contents
    if contents.global_batch_tokens is None:
        unit, epoch, most = "examples", contents.rows_per_epoch, contents.global_batch_size
    else:
        unit, epoch, most = "tokens", contents.tokens_per_epoch, contents.global_batch_tokens
    if plan.mean_batch == most:
        return f"{most:,} {unit}"
    return (
        f"{plan.mean_batch:,.6g} {unit} per step: {plan.steps_per_epoch:,} equal steps of at most "
        f"{most:,} for the {epoch:,} of an epoch"
    )


def _sources(plan: DataPlan) -> dict[str, str]:
    """If there are several sources, a line for each: its examples, and its share of an epoch."""
    names, rows, mix = plan.data.meta["sources"], plan.data.meta["source_rows"], plan.contents.mix
    if len(names) == 1:
        return {}
    lines = {}
    for i, (name, count) in enumerate(zip(names, rows, strict=True)):
        text = f"{name} ({plan.data.meta['formats'][i]}): {count:,} examples"
        if mix:
            per_epoch, epoch = mix[i].per_epoch, plan.contents.rows_per_epoch
            text += (
                f", {per_epoch:,} of them per epoch, {per_epoch / epoch:.1%} of its examples and "
                f"{plan.contents.tokens_of(mix[i]) / plan.contents.tokens_per_epoch:.1%} of its "
                "tokens"
            )
        lines[f"source {i + 1}"] = text
    return lines


def _shared_files(data: DataConfig) -> str:
    """A warning where sources, of training and held-out rows together, name the same file."""
    files = shared_files(data.sources("train_sources") + data.sources("eval_sources"))
    if not files:
        return ""
    more = f" and {len(files) - 1:,} more files are" if len(files) > 1 else " is"
    return f"; WARNING: {files[0]}{more} in more than one of train_sources and eval_sources"


def _held_out(plans: dict[str, DataPlan]) -> str:
    sizes = {name: f"{len(plan.data):,} examples" for name, plan in plans.items()}
    if sizes.keys() == {HELD_OUT}:
        return sizes[HELD_OUT]
    return ", ".join(f"{name} {size}" for name, size in sizes.items()) or "none: no evaluation"


def _rejected(*plans: DataPlan) -> dict[str, str]:
    counts: Counter[str] = Counter()
    for meta in {id(p.data.meta["rejected"]): p.data.meta for p in plans}.values():
        counts.update(meta["rejected"])
    if not counts:
        return {}
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in counts.most_common())
    return {"bad rows": f"{counts.total():,} left out: {reasons} (rejected_rows.jsonl)"}


def _texts(*plans: DataPlan) -> dict[str, str]:
    lines = {}
    for name, key in (("special text", "special_text"), ("prompts", "prompts")):
        found = dict.fromkeys(p.data.meta[key] for p in plans)
        if text := "; ".join(filter(None, found)):
            lines[name] = text
    return lines


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
