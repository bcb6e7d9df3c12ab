"""Rows -> input_ids + loss mask, done once per machine and cached as Arrow files that every rank
maps.

A cache folder holds what one rank needs to plan an epoch without touching the tokens:

    rows/            Arrow: input_ids list<int32>, loss_mask list<bool>, line int64
    lengths.npy      int32 [rows], tokens
    supervised.npy   int32 [rows], tokens that carry loss
    meta.json        counts for the start-up table, and `content`, a hash of tokens and masks

It is written under another name and renamed when whole, so a killed tokenisation leaves no half
cache.
"""

import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import xxhash
from filelock import FileLock

from data import sources
from data.plan import permute
from finetune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config import DataConfig

CACHE_VERSION = 2  # raise it when the same input should give other tokens than before
ROWS_PER_WORKER = 10_000

# What became of a row; but for KEPT, counted in meta.json under the first name.
KEPT, TRUNCATED, SPLIT, DROPPED, LOST_ANSWER = range(5)
OUTCOMES = {
    TRUNCATED: ("truncated", "truncated"),
    SPLIT: ("split", "pieces of split rows"),
    DROPPED: ("dropped", "dropped"),
    LOST_ANSWER: ("without_answer", "dropped because no supervised token was left"),
}

TOKENIZED = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "line": datasets.Value("int64"),
        "outcome": datasets.Value("int8"),
    }
)


@dataclass(frozen=True)
class TokenizedRows:
    """A cache, mapped. Index i of every array and of `rows` is the same example."""

    rows: datasets.Dataset
    lengths: np.ndarray  # int32 [rows], tokens
    supervised: np.ndarray  # int32 [rows], tokens that carry loss
    meta: dict[str, Any]

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class RenderOptions:
    """What of the data config decides a row's tokens."""

    format: str
    columns: dict[str, str]
    as_chat: bool
    supervise: str
    max_length: int
    on_too_long: str

    @classmethod
    def of(cls, config: "DataConfig") -> "RenderOptions":
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})


# --------------------------------------------------------------------------------------------------
# One row -> tokens


