"""Checks of data sources that need no tokenizer: their files and their weights."""

import math
from collections.abc import Sequence
from functools import partial

from config.parse import CommandLine, parse_command_line
from config.places import require
from config.schema import DataConfig
from data.scorers import check_scorer
from data.sources import FORMAT_KEYS, OPTIONAL_KEYS, local_files
from runtime.errors import UserError


def parse_with_sources(argv: Sequence[str], prog: str = "train.py") -> CommandLine:
    """`parse_command_line` followed by `check_sources` and `check_scorer`.

    Raises:
        UserError: as either of them.
    """
    command_line = parse_command_line(argv, prog)
    check_sources(command_line.config.data, argv)
    check_scorer(command_line.config.eval, argv)
    return command_line


def check_sources(data: DataConfig, argv: Sequence[str]) -> None:
    """Check that every source has files, and that either all or none have a weight.

    Args:
        argv: the command line that the config came from, for messages.

    Raises:
        UserError: a check fails; the message says where the key was set.
    """
    check = partial(require, argv)
    check(bool(data.train_sources), "data.train_sources", "is empty")
    for key in ("train_sources", "eval_sources"):
        for source in data.sources(key):
            given = (source.path is not None) + (source.hub is not None)
            check(given == 1, f"data.{key}", "a source must have either path or hub")
            of_hub = source.subset or source.revision or source.split != "train"
            check(
                source.hub is not None or not of_hub,
                f"data.{key}",
                f"{source.path}: subset, split and revision are only for hub data sets",
            )
            for ours in source.columns:
                check(
                    any(ours in (*FORMAT_KEYS[f], *OPTIONAL_KEYS[f]) for f in FORMAT_KEYS),
                    "data.columns",
                    f"{ours} is not a key of any row format; the file's keys go on the right",
                )
            try:
                if source.path is not None:
                    local_files(source.path)
            except (UserError, OSError) as error:  # OSError: no permission
                check(False, f"data.{key}", str(error))
    sources = data.sources("train_sources")
    for source in sources:
        name, weight = source.path or source.hub, source.weight
        check(
            weight is None or 0 < weight < math.inf,
            "data.train_sources",
            f"{name}: weight {weight} is not a positive number",
        )
        check(
            (weight is None) == (sources[0].weight is None),
            "data.train_sources",
            f"{name} has {'no' if weight is None else 'a'} weight, but the first source has "
            f"{'one' if weight is None else 'none'}; give either all sources a weight or none",
        )
    check(
        all(source.weight is None for source in data.sources("eval_sources")),
        "data.eval_sources",
        "sources of held-out rows cannot have weights: each row is evaluated once",
    )
