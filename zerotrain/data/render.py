"""Renders parsed rows into token ids and loss masks."""

import json
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any

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


def render(
    row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", options: RenderOptions
) -> tuple[list[int], list[bool]]:
    """Render one parsed row, not truncated; options.format is not "auto".

    Returns:
        Token ids, and which of them are targets. Token 0 never is, since nothing predicts it.

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
    ids, mask = (_chat if "messages" in row else _plain)(row, tokenizer, options)
    mask[:1] = [False]
    if not any(mask):
        raise BadRow("empty answer", "no token is supervised: no answer, or only of weight 0")
    return ids, mask


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
    wanted = context if options.supervise == "all" else set(answers) - set(context)
    text, spans = locate(messages, row.get("tools"), tokenizer, sorted(wanted))
    encoded = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    mask = tokens_within(text, encoded.offsets, spans)
    return encoded.ids, [not hit for hit in mask] if options.supervise == "all" else mask


def tokens_within(text: str, offsets: list[Span], spans: list[Span]) -> list[bool]:
    """Which tokens lie in spans of characters [start, end), apart from white space around them.

    Args:
        offsets: of each token, in the order of the text. Some tokenizers omit white space from
            them; it belongs to the token that follows or contains it.

    Raises:
        BadRow: a token has characters other than white space on both sides of a span's boundary.
    """
    mask = [False] * len(offsets)
    ends = list(accumulate((last for _, last in offsets), max))
    starts = [min(first, end) for (first, _), end in zip(offsets, [0, *ends], strict=False)]
    for start, end in spans:
        for i in range(bisect_right(ends, start), bisect_left(starts, end)):
            mask[i] = True
            if starts[i] < start or ends[i] > end:
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
    starts = [0]
    outcome = TRUNCATED
    if options.on_too_long == "split":
        starts = range(0, len(ids) - 1, max(1, limit - 1))
        outcome = SPLIT
    pieces = []
    for start in starts:
        piece = ids[start : start + limit]
        piece_mask = mask[start : start + limit]
        piece_mask[0] = False
        pieces.append((piece, piece_mask, outcome) if any(piece_mask) else ([], [], LOST_ANSWER))
    return pieces
