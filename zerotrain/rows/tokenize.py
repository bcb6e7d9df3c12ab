"""Tokenize rows into token caches; zerotrain/data/cache.py has their format.

A cache folder is written under a temporary name, synced to disk, and renamed when complete, so
neither a killed process nor a failed node leaves an incomplete cache.
"""

import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, count, islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import Config, DataConfig, Source
from zerotrain.data.cache import CACHE_VERSION, SCHEMA, WEIGHTED, Meta, open_cache
from zerotrain.data.caches import NOT_OF_TOKENS, cache_of, check_of, link_of, sets_of, tokenizer_key
from zerotrain.model.tokenizer import load_tokenizer
from zerotrain.rows.chat_template import set_chat_template
from zerotrain.rows.describe import describe_examples
from zerotrain.rows.fixes import explained
from zerotrain.rows.messages import detect_format
from zerotrain.rows.render import cut_to_length, tokenize_row
from zerotrain.rows.sources import (
    BadRow,
    RawRow,
    check_split,
    fingerprints,
    is_cache,
    loaded_commit,
    name_of,
    parse_row,
    read_rows,
    require_distinct,
    unread_files,
)
from zerotrain.runtime.ahead import map_ahead
from zerotrain.runtime.children import end_with_parent
from zerotrain.runtime.errors import EnvironmentFailure, UserError, describe, disk_error
from zerotrain.runtime.files import replace_text, sync_folder, sync_tree, temporary_name
from zerotrain.runtime.progress import LINE_SECONDS, print_line

# Most rows and characters that are tokenized at a time.
BATCH_ROWS = 500
BATCH_CHARACTERS = 1 << 24
MIN_POOL_BATCHES = 20  # A source of fewer batches is tokenized in this process.
SHOWN_CHARACTERS = 80  # Messages show this much of a bad row.
_printed_at = time.monotonic()


def print_progress(source: str, examples: int) -> None:
    """Print a line, but not more often than every ten seconds."""
    global _printed_at
    if time.monotonic() - _printed_at > LINE_SECONDS:
        _printed_at = time.monotonic()
        print_line(f"tokenizing {source}: {examples:,} examples")


class HasWeights(Exception):
    """A token's weight is between 0 and 1, which SCHEMA has no column for."""


def make_caches(config: Config, show: Callable[[str, int], None] = print_progress) -> list[Path]:
    """Return the folders of the caches of the training data and of each held-out set. Sets without
    one are tokenized.

    Args:
        show: called with the name of a source and its examples so far.

    Raises:
        UserError: a row cannot be used (the message has file and line), a set has no rows,
            data.cache_dir cannot be written, or two sources have the same rows.
    """
    require_distinct(sets_of(config))
    tokenizer = load_tokenizer(config.model)
    key = tokenizer_key(tokenizer)  # The trainer computes it without the run's chat template, too.
    check = check_of(config, key)
    set_chat_template(tokenizer, config.model)
    folders = []
    for sources in sets_of(config).values():
        folder, _ = cache_of(sources, key, config) or (None, "")
        if folder is None or any(source.hub for source in sources):
            folder = _make_cache(sources, tokenizer, key, config, show)
        folders.append(folder)
    with suppress(OSError):  # Others may own the folder: then the next run compares again.
        replace_text(check, "")
    return folders


