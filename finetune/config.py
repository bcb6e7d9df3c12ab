"""The run config: frozen dataclasses < YAML file < command line.

It owns what a run is: batch, steps, learning rate, seeds, paths. Nothing here imports torch, so
`--help` and every complaint about the config come before the seconds that this import takes.
"""

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from finetune.ds_config import check_compiler, merge_ds_config
from finetune.errors import UserError

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(frozen=True)
class ModelConfig:
    """The model and its tokenizer."""

    name_or_path: str
    """Hub id, or a folder with a config.json (and weights, unless from_config)."""
    from_config: bool = False
    """Start from random weights drawn with train.seed instead of pretrained ones."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer; default: model.name_or_path."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template; it marks the assistant's tokens."""
    attn_implementation: str | None = None
    """sdpa, eager, flash_attention_2 ...; default: what transformers chooses."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: about 1/3 more compute, far less memory."""
    trust_remote_code: bool = False
    """Run Python code that came with the model. Only for sources you have read."""


@dataclass(frozen=True)
class DataConfig:
    """Rows of text in, micro-batches of bounded size out."""

    train_files: list[str]
    """JSONL files, each line one row. They are concatenated in this order."""
    eval_files: list[str] = field(default_factory=list)
    """JSONL files with held-out rows."""
    eval_fraction: float = 0.0
    """Hold out this share of the training rows instead of eval_files; drawn with train.seed."""
    format: Literal["auto", "messages", "prompt_completion", "instruction", "text"] = "auto"
    """Row format; auto looks at the keys of the first row."""
    columns: dict[str, str] = field(default_factory=dict)
    """Renames keys of the rows: {prompt: question, completion: answer} reads gsm8k."""
    as_chat: bool = False
    """Render prompt/completion and instruction rows as one user and one assistant turn."""
    supervise: Literal["answers", "all"] = "answers"
    """Which tokens carry loss: the assistant's turns or the completion, or every token."""
    max_length: int = 2048
    """Longest row, in tokens."""
    on_too_long: Literal["truncate", "split", "drop", "error"] = "truncate"
    """What happens to a row over max_length; always counted and reported."""
    micro_batch_tokens: int = 16384
    """Memory budget: the most padded tokens one rank holds in one micro-step."""
    pad_to_multiple_of: int = 8
    """Padded row length is rounded up to this; 8 suits tensor cores."""
    cache_dir: str = ".cache/tokenized"
    """Tokenised rows, one folder per (files, tokenizer, options)."""
    workers: int = 0
    """Tokenising processes per machine; 0: one per 10,000 rows, up to the cores there are."""


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation, in units of examples and optimizer steps."""

    global_batch_size: int
    """Sequences per optimizer step, over all ranks; accumulation follows from it."""
    learning_rate: float
    """Peak learning rate at reference_global_batch_size, before scaling."""
    epochs: int | None = None
    """Passes over the data. Give epochs or steps."""
    steps: int | None = None
    """Optimizer steps. Give epochs or steps."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """learning_rate * (global_batch_size / reference_global_batch_size) ** (0, 0.5, 1)."""
    reference_global_batch_size: int | None = None
    """The global batch that learning_rate was tuned for; needed by sqrt and linear."""
    lr_schedule: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "warmup_stable_decay",
    ] = "cosine"
    """transformers' get_scheduler name."""
    lr_schedule_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of that schedule: {min_lr_rate: 0.1}, {num_decay_steps: 100} ..."""
    warmup_examples: int = 0
    """Learning rate rises linearly over this many examples, whatever the global batch."""
    weight_decay: float = 0.0
    """AdamW's decoupled decay; biases and norms (parameters of one dimension) get none."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon."""
    gradient_clipping: float = 1.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Compute precision; auto: bf16 on GPUs that have it, fp32 on CPU."""
    seed: int = 42
    """Initialisation and the plan use seed; each rank's dropout uses seed + rank."""
    eval_every_steps: int = 0
    """Evaluate every so many steps; 0: only at the end."""
    eval_at_start: bool = True
    """Evaluate before the first step."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and where to go on from."""

    every_steps: int = 0
    """Save every so many steps; 0: only at the end."""
    keep_last: int = 2
    """Complete checkpoints to keep; older ones go after a newer one is complete."""
    resume: str = "auto"
    """auto: newest complete one in output_dir, if any; none: start at step 0; or a checkpoint
    folder.
    """


@dataclass(frozen=True)
class TrackingConfig:
    """Weights & Biases; metrics.jsonl in output_dir is written in any case."""

    wandb: Literal["online", "offline", "disabled"] = "offline"
    """offline writes a folder that `wandb sync` uploads later."""
    project: str = "deepspeed-zero-template"
    """W&B project."""
    entity: str | None = None
    """W&B team or user."""
    run_name: str | None = None
    """W&B run name; default: the name of output_dir."""
    tags: list[str] = field(default_factory=list)
    """W&B tags."""


