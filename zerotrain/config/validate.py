"""Checks of a config that need neither torch nor the data nor the model's files."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

from zerotrain.config.schema import (
    CHAT_TEMPLATES,
    Config,
    ModelConfig,
    TrainConfig,
    chat_template_file,
)
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.rank_env import rank_variables

Check = Callable[[bool, str, str], None]  # holds, key, problem: raises UserError unless it holds


def check_config(config: Config, check: Check) -> None:
    """Check a parsed config for values that contradict each other and for missing files.

    Raises:
        UserError: contradicting values, or a missing file.
    """
    _check_train(config.train, check)
    data = config.data
    check(
        not (data.eval_sources and data.eval_fraction),
        "data.eval_fraction",
        "give data.eval_sources or data.eval_fraction, not both",
    )
    _check_eval(config, check)
    check(
        not config.checkpoint.weights_only or config.checkpoint.resume != "auto",
        "checkpoint.weights_only",
        "needs checkpoint.resume PATH, the checkpoint folder whose weights to start from",
    )
    ranks = int(rank_variables(os.environ).get("WORLD_SIZE", "1"))
    check(
        config.train.global_batch >= ranks,
        f"train.{config.train.global_batch_key}",
        f"{config.train.global_batch} is smaller than the number of ranks ({ranks}); "
        "each needs at least one example, so raise it or use fewer ranks",
    )
    _check_model(config, check)
    check(
        Path(config.ds_config).is_file(),
        "ds_config",
        f"no such file: {config.ds_config}; ds_configs/README.md says which to take",
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
    check(
        train.lr_scaling == "none" or train.reference_global_batch is not None,
        "train.lr_scaling",
        f"{train.lr_scaling} needs train.reference_global_batch, the global batch that "
        "train.learning_rate was tuned for",
    )
    check(
        not (train.lr_schedule == "constant" and train.warmup_examples),
        "train.warmup_examples",
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
        ("model.tokenizer", config.tokenizer_source[0]),
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


def check_folders(config: Config) -> None:
    """Check, before the data is read, that the output folder can be written and that the checkpoint
    to resume from exists.

    Raises:
        UserError: one of the two is not so.
    """
    resume = Path(config.checkpoint.resume)
    if config.checkpoint.resume != "auto" and not resume.is_dir():
        raise UserError(f"checkpoint.resume: no such folder: {resume}")
    folder = Path(config.output_dir).absolute()
    while not folder.exists() and not folder.is_symlink():
        folder = folder.parent
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"output_dir: cannot write {config.output_dir}: {folder}: {error.strerror}; choose "
            "another folder"
        ) from error
