"""Renders parsed rows into token ids and loss masks."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zerotrain.data.messages import canonical_row
from zerotrain.data.options import RenderOptions
from zerotrain.data.sources import BadRow
from zerotrain.data.turns import Span, locate, special_pattern
from zerotrain.runtime.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Outcomes of a row. All but KEPT and REJECTED are counted in meta.json, under the first name.
KEPT, TRUNCATED, SPLIT, DROPPED, LOST_ANSWER, REJECTED = range(6)
OUTCOMES = {
    TRUNCATED: ("truncated", "truncated"),
    SPLIT: ("split", "pieces of split rows"),
    DROPPED: ("dropped", "dropped"),
    LOST_ANSWER: ("without_answer", "dropped because no supervised token was left"),
}


class Rendered(NamedTuple):
    """An example before it is cut to data.max_length."""

    ids: list[int]
    mask: list[bool]
    """Which tokens are targets. Token 0 never is, since nothing predicts it."""


def render(
    row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", options: RenderOptions
) -> Rendered:
    """Render one parsed row, not truncated; options.format is not "auto".

    Raises:
        BadRow: a key is missing or of the wrong type, an answer is empty, or the chat template
            changes or leaves out part of the row.
    """
    [rendered] = render_batch([row], tokenizer, options)
    if isinstance(rendered, BadRow):
        raise rendered
    return rendered


def render_batch(
    rows: Sequence[dict[str, Any] | BadRow],
    tokenizer: "PreTrainedTokenizerBase",
    options: RenderOptions,
) -> list[Rendered | BadRow]:
    """Render parsed rows, in their order; one that cannot be used gives its error, and an error
    itself.
    """
    out = []
    for row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            row = canonical_row(row, options)
            special = special_pattern(tokenizer).search(json.dumps(row, ensure_ascii=False))
            if special:
                raise BadRow(
                    "text of a special token",
                    f"its text has {special[0]!r}, a special token of the tokenizer, which would "
                    "act as one; write chats as messages, and leave out start and end marks",
                )
            chat = "messages" in row
            ids, mask = (_chat if chat else _plain)(row, tokenizer, options)
            mask[:1] = [False]
            if not any(mask):
                raise BadRow("empty answer", "no token is supervised: the answer is empty")
            out.append(Rendered(ids, mask))
        except BadRow as error:
            out.append(error)
    return out


def _plain(
    row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", options: RenderOptions
) -> tuple[list[int], list[bool]]:
    """Token ids and mask of a row without a template."""
    eos = tokenizer.eos_token_id
    prompt = tokenizer(row.get("prompt", row.get("text")))["input_ids"]
    if prompt[-1:] == [eos]:  # which some tokenizers add to every text
        prompt.pop()
    answer = tokenizer(row.get("completion", ""), add_special_tokens=False)["input_ids"]
    if eos is not None:
        answer.append(eos)
    is_answer = "text" in row or options.supervise == "all"
    return prompt + answer, [is_answer] * len(prompt) + [True] * len(answer)


def _chat(
    row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", options: RenderOptions
) -> tuple[list[int], list[bool]]:
    messages = row["messages"]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    context = [i for i in answers if messages[i].pop("weight", 1) == 0]
    if options.supervise == "last":
        answers = answers[-1:]
    answers = [i for i in answers if i not in context]
    if not answers:
        raise BadRow("empty answer", "no token is supervised: the last assistant turn has weight 0")
    has_all = options.supervise == "all"
    wanted = context if has_all else answers
    text, spans = locate(messages, row.get("tools"), tokenizer, wanted, answers)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = tokens_within(text, encoded["offset_mapping"], spans)
    return encoded["input_ids"], [not m for m in mask] if has_all else mask


def tokens_within(text: str, offsets: list[Span], spans: list[Span]) -> list[bool]:
    """Which tokens lie in spans of characters [start, end), apart from white space around them.

    Args:
        offsets: of each token, in the order of the text. Some tokenizers omit white space from
            them; it belongs to the token that follows or contains it.

    Raises:
        BadRow: a token has characters other than white space on both sides of a span's boundary.
    """
    if not offsets:
        return []
    inside = np.zeros(len(text), bool)
    for start, end in spans:
        inside[start:end] = True
    is_blank = np.array([character.isspace() for character in text], bool)
    ends = np.maximum.accumulate([last for _, last in offsets])
    starts = np.minimum([first for first, _ in offsets], np.append(0, ends[:-1]))

    def count(flags: np.ndarray) -> np.ndarray:
        """Of each token, the characters with the flag."""
        sums = np.append(0, np.cumsum(flags))
        return sums[ends] - sums[starts]

    outside = count(~inside & ~is_blank)
    joined = np.flatnonzero((count(inside & ~is_blank) > 0) & (outside > 0))
    if len(joined):
        token = text[starts[joined[0]] : ends[joined[0]]]
        raise BadRow(
            "joined by the tokenizer",
            f"one token spans the boundary of an answer ({token!a}): use a chat template whose "
            "marks are tokens, or whose headers end with a line break",
        )
    return ((count(inside) > 0) & (outside == 0)).tolist()


def check_template(tokenizer: "PreTrainedTokenizerBase", name: str) -> None:
    """Raise UserError if there is no chat template, or no way to mask what it renders."""
    if not tokenizer.chat_template:
        raise UserError(
            f"tokenizer {name} has no chat template, but the rows are chat; set model.chat_template"
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {name} has no fast version, which is needed to map answers to tokens; "
            "convert it to a tokenizer.json, and set model.tokenizer to its folder"
        )


# --------------------------------------------------------------------------------------------------
# Too long


def fit(
    ids: list[int], mask: list[bool], options: RenderOptions
) -> list[tuple[list[int], list[bool], int]]:
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