@dataclass(frozen=True)
class DistributedConfig:
    """The process group."""

    timeout_seconds: int = 1800
    """A collective that takes longer is a hang: the run ends with an error."""
    data_timeout_seconds: int = 86400
    """Longest wait for a machine's first rank to tokenise."""


@dataclass(frozen=True)
class Config:
    """One training run."""

    output_dir: str
    """Folder of the run: resolved configs, metrics.jsonl, checkpoints/."""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    ds_config: str = "ds_configs/zero2.json"
    """DeepSpeed config file: ZeRO stage, offload, communication."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer or self.model.name_or_path


# (section, key, smallest value); None, where a key may be null, passes
LEAST_VALUES = [
    ("train", "global_batch_size", 1),
    ("train", "epochs", 1),
    ("train", "steps", 1),
    ("train", "reference_global_batch_size", 1),
    ("train", "learning_rate", 0),
    ("train", "warmup_examples", 0),
    ("train", "weight_decay", 0),
    ("train", "gradient_clipping", 0),
    ("train", "eval_every_steps", 0),
    ("train", "seed", 0),
    ("train", "adam_epsilon", 0),
    ("data", "max_length", 2),
    ("data", "micro_batch_tokens", 1),
    ("data", "pad_to_multiple_of", 1),
    ("data", "workers", 0),
    ("checkpoint", "every_steps", 0),
    ("checkpoint", "keep_last", 1),
    ("distributed", "timeout_seconds", 1),
    ("distributed", "data_timeout_seconds", 1),
]


class CommandLine(NamedTuple):
    """What the command line asked for."""

    config: Config
    dry_run: bool


# --------------------------------------------------------------------------------------------------
# Command line and YAML -> Config


def parse_command_line(argv: Sequence[str], prog: str = "train.py") -> CommandLine:
    """Parse `--config FILE --section.key value ... [--dry_run]`.

    Raises:
        UserError: unknown key, wrong type, unreadable file or impossible combination; names key
            and file.
        SystemExit: 0, after `--help`.
    """
    parser = ArgumentParser(
        prog=prog, exit_on_error=False, description="Fine-tune a causal language model."
    )
    parser.add_argument(
        "--config", action="config", help="YAML file with the run config; flags override it."
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="Print the start-up table and stop before any weight is loaded.",
    )
    # The deepspeed launcher passes --local_rank to every process; LOCAL_RANK in the environment
    # says the same.
    parser.add_argument("--local_rank", type=int, help="Set by the deepspeed launcher; not used.")
    parser.add_class_arguments(Config)
    try:
        namespace = parser.parse_args(list(argv))
        sections = parser.instantiate(namespace)
    except (ArgumentError, TypeError, ValueError, KeyError) as error:
        raise UserError(_one_line(str(error), argv)) from error
    config = Config(**{f.name: sections[f.name] for f in dataclasses.fields(Config)})
    _validate(config, argv)
    return CommandLine(config, namespace.dry_run)


def dump_config(config: Config) -> str:
    """YAML text that parse_command_line reads back to an equal Config."""
    plain = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples become YAML's lists
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _one_line(message: str, argv: Sequence[str]) -> str:
    """jsonargparse's message, some of them six lines long, as one: place, key, what is wrong."""
    if match := re.search(r"Group '(.+?)' does not accept option '(.+?)'", message):
        key, problem = ".".join(match.groups()), "unknown key"
    elif match := re.search(
        r"Option '(.+?)' is not accepted|unrecognized arguments: (\S+)", message
    ):
        key, problem = (match[1] or match[2].removeprefix("--")).split("=")[0], "unknown key"
    elif match := re.search(r"arguments are required: (\S+)", message):
        return f"{_config_files(argv)}: required key {match[1]} is missing"
    elif match := re.search(r'Parser key "(.+?)":\s*(.*)', message, re.DOTALL):
        key, problem = match[1], match[2]
        value = re.search(r"(?:Given value|Got value): (.*)", problem)
        types = re.findall(r"<class '(\w+)'>", problem.split("Errors:")[0])
        if value and types:
            expected = " or ".join("null" if t == "NoneType" else t for t in types)
            problem = f"expected {expected}, got {value[1]!r}"
    else:
        return f"{_config_files(argv)}: {' '.join(message.split())}"
    if problem == "unknown key" and (
        near := difflib.get_close_matches(key, _keys(Config), n=1, cutoff=0.5)
    ):
        problem = f"unknown key; did you mean {near[0]}?"
    return f"{_where(key, argv)}: {key}: {' '.join(problem.split())}"


