"""Tokenizes rows into examples (token ids and loss mask), once per node, into a cache of Arrow
files that every rank memory-maps.

A cache folder has what a rank needs to plan an epoch without reading the tokens:

    rows/               Arrow: input_ids list<int32>, loss_mask list<bool>, and their origin
    lengths.npy         int32 [examples], tokens
    supervised.npy      int32 [examples], tokens that carry loss
    meta.json           counts for the start-up table, and `content`, a hash of tokens and masks
    rejected_rows.jsonl rows skipped under data.on_bad_row, with reasons

It is written under a temporary name, synced to disk, and renamed when complete, so neither a killed
process nor a failed machine leaves an incomplete cache.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa
import xxhash
from filelock import SoftFileLease

from data import sources
from data.end_marks import describe_masks
from data.options import RenderOptions
from data.plan import permute
from data.render import OUTCOMES, REJECTED, SPLIT, check_template, fit, render
from data.sources import BadRow, RawRow
from runtime.errors import UserError, describe
from runtime.files import explain, sync_folder, sync_tree
from runtime.progress import polled_progress, progress, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from config.schema import DataConfig, Source

CACHE_VERSION = 7  # increase it when the same input is to give other tokens than before
ROWS_PER_WORKER = 10_000
LEASE_SECONDS = 60.0  # of the lock, which its holder refreshes three times as often
RAW_ROWS, RAW_CHARACTERS = 1000, 1 << 26  # at most so much of the sources is written at a time
FORMAT_ROWS = 1000  # rows of a source that are searched for one that shows its format
MEASURED_ROWS = 500  # examples read at a time: with 32,000 tokens each, some 300 MB
POLL_SECONDS = 0.2
SHOWN_CHARACTERS = 80  # of a bad row, in messages

RAW = datasets.Features(
    {
        "source": datasets.Value("int32"),
        "file": datasets.Value("string"),
        "place": datasets.Value("int64"),
        "text": datasets.Value("large_string"),  # a thousand long rows exceed the 2 GiB of `string`
        "problem": datasets.Value("string"),
    }
)
TOKENIZED = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "source": datasets.Value("int32"),
        "file": datasets.Value("string"),
        "place": datasets.Value("int64"),  # line of the file, or number of the row in it
        "row": datasets.Value("int64"),  # number among all rows read, the same for split pieces
        "outcome": datasets.Value("int8"),
        "special": datasets.Value("string"),  # the first special token in the row's own text, or ""
        "unprompted": datasets.Value("string"),  # what a server's prompt has and the row's lacks
        "reason": datasets.Value("string"),
        "problem": datasets.Value("string"),
    }
)
PLACES = ("special", "unprompted", "file", "place", "row")
# columns that are not kept in the cache
WORKING = ("outcome", "special", "unprompted", "reason", "problem")


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

    def fetch(self, rows: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Token ids, int32, and loss masks, bool, of the examples with these indices, int64 [n]."""
        table = self._tokens[rows.tolist()]
        columns = []
        for name in ("input_ids", "loss_mask"):
            column = table[name].combine_chunks()
            values = column.flatten().to_numpy(zero_copy_only=False)
            columns.append(np.split(values, np.cumsum(column.value_lengths().to_numpy())[:-1]))
        return columns[0], columns[1]

    def place_of(self, row: int) -> str:
        """FILE:LINE of the row that an example came from."""
        where = self.rows.with_format(None, columns=["file", "place"])[row]
        return f"{where['file']}:{where['place']}"


# --------------------------------------------------------------------------------------------------
# One batch, in a worker process


