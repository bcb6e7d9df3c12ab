"""Checks of a config that need neither torch nor the data nor the model's files."""

import dataclasses
import os
import re
import subprocess
import typing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from config.ds_config import check_compiler, merge_ds_config, zero_stage
from config.places import config_keys, place_of_key, require
from config.schema import CHAT_TEMPLATES, Config, ModelConfig, TrainConfig, chat_template_file
from runtime.errors import UserError
from runtime.rank_env import rank_variables
from runtime.redact import secret_in_command

Check = Callable[[bool, str, str], None]  # holds, key, problem: raises UserError unless it holds


def _is_null(config: Config, key: str) -> bool:
    """Whether a required value is null, which jsonargparse accepts for every type."""
    *sections, name = key.split(".")
    holder: Any = config
    for section in sections:
        holder = getattr(holder, section)
    if holder is None:  # a section that is off
        return False
    kind = next(f.type for f in dataclasses.fields(holder) if f.name == name)
    return getattr(holder, name) is None and type(None) not in typing.get_args(kind)


def check_config(config: Config, argv: Sequence[str]) -> None:
    """Check a parsed config for values that contradict each other and for missing files.

    Args:
        argv: the command line that the config was read from, for messages.

    Raises:
        UserError: a null that is not allowed, contradicting values, or a missing file.
    """
    check = partial(require, argv)
    for key in config_keys(Config):
        check(not _is_null(config, key), key, "is null, but needs a value")
    _check_train(config.train, check)
    data = config.data
    check(
        config.checkpoint.every is None or not config.checkpoint.every_steps,
        "checkpoint.every",
        "cannot be combined with checkpoint.every_steps; give only one of them",
    )
    if config.checkpoint.after_save is not None:
        _check_after_save(config.checkpoint.after_save, check)
    check(
        not (data.eval_sources and data.eval_fraction),
        "data.eval_fraction",
        "give data.eval_sources or data.eval_fraction, not both",
    )
    _check_eval(config, check)
    check(
        not config.checkpoint.weights_only or config.checkpoint.resume not in ("auto", "none"),
        "checkpoint.weights_only",
        "needs checkpoint.resume PATH, the checkpoint folder whose weights to start from",
    )
    check(
        not config.tracking.wandb_shared or config.tracking.wandb == "online",
        "tracking.wandb_shared",
        "needs tracking.wandb online: nodes write to one run through W&B's server",
    )
    ranks = int(rank_variables(os.environ).get("WORLD_SIZE", "1"))
    check(
        config.train.global_batch >= ranks,
        f"train.{config.train.global_batch_key}",
        f"{config.train.global_batch} is smaller than the number of ranks ({ranks}); "
        "each needs at least one example, so raise it or use fewer ranks",
    )
    check(
        "WORLD_SIZE" not in rank_variables(os.environ)
        or all(rank < ranks for rank in config.profile.ranks),
        "profile.ranks",
        f"{config.profile.ranks} has a rank that does not exist; ranks are 0 to {ranks - 1}",
    )
    _check_model(config, check)
    try:
        stage = zero_stage(merge_ds_config(config))
        check_compiler(config)
    except UserError as error:  # add where the run config sets the key that the message names
        key = re.search(r"\b(train\.\w+|data\.\w+|checkpoint\.node_local)", str(error))
        raise UserError(
            f"{error} ({key[0]}: {place_of_key(key[0], argv)})" if key else str(error)
        ) from None
    check(
        not config.model.quantization or stage < 3,
        "model.quantization",
        f"{config.ds_config} has ZeRO stage 3, which cannot partition weights in 4 bits; use a "
        "stage from 0 to 2, or LoRA without quantization: ds_configs/README.md has a table",
    )


def _check_after_save(command: str, check: Check) -> None:
    key = "checkpoint.after_save"
    check(command.strip() != "", key, "is empty; give a command, or leave the key out")
    check("\0" not in command, key, "has a null character")
    parsed = subprocess.run(["/bin/sh", "-n", "-c", command], capture_output=True, text=True)
    check(parsed.returncode == 0, key, f"sh cannot read it: {' '.join(parsed.stderr.split())}")
    secret = secret_in_command(command)
    check(
        secret is None,
        key,
        f"gives a secret to {secret}, and the config is written to the run folder and to W&B; put "
        "the secret into the environment, or into the file where the program looks for it",
    )


