"""Tokenizes rows into examples (token ids and loss mask), once per node, into a cache of Arrow
files that every rank memory-maps.

A cache folder has what a rank needs to plan an epoch without reading the tokens:

    examples.arrow      input_ids list<int32>, loss_mask list<bool>, and the row they came from
    lengths.npy         int32 [examples], tokens
    supervised.npy      int32 [examples], tokens that carry loss
    meta.json           counts for the start-up table, and `content`, a hash of tokens and masks
    rejected_rows.jsonl rows skipped under data.on_bad_row, with reasons

It is written under a temporary name, synced to disk, and renamed when complete, so neither a killed
process nor a failed machine leaves an incomplete cache.
"""

import json
import os
import re
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa
import xxhash
from filelock import FileLock

from zerotrain.data.end_marks import describe_masks
from zerotrain.data.epoch_order import permute
from zerotrain.data.options import RenderOptions
from zerotrain.data.readers import RawRow
from zerotrain.data.render import OUTCOMES, SPLIT, check_template, fit, render_batch
from zerotrain.data.sources import (
    BadRow,
    detect_format,
    fingerprint,
    name_of,
    parse_row,
    read_rows,
)
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.files import draft_of, explain, sync_folder, sync_tree
from zerotrain.runtime.progress import progress, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zerotrain.config.schema import DataConfig, Source

CACHE_VERSION = 9  # increase it when the same input is to give other tokens than before
BATCH_ROWS, BATCH_CHARACTERS = 500, 1 << 24  # at most so much is tokenized at a time
POOL_BATCHES = 20  # a data set of fewer batches is tokenized in this process
FORMAT_ROWS = 1000  # rows of a source that are searched for one that shows its format
SHOWN_CHARACTERS = 80  # of a bad row, in messages
ABANDONED_SECONDS = 3600  # since a draft was last written to
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "file": pa.string(),
        "place": pa.int64(),  # line of the file, or number of the row in it
        "row": pa.int64(),  # number among all rows read, the same for split pieces
    }
)