def _tokenize_batch(
    batch: dict[str, list],
    index: list[int],
    tokenizer: "PreTrainedTokenizerBase",
    options: list[RenderOptions],
    on_bad_row: str,
    done: Path,
) -> dict[str, list]:
    out: dict[str, list] = {name: [] for name in TOKENIZED}
    rows = zip(index, *(batch[name] for name in RAW), strict=True)
    for number, source, file, place, text, problem in rows:
        option = options[source]
        reason, specials, unprompted = "", list[str](), list[str]()
        try:
            pieces = fit(
                *render(
                    sources.parse_row(
                        RawRow(place, text, problem), option.columns, option.ignore_keys
                    ),
                    tokenizer,
                    option,
                    specials,
                    unprompted,
                ),
                option,
            )
        except BadRow as error:
            if on_bad_row == "error":
                raise UserError(_bad_row(file, place, str(error), text)) from error
            pieces, reason, problem = [([], [], REJECTED)], error.reason, str(error)
        for ids, mask, outcome in pieces:
            texts = [found[0] if found else "" for found in (specials, unprompted)]
            values = (ids, mask, source, file, place, number, outcome, *texts, reason, problem)
            for name, value in zip(TOKENIZED, values, strict=True):
                out[name].append(value)
    with done.open("ab") as counter:  # a short append is atomic across workers
        counter.write(b"." * len(index))
    return out


def _bad_row(file: str, place: int, problem: str, text: str) -> str:
    shown = ascii(text[:SHOWN_CHARACTERS])
    return f"{file}:{place}: {problem}: {shown} (set data.on_bad_row: skip to leave such rows out)"


# --------------------------------------------------------------------------------------------------
# Sources -> cache


def cache_path(
    given: list["Source"], tokenizer: "PreTrainedTokenizerBase", config: "DataConfig"
) -> Path:
    """Folder of the cache for these sources, this tokenizer and these options. The weights of
    sources do not matter.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)  # None: a slow tokenizer
    options = RenderOptions.of(config)
    key = json.dumps(
        [
            CACHE_VERSION,
            [[sources.fingerprint(s), s.format, s.columns, s.ignore_keys, s.roles] for s in given],
            [options.as_chat, options.supervise, options.max_length, options.on_too_long],
            options.special_tokens_in_text,
            [config.on_bad_row, config.max_row_characters],
            tokenizer.chat_template,
            _backend_state(backend) if backend else sorted(tokenizer.get_vocab().items()),
            {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
        ]
    )
    return Path(config.cache_dir) / xxhash.xxh3_64_hexdigest(key.encode())


def _backend_state(backend: Any) -> dict[str, Any]:
    """The part of a fast tokenizer's state that determines tokens: without padding and truncation,
    which are left over from its last call.
    """
    state = json.loads(backend.to_str())
    return {k: v for k, v in state.items() if k not in ("padding", "truncation")}


def tokenize_sources(
    given: list["Source"],
    tokenizer: "PreTrainedTokenizerBase",
    config: "DataConfig",
) -> Path:
    """Create the cache of these sources unless it exists, and return its folder.

    Concurrent callers, on one machine or on a shared disk, wait for the first of them.

    Raises:
        UserError: a row cannot be used (the message has file and line), a source has no rows, or
            data.cache_dir cannot be written.
    """
    target = cache_path(given, tokenizer, config)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        while not target.exists():
            with _lease(target) as lease:
                try:
                    _tokenize_alone(given, tokenizer, config, target)
                except Exception:
                    # If this process was stopped for a minute, another one has taken over and
                    # deleted what this one had written: wait for that one.
                    if lease.is_lock_held_by_us:
                        raise
    except UserError:
        raise
    except Exception as error:  # datasets and its workers wrap what they raise
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError | UserError):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, OSError):
            raise UserError(explain(cause, "data.cache_dir", target.parent)) from error
        raise cause or error from None
    return target


@contextlib.contextmanager
def _lease(target: Path) -> Iterator[SoftFileLease]:
    """Hold the right to create `target`: a file that is created exclusively and refreshed, because
    some shared disks lack the system's file locks, or ignore them.
    """
    path, seen, since = Path(f"{target}.lock"), None, time.monotonic()

    def is_stuck() -> bool:
        """Raise PermissionError for a dead process's lock that this user may not remove."""
        nonlocal seen, since
        with contextlib.suppress(FileNotFoundError):
            now = path.stat()
            if seen != (now.st_ino, now.st_mtime_ns):
                seen, since = (now.st_ino, now.st_mtime_ns), time.monotonic()
        if time.monotonic() - since > 3 * LEASE_SECONDS:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return False

    lease = SoftFileLease(path, lease_duration=LEASE_SECONDS, poll_interval=POLL_SECONDS)
    lease.acquire(cancel_check=is_stuck)
    try:
        yield lease
    finally:
        lease.release()


