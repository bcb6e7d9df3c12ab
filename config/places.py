"""Find where a key of the config was set: FILE:LINE, or the command line."""

import dataclasses
import typing
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from runtime.errors import UserError


def config_files(argv: Sequence[str]) -> str:
    """The files given by `--config`, separated by commas, or `command line`."""
    files = [a.removeprefix("--config=") for a in argv if a.startswith("--config=")]
    files += [b for a, b in pairwise(argv) if a == "--config"]
    return ", ".join(files) or "command line"


def place_of_key(key: str, argv: Sequence[str]) -> str:
    """`FILE:LINE` of a dotted key, or `command line`."""
    return find_key(key, argv)[0]


def find_key(key: str, argv: Sequence[str]) -> tuple[str, str | None]:
    """Where a dotted key was set, `FILE:LINE` or `command line`, and its value as written if that
    is a scalar, else None.
    """
    for flag, following in pairwise([*argv, ""]):
        name, _, value = flag.partition("=")
        if name == f"--{key}":
            return "command line", value or following
    for path in config_files(argv).split(", ") if key != "config" else []:
        line, value = _find_in_yaml(path, key)
        if line:
            return f"{path}:{line}", value
    return "command line", None


def _find_in_yaml(path: str, key: str) -> tuple[int | None, str | None]:
    try:
        node = yaml.compose(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None, None
    line = None
    for part in key.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = [(k, v) for k, v in pairs if k.value == part]
        if not found:
            return line, None  # the line of the deepest part that the file has
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return line, node.value if isinstance(node, yaml.ScalarNode) else None


def require(argv: Sequence[str], holds: bool, key: str, problem: str) -> None:
    """Raise UserError, with the place of `key`, unless the condition `holds` is true."""
    if not holds:
        raise UserError(f"{place_of_key(key, argv)}: {key}: {problem}")


def section_of(kind: Any) -> type | None:
    """The dataclass of a section, which may be `| None`; None for the types of other keys."""
    return next((k for k in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(k)), None)


def config_keys(section: type, prefix: str = "") -> list[str]:
    """The dotted keys of a dataclass and its sections; one that may be null is itself a key too."""
    keys = []
    for f in dataclasses.fields(section):
        nested = section_of(f.type)
        keys += [prefix + f.name] if nested is not f.type else []
        keys += config_keys(nested, f"{prefix}{f.name}.") if nested else []
    return keys


def type_of_key(section: type, key: str) -> Any:
    """The annotated type of a dotted key; None if there is no such key."""
    for name in key.split("."):
        types = {f.name: f.type for f in dataclasses.fields(section)}
        if name not in types:
            return None
        kind = types[name]
        if (section := section_of(kind)) is None:
            return kind
    return kind
