"""The rows of the sources as tools read them again, beside the examples that they became."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from zerotrain.config.schema import Config, Source
from zerotrain.data.cache import TokenizedRows
from zerotrain.rows.messages import canonical_row
from zerotrain.rows.sources import BadRow, parse_row, read_rows


def canonical_rows(
    sources: Sequence[Source], data: TokenizedRows, config: Config
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(FILE:LINE, row) of all rows of the sources that `data` were tokenized from; a row that
    cannot be used is empty.
    """
    for source, kind in zip(sources, data.meta.formats, strict=True):
        for raw in read_rows(source):
            row = {}
            with contextlib.suppress(BadRow):
                parsed = parse_row(raw, source.columns, config.data.ignore_keys)
                row = canonical_row(parsed, replace(source, format=kind), config.data)
            yield f"{raw.file}:{raw.place}", row


def supervised_answers(messages: list[dict[str, Any]], supervise: str) -> list[int]:
    """The indices of the messages that carry loss by data.supervise and their own weights."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = answers[-1:] if supervise == "last" else answers
    return [i for i in wanted if messages[i].get("weight") != 0]
