"""Parse the command line and YAML files into a Config. Flags override files, and files override
defaults. Each mistake is one line.
"""

import dataclasses
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError

from zerotrain.config.schema import Config, Source, config_keys, section_of, settings_of
from zerotrain.runtime.errors import UserError, describe, disk_error, similar
from zerotrain.runtime.files import read_text
from zerotrain.runtime.progress import print_line

COMMAND_LINE = "command line"
NULL = "tag:yaml.org,2002:null"
DRY_RUN = "--dry_run"
OTHER_NAMES = """
    activation_checkpointing gradient_checkpointing: model.activation_checkpointing
    amp bf16 dtype fp16 torch_dtype: train.precision
    columns: data.train_sources [{path: FILE, columns: {...}}]
    comet report_to wandb: tracking.wandb
    cutoff_len max_seq_length sequence_len: data.max_length
    deepspeed: ds_config
    dry-run dryrun: --dry_run
    gradient_accumulation_steps train_batch_size: train.global_batch_size
    lr: train.learning_rate
    lr_scheduler lr_scheduler_type: train.lr_schedule
    max_grad_norm: train.gradient_clipping
    max_steps: train.steps
    num_epochs num_train_epochs: train.epochs
    per_device_train_batch_size: data.micro_batch_tokens
    revision: model.name_or_path ID@REVISION
    warmup_ratio warmup_steps: train.warmup_examples
    weight: data.train_sources [{path: FILE, repeat: 2}]
"""
"""Names in transformers' Trainer, DeepSpeed and other tools: the key that does the same here."""
SAID_OF_A_BASE = (
    "model.tokenizer", "model.chat_template", "model.trainable", "data.supervise",
    "data.ignore_keys", "data.as_chat", "tracking.project", "model.chat_template_kwargs",
)  # fmt: skip
"""Keys that a base should not set unnoticed. They fit its own model and rows, and the start-up
table does not show them.
"""
PLAIN_WORDS = {
    "missing": "a value is missing",
    "bool_parsing": "it has to be true or false",
    "float_parsing": "it has to be a number",
    "int_parsing": "it has to be a whole number",
    "int_from_float": "it has to be a whole number",
    "dataclass_type": "it has keys of its own, as in model: {name_or_path: PATH} or lora: {}",
    "dict_type": "it has to be a mapping, as in {KEY: VALUE}",
    "list_type": "it has to be a list, as in [PATH]",
    "string_pattern_mismatch": "use letters, digits, _, . and - only",
}
"""Kinds of pydantic's errors: the text that replaces pydantic's own."""
USAGE = """usage: {} --config FILE [--section.key VALUE ...] [--dry_run]

--dry_run prints the start-up table and stops before any weights are loaded; nothing is written.
The settings:
"""


class CommandLine(NamedTuple):
    """A parsed command line."""

    config: Config
    dry_run: bool = False


class _Loader(yaml.BaseLoader):
    """Loads every scalar but null as text. pydantic decides what `off` and `1e-5` are."""


_Loader.add_implicit_resolver(NULL, re.compile(r"(~|null|)$"), None)


