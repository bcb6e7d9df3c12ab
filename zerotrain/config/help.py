"""The settings as a table: key, default, meaning."""

import ast
import dataclasses
import json
import shutil
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerotrain.config import schema


def settings_table() -> str:
    """Of each setting a line with key and default, and its meaning below."""
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    docs = {
        (section.name, field.target.id): " ".join(doc.value.value.split())
        for section in tree.body
        if isinstance(section, ast.ClassDef)
        for field, doc in zip(section.body, section.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
    columns = min(100, shutil.get_terminal_size().columns)
    lines = []
    for section, field, key in _settings(schema.Config, ""):
        meaning = docs[section.__name__, field.name]
        lines += [f"  --{key}  {_default(field)}", *textwrap.wrap(meaning, columns - 6)]
    return "\n".join(line if line.startswith("  --") else f"      {line}" for line in lines)


def section_of(kind: Any) -> type | None:
    """The dataclass of a section, which may be `| None`; None for the types of other keys."""
    return next((k for k in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(k)), None)


def _settings(section: type, prefix: str) -> Iterator[tuple[type, dataclasses.Field, str]]:
    for field in dataclasses.fields(section):
        if nested := section_of(field.type):
            yield from _settings(nested, f"{prefix}{field.name}.")
        else:
            yield section, field, prefix + field.name


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"default {json.dumps(field.default_factory())}"
    if field.default is dataclasses.MISSING:
        return "required"
    return f"default {json.dumps(field.default)}"
