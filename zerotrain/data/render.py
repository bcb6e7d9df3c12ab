"""Renders parsed rows into token ids and loss masks."""

import copy
import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from zerotrain.data.messages import canonical_row
from zerotrain.data.options import RenderOptions
from zerotrain.data.sources import BadRow
from zerotrain.data.turns import Located, Span, chat_template, marks_generation, special_pattern
from zerotrain.runtime.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding
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
    special: str = ""
    """The first special token whose text is in the row itself, where it is plain text."""
    unprompted: str = ""
    """What a server's generation prompt has, and the text before an answer lacks."""


class Part(NamedTuple):
    """A text of a row that is tokenized on its own."""

    text: str
    spans: list[Span]
    """The supervised characters; or those that are not, if `is_inverted`."""
    plain: list[Span]
    """Texts of special tokens in the row's own strings."""
    is_inverted: bool = False
    starts: bool = False
    """Whether the tokenizer adds its own tokens, as before a text without a template."""
    ends: bool = False
    """Whether the eos token follows."""
    unprompted: str = ""


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
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path} has no fast version, which is needed to map "
            "answers to tokens; convert it to a tokenizer.json, and set model.tokenizer to its "
            "folder"
        )
    found: list[list[Part] | BadRow] = []
    for row in rows:
        try:
            found.append(row if isinstance(row, BadRow) else _parts(row, tokenizer, options))
        except BadRow as error:
            found.append(error)
        except (UnicodeEncodeError, TypeError) as error:  # half of a surrogate pair
            found.append(BadRow("not text", f"the tokenizer refuses it ({_one_line(error)})"))
    encodings = {}
    for starts in (True, False):
        parts = [p for given in found if isinstance(given, list) for p in given]
        texts = [part.text for part in parts if part.starts == starts]
        if texts:
            encoded = tokenizer(texts, add_special_tokens=starts, return_attention_mask=False)
            encodings[starts] = iter(encoded.encodings)
    out: list[Rendered | BadRow] = []
    for given in found:
        if isinstance(given, list):
            encoded = [next(encodings[part.starts]) for part in given]
            try:
                given = _join(given, encoded, tokenizer, options)
            except BadRow as error:
                given = error
        out.append(given)
    return out


def _parts(
    row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", options: RenderOptions
) -> list[Part]:
    row = canonical_row(row, options)
    if "messages" in row:
        return [_chat(row, tokenizer, options)]
    texts = [row["text"]] if "text" in row else [row["prompt"], row["completion"]]
    parts = []
    for i, text in enumerate(texts):
        text.encode()
        is_start, is_end = i == 0, i == len(texts) - 1
        plain = []
        for special in special_pattern(tokenizer).finditer(text):
            is_bos = is_start and special.start() == 0 and special[0] == tokenizer.bos_token
            is_eos = is_end and special.end() == len(text) and special[0] == tokenizer.eos_token
            if not (is_bos or is_eos):
                plain.append(special.span())
        is_answer = is_end or options.supervise == "all"
        parts.append(Part(text, [], plain, is_answer, starts=is_start, ends=is_end))
    return parts


def _join(
    parts: list[Part],
    encodings: "list[Encoding]",
    tokenizer: "PreTrainedTokenizerBase",
    options: RenderOptions,
) -> Rendered:
    ids, mask = list[int](), list[bool]()
    for part, encoding in zip(parts, encodings, strict=True):
        part_ids, offsets = _tokens(tokenizer, part, encoding)
        part_mask = _within(part.text, offsets, part.spans)
        if part.is_inverted:
            part_mask = [not m for m in part_mask]
        if part.starts and part_ids[:2] == [tokenizer.bos_token_id] * 2:  # of text and tokenizer
            part_ids, part_mask = part_ids[1:], part_mask[1:]
        eos = tokenizer.eos_token_id
        if part.ends and eos is not None and part_ids[-1:] != [eos]:
            part_ids, part_mask = [*part_ids, eos], [*part_mask, True]
        elif part.starts and len(parts) > 1 and part_ids and tokenizer("").input_ids[-1:] == [eos]:
            # A tokenizer that ends every text with eos would put it before the completion.
            part_ids, part_mask = part_ids[:-1], part_mask[:-1]
        ids += part_ids
        mask += part_mask
    if mask:
        mask[0] = False
    if not any(mask):
        raise BadRow("empty answer", "no token is supervised: the answer is empty")
    specials = [part.text[slice(*part.plain[0])] for part in parts if part.plain]
    return Rendered(ids, mask, specials[0] if specials else "", parts[0].unprompted)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --------------------------------------------------------------------------------------------------
# Tokens


def _tokens(
    tokenizer: "PreTrainedTokenizerBase", part: Part, encoding: "Encoding"
) -> tuple[list[int], list[Span]]:
    """Token ids of a text, and the characters [start, end) of each.

    Where a special token's text is plain text, the text between two other special tokens is
    tokenized again without them. That changes nothing else: such a text is tokenized on its own.
    """
    if not part.plain:
        return encoding.ids, encoding.offsets
    pattern = special_pattern(tokenizer)
    ids: list[int] = []
    offsets: list[Span] = []
    reached, escaped, pending = 0, False, list[tuple[int, Span]]()
    end = (len(part.text), len(part.text))
    for token, (first, last) in [*zip(encoding.ids, encoding.offsets, strict=True), (None, end)]:
        text = part.text[first:last].strip()
        is_special = token is None or bool(pattern.fullmatch(text))
        if is_special and any(first < b and a < last for a, b in part.plain):
            escaped = True
        elif is_special:
            if escaped:
                again = tokenizer(
                    part.text[reached:first],
                    add_special_tokens=False,
                    return_offsets_mapping=True,
                    split_special_tokens=True,
                )
                ids += again["input_ids"]
                offsets += [(a + reached, b + reached) for a, b in again["offset_mapping"]]
            else:
                ids += [token for token, _ in pending]
                offsets += [span for _, span in pending]
            if token is not None:
                ids.append(token)
                offsets.append((first, last))
            reached, escaped, pending = last, False, []
        else:
            pending.append((token, (first, last)))
    return ids, offsets