def _make_cache(
    sources: list[Source],
    tokenizer: PreTrainedTokenizerBase,
    key: str,
    config: Config,
    show: Callable[[str, int], None],
) -> Path:
    """Return the folder of the cache of one set, which is made unless it exists, and link to it.

    Concurrent callers wait for the first. On a disk without locks they all do the work, and the
    first to finish creates the cache.

    Args:
        key: tokenizer_key, before the run's chat template was set.
    """
    cache_dir = Path(config.data.cache_dir)
    # One link for the sources as the config names them, one for the commits that were loaded.
    pinned = [replace(s, revision=loaded_commit(s)) if s.hub else s for s in sources]
    links = [link_of(given, key, config) for given in (sources, pinned)]
    target = _given_cache(sources, tokenizer, config.data)
    target = target or cache_dir / _content_key(pinned, tokenizer, config.data)
    draft = temporary_name(target)
    try:
        if not target.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            # The other processes wait for the first one, and then find the cache.
            with ExitStack() as stack:
                with suppress(OSError):  # On a disk without locks the others do not wait.
                    stack.enter_context(FileLock(f"{target}.lock"))
                if not target.exists():
                    draft.mkdir()
                    build = partial(_build_cache, pinned, tokenizer, config.data, draft, show)
                    try:
                        build(SCHEMA)
                    except HasWeights:
                        build(WEIGHTED)
                    if link_of(pinned, key, config) != links[1]:
                        raise UserError("a source's file changed while it was read; start again")
                    # A folder with the final name is complete, even after a power cut.
                    sync_tree(draft)
                # Some locks hold on one node only: another node may have been faster.
                if not target.exists():
                    os.replace(draft, target)
                    sync_folder(cache_dir)
        links[0].parent.mkdir(parents=True, exist_ok=True)
        unread = "; ".join(filter(None, (unread_files(s.path) for s in sources if s.path)))
        for link in links:
            replace_text(link, f"{os.path.relpath(target, cache_dir)}\n{unread}")
    except OSError as error:
        raise disk_error(error)(
            f"data.cache_dir: cannot write {cache_dir}: {describe(error)}; set it to a folder that "
            "you can write to and that has room"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _given_cache(
    sources: list[Source], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Path | None:
    """Return the cache that a config names as the source of a set; None if it names none.

    Raises:
        UserError: it is not the only source, or its examples cannot be trained on.
    """
    folders = [Path(source.path) for source in sources if is_cache(source)]
    if not folders:
        return None
    folder = folders[0]
    problem = ""
    if len(sources) > 1:
        problem = "a token cache is the only source of its set; make one cache of all sources"
    for batch in open_cache(folder).table.to_batches():
        problem = problem or _problem_of(batch, len(tokenizer), config.max_length)
    if problem:
        raise UserError(f"{folder}: {problem}")
    return folder


def _problem_of(batch: pa.RecordBatch, vocabulary: int, max_length: int) -> str:
    """Say why examples with SCHEMA cannot be trained on; "" if they can."""
    batch.validate(full=True)  # Offsets beyond a buffer would read other memory.
    ids, mask = (batch[name].flatten() for name in ("input_ids", "loss_mask"))
    if any(values.null_count for values in (*batch.columns, ids, mask)):
        return "it has null values"
    ids = ids.to_numpy()
    mask = mask.to_numpy(zero_copy_only=False)  # Arrow's booleans are bits.
    lengths = batch["length"].to_numpy()
    if lengths.min() < 2 or lengths.max() > max_length:
        return (
            f"it has examples of {lengths.min():,} and {lengths.max():,} tokens; allowed are 2 to "
            f"data.max_length ({max_length:,})"
        )
    if ids.min() < 0 or ids.max() >= vocabulary:
        return "it has token ids that the tokenizer lacks; use the tokenizer that made it"
    starts = np.cumsum(lengths) - lengths
    if mask[starts].any():
        return "loss_mask is true for the first token of an example, which nothing predicts"
    supervised = np.add.reduceat(mask, starts, dtype=int)
    if not supervised.all() or not np.array_equal(supervised, batch["supervised"].to_numpy()):
        return "supervised is 0, or differs from the number of tokens in loss_mask"
    if batch.schema == WEIGHTED:
        weights = batch["weights"].flatten().to_numpy(zero_copy_only=False)  # a null becomes NaN
        if pc.list_value_length(batch["weights"]) != batch["supervised"]:
            return "weights has other numbers of values than supervised says"
        sums = np.add.reduceat(weights, np.cumsum(supervised) - supervised, dtype=float)
        is_valid = (weights > 0) & (weights <= 1)
        if not is_valid.all() or not np.allclose(sums, batch["weight"].to_numpy()):
            return "weights has values that are not above 0, up to 1, or weight is not their sum"
    return ""


def _content_key(
    sources: list[Source], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> str:
    """Return the name of a cache: a hash of everything that its content depends on."""
    key = [
        CACHE_VERSION,
        fingerprints(sources),
        # Without weights the key is the same as before there were any.
        [[s.split, s.format, s.columns, s.on_bad_row, *{s.loss_weight} - {1}] for s in sources],
        {key: value for key, value in asdict(config).items() if key not in NOT_OF_TOKENS},
        tokenizer_key(tokenizer),
    ]
    return xxhash.xxh3_64_hexdigest(json.dumps(key).encode())


# --------------------------------------------------------------------------------------------------
# One batch, usually in another process


LEARNS_NO_REASONING = "have an empty thinking block: the model learns to answer without reasoning"
RowBatch = list[tuple[int, RawRow]]
"""Consecutive rows of a source, with their numbers among all rows."""


TokenizedBatch = tuple[pa.RecordBatch, Counter[tuple[str, str]], list[str]]
"""The result of a RowBatch: its examples, with WEIGHTED; its counts; and its lines of
rejected_rows.jsonl.

Counted are examples by ("over_length", outcome of cut_to_length), and rows by ("rejected",
BadRow.reason) and ("unprompted", TokenizedRow.unprompted).
"""


def tokenize_batch(
    batch: RowBatch, tokenizer: PreTrainedTokenizerBase, source: Source, config: DataConfig
) -> TokenizedBatch:
    """Tokenize the rows of a batch, and cut them to data.max_length.

    Args:
        source: the source of the rows. Its format must not be "auto".

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
            pieces, outcomes = cut_to_length(tokens.ids, tokens.weights, config)
        except BadRow as error:
            if source.on_bad_row == "error":
                raise _refused(raw, error, source) from error
            counts["rejected", error.reason] += 1
            text = raw.text[:SHOWN_CHARACTERS]
            line = {
                "file": raw.file,
                "place": raw.place,
                "text": text,
                "reason": error.reason,
                "problem": explained(error, raw, source.columns),
            }
            rejected.append(json.dumps(line) + "\n")
            continue
        counts.update(("over_length", outcome) for outcome in outcomes)
        if tokens.unprompted:
            counts["unprompted", tokens.unprompted] += 1
        counts["masks", LEARNS_NO_REASONING] += tokens.is_thoughtless
        for ids, weights in pieces:
            own = weights[weights > 0]
            values = (
                ids,
                weights > 0,
                len(ids),
                len(own),
                raw.file,  # Messages name the row during training.
                raw.place,
                number,
                xxhash.xxh3_64_intdigest(ids),
                own,
                own.sum(dtype=float),
            )
            examples.append(dict(zip(WEIGHTED.names, values, strict=True)))
    return pa.RecordBatch.from_pylist(examples, WEIGHTED), counts, rejected


def _refused(raw: RawRow, error: BadRow, source: Source) -> UserError:
    problem = explained(error, raw, source.columns)
    return UserError(
        f"{raw.file}:{raw.place}: {problem}: {raw.text[:SHOWN_CHARACTERS]!a} "
        "(a source {path: FILE, on_bad_row: skip} leaves such rows out)"
    )


_tokenize: Callable[[RowBatch], TokenizedBatch]
"""The processes of a pool inherit this by fork: a tokenizer has megabytes, too many to send with
each batch.
"""


def _tokenize_in_pool(batch: RowBatch) -> TokenizedBatch:
    return _tokenize(batch)


def _tokenized(
    batches: Iterator[RowBatch], tokenize: Callable[[RowBatch], TokenizedBatch]
) -> Iterator[TokenizedBatch]:
    """Yield the tokenized batches in order: from one process per core if there are enough batches,
    otherwise from this one.

    Raises:
        EnvironmentFailure: a process of the pool was killed.
    """
    global _tokenize
    _tokenize = tokenize
    read = list(islice(batches, MIN_POOL_BATCHES))
    if len(read) < MIN_POOL_BATCHES:
        yield from map(tokenize, read)
        return
    workers = len(os.sched_getaffinity(0))  # A container or a job may have fewer than the node.
    # A process that stays would hold the pipe from which a rank reads this program's messages.
    with ProcessPoolExecutor(workers, get_context("fork"), end_with_parent) as pool:
        try:
            yield from map_ahead(pool, _tokenize_in_pool, chain(read, batches), 2 * workers)
        except BrokenProcessPool as error:
            raise EnvironmentFailure(
                f"one of {workers} processes that tokenize rows was killed, as the kernel does if "
                "memory runs out; to start fewer, tokenize first, with: taskset -c 0 "
                "python -m scripts.tokenize --config FILE"
            ) from error
        finally:
            if sys.version_info < (3, 11, 5):
                # Without a worker left, the thread that sends batches would never end (gh-94777).
                pool._call_queue._reader.close()


# --------------------------------------------------------------------------------------------------
# Sources -> cache


def _batches(source: Source, numbers: Iterator[int]) -> Iterator[RowBatch]:
    """Yield the rows of a source in batches, with the next of the numbers."""
    batch = []
    characters = 0
    # The rows come first, or zip would take a number after the last row.
    for raw, number in zip(read_rows(source), numbers, strict=False):
        batch.append((number, raw))
        characters += len(raw.text)
        # The content hash covers where batches end, so these limits must not change.
        if len(batch) == BATCH_ROWS or characters > BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def _format_of(source: Source, config: DataConfig) -> str:
    """Return the row format of a source. If it is auto, the first row that parses decides."""
    if source.format != "auto":
        return source.format
    # Later rows of another format are then bad rows.
    problem = "it has no rows"
    for raw in read_rows(source):
        try:
            return detect_format(parse_row(raw, source.columns, config.ignore_keys))
        except BadRow as error:
            if source.on_bad_row == "error":
                raise _refused(raw, error, source) from error
            why = explained(error, raw, source.columns)
            problem = f"no row has a known format; line {raw.place}: {why}"
    raise UserError(f"{name_of(source)}: {problem}")


def _build_cache(
    given: list[Source],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    cache: Path,
    show: Callable[[str, int], None],
    schema: pa.Schema,
) -> None:
    given = [replace(source, format=_format_of(source, config)) for source in given]
    examples = []
    numbers = count()  # The number of each row.
    counts = Counter()
    with (
        pa.OSFile(str(cache / "examples.arrow"), "wb") as out,
        pa.ipc.new_stream(out, schema) as writer,
        (cache / "rejected_rows.jsonl").open("w", encoding="utf-8") as rejected,
    ):
        for source in given:
            tokenize = partial(tokenize_batch, tokenizer=tokenizer, source=source, config=config)
            examples.append(0)
            of_source = Counter()
            # Batches keep the order of the rows, so the cache has the same bytes every time.
            for batch, of_batch, lines in _tokenized(_batches(source, numbers), tokenize):
                if schema == SCHEMA and (pc.min(batch["weights"].flatten()).as_py() or 1) < 1:
                    raise HasWeights
                writer.write_batch(batch.select(schema.names))
                rejected.writelines(lines)
                of_source += of_batch
                examples[-1] += len(batch)
                show(name_of(source), examples[-1])
            if not examples[-1]:
                lost = ", ".join(f"{n:,} {kind}: {name}" for (kind, name), n in of_source.items())
                raise UserError(
                    f"{name_of(source)}: none of its rows is left: {lost or 'it has none'} "
                    f"(data.max_length is {config.max_length:,})"
                )
            counts += of_source
    with pa.memory_map(str(cache / "examples.arrow")) as file:
        described = describe_examples(pa.ipc.open_stream(file).read_all(), tokenizer, config)
    if thoughtless := counts["masks", LEARNS_NO_REASONING]:
        described["masks"] += f"; {thoughtless:,} rows {LEARNS_NO_REASONING}"
    meta = Meta(
        version=CACHE_VERSION,
        chat_template=tokenizer.chat_template,
        sources=[name_of(source) for source in given],
        formats=[source.format for source in given],
        source_examples=examples,
        revisions=[source.revision for source in given],
        rows_read=next(numbers),
        **{
            what: {name: n for (kind, name), n in counts.items() if kind == what}
            for what in ("over_length", "rejected", "unprompted")
        },
        **described,
    )
    (cache / "meta.json").write_text(json.dumps(asdict(meta), indent=2))