def _tokenize_alone(
    given: list["Source"],
    tokenizer: "PreTrainedTokenizerBase",
    config: "DataConfig",
    target: Path,
) -> None:
    """Create `target` unless it exists by now, and nothing else; called while its lock is held."""
    if target.exists():
        return
    for left in target.parent.glob(f"{target.name}.*/"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        _build_cache(given, tokenizer, config, work)
        sync_tree(work / "cache")
        os.replace(work / "cache", target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _build_cache(
    given: list["Source"],
    tokenizer: "PreTrainedTokenizerBase",
    config: "DataConfig",
    work: Path,
) -> None:
    began = time.perf_counter()
    raw = _read_raw(given, config, work)
    source_of = raw.with_format("numpy")["source"][:]
    rows_read = np.bincount(source_of, minlength=len(given))
    firsts = np.cumsum(rows_read) - rows_read
    options = []
    for source, first, count in zip(given, firsts.tolist(), rows_read.tolist(), strict=True):
        some = raw.select(range(first, first + min(count, FORMAT_ROWS)))
        options.append(_options_of(source, some, config))
    chat = any(o.is_chat for o in options)
    if chat:
        check_template(tokenizer, tokenizer.name_or_path)
    workers = config.workers or min(os.cpu_count() or 1, len(raw) // ROWS_PER_WORKER)
    done = work / "progress"
    done.touch()
    with polled_progress("tokenizing", len(raw), "rows", lambda: done.stat().st_size):
        mapped = raw.map(
            partial(
                _tokenize_batch,
                tokenizer=tokenizer,
                options=options,
                on_bad_row=config.on_bad_row,
                done=done,
            ),
            batched=True,
            with_indices=True,
            remove_columns=raw.column_names,
            features=TOKENIZED,
            num_proc=workers if workers > 1 else None,
            load_from_cache_file=False,
            cache_file_name=str(work / "mapped.arrow"),
            new_fingerprint="mapped",
        )
    columns = mapped.with_format("numpy")
    outcome, source_of = columns["outcome"][:], columns["source"][:]
    kept = np.flatnonzero(outcome <= SPLIT)
    for number, source in enumerate(given):
        if not np.any(source_of[kept] == number):
            raise UserError(
                f"{sources.name_of(source)}: none of its {rows_read[number]:,} rows is left: "
                f"{_what_became(outcome[source_of == number])}"
            )
    cache = work / "cache"
    rows = mapped.select(kept).remove_columns(list(WORKING))
    rows.save_to_disk(cache / "rows")
    lengths, supervised, content = _measure(rows)
    np.save(cache / "lengths.npy", lengths)
    np.save(cache / "supervised.npy", supervised)
    rejected = _write_rejected(mapped.select(np.flatnonzero(outcome == REJECTED)), raw, cache)
    counts = {name: int((outcome == code).sum()) for code, (name, _) in OUTCOMES.items()}
    meta = {
        "sources": [sources.name_of(source) for source in given],
        "formats": [option.format for option in options],
        "source_rows": np.bincount(source_of[kept], minlength=len(given)).tolist(),
        "rows_read": len(raw),
        "rows": len(kept),
        **counts,
        "rejected": rejected,
        **describe_masks(rows, tokenizer, config, chat),
        "special_text": _describe_specials(mapped.select_columns(list(PLACES)), config),
        "prompts": _describe_prompts(mapped.select_columns(list(PLACES))),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "supervised_tokens": int(supervised.sum(dtype=np.int64)),
        "content": content,
        "tokenize_seconds": round(time.perf_counter() - began, 1),
        "bytes": {str(f.relative_to(cache)): f.stat().st_size for f in _files(cache)},
    }
    (cache / "meta.json").write_text(json.dumps(meta, indent=2))
    seconds = max(1e-3, time.perf_counter() - began)
    say(f"tokenized {len(raw):,} rows in {seconds:,.1f} s ({len(raw) / seconds:,.0f} rows/s)")


def _read_raw(given: list["Source"], config: "DataConfig", work: Path) -> datasets.Dataset:
    """All rows of the sources, in an Arrow file."""
    schema, rows, characters, read = RAW.arrow_schema, list[dict[str, Any]](), 0, 0
    file = work / "raw.arrow"
    with (
        progress("reading", None, "rows") as report,
        pa.OSFile(str(file), "wb") as out,
        pa.ipc.new_stream(out, schema) as writer,
    ):
        for number, source in enumerate(given):
            found = False
            for name, row in sources.read_rows(source, config.max_row_characters):
                rows.append({"source": number, "file": name, **row._asdict()})
                found, characters = True, characters + len(row.text)
                if len(rows) == RAW_ROWS or characters > RAW_CHARACTERS:
                    writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
                    read += len(rows)
                    report(read)
                    rows, characters = [], 0
            if not found:
                raise UserError(f"{sources.name_of(source)}: has no rows")
        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
    return datasets.Dataset.from_file(str(file))


def _options_of(source: "Source", rows: datasets.Dataset, config: "DataConfig") -> RenderOptions:
    """The source's options. With data.format auto, its first row that can be parsed decides."""
    options = replace(
        RenderOptions.of(config),
        format=source.format,
        columns=source.columns,
        ignore_keys=source.ignore_keys,
        roles=source.roles,
    )
    if options.format != "auto":
        return options
    for row in rows:
        try:
            raw = RawRow(row["place"], row["text"], row["problem"])
            parsed = sources.parse_row(raw, options.columns, options.ignore_keys)
            return replace(options, format=sources.detect_format(parsed, bool(options.columns)))
        except BadRow as error:
            if config.on_bad_row == "error":
                raise UserError(
                    _bad_row(row["file"], row["place"], str(error), row["text"])
                ) from error
    raise UserError(
        f"{sources.name_of(source)}: none of its first {len(rows):,} rows shows its format; set "
        "data.format, or set data.on_bad_row: error to see what is wrong"
    )


def _measure(rows: datasets.Dataset) -> tuple[np.ndarray, np.ndarray, str]:
    """(lengths, supervised), each int32 [examples], and a hash of all tokens and masks."""
    lengths, supervised = np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)
    content = xxhash.xxh3_64()
    position = 0
    for batch in rows.with_format("arrow").iter(batch_size=MEASURED_ROWS):
        n = len(batch)
        ids, mask = batch["input_ids"].combine_chunks(), batch["loss_mask"].combine_chunks()
        ends = np.cumsum(lengths_of := ids.value_lengths().to_numpy())
        lengths[position : position + n] = lengths_of
        flags = mask.flatten().to_numpy(zero_copy_only=False)
        targets = np.cumsum(flags)[ends - 1]
        supervised[position : position + n] = np.diff(targets, prepend=0)
        content.update(lengths_of.tobytes() + ids.flatten().to_numpy().tobytes())
        content.update(np.packbits(flags).tobytes())
        position += n
    return lengths, supervised, content.hexdigest()


def _write_rejected(
    rejected: datasets.Dataset, raw: datasets.Dataset, cache: Path
) -> dict[str, int]:
    """Write rejected_rows.jsonl, and count the rejected rows by reason."""
    counts = Counter()
    with (cache / "rejected_rows.jsonl").open("w", encoding="utf-8") as out:
        for row in rejected.select_columns(["file", "place", "row", "reason", "problem"]):
            counts[row["reason"]] += 1
            line = {name: row[name] for name in ("file", "place", "reason", "problem")}
            text = raw[row["row"]]["text"][:SHOWN_CHARACTERS]
            out.write(json.dumps({**line, "text": text}) + "\n")
    return dict(counts.most_common())


def _describe_specials(rows: datasets.Dataset, config: "DataConfig") -> str:
    """How many rows have text of special tokens, what it became, and where the first is; "" for
    none.
    """
    count, text, place = _rows_with("special", rows)
    if not count:
        return ""
    became = {"escape": "tokenized as plain text", "allow": "WHICH ARE CONTROL TOKENS NOW"}
    done = became.get(config.special_tokens_in_text, "left out")
    return (
        f"{count:,} rows have special tokens in their text, {done} (data.special_tokens_in_text: "
        f"{config.special_tokens_in_text}), first {text!r} in {place}"
    )


def _describe_prompts(rows: datasets.Dataset) -> str:
    """How many rows have answers that do not follow the whole generation prompt, and where the
    first is; "" for none.
    """
    count, text, place = _rows_with("unprompted", rows)
    if not count:
        return ""
    return (
        f"WARNING: in {count:,} rows the text before an answer lacks {text!r}, with which the chat "
        "template's generation prompt ends: a server would ask for what was not trained "
        f"(data/README.md, Reasoning), first in {place}"
    )


def _rows_with(column: str, rows: datasets.Dataset) -> tuple[int, str, str]:
    """The number of rows with a text in this column; of the first one, the text and FILE:LINE."""
    found = np.flatnonzero([text != "" for text in rows[column][:]])
    if not len(found):
        return 0, "", ""
    first = rows[int(found[0])]
    count = len(set(np.asarray(rows["row"][:])[found].tolist()))
    return count, first[column], f"{first['file']}:{first['place']}"


def _what_became(outcome: np.ndarray) -> str:
    counts = {text: int((outcome == code).sum()) for code, (_, text) in OUTCOMES.items()}
    counts["rejected (data.on_bad_row)"] = int((outcome == REJECTED).sum())
    return ", ".join(f"{n:,} {text}" for text, n in counts.items() if n)


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
            rows=datasets.load_from_disk(str(path / "rows")).with_format("numpy"),
            lengths=np.load(path / "lengths.npy", mmap_mode="r"),
            supervised=np.load(path / "supervised.npy", mmap_mode="r"),
            folder=path,
        )
    except PermissionError as error:
        raise UserError(explain(error, "data.cache_dir", path.parent)) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"data.cache_dir: {path} is damaged ({describe(error)}); delete it, and the rows are "
            "tokenized again"
        ) from error


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def hold_out(
    data: TokenizedRows, fraction: float, seed: int
) -> tuple[TokenizedRows, TokenizedRows]:
    """(training, held-out) data: a random `fraction` of the rows is held out, in their order.

    The examples of a split row stay together: otherwise the model would be evaluated on rows that
    it was partly trained on.
    """
    row_of = np.asarray(data.rows["row"][:])
    index = np.concatenate([[0], np.cumsum(np.diff(row_of) != 0)])  # examples of a row are adjacent
    rows = int(index[-1]) + 1
    if rows < 2:
        raise UserError("data.eval_fraction: a single row cannot be divided; set data.eval_sources")
    order = permute(np.arange(rows, dtype=np.int64), rows, seed)
    count = min(rows - 1, max(1, round(rows * fraction)))
    held = np.isin(index, order[:count])
    return _subset(data, np.flatnonzero(~held)), _subset(data, np.flatnonzero(held))


def _subset(data: TokenizedRows, index: np.ndarray) -> TokenizedRows:
    lengths, supervised = data.lengths[index], data.supervised[index]
    content = xxhash.xxh3_64_hexdigest(data.meta["content"].encode() + index.tobytes())
    first = np.cumsum([0, *data.meta["source_rows"]])
    meta = {
        **data.meta,
        "source_rows": np.diff(np.searchsorted(index, first)).tolist(),
        "rows": len(index),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "supervised_tokens": int(supervised.sum(dtype=np.int64)),
        "content": content,
    }
    return TokenizedRows(data.rows.select(index), lengths, supervised, meta, data.folder)
