"""Tokenizes parsed rows: token ids and loss masks, of at most data.max_length tokens."""

import json
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import DataConfig, Source
from zerotrain.data.messages import canonical_row
from zerotrain.data.sources import BadRow
from zerotrain.data.turns import Span, locate, special_pattern


class TokenizedRow(NamedTuple):
    """A row as tokens, not yet cut to data.max_length."""

    ids: np.ndarray
    """int32 [tokens]."""
    mask: np.ndarray
    """bool [tokens], which of them are targets. Token 0 never is, since nothing predicts it."""
    unprompted: str = ""
    """What a server's generation prompt ends with and the text before the answers lacks."""


def tokenize_row(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, source: Source, config: DataConfig
) -> TokenizedRow:
    """Render and tokenize one parsed row.

    Args:
        source: where the row comes from, with another format than "auto".

    Raises:
        BadRow: a key is missing or of the wrong type, no token is a target, or the chat template
            changes or leaves out part of the row.
    """
    row = canonical_row(row, source, config)
    special = special_pattern(tokenizer).search(json.dumps(row, ensure_ascii=False))
    if special:
        raise BadRow(
            "text of a special token",
            f"its text has {special[0]!r}, a special token of the tokenizer, which would act as "
            "one; write chats as messages, and leave out start and end marks",
        )
    tokens = (_chat if "messages" in row else _plain)(row, tokenizer, config.supervise)
    tokens.mask[:1] = False
    if not tokens.mask.any():
        raise BadRow("empty answer", "no token is supervised: no answer, or only of weight 0")
    return tokens


def _plain(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, supervise: str) -> TokenizedRow:
    """A row without a chat template: its text, or prompt and completion, and the eos token."""
    encode = tokenizer.backend_tokenizer.encode
    ids = encode(row.get("prompt", row.get("text"))).ids
    eos = tokenizer.eos_token_id
    if ids[-1:] == [eos]:  # which some tokenizers add to every text
        ids.pop()
    prompt_tokens = len(ids)
    ids += encode(row.get("completion", ""), add_special_tokens=False).ids
    if eos is not None:
        ids.append(eos)
    mask = np.ones(len(ids), bool)
    if "completion" in row and supervise != "all":
        mask[:prompt_tokens] = False
    return TokenizedRow(np.array(ids, np.int32), mask)


def _chat(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, supervise: str) -> TokenizedRow:
    """A row of messages, rendered by the chat template."""
    messages = row["messages"]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    context = [i for i in answers if messages[i].pop("weight", 1) == 0]
    if supervise == "last":
        answers = answers[-1:]
    wanted = context if supervise == "all" else sorted({*answers} - {*context})
    text, spans, unprompted = locate(messages, row.get("tools"), tokenizer, wanted)
    encoded = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    mask = tokens_within(text, encoded.offsets, spans) ^ (supervise == "all")
    return TokenizedRow(np.array(encoded.ids, np.int32), mask, unprompted)


def tokens_within(text: str, offsets: list[Span], spans: list[Span]) -> np.ndarray:
    """Which tokens lie in spans of characters [start, end), apart from white space around them.

    Args:
        offsets: of each token, in the order of the text. Some tokenizers omit white space from
            them; it belongs to the token that follows or contains it.

    Returns:
        bool [tokens].

    Raises:
        BadRow: a token has characters other than white space on both sides of a span's boundary.
    """
    count = len(offsets)
    first, last = np.array(offsets, np.int64).reshape(-1, 2).T
    ends = np.maximum.accumulate(last)
    starts = np.minimum(first, np.append(0, ends)[:count])
    mask = np.zeros(count, bool)
    for start, end in spans:
        low = np.searchsorted(ends, start, "right")
        high = np.searchsorted(starts, end, "left")
        mask[low:high] = True
        is_cut = (starts[low:high] < start) | (ends[low:high] > end)
        for i in low + np.flatnonzero(is_cut):
            inside = text[max(starts[i], start) : min(ends[i], end)].strip()
            outside = text[starts[i] : start].strip() or text[end : ends[i]].strip()
            mask[i] = not outside
            if inside and outside:
                raise BadRow(
                    "joined by the tokenizer",
                    f"one token spans the boundary of an answer ({text[starts[i] : ends[i]]!a})"
                    ": use a chat template whose marks are tokens, or whose headers end with a "
                    "line break",
                )
    return mask


def cut_to_length(
    ids: np.ndarray, mask: np.ndarray, config: DataConfig
) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[str]]:
    """The examples of a row, (ids, mask) of at most max_length tokens each, and what happened to
    it, in words: one text for each example that was made or dropped.

    Consecutive pieces of a split row overlap by one token, which is context in the second: every
    target of the row stays a target exactly once.
    """
    limit = config.max_length
    if len(ids) <= limit:
        return [(ids, mask)], []
    if config.on_too_long == "drop":
        return [], ["dropped"]
    is_split = config.on_too_long == "split"
    starts = range(0, len(ids) - 1, limit - 1) if is_split else [0]
    parts = [slice(start, start + limit) for start in starts]
    pieces = [(ids[part], np.append(False, mask[part][1:])) for part in parts]
    kept = [piece for piece in pieces if piece[1].any()]
    lost = ["dropped because no supervised token was left"] * (len(pieces) - len(kept))
    return kept, ["pieces of split rows" if is_split else "truncated"] * len(kept) + lost
