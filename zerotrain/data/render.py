"""Renders parsed rows into token ids and loss masks."""

import json
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zerotrain.data.messages import canonical_row
from zerotrain.data.options import RenderOptions
from zerotrain.data.sources import BadRow
from zerotrain.data.turns import Span, locate, special_pattern
from zerotrain.runtime.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

ENCODED_AT_ONCE = 50  # rows; an encoding has over 100 bytes per token

# Outcomes of a row. All but KEPT are counted in meta.json, under the first name.
KEPT, TRUNCATED, SPLIT, DROPPED, LOST_ANSWER = range(5)
OUTCOMES = {
    TRUNCATED: ("truncated", "truncated"),
    SPLIT: ("split", "pieces of split rows"),
    DROPPED: ("dropped", "dropped"),
    LOST_ANSWER: ("without_answer", "dropped because no supervised token was left"),
}


class Rendered(NamedTuple):
    """A row as text."""

    text: str
    """What the chat template wrote; of a row without a template, its prompt or text."""
    completion: str
    spans: list[Span] | None
    """The characters of the text that are supervised; with data.supervise: all, those that are not.
    None without a template.
    """
    unprompted: str = ""
    """What a server's generation prompt ends with and the text before the answers lacks."""


def render(
    row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", options: RenderOptions
) -> Rendered:
    """Render one parsed row; options.format is not "auto".

    Raises:
        BadRow: a key is missing or of the wrong type, an answer is empty, or the chat template
            changes or leaves out part of the row.
    """
    row = canonical_row(row, options)
    special = special_pattern(tokenizer).search(json.dumps(row, ensure_ascii=False))
    if special:
        raise BadRow(
            "text of a special token",
            f"its text has {special[0]!r}, a special token of the tokenizer, which would act as "
            "one; write chats as messages, and leave out start and end marks",
        )
    if "messages" not in row:
        return Rendered(row.get("prompt", row.get("text")), row.get("completion", ""), None)
    messages = row["messages"]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    context = [i for i in answers if messages[i].pop("weight", 1) == 0]
    if options.supervise == "last":
        answers = answers[-1:]
    wanted = context if options.supervise == "all" else set(answers) - set(context)
    text, spans, unprompted = locate(messages, row.get("tools"), tokenizer, sorted(wanted))
    return Rendered(text, "", spans, unprompted)


def encode(
    rows: list[Rendered], tokenizer: "PreTrainedTokenizerBase"
) -> "Iterator[tuple[Encoding, Encoding]]":
    """The tokens of each row's text and completion. The rows have the same format."""
    encode_batch = tokenizer.backend_tokenizer.encode_batch  # its threads work side by side
    for i in range(0, len(rows), ENCODED_AT_ONCE):
        texts, completions, spans, _ = zip(*rows[i : i + ENCODED_AT_ONCE], strict=True)
        yield from zip(
            encode_batch(texts, add_special_tokens=spans[0] is None),
            encode_batch(completions, add_special_tokens=False),
            strict=True,
        )


def find_targets(
    row: Rendered,
    encoded: "tuple[Encoding, Encoding]",
    tokenizer: "PreTrainedTokenizerBase",
    options: RenderOptions,
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a row, not truncated.

    Returns:
        Token ids, int32, and which of them are targets, bool. Token 0 never is, since nothing
        predicts it.

    Raises:
        BadRow: no token is a target, or one is only partly within an answer.
    """
    text, completion = encoded
    is_all = options.supervise == "all"
    ids = text.ids
    if row.spans is None:
        eos = tokenizer.eos_token_id
        if ids[-1:] == [eos]:  # which some tokenizers add to every text
            ids.pop()
        prompt_tokens = len(ids)
        ids += completion.ids
        if eos is not None:
            ids.append(eos)
        mask = np.ones(len(ids), bool)
        if row.completion and not is_all:
            mask[:prompt_tokens] = False
    else:
        mask = tokens_within(row.text, text.offsets, row.spans) ^ is_all
    mask[:1] = False
    if not mask.any():
        raise BadRow("empty answer", "no token is supervised: no answer, or only of weight 0")
    return np.array(ids, np.int32), mask


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
    first, last = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * count).reshape(-1, 2).T
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


def check_template(tokenizer: "PreTrainedTokenizerBase", name: str) -> None:
    """Raise UserError if there is no chat template, or no way to mask what it renders."""
    if not tokenizer.chat_template or not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {name} has no chat template, but the rows are chat: set "
            "model.chat_template; or no tokenizer.json, which maps answers to tokens: set "
            "model.tokenizer to a folder that has one"
        )


# --------------------------------------------------------------------------------------------------
# Too long


def fit(
    ids: np.ndarray, mask: np.ndarray, options: RenderOptions
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """The examples of a row as (ids, mask, outcome), each at most max_length tokens; dropped ones
    have no tokens.

    Consecutive pieces of a split row overlap by one token, which is context in the second: every
    target of the row stays a target exactly once.

    Raises:
        BadRow: the row is too long and on_too_long is error.
    """
    limit = options.max_length
    if len(ids) <= limit:
        return [(ids, mask, KEPT)]
    if options.on_too_long == "error":
        raise BadRow(
            "too long",
            f"{len(ids)} tokens are over data.max_length ({limit}); raise it, "
            "or set data.on_too_long",
        )
    nothing = ids[:0], mask[:0]
    if options.on_too_long == "drop":
        return [(*nothing, DROPPED)]
    starts = [0]
    outcome = TRUNCATED
    if options.on_too_long == "split":
        starts = range(0, len(ids) - 1, max(1, limit - 1))
        outcome = SPLIT
    pieces = []
    for start in starts:
        piece = ids[start : start + limit]
        piece_mask = mask[start : start + limit].copy()
        piece_mask[0] = False
        pieces.append((piece, piece_mask, outcome) if piece_mask.any() else (*nothing, LOST_ANSWER))
    return pieces
