"""Command line and YAML -> Config: defaults < YAML files < flags; each mistake is one line.

The schema's dataclasses are validated by pydantic, strictly: no text becomes a number.
"""

import ast
import dataclasses
import difflib
import inspect
import json
import os
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from zerotrain.config.schema import Config, Source
from zerotrain.config.validate import check_config
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.files import read_text

COMMAND_LINE = "command line"
OTHER_NAMES = {"deepspeed": "ds_config", "deepspeed_config": "ds_config"}
USAGE = "usage: {} --config FILE [--section.key VALUE ...] [--dry_run]\n\n--dry_run prints the start-up table and stops before any weights are loaded.\n"  # noqa: E501


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    config: Config
    dry_run: bool
    argv: Sequence[str]
    """The arguments that it was read from, for messages about a key."""


@dataclass(frozen=True)
class Setting:
    """A value and where it was given: a file's name, or COMMAND_LINE."""

    value: Any
    place: str


class _Loader(yaml.SafeLoader):
    """YAML in which yes, on and dates are text, 1e-5 is a number, and a text cannot grow: there are
    no aliases, and no key occurs twice.
    """

    yaml_implicit_resolvers: typing.ClassVar = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"alias *{self.peek_event().anchor}: write the value out instead")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        pairs = [
            (str(self.construct_object(k)), self.construct_object(v, True)) for k, v in node.value
        ]
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"{name}: occurs twice; remove one")
        return dict(pairs)


_NUMBERS = {
    "int": r"[-+]?[0-9][0-9_]*",
    "float": r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.inf|\.nan",
}
for _kind, _pattern in {"null": "~|null|", "bool": "true|false", **_NUMBERS}.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), None
    )
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


def parse_command_line(
    argv: Sequence[str], prog: str = "train.py", validate: bool = True
) -> CommandLine:
    """Parse `--config FILE --section.key value ... [--dry_run]`.

    Args:
        validate: check not only keys and types, but also that values do not contradict each other
            and that files exist, which a launch host does not need.

    Raises:
        UserError: unknown key, wrong type, unreadable file or contradicting values; names key and
            file.
        SystemExit: 0, after `--help`.
    """
    if "--help" in argv or "-h" in argv:
        print(USAGE.format(prog), *_help_lines(Config, ""), sep="\n")
        sys.exit(0)
    settings = _settings(argv)
    config = _validated(settings, argv)
    trust = settings.get("model.trust_remote_code")
    if config.model.trust_remote_code and trust.place != COMMAND_LINE:
        raise UserError(
            f"{trust.place}: model.trust_remote_code: a file cannot allow a model's code to run; "
            "read that code, then add --model.trust_remote_code true to the command"
        )
    if validate:
        try:
            check_config(config, lambda holds, key, problem: require(argv, holds, key, problem))
        except OSError as error:  # a folder that may not be read, or a name too long for a path
            raise UserError(f"{_files(argv)}: {describe(error)}") from error
    return CommandLine(config, "--dry_run" in argv, argv)


def dump_config(config: Config) -> str:
    """YAML text that parse_command_line reads back as an equal Config, but for
    model.trust_remote_code, which only a command line can set.
    """
    plain = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples become lists
    del plain["model"]["trust_remote_code"]
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def place_of_key(key: str, argv: Sequence[str]) -> str:
    """Where a dotted key, or else the section around it, was given."""
    settings = _settings(argv)
    while key:
        for name, setting in settings.items():
            if name == key or name.startswith(f"{key}."):
                return setting.place
        key = key.rpartition(".")[0]
    return _files(argv)


def require(argv: Sequence[str], holds: bool, key: str, problem: str) -> None:
    """Raise UserError, with the place of `key`, unless the condition `holds` is true."""
    if not holds:
        raise UserError(f"{place_of_key(key, argv)}: {key}: {problem}")


def read_yaml(text: str, place: str) -> Any:
    """The values of a YAML text, of the types of JSON.

    Raises:
        UserError: not YAML, nested too deeply, an alias, or a key that occurs twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{place}: not YAML: {describe(error)}") from error
    except RecursionError:
        raise UserError(f"{place}: not a config: it is nested too deeply") from None


def section_of(kind: Any) -> type | None:
    """The dataclass of a section, which may be `| None`; None for the types of other keys."""
    return next((k for k in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(k)), None)


def config_keys(section: type = Config, prefix: str = "") -> dict[str, Any]:
    """The dotted keys of a dataclass and its sections, with their types."""
    keys = {}
    for f in dataclasses.fields(section):
        nested = section_of(f.type)
        keys |= config_keys(nested, f"{prefix}{f.name}.") if nested else {prefix + f.name: f.type}
    return keys


def config_files(argv: Sequence[str]) -> list[str]:
    """The files given by `--config`."""
    return [value for name, value in _flags(argv) if name == "config"]


def _files(argv: Sequence[str]) -> str:
    return ", ".join(config_files(argv)) or COMMAND_LINE


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of every flag but --dry_run and DeepSpeed's --local_rank."""
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            raise UserError(f"{COMMAND_LINE}: {argument}: expected --section.key VALUE")
        if name == "dry_run":
            continue
        if not equals:
            value = next(arguments, None)
        if value is None or (not equals and value.startswith("--")):
            raise UserError(f"{COMMAND_LINE}: --{name} needs a value")
        if name != "local_rank":
            yield name, value