@dataclass(frozen=True)
class TokenizedRows:
    """A memory-mapped cache. Index i of every array and of `rows` is the same example."""

    rows: datasets.Dataset
    lengths: np.ndarray  # int32 [examples], tokens
    supervised: np.ndarray  # int32 [examples], tokens that carry loss
    meta: dict[str, Any]
    folder: Path

    @property
    def rejected_rows(self) -> Path:
        """JSON lines of the rows skipped under data.on_bad_row."""
        return self.folder / "rejected_rows.jsonl"

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def _tokens(self) -> datasets.Dataset:
        return self.rows.with_format("arrow", columns=["input_ids", "loss_mask"])

    def fetch(self, examples: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Token ids, int32, and loss masks, bool, of the examples with these indices, int64 [n]."""
        table = self._tokens[examples.tolist()]
        columns = []
        for name in ("input_ids", "loss_mask"):
            column = table[name].combine_chunks()
            values = column.flatten().to_numpy(zero_copy_only=False)
            columns.append(np.split(values, np.cumsum(column.value_lengths().to_numpy())[:-1]))
        return columns[0], columns[1]

    def place_of(self, example: int) -> str:
        """FILE:LINE of the row that an example came from."""
        where = self.rows.with_format(None, columns=["file", "place"])[example]
        return f"{where['file']}:{where['place']}"


def cache_path(
    given: list["Source"], tokenizer: "PreTrainedTokenizerBase", config: "DataConfig"
) -> Path:
    """Folder of the cache for these sources, this tokenizer and these options. The weights of
    sources do not matter.
    """
    vocabulary: Any = sorted(tokenizer.get_vocab().items())
    if tokenizer.is_fast:  # without what is left over from its last call
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        vocabulary = {k: v for k, v in state.items() if k not in ("padding", "truncation")}
    options = RenderOptions.of(config)
    key = json.dumps(
        [
            CACHE_VERSION,
            [[fingerprint(s), s.format, s.columns] for s in given],
            [options.as_chat, options.supervise, options.max_length, options.on_too_long],
            [config.ignore_keys, config.roles, config.on_bad_row],
            tokenizer.chat_template,
            vocabulary,
            {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
        ]
    )
    return Path(config.cache_dir) / xxhash.xxh3_64_hexdigest(key.encode())


def tokenize_sources(
    given: list["Source"], tokenizer: "PreTrainedTokenizerBase", config: "DataConfig"
) -> Path:
    """Create the cache of these sources unless it exists, and return its folder.

    Concurrent callers wait for the first of them. Where the disk has no locks they do the same work
    twice; the first to finish creates the cache.

    Raises:
        UserError: a row cannot be used (the message has file and line), a source has no rows, or
            data.cache_dir cannot be written.
    """
    target = cache_path(given, tokenizer, config)
    draft = draft_of(target)
    try:
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if target.exists():
                return target
            _remove_abandoned(target)
            draft.mkdir()
            _build_cache(given, tokenizer, config, draft)
            sync_tree(draft)
            if not target.exists():
                os.replace(draft, target)
            sync_folder(target.parent)
    except OSError as error:
        raise UserError(explain(error, "data.cache_dir", target.parent)) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _remove_abandoned(target: Path) -> None:
    """Remove the drafts of this cache that killed processes left, by their exact names."""
    name = re.compile(rf"\.{target.name}\.[0-9a-f]{{32}}\.tmp")
    for folder in target.parent.iterdir():
        if name.fullmatch(folder.name) and not folder.is_symlink():
            written = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - written > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# One batch, usually in another process


@dataclass(frozen=True)
class RowBatch:
    """Consecutive rows of a source."""

    source: int
    first: int
    """Number of the first row among all rows."""
    rows: list[tuple[str, RawRow]]  # with their files


@dataclass
class TokenizedBatch:
    """What became of a RowBatch."""

    source: int
    rows_read: int
    columns: dict[str, list] = field(default_factory=lambda: {name: [] for name in SCHEMA.names})
    outcomes: Counter[int] = field(default_factory=Counter)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    specials: list[tuple[str, str]] = field(default_factory=list)
    """Special tokens in rows' own text, and the place of the row."""
    unprompted: list[tuple[str, str]] = field(default_factory=list)
    """What the text before an answer lacks of a generation prompt, and the place of the row."""


def tokenize_batch(
    batch: RowBatch,
    tokenizer: "PreTrainedTokenizerBase",
    options: list[RenderOptions],
    on_bad_row: str,
) -> TokenizedBatch:
    """Render the rows of a batch, and cut them to data.max_length.

    Raises:
        UserError: a row cannot be used, and data.on_bad_row is error.
    """
    out, option = TokenizedBatch(batch.source, len(batch.rows)), options[batch.source]
    parsed: list[dict[str, Any] | BadRow] = []
    for _, raw in batch.rows:
        try:
            parsed.append(parse_row(raw, option.columns, option.ignore_keys))
        except BadRow as error:
            parsed.append(error)
    rendered = render_batch(parsed, tokenizer, option)
    for number, found in enumerate(rendered, start=batch.first):
        file, raw = batch.rows[number - batch.first]
        try:
            if isinstance(found, BadRow):
                raise found
            pieces = fit(found.ids, found.mask, option)
        except BadRow as error:
            if on_bad_row == "error":
                raise _explained(file, raw, error) from error
            where = {"file": file, "place": raw.place}
            why = {"reason": error.reason, "problem": str(error)}
            out.rejected.append({**where, **why, "text": raw.text[:SHOWN_CHARACTERS]})
            continue
        if found.special:
            out.specials.append((found.special, f"{file}:{raw.place}"))
        if found.unprompted:
            out.unprompted.append((found.unprompted, f"{file}:{raw.place}"))
        for ids, mask, outcome in pieces:
            out.outcomes[outcome] += 1
            if outcome <= SPLIT:
                values = (ids, mask, file, raw.place, number)
                for name, value in zip(SCHEMA.names, values, strict=True):
                    out.columns[name].append(value)
    return out


def _explained(file: str, raw: RawRow, error: BadRow) -> UserError:
    return UserError(
        f"{file}:{raw.place}: {error}: {raw.text[:SHOWN_CHARACTERS]!a} "
        "(set data.on_bad_row: skip to leave such rows out)"
    )


_tokenize: Callable[[RowBatch], TokenizedBatch]  # of a process of the pool


def _start_process(tokenize: Callable[[RowBatch], TokenizedBatch]) -> None:
    global _tokenize
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenize = tokenize


def _tokenize_in_pool(batch: RowBatch) -> TokenizedBatch:
    return _tokenize(batch)


def _tokenized(
    batches: Iterator[RowBatch], tokenize: Callable[[RowBatch], TokenizedBatch]
) -> Iterator[TokenizedBatch]:
    """The batches in their order, from a process per core if there are enough."""
    head = list(islice(batches, POOL_BATCHES))
    if len(head) < POOL_BATCHES:
        yield from map(tokenize, head)
        return
    workers = len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(workers, get_context("fork"), _start_process, (tokenize,))
    try:
        pending = deque()
        for batch in chain(head, batches):
            pending.append(pool.submit(_tokenize_in_pool, batch))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


# --------------------------------------------------------------------------------------------------
# Sources -> cache


def _batches(given: list["Source"]) -> Iterator[RowBatch]:
    first = 0
    for number, source in enumerate(given):
        rows, characters, is_empty = [], 0, True
        for file, raw in read_rows(source):
            rows.append((file, raw))
            characters += len(raw.text)
            is_empty = False
            if len(rows) == BATCH_ROWS or characters > BATCH_CHARACTERS:
                yield RowBatch(number, first, rows)
                first += len(rows)
                rows, characters = [], 0
        if is_empty:
            raise UserError(f"{name_of(source)}: has no rows")
        if rows:
            yield RowBatch(number, first, rows)
            first += len(rows)


def _options_of(source: "Source", config: "DataConfig") -> RenderOptions:
    """The source's options. With the format auto, its first row that can be parsed decides."""
    options = replace(RenderOptions.of(config), format=source.format, columns=source.columns)
    if options.format != "auto":
        return options
    is_empty = True
    for file, raw in islice(read_rows(source), FORMAT_ROWS):
        is_empty = False
        try:
            row = parse_row(raw, options.columns, options.ignore_keys)
            return replace(options, format=detect_format(row))
        except BadRow as error:
            if config.on_bad_row == "error":
                raise _explained(file, raw, error) from error
    name = name_of(source)
    if is_empty:
        raise UserError(f"{name}: has no rows")
    raise UserError(f"{name}: none of its first {FORMAT_ROWS:,} rows shows its format; set it")


def _build_cache(
    given: list["Source"],
    tokenizer: "PreTrainedTokenizerBase",
    config: "DataConfig",
    cache: Path,
) -> None:
    began = time.perf_counter()
    options = [_options_of(source, config) for source in given]
    chat = any(option.is_chat for option in options)
    if chat:
        check_template(tokenizer, tokenizer.name_or_path)
    tokenize = partial(
        tokenize_batch, tokenizer=tokenizer, options=options, on_bad_row=config.on_bad_row
    )
    outcomes = [Counter() for _ in given]
    examples, rows_read = [0] * len(given), [0] * len(given)
    reasons, specials, unprompted = Counter(), _Places(), _Places()
    lengths, supervised, content = [], [], xxhash.xxh3_64()
    with (
        progress("tokenizing", None, "rows") as report,
        pa.OSFile(str(cache / "examples.arrow"), "wb") as out,
        pa.ipc.new_stream(out, SCHEMA) as writer,
        (cache / "rejected_rows.jsonl").open("w", encoding="utf-8") as rejected,
    ):
        for found in _tokenized(_batches(given), tokenize):
            batch = pa.RecordBatch.from_pydict(found.columns, SCHEMA)
            writer.write_batch(batch)
            ids, flags = batch["input_ids"], batch["loss_mask"].flatten()
            is_target = flags.to_numpy(zero_copy_only=False)
            lengths.append(ids.value_lengths().to_numpy().astype(np.int32))
            targets = np.append(0, np.cumsum(is_target))[np.cumsum(lengths[-1])]
            supervised.append(np.diff(targets, prepend=0).astype(np.int32))
            for part in (lengths[-1], ids.flatten().to_numpy(), is_target):
                content.update(part.tobytes())
            examples[found.source] += len(batch)
            rows_read[found.source] += found.rows_read
            outcomes[found.source] += found.outcomes
            for row in found.rejected:
                reasons[row["reason"]] += 1
                rejected.write(json.dumps(row) + "\n")
            specials.add(found.specials)
            unprompted.add(found.unprompted)
            report(sum(rows_read))
    for source, count, read, became in zip(given, examples, rows_read, outcomes, strict=True):
        if not count:
            why = [f"{became[code]:,} {text}" for code, (_, text) in OUTCOMES.items()]
            raise UserError(
                f"{name_of(source)}: none of its {read:,} rows is left: {', '.join(why)}, "
                f"{reasons.total():,} rejected (data.on_bad_row)"
            )
    np.save(cache / "lengths.npy", np.concatenate(lengths))
    np.save(cache / "supervised.npy", np.concatenate(supervised))
    rows = datasets.Dataset.from_file(str(cache / "examples.arrow"))
    total = sum(outcomes, Counter())
    meta = {
        "sources": [name_of(source) for source in given],
        "formats": [option.format for option in options],
        "source_examples": examples,
        "rows_read": sum(rows_read),
        **{name: total[code] for code, (name, _) in OUTCOMES.items()},
        "rejected": dict(reasons.most_common()),
        **describe_masks(rows, tokenizer, config, chat),
        "special_text": specials.text(
            "{count:,} rows have special tokens in their text, tokenized as plain text, first "
            "{first!r} in {place}"
        ),
        "prompts": unprompted.text(
            "WARNING: in {count:,} rows the text before an answer lacks {first!r}, with which the "
            "chat template's generation prompt ends: a server would ask for what was not trained "
            "(data/README.md, Reasoning), first in {place}"
        ),
        "tokens": int(sum(part.sum(dtype=np.int64) for part in lengths)),
        "supervised_tokens": int(sum(part.sum(dtype=np.int64) for part in supervised)),
        "content": content.hexdigest(),
        "bytes": {path.name: path.stat().st_size for path in sorted(cache.iterdir())},
    }
    (cache / "meta.json").write_text(json.dumps(meta, indent=2))
    seconds = max(1e-3, time.perf_counter() - began)
    read = sum(rows_read)
    say(f"tokenized {read:,} rows in {seconds:,.1f} s ({read / seconds:,.0f} rows/s)")


class _Places:
    """Counts rows with something to report, and remembers the first."""

    def __init__(self) -> None:
        self.count, self.first = 0, ("", "")

    def add(self, found: Iterable[tuple[str, str]]) -> None:
        for text_and_place in found:
            if not self.count:
                self.first = text_and_place
            self.count += 1

    def text(self, template: str) -> str:
        if not self.count:
            return ""
        return template.format(count=self.count, first=self.first[0], place=self.first[1])


def open_cache(path: Path) -> TokenizedRows:
    """Memory-map a cache folder: only meta.json is read at once.

    Raises:
        UserError: a file cannot be read, or has another size than when it was written: reading a
            truncated file that is mapped would end the process.
    """
    try:
        meta = json.loads((path / "meta.json").read_text())
        for name, size in meta["bytes"].items():
            if (found := (path / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found:,} bytes instead of {size:,}")
        return TokenizedRows(
            meta=meta,
            rows=datasets.Dataset.from_file(str(path / "examples.arrow")).with_format("numpy"),
            lengths=np.load(path / "lengths.npy", mmap_mode="r"),
            supervised=np.load(path / "supervised.npy", mmap_mode="r"),
            folder=path,
        )
    except PermissionError as error:
        raise UserError(explain(error, "data.cache_dir", path.parent)) from error
    except (
        OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError,
        pa.ArrowException,
    ) as error:  # fmt: skip
        raise UserError(
            f"data.cache_dir: {path} is damaged ({describe(error)}); delete it, and the rows are "
            "tokenized again"
        ) from error


def hold_out(
    data: TokenizedRows, fraction: float, seed: int
) -> tuple[TokenizedRows, TokenizedRows]:
    """(training, held-out) data: a random `fraction` of the rows is held out, in their order.

    The examples of a split row stay together: otherwise the model would be evaluated on rows that
    it was partly trained on.
    """
    row_of = np.asarray(data.rows["row"][:])
    index = np.cumsum(np.diff(row_of, prepend=row_of[0]) != 0)  # examples of a row are adjacent
    rows = int(index[-1]) + 1
    if rows < 2:
        raise UserError("data.eval_fraction: a single row cannot be divided; set data.eval_sources")
    order = permute(np.arange(rows, dtype=np.int64), rows, seed)
    count = min(rows - 1, max(1, round(rows * fraction)))
    held = np.isin(index, order[:count])
    return _subset(data, np.flatnonzero(~held)), _subset(data, np.flatnonzero(held))


def _subset(data: TokenizedRows, index: np.ndarray) -> TokenizedRows:
    lengths, supervised = data.lengths[index], data.supervised[index]
    first = np.cumsum([0, *data.meta["source_examples"]])
    meta = {
        **data.meta,
        "source_examples": np.diff(np.searchsorted(index, first)).tolist(),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "supervised_tokens": int(supervised.sum(dtype=np.int64)),
        "content": xxhash.xxh3_64_hexdigest(data.meta["content"].encode() + index.tobytes()),
    }
    return TokenizedRows(data.rows.select(index), lengths, supervised, meta, data.folder)