def parse_command_line(argv: Sequence[str], prog: str = "train.py") -> CommandLine:
    """Parse `--config FILE --section.key value ... [--dry_run]`.

    Raises:
        UserError: a key is unknown, a value has the wrong type or contradicts another, or a file
            cannot be read.
        SystemExit: 0, after `--help`.
    """
    if "--help" in argv or "-h" in argv:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
        print(USAGE.format(prog), *settings_table(), sep="\n")
        sys.exit(0)
    # The model comes first: its name resets a from_config meant for a different model.
    flags = sorted(_flags(argv), key=lambda flag: flag[0] != "model.name_or_path")
    files = [value for name, value in flags if name == "config"]
    if len(files) != 1:
        raise UserError(
            f"{COMMAND_LINE}: --config: is given {len(files)} times; give it once, as in --config "
            "recipes/demo.yaml (a file can name another file as its `base`)"
        )
    [file] = files
    settings = {}
    places = {"": file}
    """FILE:LINE of each key, where it was given last."""
    for values, own_places in _with_bases(file):
        settings = _merge(settings, values, Config)
        places |= own_places
    for key, text in flags:
        if key != "config":
            value = text
            if text == "null" or text.startswith(("[", "{")):
                value, lines = read_yaml(text, f"{COMMAND_LINE}: {key}")
                places |= {f"{key}.{name}": COMMAND_LINE for name in lines}
            while key:  # errors about a section name the place of the section
                places[key] = COMMAND_LINE
                key, _, part = key.rpartition(".")
                value = {part: value}
            settings = _merge(settings, value, Config)
    try:
        config = TypeAdapter(Config).validate_python(settings)
    except ValidationError as error:
        raise UserError(_first_mistake(error, places)) from None
    trust = "model.trust_remote_code"
    if config.model.trust_remote_code and places[trust] != COMMAND_LINE:
        raise UserError(
            f"{places[trust]}: {trust}: a file cannot allow a model's code to run; read that code, "
            f"then add --{trust} true to the command"
        )
    own = (f"{file}:", COMMAND_LINE)
    inherited = [
        f"{key} {attrgetter(key)(config)}"
        for key in SAID_OF_A_BASE
        if not places.get(key, COMMAND_LINE).startswith(own)
    ]
    if inherited:
        print_line(f"from the base of {file}: {', '.join(inherited)}")
    return CommandLine(config, DRY_RUN in argv)


def settings_table() -> Iterator[str]:
    """Yield key, allowed values and default of each setting, and its meaning on the next lines."""
    fill = textwrap.TextWrapper(80, subsequent_indent="      ").fill
    for section, name, key in settings_of(Config):
        field = section.__pydantic_fields__[name]
        schema = TypeAdapter(section).json_schema()["properties"][name]
        values = (
            # No setting has another exclusive minimum.
            value + " > 0" * ("exclusiveMinimum" in kind)
            for kind in schema.get("anyOf", [schema])
            for value in kind.get("enum", [kind.get("const", kind.get("type", "object"))])
        )
        default = "required"
        if not field.is_required():
            default = f"default {json.dumps(field.get_default(call_default_factory=True))}"
        yield fill(f"  --{key}  {' | '.join(values)}; {default}")
        yield fill(f"      {field.description}")


def plain_config(config: Config) -> dict[str, Any]:
    """Return the config as dictionaries and lists, as in JSON."""
    return TypeAdapter(Config).dump_python(config, mode="json")


def dump_config(config: Config) -> str:
    """Return YAML text that parse_command_line reads back as an equal Config, except
    model.trust_remote_code, which only a command line can set.
    """
    plain = plain_config(config)
    del plain["model"]["trust_remote_code"]
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def read_yaml(text: str, place: str) -> tuple[Any, dict[str, int]]:
    """Return the value of a YAML text (mappings, lists, texts, None), and each dotted key's line.

    Raises:
        UserError: it is not YAML, has an alias, or has a key twice.
    """
    lines = {}

    def value_of(node: yaml.Node | None, prefix: str) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [value_of(item, f"{prefix}[].") for item in node.value]
        if not isinstance(node, yaml.MappingNode):
            return None if node is None or node.tag == NULL else node.value
        values = {}
        for key, value in node.value:
            name = str(key.value)
            if name in values:
                raise yaml.YAMLError(f"{prefix}{name} occurs twice; remove one")
            lines[prefix + name] = key.start_mark.line + 1
            values[name] = value_of(value, f"{prefix}{name}.")
        return values

    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise yaml.YAMLError("it has an alias (*); write the value out")
        return value_of(yaml.compose(text, _Loader), ""), lines
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{place}: not YAML: {describe(error)}") from error


def check_start(config: Config) -> None:
    """Check, before anything is loaded, that the output folder can be written.

    Raises:
        UserError: it cannot.
    """
    if config.output_dir.startswith("~") or "$" in config.output_dir:
        raise UserError(
            f"output_dir: ~ and variables are not expanded in {config.output_dir}; write the "
            "folder itself"
        )
    folder = Path(config.output_dir).absolute()
    while not folder.exists() and not folder.is_symlink():
        folder = folder.parent
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))  # a full disk accepts an empty file
    except OSError as error:
        raise disk_error(error)(
            f"output_dir: cannot write {config.output_dir}: {folder}: {error.strerror}; choose "
            "another folder"
        ) from error


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and value of every flag except --dry_run and DeepSpeed's --local_rank."""
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not (argument.startswith("--") and name):
            raise UserError(f"{COMMAND_LINE}: {argument}: write --section.key VALUE")
        if argument == DRY_RUN:
            continue
        if not equals:
            value = next(arguments, "--")
            if value.startswith("--"):
                raise UserError(
                    f"{COMMAND_LINE}: --{name}: needs a value{likely(name, config_keys())}"
                )
        if name != "local_rank":
            yield name, value


