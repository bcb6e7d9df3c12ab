"""Tokenizes parsed rows: token ids and loss masks, of at most data.max_length tokens."""

import json
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import DataConfig, Source
from zerotrain.rows.messages import canonical_row
from zerotrain.rows.sources import BadRow, JsonObject
from zerotrain.rows.tokens import read_tokens
from zerotrain.rows.turns import Span, locate, special_tokens
from zerotrain.runtime.errors import UserError


class TokenizedRow(NamedTuple):
    """A row as tokens, not yet cut to data.max_length."""

    ids: np.ndarray
    """int32 [tokens]."""
    mask: np.ndarray
    """bool [tokens], which of them are targets. Token 0 never is, since nothing predicts it."""
    unprompted: str = ""
    """What a server's generation prompt ends with and the text before the answers lacks."""


def tokenize_row(
    row: JsonObject, tokenizer: PreTrainedTokenizerBase, source: Source, config: DataConfig
) -> TokenizedRow:
    """Render and tokenize one parsed row.

    Args:
        source: where the row comes from, with another format than "auto".

    Raises:
        BadRow: a key is missing or of the wrong type, no token is a target, or the chat template
            changes or leaves out part of the row.
    """
    row = canonical_row(row, source, config)
    if source.format == "tokens":
        tokens = TokenizedRow(*read_tokens(row, tokenizer, config.supervise))
    else:
        text = json.dumps(row, ensure_ascii=False)
        if special := next((s for s in special_tokens(tokenizer) if s in text), None):
            raise BadRow(
                "text of a special token",
                f'its text has "{special}", a special token of the tokenizer, which would act as '
                "one; write chats as messages, and leave out start and end marks",
            )
        tokens = (_chat if "messages" in row else _plain)(row, tokenizer, config.supervise)
    tokens.mask[:1] = False  # of plain text without a bos token; no other has a target there
    if not tokens.mask.any():
        raise BadRow(
            "empty answer", "no token is supervised: it has no answer, or none of weight 1"
        )
    return tokens


def _plain(row: JsonObject, tokenizer: PreTrainedTokenizerBase, supervise: str) -> TokenizedRow:
    """A row without a chat template: prompt, completion and the eos token; the prompt of a text is
    empty.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path} has no eos token, so nothing would teach the "
            "model where an answer ends; set eos_token in its tokenizer_config.json"
        )
    encode = tokenizer.backend_tokenizer.encode
    # Apart from each other, so that no token spans the boundary: at inference there is the prompt
    # alone. Only what comes first gets the tokens that the tokenizer adds, such as bos.
    prompt = row["prompt"]
    ids = encode(prompt or row["completion"]).ids
    if ids[-1:] == [eos]:  # which some tokenizers add to every text
        ids.pop()
    prompt_tokens = 0
    if prompt:
        prompt_tokens = len(ids)
        ids += encode(row["completion"], add_special_tokens=False).ids
    mask = np.ones(len(ids) + 1, bool)
    if supervise != "all":
        mask[:prompt_tokens] = False
    return TokenizedRow(np.array([*ids, eos], np.int32), mask)


def _chat(row: JsonObject, tokenizer: PreTrainedTokenizerBase, supervise: str) -> TokenizedRow:
    """A row of messages, rendered by the chat template."""
    if not tokenizer.chat_template:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path} has no chat template, but the rows are chat: set "
            "model.chat_template"
        )
    messages = row["messages"]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    # popped, since a template that prints all keys would print the weight
    context = [i for i in answers if messages[i].pop("weight", 1) == 0]
    if supervise == "last":
        answers = answers[-1:]
    # With `all`, what is found is what is not supervised.
    wanted = context if supervise == "all" else sorted({*answers} - {*context})
    text, spans, unprompted = locate(messages, row.get("tools"), tokenizer, wanted)
    # The template has written bos itself.
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
    first, last = np.array(offsets, np.int64).reshape(-1, 2).T
    # Each token from where the one before it ends, so that omitted white space belongs to one.
    ends = np.maximum.accumulate(last)
    starts = np.minimum(first, np.append(0, ends)[:-1])
    # [characters + 1]: the last one stands for what is before the text, at index -1
    is_space = np.char.isspace(np.array([f"{text} "]).view("U1"))
    is_inside = np.zeros_like(is_space)
    for start, end in spans:
        is_inside[start:end] = True
    has_inside, has_outside = (
        sums[ends] > sums[starts]
        for sums in (np.append(0, np.cumsum(s & ~is_space)) for s in (is_inside, ~is_inside))
    )
    for i in np.flatnonzero(has_inside & has_outside):
        raise BadRow(
            "joined by the tokenizer",
            f"one token spans the boundary of an answer ({text[starts[i] : ends[i]]!a}): use a "
            "chat template whose marks are tokens, or whose headers end with a line break",
        )
    # white space alone, or a later byte of a character, is where its last character is
    return has_inside | (is_inside[ends - 1] & ~has_outside)


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
    starts, outcome = [0], "truncated"
    if config.on_too_long == "split":
        # one token less than the limit, since the last of a piece is also the first of the next
        starts, outcome = range(0, len(ids) - 1, limit - 1), "pieces of split rows"
    # The first token of a piece is context: what would predict it is in the piece before.
    pieces = [(ids[k : k + limit], np.append(False, mask[k + 1 : k + limit])) for k in starts]
    kept = [piece for piece in pieces if piece[1].any()]
    lost = ["dropped because no supervised token was left"] * (len(pieces) - len(kept))
    return kept, [outcome] * len(kept) + lost