def _settings(argv: Sequence[str]) -> dict[str, Setting]:
    """Every dotted key that is given; the last one counts.

    Raises:
        UserError: a file cannot be read, or a key is not in the schema.
    """
    settings: dict[str, Setting] = {}
    for file in config_files(argv):
        for each, values in _with_bases(file):
            for key, value in _leaves(values, Config, "", each):
                _give(settings, key, Setting(value, each))
    kinds = config_keys()
    for key, text in _flags(argv):
        if key == "config":
            continue
        kind = kinds.get(key)
        is_text = str in (kind, *typing.get_args(kind)) and not text.startswith("[")
        as_text = is_text and text != "null"
        nested: Any = text if as_text else read_yaml(text, f"{COMMAND_LINE}: {key}")
        for part in reversed(key.split(".")):
            nested = {part: nested}
        for name, value in _leaves(nested, Config, "", COMMAND_LINE):
            _give(settings, name, Setting(value, COMMAND_LINE))
    return settings


def _with_bases(file: str, inner: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, its values), after those of the file that its key `base` names, if it has one.

    Args:
        inner: the files for which this one is a base.
    """
    if os.path.realpath(file) in inner:
        raise UserError(f"{file}: base: is its own base, directly or by other files; remove it")
    key = f"{inner[-1]}: base: " if inner else "--config: "
    values = read_yaml(read_text(file, key), file)
    if not isinstance(values, dict):
        raise UserError(f"{file}: not a run config, which is a mapping like recipes/demo.yaml")
    base = values.pop("base", None)
    if base is not None:
        found = os.path.normpath(Path(file).parent / str(base))
        yield from _with_bases(found, (*inner, os.path.realpath(file)))
    yield file, values


def _give(settings: dict[str, Setting], key: str, setting: Setting) -> None:
    """Set a key. null takes back what was set before; a section that is null is set again by any of
    its keys, and the reverse.
    """
    for other in list(settings):
        if key.startswith(f"{other}.") or other.startswith(f"{key}."):
            del settings[other]
    if setting.value is None and key in settings:
        del settings[key]
    else:
        settings[key] = setting


def _leaves(values: dict, section: type, prefix: str, place: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of the settings of a section.

    Raises:
        UserError: an unknown key, or a section that is not a mapping.
    """
    kinds = {f.name: f.type for f in dataclasses.fields(section)}
    for name, value in values.items():
        key = prefix + name
        if name not in kinds:
            while isinstance(value, dict) and len(value) == 1:  # name the key, not its section
                key += f".{next(iter(value))}"
                value = next(iter(value.values()))
            raise UserError(f"{place}: {_unknown_key(key, config_keys(section, prefix))}")
        nested = section_of(kinds[name])
        if nested is None or (value is None and nested is not kinds[name]):
            yield key, value
        elif isinstance(value, dict):
            yield from _leaves(value, nested, f"{key}.", place)
        else:
            raise UserError(f"{place}: {key}: is a section, so its keys go below it")


def _unknown_key(key: str, known: typing.Iterable[str]) -> str:
    near = OTHER_NAMES.get(key) or next(
        iter(
            difflib.get_close_matches(key, known, n=1, cutoff=0.6)
            or [k for k in config_keys() if k.rpartition(".")[2] == key.rpartition(".")[2]]
        ),
        None,
    )
    return f"{key!r}"[1:-1] + ": unknown key" + (f"; did you mean {near}?" if near else "")


def _validated(settings: dict[str, Setting], argv: Sequence[str]) -> Config:
    nested: dict[str, Any] = {}
    for key, setting in settings.items():
        *parents, leaf = key.split(".")
        block = nested
        for parent in parents:
            block = block.setdefault(parent, {})
        block[leaf] = setting.value
    try:
        return TypeAdapter(Config).validate_json(json.dumps(nested))
    except ValidationError as error:
        raise UserError(_first_mistake(error, settings, argv)) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{_files(argv)}: {describe(error)}") from None


def _first_mistake(
    error: ValidationError, settings: dict[str, Setting], argv: Sequence[str]
) -> str:
    """The first error of pydantic as `PLACE: key: problem`. A key that takes several types has an
    error for each of them.
    """
    keys = config_keys()
    first, *others = error.errors()
    parts = [str(part) for part in first["loc"]]
    depth = next((n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in keys), len(parts))
    key = ".".join(parts[:depth])
    place = settings[key].place if key in settings else _files(argv)
    if first["type"] == "missing" and key not in settings:
        if not config_files(argv):
            return "no --config FILE is given, such as --config recipes/demo.yaml"
        return f"{place}: required key {key} is missing"
    same_key = [first, *(e for e in others if e["loc"][:depth] == first["loc"][:depth])]
    for each in same_key:
        if each["type"] == "unexpected_keyword_argument":  # of a source, in a list
            name = str(each["loc"][-1])
            return f"{place}: {key}: {_unknown_key(name, config_keys(Source))}"
    problems = [e["msg"].removeprefix("Input should be ") for e in same_key]
    value = json.dumps(first["input"], default=str)
    shown = value if len(value) < 100 else value[:97] + "..."
    choices = [c for c in re.findall(r"'([^']+)'", " ".join(problems))]
    near = difflib.get_close_matches(str(first["input"]), choices, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{place}: {key}: expected {' or '.join(dict.fromkeys(problems))}, got {shown}{hint}"


def _help_lines(section: type, prefix: str) -> Iterator[str]:
    """Every setting with its type, its default and the text below it in the schema."""
    body = ast.parse(inspect.getsource(section)).body[0].body
    texts = {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    for f in dataclasses.fields(section):
        if nested := section_of(f.type):
            yield f"\n{prefix}{f.name}: {' '.join(nested.__doc__.split())}"
            yield from _help_lines(nested, f"{prefix}{f.name}.")
            continue
        has_default = f.default is not dataclasses.MISSING
        default = json.dumps(f.default) if has_default else "required"
        if f.default_factory is not dataclasses.MISSING:
            default = json.dumps(f.default_factory())
        yield f"  --{prefix}{f.name} ({default})\n      {texts[f.name]}"