def _config_files(argv: Sequence[str]) -> str:
    files = [a.removeprefix("--config=") for a in argv if a.startswith("--config=")]
    files += [b for a, b in pairwise(argv) if a == "--config"]
    return ", ".join(files) or "command line"


def _where(key: str, argv: Sequence[str]) -> str:
    """`FILE:LINE` of a dotted key, or `command line`."""
    if key != "config" and not any(a.split("=")[0] == f"--{key}" for a in argv):
        for path in _config_files(argv).split(", "):
            if line := _yaml_line(path, key):
                return f"{path}:{line}"
    return "command line"


def _yaml_line(path: str, key: str) -> int | None:
    try:
        node = yaml.compose(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None
    line = None
    for part in key.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = [(k, v) for k, v in pairs if k.value == part]
        if not found:
            return line  # the deepest part that the file names
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return line


def _keys(section: type, prefix: str = "") -> list[str]:
    keys = []
    for f in dataclasses.fields(section):
        nested = dataclasses.is_dataclass(f.type)
        keys += _keys(f.type, f"{prefix}{f.name}.") if nested else [prefix + f.name]
    return keys


def _validate(config: Config, argv: Sequence[str]) -> None:
    """Everything about a config that can be known without torch, the data or the model."""

    def check(holds: bool, key: str, problem: str) -> None:
        if not holds:
            raise UserError(f"{_where(key, argv)}: {key}: {problem}")

    train, data, model = config.train, config.data, config.model
    for section, name, least in LEAST_VALUES:
        value = getattr(getattr(config, section), name)
        check(value is None or value >= least, f"{section}.{name}", f"{value} is under {least}")
    check(
        (train.epochs is None) != (train.steps is None),
        "train.epochs",
        "give exactly one of train.epochs and train.steps",
    )
    check(
        train.lr_scaling == "none" or train.reference_global_batch_size is not None,
        "train.lr_scaling",
        f"{train.lr_scaling} needs train.reference_global_batch_size, the global batch that "
        "train.learning_rate was tuned for",
    )
    constant = train.lr_schedule == "constant"
    check(
        not (constant and train.warmup_examples),
        "train.warmup_examples",
        "train.lr_schedule constant has no warm-up; say constant_with_warmup",
    )
    check(
        not (train.lr_schedule.startswith("constant") and train.lr_schedule_args),
        "train.lr_schedule_args",
        f"{train.lr_schedule} takes none",
    )
    check(train.seed < 2**63, "train.seed", f"{train.seed} is over 2^63 - 1")
    check(all(0 <= b < 1 for b in train.adam_betas), "train.adam_betas", "must lie in [0, 1)")
    check(0 <= data.eval_fraction < 1, "data.eval_fraction", "must lie in [0, 1)")
    check(
        not (data.eval_files and data.eval_fraction),
        "data.eval_fraction",
        "give data.eval_files or data.eval_fraction, not both",
    )
    padded = -(-data.max_length // data.pad_to_multiple_of) * data.pad_to_multiple_of
    check(
        padded <= data.micro_batch_tokens,
        "data.micro_batch_tokens",
        f"{data.micro_batch_tokens} is less than one row of data.max_length ({data.max_length}, "
        f"padded {padded}); raise it, or lower data.max_length",
    )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    check(
        train.global_batch_size >= ranks,
        "train.global_batch_size",
        f"{train.global_batch_size} is smaller than the number of ranks ({ranks}); "
        "each needs a row, so raise it or use fewer ranks",
    )

    check(data.columns is not None, "data.columns", "is null; write {} for none")
    check(bool(data.train_files), "data.train_files", "is empty")
    for key, files in (
        ("data.train_files", data.train_files),
        ("data.eval_files", data.eval_files),
        ("model.chat_template", [model.chat_template] if model.chat_template else []),
    ):
        for file in files:
            check(Path(file).is_file(), key, f"no such file: {file}")
    for key, name in (
        ("model.name_or_path", model.name_or_path),
        ("model.tokenizer", config.tokenizer_name),
    ):
        # A hub id is `name` or `owner/name`; everything else, and what exists here, is a folder.
        local = Path(name).exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
        check(not local or Path(name).is_dir(), key, f"no such folder: {name}")
    check(
        not Path(model.name_or_path).is_dir()
        or (Path(model.name_or_path) / "config.json").is_file(),
        "model.name_or_path",
        f"folder {model.name_or_path} has no config.json",
    )
    try:
        merge_ds_config(config)
        check_compiler(config)
    except UserError as error:  # name the run config's place beside the DeepSpeed config's
        key = re.search(r"\b(train|data)\.\w+", str(error))
        raise UserError(
            f"{error} ({key[0]}: {_where(key[0], argv)})" if key else str(error)
        ) from None
