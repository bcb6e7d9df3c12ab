"""The data of a config, without a process group: its plans, and the rows of its sources."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import Config, Source
from zerotrain.data.data_plan import DataPlan, make_budget, make_plans
from zerotrain.data.messages import canonical_row
from zerotrain.data.options import RenderOptions
from zerotrain.data.sources import BadRow, parse_row, read_rows
from zerotrain.data.tokenize import TokenizedRows
from zerotrain.model.architecture import check_model_fits, linear_cost, meta_model
from zerotrain.model.load import load_model_config, load_tokenizer
from zerotrain.model.packing import resolve_batching


def open_plans(
    config: Config, world_size: int
) -> tuple[Config, PreTrainedTokenizerBase, DataPlan, dict[str, DataPlan]]:
    """The config with data.batching resolved as on CPU, the tokenizer, the training plan and that
    of each held-out set of a run on `world_size` ranks.

    Raises:
        UserError: whatever train.py would refuse.
    """
    tokenizer = load_tokenizer(config)
    model_config = load_model_config(config)
    skeleton = meta_model(model_config, config.model.trust_remote_code)
    check_model_fits(config, skeleton, tokenizer)
    config, _ = resolve_batching(config, skeleton, torch.device("cpu"), "fp32")
    budget = make_budget(config.data, world_size, linear_cost(skeleton))
    return config, tokenizer, *make_plans(config, tokenizer, budget)


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