def _with_bases(file: str, *derived: str) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Yield the values of a file, and the place of each of its keys. Before that, yield the same
    for the file that its key `base` names.
    """
    values, lines = read_yaml(read_text(file, f"{derived[0]}: base: " if derived else ""), file)
    if not isinstance(values, dict) or "zero_optimization" in values:
        raise UserError(
            f"{file}: not a run config, which is a mapping like recipes/demo.yaml; give a "
            "DeepSpeed config with --ds_config"
        )
    places = {key: f"{file}:{line}" for key, line in lines.items()}
    base = values.pop("base", None)
    if base is not None:
        path = os.path.normpath(Path(file).parent / str(base))
        if path in derived:
            raise UserError(
                f"{places['base']}: base: {base} is itself based on this file; remove one base"
            )
        yield from _with_bases(path, os.path.normpath(file), *derived)
    yield values, places


def _merge(settings: Any, values: dict[str, Any], section: type) -> dict[str, Any]:
    """Return the settings of a section, updated by `values`. null removes an inherited value;
    pydantic rejects null for a section.
    """
    kinds = {f.name: f.type for f in dataclasses.fields(section)}
    merged = dict(settings) if isinstance(settings, dict) else {}
    if values.get("name_or_path", model := merged.get("name_or_path")) != model:
        merged.pop("from_config", None)  # it was meant for a different model
    for name, value in values.items():
        # Sections are merged key by key. Other mappings, such as data.eval_sources, are replaced.
        nested = section_of(kinds.get(name))
        if nested and isinstance(value, dict):
            merged[name] = _merge(merged.get(name), value, nested)
        elif value is None and name in kinds and not nested:
            merged.pop(name, None)
        else:
            merged[name] = value
    return merged


def _first_mistake(error: ValidationError, places: dict[str, str]) -> str:
    """Return pydantic's first error, which has several lines, as `FILE:LINE: KEY: problem`."""
    # A missing key comes last, because an unknown key may be its misspelling.
    first = min(error.errors(), key=lambda e: e["type"] == "missing")
    # A part with a bracket is pydantic's name for one of the types that a key takes.
    parts = [str(part) for part in first["loc"] if "[" not in str(part)]
    path = key = ".".join(parts)
    while key not in places:
        key = key.rpartition(".")[0]
    within = path.removeprefix(key).split(".")
    within = [f"item {int(part) + 1}" if part.isdigit() else part for part in within]
    problem = first["msg"].removeprefix("Value error, ").replace("Input should", "it has to")
    problem = PLAIN_WORDS.get(first["type"], problem)
    if first["type"] == "unexpected_keyword_argument":
        problem = f"unknown key; remove it{likely(path, [*config_keys(), *config_keys(Source)])}"
    elif first["type"] not in ("missing", "value_error"):
        problem += f", got {json.dumps(first['input'], default=str)[:100]}".replace('"', "")
    return ": ".join(filter(None, (places[key], key, *within, problem)))


def likely(name: str, names: Sequence[str]) -> str:
    """Return a question for a message about an unknown key: it names the same word in a section,
    or the most similar key or section. Return "" for a known name.
    """
    if name in names:
        return ""
    word = name.rpartition(".")[2]
    other = re.search(rf"(?m)^[^:]*\b{re.escape(word)}\b[^:\n]*: (.*)", OTHER_NAMES)
    if other:
        return f", or did you mean {other[1]}?"
    names = [*names, *{key.partition(".")[0] for key in names}]
    same_word = {key.rpartition(".")[2]: key for key in names}
    return similar(same_word.get(word, word), names) or similar(name, names)
