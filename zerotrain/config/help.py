"""The settings as a table: key, default, meaning."""

import dataclasses
import json
import shutil
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from zerotrain.config.schema import Config, Section


def settings_table() -> str:
    """Of each setting a line with key and default, and its meaning below."""
    columns = min(100, shutil.get_terminal_size().columns)
    lines = []
    for section, name, key in settings_of(Config):
        field = section.__pydantic_fields__[name]
        default = "required"
        if not field.is_required():
            default = f"default {json.dumps(field.get_default(call_default_factory=True))}"
        lines.append(f"  --{key}  {default}")
        lines += [f"      {line}" for line in textwrap.wrap(field.description, columns - 6)]
    return "\n".join(lines)


def section_of(kind: Any) -> type | None:
    """The class of a section, which may be `| None`; None for the types of other keys."""
    kinds = (kind, *typing.get_args(kind))
    return next((k for k in kinds if Section in getattr(k, "__mro__", ())), None)


def settings_of(section: type, prefix: str = "") -> Iterator[tuple[type, str, str]]:
    """(section, name, dotted key) of each setting of a section and of those in it."""
    for field in dataclasses.fields(section):
        if nested := section_of(field.type):
            yield from settings_of(nested, f"{prefix}{field.name}.")
        else:
            yield section, field.name, prefix + field.name


def config_keys(section: type = Config) -> list[str]:
    """The dotted keys of a section."""
    return [key for _, _, key in settings_of(section)]
