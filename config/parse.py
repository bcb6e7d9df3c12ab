"""Command line and YAML -> Config: defaults < YAML file < command line; one-line errors."""

import dataclasses
import json
import re
import textwrap
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from config.ds_config import with_schedule
from config.places import config_files, find_key, place_of_key, section_of, type_of_key
from config.schema import Config
from config.validate import check_config
from config.yaml_check import check_config_text, check_flag, read_config_text, unknown_key
from runtime.errors import UserError, describe

# A value that names a class is never imported nor instantiated, wherever jsonargparse looks for one
set_parsing_settings(
    docstring_parse_attribute_docstrings=True,
    import_path_denylist=["*"],
    import_path_allowlist=["config.schema"],
    instantiate_subclass_spec_in_any=False,
)
SHOWN_CHARACTERS = 300  # of an error message of jsonargparse, which quotes values


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    config: Config
    dry_run: bool
    argv: Sequence[str]
    """The arguments that it was read from, for messages about a key."""


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
    parser = ArgumentParser(
        prog=prog, exit_on_error=False, description="Fine-tune a causal language model."
    )
    parser.add_argument(
        "--config", action="config", help="YAML file with the run config; flags override it."
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="Print the start-up table and stop before any weights are loaded.",
    )
    # The deepspeed launcher passes --local_rank to every process, and also sets LOCAL_RANK.
    parser.add_argument("--local_rank", type=int, help="Set by the deepspeed launcher; not used.")
    parser.add_class_arguments(Config)
    try:
        namespace = parser.parse_args(_checked(argv))
        sections = parser.instantiate(namespace)
    except (ArgumentError, TypeError, ValueError, KeyError) as error:
        raise UserError(_one_line(str(error), argv)) from error
    except OverflowError as error:  # an integer of over 308 digits, for a float
        raise UserError(f"run config: a number is too large ({error})") from error
    config = _plain(Config(**{f.name: sections[f.name] for f in dataclasses.fields(Config)}))
    if validate:
        try:
            check_config(config, argv)
        except OSError as error:  # a name that is too long for a path
            raise UserError(f"run config: {describe(error)}") from error
        config = with_schedule(config)
    return CommandLine(config, namespace.dry_run, argv)


def _checked(argv: Sequence[str]) -> list[str]:
    """The arguments with the text of each config file in place of its name, all checked.

    Raises:
        UserError: a file cannot be read, or a file or flag is refused.
    """
    checked = []
    for before, argument in pairwise(["", *argv]):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
        else:
            flag, equals, value = before, "", argument
        if flag == "--config" and value:
            text = read_config_text(value)
            check_config_text(text, value)
            # the comment keeps jsonargparse from taking the text for the name of a file
            argument = f"{flag}{equals}{text}\n#" if equals else f"{text}\n#"
        elif flag.startswith("--") and value:
            check_flag(flag.removeprefix("--"), value)
        checked.append(argument)
    return checked


def _plain(value: Any) -> Any:
    """`value` with every bounded number as an int or a float: W&B, for one, takes jsonargparse's
    subclasses for text.
    """
    if dataclasses.is_dataclass(value):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value


def dump_config(config: Config) -> str:
    """YAML text that parse_command_line reads back as an equal Config."""
    plain = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples become lists
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _one_line(message: str, argv: Sequence[str]) -> str:
    """A message of jsonargparse, which may have several lines, as one: place, key, problem."""
    if match := re.search(r"Group '(.+?)' does not accept option '(.+?)'", message):
        key, problem = ".".join(match.groups()), "unknown key"
    elif match := re.search(
        r"Option '(.+?)' is not accepted|unrecognized arguments: (\S+)", message
    ):
        key, problem = (match[1] or match[2].removeprefix("--")).split("=")[0], "unknown key"
    elif match := re.search(r"arguments are required: (\S+)", message):
        return f"{config_files(argv)}: required key {match[1]} is missing"
    elif match := re.search(r'Parser key "(.+?)":\s*(.*)', message, re.DOTALL):
        key, problem = match.groups()
        is_section = section_of(type_of_key(Config, key))
        if is_section and (inner := re.search(r'Parser key "(.+?)":\s*(.*)', problem, re.DOTALL)):
            key, problem = f"{key}.{inner[1]}", inner[2]
        value = find_key(key, argv)[1]
        if value is not None and (expected := _scalar_type(type_of_key(Config, key))):
            problem = f"expected {expected}, got {value!r}"
    else:
        message = textwrap.shorten(message, SHOWN_CHARACTERS, placeholder=" ...")
        return f"{config_files(argv)}: {message}"
    if problem == "unknown key":
        return f"{place_of_key(key, argv)}: {unknown_key(key, Config)}"
    problem = textwrap.shorten(problem, SHOWN_CHARACTERS, placeholder=" ...")
    return f"{place_of_key(key, argv)}: {key}: {problem}"


def _scalar_type(kind: Any) -> str | None:
    """`int >=0 or null`; None for other types than numbers, whose errors are clear as they are."""
    names = []
    for part in typing.get_args(kind) or (kind,):
        if part is type(None):
            names.append("null")
        elif isinstance(part, type) and issubclass(part, int | float):
            text = part.__name__ if part in (int, float) else part.__doc__
            names.append(text.replace(" restricted to be", "").replace("≥", ">="))
        else:
            return None
    return " or ".join(names)
