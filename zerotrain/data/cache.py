"""The token cache: a folder of tokenized examples, which every rank maps into its memory.

    examples.arrow      an Arrow stream with the columns of SCHEMA or WEIGHTED, one line per example
    meta.json           Meta
    rejected_rows.jsonl the rows that on_bad_row: skip left out, with reasons

`python -m scripts.tokenize` (zerotrain/rows/) makes one folder for the training sources and one for
each held-out set. The trainer knows nothing about rows but this format. data/README.md describes it
for other programs that write it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import TypeAdapter

from zerotrain.data.epoch_order import permute
from zerotrain.runtime.errors import UserError, describe

CACHE_VERSION = 19
"""Increase it when the same rows give another cache than before, or when the format changes."""
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "length": pa.int32(),  # tokens
        "supervised": pa.int32(),  # tokens that carry loss
        "file": pa.string(),
        "place": pa.int64(),  # line of the file, or number of the row in it
        "row": pa.int64(),  # number among all rows read, the same for pieces of a row
        "content": pa.uint64(),  # hash of input_ids
    }
)
WEIGHTED = SCHEMA.append(pa.field("weights", pa.list_(pa.float32()))).append(
    pa.field("weight", pa.float64())
)
"""The columns of a cache with weights between 0 and 1. `weights` has those of the tokens that carry
loss, and `weight` their sum. Programs that do not know them refuse the cache.
"""


@dataclass(frozen=True)
class Meta:
    """What is known of all examples of a cache: meta.json."""

    version: int
    """CACHE_VERSION of the program that wrote it."""
    content: str
    """A hash of all tokens, masks and weights. A run resumes only on the content that it started
    with.
    """
    end_tokens: list[int]
    """Ids of the tokens that end answers."""
    chat_template: str | dict[str, str] | None
    """The tokenizer's chat templates as the rows were rendered; exports have the same."""
    masks: str
    """What is supervised, for the start-up table."""
    sources: list[str]
    formats: list[str]
    """Row format of each source."""
    source_examples: list[int]
    """Examples of each source; the examples are in the order of the sources."""
    revisions: list[str | None]
    """Commit of each source that is a hub data set, None for others."""
    rows_read: int
    over_length: dict[str, int]
    """Outcome -> number of rows longer than data.max_length that had it."""
    rejected: dict[str, int]
    """Reason -> number of rows that were left out for it."""
    unprompted: dict[str, int]
    """End of a server's generation prompt -> number of rows that lack it before an answer."""


@dataclass(frozen=True)
class TokenizedRows:
    """The examples `index`, int64 [examples], of a memory-mapped cache. Index i of every array is
    the same example.
    """

    table: pa.Table
    index: np.ndarray
    meta: Meta
    folder: Path
    unread: str = ""
    """The files of the sources that were not read, for the start-up table."""

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [examples], in tokens."""
        return self.column("length")

    @cached_property
    def supervised(self) -> np.ndarray:
        """int32 [examples], the number of tokens that carry loss."""
        return self.column("supervised")

    @cached_property
    def sources(self) -> np.ndarray:
        """int64 [examples], the number of the source, from 0."""
        counts = self.meta.source_examples
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def weight(self) -> np.ndarray:
        """float64 or int32 [examples], the sum of the weights of tokens that carry loss."""
        return self.column("weight" if self.is_weighted else "supervised")

    @property
    def is_weighted(self) -> bool:
        """Whether there are weights between 0 and 1."""
        return self.table.schema == WEIGHTED

    def __len__(self) -> int:
        return len(self.lengths)

    def column(self, name: str) -> np.ndarray:
        """A column of numbers of SCHEMA, [examples]."""
        # pyarrow's to_numpy would import pandas
        return np.from_dlpack(self.table[name].combine_chunks())[self.index]

    def fetch(self, examples: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Token ids and loss mask (0 or 1) of each example: n arrays int64 [2, tokens].

        Args:
            examples: n indices.
        """
        columns = self.table["input_ids"], self.table["loss_mask"]
        return [
            np.stack([np.from_dlpack(column[row].values.cast("int64")) for column in columns])
            for row in self.index[examples]
        ]

    def of_targets(self, examples: np.ndarray) -> np.ndarray:
        """The number of the source of each token that carries loss, one example after the other,
        and its weight, if the cache has weights: float32 [1 or 2, targets].
        """
        found = [np.repeat(self.sources[examples], self.supervised[examples])]
        if self.is_weighted:
            rows = (self.table["weights"][row].values for row in self.index[examples])
            found.append(np.concatenate([[], *map(np.from_dlpack, rows)]))
        return np.array(found, np.float32)

    def place_of(self, example: int) -> str:
        """FILE:LINE of the row that an example came from."""
        row = self.index[example]
        return f"{self.table['file'][row]}:{self.table['place'][row]}"


def open_cache(path: Path) -> TokenizedRows:
    """Memory-map a cache folder.

    Raises:
        UserError: a file cannot be read, lacks its end, or is not in this format.
    """
    try:
        meta = TypeAdapter(Meta).validate_json((path / "meta.json").read_bytes())
        if meta.version != CACHE_VERSION:
            raise ValueError(f"its version is {meta.version}, not {CACHE_VERSION}")
        table = pa.ipc.open_stream(pa.memory_map(str(path / "examples.arrow"))).read_all()
        table.validate()  # that lists end within the file
        if table.schema not in (SCHEMA, WEIGHTED):
            raise ValueError("its columns differ from the format in data/README.md")
        ids, mask = (pc.list_value_length(table[name]) for name in ("input_ids", "loss_mask"))
        # A stream that ends between two batches can be read, but lacks examples.
        is_whole = 0 < len(table) == sum(meta.source_examples)
        if not is_whole or not ids == mask == table["length"]:
            raise ValueError("its numbers of examples or tokens differ")
        return TokenizedRows(table, np.arange(len(table)), meta, path)
    except Exception as error:  # pydantic and pyarrow raise their own.
        raise UserError(
            f"data.cache_dir: cannot read {path} ({describe(error)}); delete it to tokenize its "
            "rows again (a source: write it again), or set data.cache_dir to a folder of your own"
        ) from error


def hold_out(
    data: TokenizedRows, fraction: float, seed: int
) -> tuple[TokenizedRows, TokenizedRows]:
    """Return (training, held-out) examples: a random `fraction` of the rows is held out.

    The pieces of a split row stay together, or the model would be evaluated on rows that it was
    partly trained on.
    """
    # Number the rows again: rows without an example have left gaps.
    _, index = np.unique(data.column("row"), return_inverse=True)
    rows = int(index[-1]) + 1
    count = max(1, round(rows * fraction))
    if count == rows:
        raise UserError(
            f"data.eval_fraction: {fraction:g} of {rows:,} rows leaves none to train on; lower it, "
            "or set data.eval_sources instead"
        )
    held = np.isin(index, permute(np.arange(count), rows, seed))
    ends = np.cumsum(data.meta.source_examples)

    def part(is_in: np.ndarray) -> TokenizedRows:
        index = np.flatnonzero(is_in)
        meta = replace(
            data.meta,
            # A run cannot resume with another fraction or seed, since its data would differ.
            content=xxhash.xxh3_64_hexdigest(data.meta.content.encode() + index.tobytes()),
            source_examples=np.diff(np.searchsorted(index, ends), prepend=0).tolist(),
        )
        return replace(data, index=index, meta=meta)

    return part(~held), part(held)
