"""Checks of data sources that need no tokenizer: their files."""

from collections.abc import Sequence
from functools import partial

from zerotrain.config.parse import CommandLine, parse_command_line, require
from zerotrain.config.schema import DataConfig
from zerotrain.data.sources import local_files
from zerotrain.runtime.errors import UserError


def parse_with_sources(argv: Sequence[str], prog: str = "train.py") -> CommandLine:
    """`parse_command_line` followed by `check_sources`.

    Raises:
        UserError: as either of the two.
    """
    command_line = parse_command_line(argv, prog)
    check_sources(command_line.config.data, argv)
    return command_line


def check_sources(data: DataConfig, argv: Sequence[str]) -> None:
    """Check that every source has files.

    Args:
        argv: the command line that the config came from, for messages.

    Raises:
        UserError: a check fails; the message says where the key was set.
    """
    check = partial(require, argv)
    check(bool(data.train_sources), "data.train_sources", "is empty")
    for key in ("train_sources", "eval_sources"):
        for source in data.sources(key):
            one = (source.path is None) != (source.hub is None)
            check(one, f"data.{key}", "a source must have either path or hub")
            of_hub = source.subset or source.revision or source.split != "train"
            check(
                source.hub is not None or not of_hub,
                f"data.{key}",
                f"{source.path}: subset, split and revision are only for hub data sets",
            )
            try:
                if source.path is not None:
                    local_files(source.path)
            except UserError as error:
                check(False, f"data.{key}", str(error))