def render(
    row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", options: RenderOptions
) -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of one parsed row, both of its full length; options.format is not
    "auto" here.

    `mask[t]` says that token t is a target. Token 0 is never one: nothing predicts it.

    Raises:
        ValueError: a key is missing or of the wrong type, or no token is supervised.
    """
    kind = options.format
    for key in sources.FORMAT_KEYS[kind]:
        if key not in row:
            raise ValueError(f"key {key!r} is missing (data.format {kind})")
        if kind != "messages" and not isinstance(row[key], str):
            raise ValueError(f"key {key!r} is a {type(row[key]).__name__}, not a string")
    if kind == "instruction":
        extra = row.get("input") or ""
        if not isinstance(extra, str):
            raise ValueError(f"key 'input' is a {type(extra).__name__}, not a string")
        row = {
            "prompt": row["instruction"] + (f"\n\n{extra}" if extra else ""),
            "completion": row["output"],
        }
    if kind != "text" and kind != "messages" and options.as_chat:
        row = {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        }
        kind = "messages"

    if kind == "messages":
        ids, mask = _render_chat(row, tokenizer)
    elif kind == "text":
        ids = _with_end(tokenizer(row["text"])["input_ids"], tokenizer)
        mask = [True] * len(ids)
    else:
        prompt = tokenizer(
            row["prompt"] if kind == "prompt_completion" else row["prompt"] + "\n\n"
        )["input_ids"]
        # A tokenizer that ends every text would put its end mark between prompt and completion.
        prompt = prompt[:-1] if prompt and prompt[-1] == tokenizer.eos_token_id else prompt
        completion = _with_end(
            tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer
        )
        ids, mask = prompt + completion, [False] * len(prompt) + [True] * len(completion)
    if options.supervise == "all":
        mask = [True] * len(ids)
    if mask:
        mask[0] = False
    if not any(mask):
        raise ValueError("no token is supervised: the answer is empty")
    return ids, mask


def _render_chat(
    row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[int], list[bool]]:
    messages = row["messages"]
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) for m in messages)
    ):
        raise ValueError("key 'messages' is not a list of {role, content} objects")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise ValueError("a message has no role")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(
                f"the content of a message of role {message['role']!r} is not a string"
            )
    try:
        encoded = tokenizer.apply_chat_template(
            messages, tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
    except (
        Exception
    ) as error:  # a template raises what it likes: jinja2.TemplateError, TypeError, KeyError ...
        raise ValueError(
            f"the chat template refuses it ({' '.join(str(error).split())})"
        ) from error
    return list(encoded["input_ids"]), [bool(m) for m in encoded["assistant_masks"]]


def _with_end(ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def fit(
    ids: list[int], mask: list[bool], options: RenderOptions
) -> list[tuple[list[int], list[bool], int]]:
    """(ids, mask, outcome) pieces of a row, each at most max_length tokens; dropped pieces have no
    tokens.

    Pieces of a split row overlap by one token, which is context in the second piece: every target
    of the row stays a target exactly once.

    Raises:
        ValueError: the row is too long and on_too_long is error.
    """
    limit = options.max_length
    if len(ids) <= limit:
        return [(ids, mask, KEPT)]
    if options.on_too_long == "error":
        raise ValueError(
            f"{len(ids)} tokens are over data.max_length ({limit}); raise it, "
            "or set data.on_too_long"
        )
    if options.on_too_long == "drop":
        return [([], [], DROPPED)]
    starts = range(0, len(ids) - 1, max(1, limit - 1)) if options.on_too_long == "split" else [0]
    outcome = SPLIT if options.on_too_long == "split" else TRUNCATED
    pieces = []
    for start in starts:
        piece, piece_mask = ids[start : start + limit], mask[start : start + limit]
        piece_mask[0] = False
        pieces.append((piece, piece_mask, outcome) if any(piece_mask) else ([], [], LOST_ANSWER))
    return pieces


def _tokenize_batch(
    batch: dict[str, list], tokenizer: "PreTrainedTokenizerBase", options: RenderOptions
) -> dict:
    out: dict[str, list] = {name: [] for name in TOKENIZED}
    for file, line, text in zip(batch["file"], batch["line"], batch["json"], strict=True):
        try:
            pieces = fit(
                *render(sources.parse_row(text, options.columns), tokenizer, options), options
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{file}:{line}: {error}: {text[:80]!r}") from error
        for ids, mask, outcome in pieces:
            for name, value in zip(TOKENIZED, (ids, mask, line, outcome), strict=True):
                out[name].append(value)
    return out


# --------------------------------------------------------------------------------------------------
# Files -> cache


def check_template(tokenizer: "PreTrainedTokenizerBase", name: str, supervise: str) -> None:
    """Refuse a chat template that cannot say which tokens are the assistant's, where that matters.

    Without `{% generation %}` transformers returns a mask of zeros and no word about it.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"tokenizer {name} has no chat template, and the rows are chat; "
            "give one in model.chat_template"
        )
    if supervise == "answers" and not re.search(
        r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)
    ):
        raise UserError(
            f"tokenizer {name}: its chat template marks no assistant token; copy it to a file, "
            "put {% generation %} ... {% endgeneration %} around the assistant's text, "
            "and name it in model.chat_template"
        )


