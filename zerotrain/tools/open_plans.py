"""The data of a config, without a process group: its plans, and the rows of its sources."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import Config, Source
from zerotrain.data.data_plan import DataPlan, make_plans
from zerotrain.data.messages import canonical_row
from zerotrain.data.options import RenderOptions
from zerotrain.data.sources import BadRow, parse_row, read_rows
from zerotrain.data.tokenize import TokenizedRows
from zerotrain.runtime.machine import Machine
from zerotrain.training.setup import open_run


def open_plans(
    config: Config, world_size: int
) -> tuple[Config, PreTrainedTokenizerBase, DataPlan, dict[str, DataPlan]]:
    """The config resolved for `world_size` ranks on CPU, the tokenizer, and the plans of the
    training data and of each held-out set.

    Raises:
        UserError: whatever train.py would refuse.
    """
    setup, tokenizer = open_run(config, Machine(world_size, world_size))
    return setup.config, tokenizer, *make_plans(setup.config, tokenizer, setup.budget)


def canonical_rows(
    sources: Sequence[Source], data: TokenizedRows, config: Config
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(FILE:LINE, row) of all rows of the sources that `data` were tokenized from; a row that
    cannot be used is empty.
    """
    for source, kind in zip(sources, data.meta["formats"], strict=True):
        options = replace(RenderOptions.of(config.data), format=kind, columns=source.columns)
        for file, row in read_rows(source):
            try:
                parsed = canonical_row(
                    parse_row(row, options.columns, options.ignore_keys), options
                )
            except BadRow:
                parsed = {}
            yield f"{file}:{row.place}", parsed