def _within(text: str, offsets: list[Span], spans: list[Span]) -> list[bool]:
    """Which tokens lie in spans of characters [start, end), apart from white space around them.

    Args:
        offsets: of each token, in the order of the text. Some tokenizers omit white space from
            them; it belongs to the token that follows or contains it.
        spans: sorted, not overlapping.

    Raises:
        BadRow: a token has characters other than white space on both sides of a span's boundary.
    """
    mask = [False] * len(offsets)
    ends = list(accumulate((last for _, last in offsets), max))
    starts = [min(first, end) for (first, _), end in zip(offsets, [0, *ends], strict=False)]
    for start, end in spans:
        low, high = bisect_right(ends, start), bisect_left(starts, end)
        while low < high and _is_outside(text, starts[low], ends[low], start, end):
            low += 1
        while low < high and _is_outside(text, starts[high - 1], ends[high - 1], start, end):
            high -= 1
        if low == high:
            continue
        if text[starts[low] : start].strip() or text[end : ends[high - 1]].strip():
            token = text[starts[low] : ends[low]]
            raise BadRow(
                "joined by the tokenizer",
                f"one token spans the boundary of an answer ({token!a}): use a chat template whose "
                "marks are tokens, or whose headers end with a line break",
            )
        mask[low:high] = [True] * (high - low)
    return mask


def _is_outside(text: str, first: int, last: int, start: int, end: int) -> bool:
    """Whether a token has a text, but only white space of it lies in a span."""
    inside = text[max(first, start) : min(last, end)]
    return not inside.strip() and bool(text[first:last].strip())


# --------------------------------------------------------------------------------------------------
# Chat


def check_template(tokenizer: "PreTrainedTokenizerBase", name: str) -> None:
    """Raise UserError if there is no valid chat template, or no way to mask what it renders."""
    if not tokenizer.chat_template:
        raise UserError(
            f"tokenizer {name} has no chat template, but the rows are chat; set model.chat_template"
        )
    _check_syntax(tokenizer.chat_template, name)
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {name} has no fast version, which is needed to map answers to tokens; "
            "convert it to a tokenizer.json, and set model.tokenizer to its folder"
        )


def _check_syntax(template: str | dict[str, str], name: str) -> None:
    """Raise UserError if a template, or one of several named ones, is not valid Jinja."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            _compile_jinja_template(text)
        except TemplateSyntaxError as error:
            raise UserError(
                f"tokenizer {name}: its chat template is not valid Jinja: line {error.lineno}: "
                f"{_one_line(error)}; fix it, or set model.chat_template to another"
            ) from error


def mask_method(tokenizer: "PreTrainedTokenizerBase", supervise: str) -> str:
    """How assistant tokens are identified, for the start-up table."""
    if supervise == "all":
        return "every token"
    turns = "last assistant turn" if supervise == "last" else "assistant turns"
    if marks_generation(tokenizer.get_chat_template()):
        return f"{turns}, by the template's generation marks, verified row by row"
    return f"{turns}, by the origin of each character, verified row by row"


def _chat(
    row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", options: RenderOptions
) -> Part:
    given = row["messages"]
    assistants = [i for i, message in enumerate(given) if message["role"] == "assistant"]
    answers = assistants[-1:] if options.supervise == "last" else assistants
    context = [i for i in assistants if given[i].get("weight") == 0]
    answers = [i for i in answers if i not in context]
    if not answers:
        which = "the last assistant turn has" if options.supervise == "last" else "all turns have"
        raise BadRow("empty answer", f"no token is supervised: {which} weight 0")
    is_inverted = options.supervise == "all"
    chat = _located(
        [{k: v for k, v in message.items() if k != "weight"} for message in given],
        tokenizer,
        row.get("tools"),
        answers,
        context if is_inverted else answers,
    )
    plain = []
    for special in special_pattern(tokenizer).finditer(chat.text):
        start, end = special.span()
        if any(a < end and start < b for a, b in chat.contents):
            plain.append((start, end))
    return Part(chat.text, chat.spans, plain, is_inverted, unprompted=chat.unprompted)


def _located(
    messages: list[dict[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    tools: list[dict[str, Any]] | None,
    answers: list[int],
    wanted: list[int],
) -> Located:
    """The rendered row. Arguments of tool calls are passed as objects, which most templates write
    as JSON, and if that fails as JSON in strings, which others insert between their marks.
    """
    template = chat_template(tokenizer, tools)
    try:
        return template.locate(messages, wanted, answers)
    except BadRow as error:
        as_text = copy.deepcopy(messages)
        for message in as_text:
            for call in message.get("tool_calls", ()):
                function = call.get("function", call)
                if isinstance(function.get("arguments"), dict | list):
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        if as_text == messages:
            raise
        try:
            return template.locate(as_text, wanted, answers)
        except BadRow as second:
            raise second if error.reason == "refused by the chat template" else error from None


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
