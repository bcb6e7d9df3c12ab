"""Text of special tokens in rows: `<|end|>` in a message of a user is text, and ends no turn."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from data.sources import BadRow
from data.turns import FIRST_LABEL, RenderedChat, apply_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
UNMARKED_KEYS = ("role", "type")  # on which templates decide


@lru_cache(maxsize=8)
def _specials(
    tokenizer: "PreTrainedTokenizerBase", named: tuple[str, ...]
) -> tuple[re.Pattern[str], set[int]]:
    """A pattern of the special tokens' texts, and their ids; `named` are the tokenizer's own."""
    added = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    texts = sorted({t for t in (*added, *named) if t.strip()}, key=len, reverse=True)
    ids = set(tokenizer.convert_tokens_to_ids(texts)) if texts else set()
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)"), ids


def _pattern(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str]:
    return _specials(tokenizer, tuple(tokenizer.all_special_tokens))[0]


def special_spans(
    tokenizer: "PreTrainedTokenizerBase", text: str, start: bool, end: bool
) -> list[Span]:
    """Characters [start, end) of special tokens in a text without a template, but for marks that
    are added anyway.

    Args:
        start: whether a start mark may begin the text.
        end: whether an end mark may end it.
    """
    spans = []
    for found in _pattern(tokenizer).finditer(text):
        is_start = start and found.start() == 0 and found[0] == tokenizer.bos_token
        is_end = end and found.end() == len(text) and found[0] == tokenizer.eos_token
        if not (is_start or is_end):
            spans.append(found.span())
    return spans


def special_spans_of_chat(chat: RenderedChat) -> list[Span]:
    """Characters [start, end) of a rendered chat that are the text of a special token in a message
    or tool, not the template's own.

    They are found by rendering the chat with other characters in their place.

    Raises:
        BadRow: the template then writes something else as well.
    """
    pattern = _pattern(chat.tokenizer)
    if not pattern.search(json.dumps([chat.messages, chat.tools], ensure_ascii=False)):
        return []
    messages, tools = (_marked(value, pattern) for value in (chat.messages, chat.tools))
    try:
        marked = apply_template(chat.tokenizer, messages, tools)
    except BadRow:
        marked = ""
    differing = [i for i, (a, b) in enumerate(zip(chat.text, marked, strict=False)) if a != b]
    if len(marked) != len(chat.text) or any(marked[i] != chr(FIRST_LABEL) for i in differing):
        raise BadRow(
            "text of a special token",
            "the chat template looks for special tokens in its messages, so they cannot be told "
            "from its own; data.special_tokens_in_text: allow makes all of them tokens",
        )
    spans: list[Span] = []
    for i in differing:
        if spans and spans[-1][1] == i:
            spans[-1] = (spans[-1][0], i + 1)
        else:
            spans.append((i, i + 1))
    return spans


def _marked(value: Any, pattern: re.Pattern[str]) -> Any:
    """`value` with each character of a special token's text replaced by a label."""
    if isinstance(value, str):
        return pattern.sub(lambda found: chr(FIRST_LABEL) * len(found[0]), value)
    if isinstance(value, dict):
        return {
            _marked(k, pattern): v if k in UNMARKED_KEYS else _marked(v, pattern)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [_marked(v, pattern) for v in value]
    return value


def encode(
    tokenizer: "PreTrainedTokenizerBase", text: str, plain: Sequence[Span], is_added: bool
) -> tuple[list[int], list[Span]]:
    """Token ids of a text, and the characters [start, end) of each.

    Args:
        plain: spans in which special tokens are plain text. The text between two other special
            tokens is tokenized on its own in any case, so it can be tokenized again by itself.
        is_added: whether the tokenizer adds its own special tokens around the text.
    """
    encoded = tokenizer(text, add_special_tokens=is_added, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    if not plain:
        return ids, offsets
    special = _specials(tokenizer, tuple(tokenizer.all_special_tokens))[1]
    out_ids: list[int] = []
    out_offsets: list[Span] = []
    reached = begin = 0  # the characters and tokens up to the last control token
    escaped = False
    for i, (token, (first, last)) in enumerate(
        zip([*ids, None], [*offsets, (len(text), len(text))], strict=True)
    ):
        if token in special and any(first < b and a < last for a, b in plain):
            escaped = True
        elif token is None or token in special:
            until = first if first < last else len(text)  # an inserted one has no characters
            if escaped:
                again = tokenizer(
                    text[reached:until],
                    add_special_tokens=False,
                    return_offsets_mapping=True,
                    split_special_tokens=True,
                )
                out_ids += again["input_ids"]
                out_offsets += [(a + reached, b + reached) for a, b in again["offset_mapping"]]
            else:
                out_ids += ids[begin:i]
                out_offsets += offsets[begin:i]
            if token is not None:
                out_ids.append(token)
                out_offsets.append((first, last))
            reached, begin, escaped = max(reached, last), i + 1, False
    return out_ids, out_offsets
