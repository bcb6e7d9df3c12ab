"""Reads YAML that other people wrote: bounded, and checked against the schema before jsonargparse
sees it, which would import what a `class_path` names.
"""

import dataclasses
import difflib
import typing
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from config.places import config_keys, section_of
from config.schema import Config
from runtime.errors import UserError

MOST_BYTES = 1_000_000  # of a config file; the recipes have 2,000
MOST_VALUES = 100_000  # with aliases written out, which can be exponentially many
RENAMED = {"train.eval_every_steps": "eval.every_steps", "train.eval_at_start": "eval.at_start"}


def read_config_text(file: str, key: str = "") -> str:
    """The text of a config file.

    Args:
        key: of the run config that names the file, for messages.

    Raises:
        UserError: it cannot be read, is not UTF-8, or has over a million bytes.
    """
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserError(f"{file}: has over {MOST_BYTES:,} bytes, so it is not a config")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{key}cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text (byte {error.start})") from error


def compose(text: str, place: str, is_text: bool = False) -> yaml.Node | None:
    """The nodes of a YAML text, in which nothing is constructed yet; None if it is empty.

    Args:
        place: file or flag, for messages.
        is_text: whether it need not be YAML; None if it is not.

    Raises:
        UserError: not YAML, or over 100,000 values once its aliases are written out.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _count(node, {}) > MOST_VALUES:
            raise UserError(
                f"{place}: its aliases stand for over {MOST_VALUES:,} values; write them out"
            )
    except yaml.YAMLError as error:
        if is_text:
            return None
        raise UserError(f"{place}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise UserError(f"{place}: not a config: it is nested too deeply") from None
    return node


def _count(node: yaml.Node, known: dict[int, float]) -> float:
    """Values in a tree of nodes, with each alias counted as often as it occurs; infinite if a node
    contains itself. Strings that jsonargparse may take for YAML are trees too.
    """
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = float("inf")
    inner: list[Any] = []
    if isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    elif "&" in node.value and "*" in node.value:
        with suppress(yaml.YAMLError):
            text = yaml.compose(node.value, Loader=yaml.SafeLoader)
            inner = [text] if isinstance(text, yaml.CollectionNode) else []
    known[id(node)] = 1 + sum(_count(part, known) for part in inner)
    return known[id(node)]


def check_config_text(text: str, file: str) -> None:
    """Check a config file: bounded, a mapping, every section a mapping with known keys, none twice.

    Raises:
        UserError: a check fails; names file, line and key.
    """
    node = compose(text, file)
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{file}: not a run config, which is a mapping like recipes/demo.yaml")
    _check_section(node, Config, "", file)


def check_flag(name: str, value: str) -> None:
    """Check the value of a flag in the same way.

    Args:
        name: dotted key, without `--`.

    Raises:
        UserError: a check fails.
    """
    node = compose(value, f"command line: {name}", is_text=True)
    known, key = _known(Config), name.removesuffix("+")
    if "." in key and key not in known:
        raise UserError(f"command line: {unknown_key(key, Config)}")
    kind = known.get(key)
    if dataclasses.is_dataclass(kind):
        first = dataclasses.fields(kind)[0].name
        raise UserError(f"command line: {name}: is a section; set its keys, such as {name}.{first}")
    if node is not None:
        _check_value(node, kind, name, None)


def _known(section: type, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> type, of the sections too."""
    found = {}
    for f in dataclasses.fields(section):
        found[prefix + f.name] = f.type
        if nested := section_of(f.type):
            found |= _known(nested, f"{prefix}{f.name}.")
    return found


def _source_type(kind: Any) -> type | None:
    """The dataclass of the elements of a list type, or of lists in a mapping, if it has one."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind
    return next(filter(None, map(_source_type, typing.get_args(kind))), None)


def _check_section(node: yaml.MappingNode, section: type, prefix: str, file: str | None) -> None:
    known, seen = _known(section), set()
    for key, value in node.value:
        place = "command line" if file is None else f"{file}:{key.start_mark.line + 1}"
        if key.tag == "tag:yaml.org,2002:merge":
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(merged, yaml.MappingNode):
                    _check_section(merged, section, prefix, file)
            continue
        name = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
        if name not in known:
            if isinstance(value, yaml.MappingNode) and value.value and not prefix:
                key = value.value[0][0]  # shows which section is meant
                name = f"{name}.{key.value}"
                place = f"{file}:{key.start_mark.line + 1}"
            name = name if name.isprintable() else repr(name)
            raise UserError(f"{place}: {unknown_key(prefix + name, section, prefix)}")
        if name in seen:
            raise UserError(f"{place}: {prefix}{name}: occurs twice; remove one")
        seen.add(name)
        _check_value(value, known[name], prefix + name, file)


def unknown_key(key: str, section: type, prefix: str = "") -> str:
    """The problem with a dotted key that `section`, whose own keys begin with `prefix`, lacks."""
    if key in RENAMED:
        return f"{key}: is now {RENAMED[key]}"
    names = [prefix + name for name in config_keys(section)]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")


def _check_value(node: yaml.Node, kind: Any, key: str, file: str | None) -> None:
    place = "command line" if file is None else f"{file}:{node.start_mark.line + 1}"
    if section := section_of(kind):
        is_null = section is not kind and node.tag == "tag:yaml.org,2002:null"
        if not (is_null or isinstance(node, yaml.MappingNode)):
            raise UserError(f"{place}: {key}: is a section, so its keys go below it")
        if not is_null:
            _check_section(node, section, f"{key}.", file)
    elif element := _source_type(kind):
        lists = {key: node}
        if isinstance(node, yaml.MappingNode):
            lists = {f"{key}.{name.value}": inner for name, inner in node.value}
        for name, inner in lists.items():
            items = inner.value if isinstance(inner, yaml.SequenceNode) else []
            for number, item in enumerate(items):
                if isinstance(item, yaml.MappingNode):
                    _check_section(item, element, f"{name}[{number}].", file)