def cache_path(
    files: list[str], tokenizer: "PreTrainedTokenizerBase", config: "DataConfig"
) -> Path:
    """Folder of the cache for these files, this tokenizer and these options."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # None: a tokenizer without a Rust side
    key = json.dumps(
        [
            CACHE_VERSION,
            sources.fingerprint(files),
            asdict(RenderOptions.of(config)),
            tokenizer.chat_template,
            backend.to_str() if backend else sorted(tokenizer.get_vocab().items()),
            tokenizer.eos_token,
        ]
    )
    return Path(config.cache_dir) / xxhash.xxh3_64_hexdigest(key.encode())


def tokenize_files(
    files: list[str], tokenizer: "PreTrainedTokenizerBase", config: "DataConfig"
) -> Path:
    """Make the cache of these files unless it is there, and return its folder.

    Processes that ask at the same time, on one machine or on a shared disk, wait for the first of
    them.

    Raises:
        UserError: a row that cannot be used, by file and line; no rows at all.
    """
    target = cache_path(files, tokenizer, config)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir: {config.cache_dir}: {error.strerror}") from error
    with FileLock(f"{target}.lock"):
        if not target.exists():
            work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
            try:
                _build_cache(files, tokenizer, config, work)
                os.replace(work / "cache", target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target


def _build_cache(
    files: list[str], tokenizer: "PreTrainedTokenizerBase", config: "DataConfig", work: Path
) -> None:
    raw = _read_raw(files, work)
    options = RenderOptions.of(config)
    if options.format == "auto":
        try:
            first_row = sources.parse_row(raw[0]["json"], config.columns)
            options = replace(options, format=sources.detect_format(first_row))
        except ValueError as error:
            raise UserError(
                f"{files[0]}:{raw[0]['line']}: {error}: {raw[0]['json'][:80]}"
            ) from error
    if options.format == "messages" or (options.as_chat and options.format != "text"):
        check_template(tokenizer, tokenizer.name_or_path, options.supervise)
    workers = config.workers or min(os.cpu_count() or 1, len(raw) // ROWS_PER_WORKER)
    mapped = raw.map(
        partial(_tokenize_batch, tokenizer=tokenizer, options=options),
        batched=True,
        remove_columns=raw.column_names,
        features=TOKENIZED,
        num_proc=workers if workers > 1 else None,
        load_from_cache_file=False,
        cache_file_name=str(work / "mapped.arrow"),
        new_fingerprint="mapped",
        desc="tokenising",
    )
    outcome = mapped.with_format("numpy")["outcome"][:]
    kept = np.flatnonzero(outcome <= SPLIT)
    if not len(kept):
        raise UserError(f"{files[0]}: no row is left under data.max_length ({config.max_length})")
    rows = mapped.select(kept).remove_columns("outcome")
    rows.save_to_disk(work / "cache" / "rows")
    lengths, supervised = np.empty(len(kept), np.int32), np.empty(len(kept), np.int32)
    content = xxhash.xxh3_64()
    position = 0
    for batch in rows.with_format("arrow").iter(batch_size=10_000):
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
    np.save(work / "cache" / "lengths.npy", lengths)
    np.save(work / "cache" / "supervised.npy", supervised)
    counts = {name: int((outcome == code).sum()) for code, (name, _) in OUTCOMES.items()}
    meta = {
        "files": files,
        "rows_read": len(raw),
        "rows": len(kept),
        **counts,
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(supervised.sum()),
        "content": content.hexdigest(),
    }
    (work / "cache" / "meta.json").write_text(json.dumps(meta, indent=2))


def _read_raw(files: list[str], work: Path) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_generator(
            sources.read_lines,
            gen_kwargs={"files": files},
            cache_dir=str(work / "raw"),
            keep_in_memory=False,
        )
    except Exception as error:  # datasets wraps whatever the generator raised
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__cause__ or cause.__context__
        raise cause or error from None


def open_cache(path: Path) -> TokenizedRows:
    """Map a cache folder; nothing is read into memory but the two small arrays' pages that are
    touched.
    """
    return TokenizedRows(
        rows=datasets.load_from_disk(str(path / "rows")).with_format("numpy"),
        lengths=np.load(path / "lengths.npy", mmap_mode="r"),
        supervised=np.load(path / "supervised.npy", mmap_mode="r"),
        meta=json.loads((path / "meta.json").read_text()),
    )


def hold_out(
    data: TokenizedRows, fraction: float, seed: int
) -> tuple[TokenizedRows, TokenizedRows]:
    """(training rows, held-out rows): a share of the rows drawn with `seed`, in the files' order.

    The pieces of a split row stay together, or the model would be tested on what it was shown.
    """
    lines = np.asarray(data.rows["line"][:])
    source = np.concatenate([[0], np.cumsum(np.diff(lines) != 0)])  # pieces are neighbours
    sources_there = int(source[-1]) + 1
    if sources_there < 2:
        raise UserError("data.eval_fraction: one row cannot be divided; give data.eval_files")
    order = permute(np.arange(sources_there, dtype=np.int64), sources_there, seed)
    count = min(sources_there - 1, max(1, round(sources_there * fraction)))
    held = np.isin(source, order[:count])
    return _subset(data, np.flatnonzero(~held)), _subset(data, np.flatnonzero(held))


def _subset(data: TokenizedRows, index: np.ndarray) -> TokenizedRows:
    lengths, supervised = data.lengths[index], data.supervised[index]
    content = xxhash.xxh3_64_hexdigest(data.meta["content"].encode() + index.tobytes())
    meta = {
        **data.meta,
        "rows": len(index),
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(supervised.sum()),
        "content": content,
    }
    return TokenizedRows(data.rows.select(index), lengths, supervised, meta)
