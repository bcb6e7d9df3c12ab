"""Tokenizes rows into examples (token ids and loss mask), once per node, into a cache of Arrow
files that every rank memory-maps.

    examples.arrow      SCHEMA
    meta.json           counts for the start-up table, and `content`, a hash of tokens and masks
    rejected_rows.jsonl rows skipped under on_bad_row: skip, with reasons

A cache folder is written under a temporary name, synced to disk, and renamed when complete, so
neither a killed process nor a failed node leaves an incomplete cache.
"""

import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain, count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import DataConfig, Source
from zerotrain.data.epoch_order import permute
from zerotrain.rows.end_marks import describe_examples
from zerotrain.rows.messages import detect_format
from zerotrain.rows.render import cut_to_length, tokenize_row
from zerotrain.rows.sources import (
    BadRow,
    JsonObject,
    RawRow,
    check_split,
    fingerprint,
    name_of,
    parse_row,
    read_rows,
)
from zerotrain.runtime.errors import UserError, describe, disk_error
from zerotrain.runtime.files import sync_folder, sync_tree, temporary_name
from zerotrain.runtime.progress import LINE_SECONDS, print_line

T = TypeVar("T")
R = TypeVar("R")
CACHE_VERSION = 17  # increase it when the same input is to give another cache than before
# at most so much is tokenized at a time
BATCH_ROWS = 500
BATCH_CHARACTERS = 1 << 24
MIN_POOL_BATCHES = 20  # a source of fewer batches is tokenized in this process
SHOWN_CHARACTERS = 80  # of a bad row, in messages
# Keys of the data section that do not change a row's tokens
NOT_OF_TOKENS = {
    "train_sources", "eval_sources", "eval_fraction", "batching", "micro_batch_tokens", "cache_dir",
}  # fmt: skip
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "length": pa.int32(),  # tokens
        "supervised": pa.int32(),  # tokens that carry loss
        "file": pa.string(),
        "place": pa.int64(),  # line of the file, or number of the row in it
        "row": pa.int64(),  # number among all rows read, the same for split pieces
        "content": pa.uint64(),  # hash of input_ids
    }
)


@dataclass(frozen=True)
class TokenizedRows:
    """The rows `index`, int64 [examples], of a memory-mapped cache. Index i of every array is the
    same example.
    """

    table: pa.Table
    index: np.ndarray
    meta: JsonObject
    folder: Path

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [examples], in tokens."""
        return self.column("length")

    @cached_property
    def supervised(self) -> np.ndarray:
        """int32 [examples], the number of tokens that carry loss."""
        return self.column("supervised")

    def __len__(self) -> int:
        return len(self.lengths)

    def column(self, name: str) -> np.ndarray:
        """A column of numbers of SCHEMA, [examples]."""
        # pyarrow's to_numpy would import pandas
        return np.from_dlpack(self.table[name].combine_chunks())[self.index]

    def fetch(self, examples: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Of each of the examples with these indices, int64 [n], its token ids and its loss mask,
        0 or 1: int64 [2, tokens].
        """
        columns = self.table["input_ids"], self.table["loss_mask"]
        return [
            np.stack([np.from_dlpack(column[row].values.cast("int64")) for column in columns])
            for row in self.index[examples]
        ]

    def place_of(self, example: int) -> str:
        """FILE:LINE of the row that an example came from."""
        row = self.index[example]
        return f"{self.table['file'][row]}:{self.table['place'][row]}"