def _check_eval(config: Config, check: Check) -> None:
    """Names of held-out sets, and what is measured on them."""
    evaluation, names = config.eval, config.data.set_names()
    for name in names:
        check(
            re.fullmatch(r"[\w.-]+", name) is not None,
            "data.eval_sources",
            f"{name!r} is not a name for a set: use letters, digits, _, . and -",
        )
    kinds = ["loss", "perplexity", *([evaluation.score_name] if evaluation.generate else [])]
    metrics = ["eval_loss", *(f"{kind}/{name}" for name in names for kind in kinds)]
    check(
        evaluation.metric in metrics,
        "eval.metric",
        f"{evaluation.metric} is not measured; choose one of {', '.join(metrics)}"
        + ("" if evaluation.generate else ", or set eval.generate for scores"),
    )
    check(
        not evaluation.patience or (names and evaluation.every_steps > 0),
        "eval.patience",
        "needs eval.every_steps, and held-out rows: data.eval_sources or data.eval_fraction",
    )
    check(
        not evaluation.generate or config.data.supervise != "all",
        "eval.generate",
        "needs data.supervise answers or last: with all, nothing shows where an answer begins",
    )


def _check_trained(model: ModelConfig, check: Check) -> None:
    """Which weights are trained, and in what form the others are kept."""
    check(
        not (model.lora and model.trainable),
        "model.trainable",
        "cannot be combined with model.lora; name whole modules to train in "
        "model.lora.modules_to_save",
    )
    check(
        not (model.lora and model.lora.target_parameters and model.lora.dropout),
        "model.lora.dropout",
        "has to be 0 with model.lora.target_parameters, whose adapters have no input of their own",
    )
    for pattern in model.trainable:
        try:
            re.compile(pattern)
        except re.error as error:
            check(False, "model.trainable", f"{pattern!r} is not a regular expression: {error.msg}")
    if model.quantization:
        key = "model.quantization"
        check(model.lora is not None, key, "weights in 4 bits are frozen; set model.lora to train")
        check(not model.from_config, key, "needs pretrained weights; model.from_config has none")


def _check_train(train: TrainConfig, check: Check) -> None:
    check(
        (train.epochs is None) != (train.steps is None),
        "train.epochs",
        "give exactly one of train.epochs and train.steps",
    )
    check(
        (train.global_batch_size is None) != (train.global_batch_tokens is None),
        "train.global_batch_size",
        "give exactly one of train.global_batch_size and train.global_batch_tokens",
    )
    reference, warmup = f"reference_{train.global_batch_key}", train.warmup_key
    for key in (
        "reference_global_batch_size",
        "reference_global_batch_tokens",
        "warmup_examples",
        "warmup_tokens",
    ):
        check(
            key in (reference, warmup) or not getattr(train, key),
            f"train.{key}",
            f"cannot be combined with train.{train.global_batch_key}; "
            f"use train.{warmup if key.startswith('warmup') else reference}",
        )
    check(
        train.lr_scaling == "none" or train.reference_global_batch is not None,
        "train.lr_scaling",
        f"{train.lr_scaling} needs train.{reference}, the global batch that "
        "train.learning_rate was tuned for",
    )
    check(
        not (train.lr_schedule == "constant" and train.warmup),
        f"train.{warmup}",
        "train.lr_schedule constant has no warm-up; use constant_with_warmup",
    )
    check(
        not ((train.lr_schedule or "").startswith("constant") and train.lr_schedule_args),
        "train.lr_schedule_args",
        f"train.lr_schedule {train.lr_schedule} takes no arguments",
    )


def _check_model(config: Config, check: Check) -> None:
    model = config.model
    _check_trained(model, check)
    if model.chat_template:
        check(
            chat_template_file(model.chat_template).is_file(),
            "model.chat_template",
            f"no such file: {model.chat_template}; bundled templates are "
            + ", ".join(sorted(file.stem for file in CHAT_TEMPLATES.glob("*.jinja"))),
        )
    for key, name in (
        ("model.name_or_path", model.name_or_path),
        ("model.tokenizer", config.tokenizer_name),
    ):
        # A hub id is `name` or `owner/name`; anything else, or an existing path, is a folder.
        local = Path(name).exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
        check(not local or Path(name).is_dir(), key, f"no such folder: {name}")
    check(
        not Path(model.name_or_path).is_dir()
        or (Path(model.name_or_path) / "config.json").is_file(),
        "model.name_or_path",
        f"folder {model.name_or_path} has no config.json; if it has adapters alone, export the run "
        "that trained them without --adapter",
    )