def cache_path(given: list[Source], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Path:
    """Folder of the cache for these sources, this tokenizer and these options.

    Raises:
        UserError: the tokenizer cannot tell which characters its tokens are from.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path} has no tokenizer.json, which maps answers to "
            "tokens; set model.tokenizer to a folder that has one"
        )
    tokenizer.backend_tokenizer.no_padding()  # otherwise it contains those of its last call
    tokenizer.backend_tokenizer.no_truncation()
    remembered = Path(config.cache_dir) / ".contents"
    key = json.dumps(
        [
            CACHE_VERSION,
            [
                [fingerprint(s, remembered), s.split, s.format, s.columns, s.on_bad_row]
                for s in given
            ],
            {key: value for key, value in asdict(config).items() if key not in NOT_OF_TOKENS},
            tokenizer.chat_template,
            tokenizer.backend_tokenizer.to_str(),
            # eos and bos, which tokenizer.json does not know as such
            str(sorted(tokenizer.special_tokens_map.items())),
        ]
    )
    return Path(config.cache_dir) / xxhash.xxh3_64_hexdigest(key.encode())


def tokenize_sources(
    given: list[Source], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> TokenizedRows:
    """The cache of these sources, which is created unless it exists.

    Concurrent callers wait for the first of them. Where the disk has no locks they do the same work
    twice; the first to finish creates the cache.

    Raises:
        UserError: a row cannot be used (the message has file and line), a source has no rows, or
            data.cache_dir cannot be written, or the cache is damaged.
    """
    target = cache_path(given, tokenizer, config)
    draft = temporary_name(target)
    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            # the first of the processes that ask; the others wait, and then find the cache
            with ExitStack() as stack:
                with suppress(OSError):  # on a disk without locks the others do not wait
                    stack.enter_context(FileLock(f"{target}.lock"))
                if not target.exists():
                    draft.mkdir()
                    _build_cache(given, tokenizer, config, draft)
                    if cache_path(given, tokenizer, config) != target:
                        raise UserError("a source's file changed while it was read; start again")
                    # before it gets its name: what has the name is whole, also after a power cut
                    sync_tree(draft)
                # where locks hold on one node only, another may have been faster
                if not target.exists():
                    os.replace(draft, target)
                    sync_folder(target.parent)
    except OSError as error:
        raise disk_error(error)(
            f"data.cache_dir: cannot write {target.parent}: {describe(error)}; set it to a folder "
            "that you can write to and that has room"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return open_cache(target)


# --------------------------------------------------------------------------------------------------
# One batch, usually in another process


RowBatch = list[tuple[int, RawRow]]
"""Consecutive rows of a source, with their numbers among all rows."""


TokenizedBatch = tuple[pa.RecordBatch, Counter[tuple[str, str]], list[str]]
"""What became of a RowBatch: examples, with SCHEMA; lines of rejected_rows.jsonl; and counts: of
examples ("over_length", what cut_to_length says), of rows ("rejected", BadRow.reason) and
("unprompted", TokenizedRow.unprompted).
"""


def tokenize_batch(
    batch: RowBatch, tokenizer: PreTrainedTokenizerBase, source: Source, config: DataConfig
) -> TokenizedBatch:
    """Tokenize the rows of a batch, and cut them to data.max_length.

    Args:
        source: where the rows come from, with another format than "auto".

    Raises:
        UserError: a row cannot be used, and on_bad_row of the source is error.
    """
    examples = []
    counts = Counter()
    rejected = []
    for number, raw in batch:
        try:
            row = parse_row(raw, source.columns, config.ignore_keys)
            check_split(row, source)
            tokens = tokenize_row(row, tokenizer, source, config)
            pieces, outcomes = cut_to_length(tokens.ids, tokens.mask, config)
        except BadRow as error:
            if source.on_bad_row == "error":
                raise _refused(raw, error) from error
            counts["rejected", error.reason] += 1
            text = raw.text[:SHOWN_CHARACTERS]
            line = {
                "file": raw.file,
                "place": raw.place,
                "text": text,
                "reason": error.reason,
                "problem": str(error),
            }
            rejected.append(json.dumps(line) + "\n")
            continue
        counts.update(("over_length", outcome) for outcome in outcomes)
        if tokens.unprompted:
            counts["unprompted", tokens.unprompted] += 1
        for ids, mask in pieces:
            values = (
                ids,
                mask,
                len(ids),
                np.count_nonzero(mask),
                raw.file,  # and the place, so that messages can name the row during training
                raw.place,
                number,
                xxhash.xxh3_64_intdigest(ids),
            )
            examples.append(dict(zip(SCHEMA.names, values, strict=True)))
    return pa.RecordBatch.from_pylist(examples, SCHEMA), counts, rejected


def _refused(raw: RawRow, error: BadRow) -> UserError:
    return UserError(
        f"{raw.file}:{raw.place}: {error}: {raw.text[:SHOWN_CHARACTERS]!a} "
        "(a source {path: FILE, on_bad_row: skip} leaves such rows out)"
    )


_tokenize: Callable[[RowBatch], TokenizedBatch]  # which the processes of a pool inherit


def _tokenize_in_pool(batch: RowBatch) -> TokenizedBatch:
    return _tokenize(batch)


def _tokenized(
    batches: Iterator[RowBatch], tokenize: Callable[[RowBatch], TokenizedBatch]
) -> Iterator[TokenizedBatch]:
    """The batches in their order, from a process per core if there are enough, else from here."""
    global _tokenize
    _tokenize = tokenize
    # Forked processes inherit it: the tokenizer, of megabytes, is not sent with each batch.
    read = list(islice(batches, MIN_POOL_BATCHES))
    if len(read) < MIN_POOL_BATCHES:
        yield from map(tokenize, read)
        return
    workers = len(os.sched_getaffinity(0))  # of a container or a job, not of the node
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        yield from map_ahead(pool, _tokenize_in_pool, chain(read, batches), 2 * workers)


def map_ahead(
    pool: Executor, work: Callable[[T], R], items: Iterable[T], ahead: int
) -> Iterator[R]:
    """The results of `work` on each item, in their order. Of the items that follow the one whose
    result is taken, at most `ahead` are worked on: Executor.map would take all of them at once.
    """
    pending = deque()
    for item in items:
        pending.append(pool.submit(work, item))
        if len(pending) > ahead:
            yield pending.popleft().result()
    yield from (future.result() for future in pending)


# --------------------------------------------------------------------------------------------------
# Sources -> cache


def _batches(source: Source, numbers: Iterator[int]) -> Iterator[RowBatch]:
    """The rows of a source, with the next of the numbers."""
    batch = []
    characters = 0
    # rows first: zip would otherwise take a number before it finds that there is no row left
    for raw, number in zip(read_rows(source), numbers, strict=False):
        batch.append((number, raw))
        characters += len(raw.text)
        # where batches end is part of `content`, the hash of what the run trains on
        if len(batch) == BATCH_ROWS or characters > BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def _format_of(source: Source, config: DataConfig) -> str:
    """The format of a source's rows. If it is auto, the first row that can be parsed decides."""
    if source.format != "auto":
        return source.format
    # Later rows of another format are bad rows, rather than read in another way without a word.
    problem = "it has no rows"
    for raw in read_rows(source):
        try:
            return detect_format(parse_row(raw, source.columns, config.ignore_keys))
        except BadRow as error:
            if source.on_bad_row == "error":
                raise _refused(raw, error) from error
            problem = f"no row has a known format; line {raw.place}: {error}"
    raise UserError(f"{name_of(source)}: {problem}")


def _build_cache(
    given: list[Source],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    cache: Path,
) -> None:
    given = [replace(source, format=_format_of(source, config)) for source in given]
    examples = []
    numbers = count()  # of rows
    counts = Counter()
    shown_at = time.monotonic()
    with (
        pa.OSFile(str(cache / "examples.arrow"), "wb") as out,
        pa.ipc.new_stream(out, SCHEMA) as writer,
        (cache / "rejected_rows.jsonl").open("w", encoding="utf-8") as rejected,
    ):
        for source in given:
            tokenize = partial(tokenize_batch, tokenizer=tokenizer, source=source, config=config)
            examples.append(0)
            of_source = Counter()
            # Batches come in the order of the rows: the cache has the same bytes every time.
            for batch, of_batch, lines in _tokenized(_batches(source, numbers), tokenize):
                writer.write_batch(batch)
                rejected.writelines(lines)
                of_source += of_batch
                examples[-1] += len(batch)
                if time.monotonic() - shown_at > LINE_SECONDS:
                    shown_at = time.monotonic()
                    print_line(f"tokenizing: {sum(examples):,} examples")
            if not examples[-1]:
                lost = ", ".join(f"{n:,} {kind}: {name}" for (kind, name), n in of_source.items())
                raise UserError(
                    f"{name_of(source)}: none of its rows is left: {lost or 'it has none'} "
                    f"(data.max_length is {config.max_length:,})"
                )
            counts += of_source
    meta = {
        "sources": [name_of(source) for source in given],
        "formats": [source.format for source in given],
        "source_examples": examples,
        "rows_read": next(numbers),
        **{
            what: {name: n for (kind, name), n in counts.items() if kind == what}
            for what in ("over_length", "rejected", "unprompted")
        },
        **describe_examples(_memory_map(cache), tokenizer, config),
    }
    (cache / "meta.json").write_text(json.dumps(meta, indent=2))


def _memory_map(cache: Path) -> pa.Table:
    return pa.ipc.open_stream(pa.memory_map(str(cache / "examples.arrow"))).read_all()


def open_cache(path: Path) -> TokenizedRows:
    """Memory-map a cache folder.

    Raises:
        UserError: a file cannot be read, or lacks its end.
    """
    try:
        meta = json.loads((path / "meta.json").read_text())
        table = _memory_map(path)
        table.validate()  # that lists end within the file
        ids, mask = (pc.list_value_length(table[name]) for name in ("input_ids", "loss_mask"))
        # a stream that ends between two batches can be read
        is_whole = len(table) == sum(meta["source_examples"])
        if not is_whole or table.schema != SCHEMA or not ids == mask == table["length"]:
            raise ValueError("examples, columns or lengths differ")
        return TokenizedRows(table, np.arange(len(table)), meta, path)
    except Exception as error:  # JSON and Arrow files raise their own
        raise UserError(
            f"data.cache_dir: cannot read {path} ({describe(error)}); delete it, and the rows are "
            "tokenized again, or set data.cache_dir to a folder of your own"
        ) from error


def hold_out(
    data: TokenizedRows, fraction: float, seed: int
) -> tuple[TokenizedRows, TokenizedRows]:
    """(training, held-out) data: a random `fraction` of the rows is held out, in their order.

    The examples of a split row stay together: otherwise the model would be evaluated on rows that
    it was partly trained on.
    """
    # without holes, which rows leave that became no example
    _, index = np.unique(data.column("row"), return_inverse=True)
    rows = int(index[-1]) + 1
    count = max(1, round(rows * fraction))
    if count == rows:
        raise UserError(
            f"data.eval_fraction: {fraction:g} of {rows:,} rows leaves none to train on; lower it, "
            "or set data.eval_sources"
        )
    held = np.isin(index, permute(np.arange(count), rows, seed))
    ends = np.cumsum(data.meta["source_examples"])

    def part(is_in: np.ndarray) -> TokenizedRows:
        index = np.flatnonzero(is_in)
        meta = data.meta | {
            # a run that resumes with another fraction or seed has other data
            "content": xxhash.xxh3_64_hexdigest(data.meta["content"].encode() + index.tobytes()),
            "source_examples": np.diff(np.searchsorted(index, ends), prepend=0).tolist(),
        }
        return replace(data, index=index, meta=meta)

    return part(~held), part(held)
