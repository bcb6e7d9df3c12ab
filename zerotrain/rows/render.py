"""Tokenize parsed rows into token ids and weights of at most data.max_length tokens."""

import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import DataConfig, Source
from zerotrain.rows.messages import canonical_row
from zerotrain.rows.sources import BadRow, JsonObject
from zerotrain.rows.tokens import read_tokens
from zerotrain.rows.turns import EMPTY_THOUGHTS, Span, locate, special_tokens
from zerotrain.runtime.errors import UserError


class TokenizedRow(NamedTuple):
    """A row as tokens, not yet cut to data.max_length."""

    ids: np.ndarray
    """int32 [tokens]."""
    weights: np.ndarray
    """bool or float [tokens], above 0 for targets. Nothing predicts token 0, so it never is one."""
    unprompted: str = ""
    """The end of a server's generation prompt that the text before the answers lacks."""
    is_thoughtless: bool = False
    """Whether a supervised turn begins with an empty thinking block."""


def tokenize_row(
    row: JsonObject, tokenizer: PreTrainedTokenizerBase, source: Source, config: DataConfig
) -> TokenizedRow:
    """Render and tokenize one parsed row.

    Args:
        source: the row's source. Its format must not be "auto".

    Raises:
        BadRow: a key is missing or of the wrong type, no token is a target, or the chat template
            changes or drops part of the row.
    """
    weight = row.get("weight", 1)
    row = canonical_row(row, source, config)
    if source.format == "tokens":
        tokens = TokenizedRow(*read_tokens(row, tokenizer, config.supervise))
    else:
        text = json.dumps(row, ensure_ascii=False)
        if special := next((s for s in special_tokens(tokenizer) if s in text), None):
            raise BadRow(
                "text of a special token",
                f'its text has "{special}", a special token of the tokenizer, which would act as '
                "markup; write chats as messages, without the template's tokens",
            )
        tokens = (_chat if "messages" in row else _plain)(row, tokenizer, config.supervise)
    weights = np.float32(tokens.weights * (weight * source.loss_weight))
    weights[:1] = 0  # nothing predicts the first token
    if not weights.any():
        raise BadRow(
            "empty answer", "no token is supervised: it has no answer, or only some of weight 0"
        )
    return TokenizedRow(tokens.ids, weights, *tokens[2:])


def _plain(row: JsonObject, tokenizer: PreTrainedTokenizerBase, supervise: str) -> TokenizedRow:
    """Tokenize prompt, completion and the eos token, without a chat template."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path} has no eos token, so the model would not learn "
            "where an answer ends; set eos_token in its tokenizer_config.json"
        )

    def encode(text: str) -> list[int]:
        ids = tokenizer.backend_tokenizer.encode(text).ids
        return ids[:-1] if ids[-1:] == [eos] else ids  # some tokenizers add eos to every text

    prompt, completion = row["prompt"], row["completion"]
    if not prompt:
        ids, prompt_tokens = encode(completion), 0
    else:
        ids = encode(prompt)
        prompt_tokens = len(ids)
        ids += _continuation(prompt, ids, completion, encode)
    mask = np.ones(len(ids) + 1, bool)
    if supervise != "all":
        mask[:prompt_tokens] = False
    return TokenizedRow(np.array([*ids, eos], np.int32), mask)


def _continuation(
    prompt: str, prompt_ids: list[int], completion: str, encode: Callable[[str], list[int]]
) -> list[int]:
    """Return the tokens of a completion as they follow the prompt.

    Encoded alone, the completion would begin with a space: many tokenizers put one before every
    text. So both are encoded as one text. But at inference the prompt is alone. If its last token
    would join the completion's first, as in "foo(" + "self", a line break or a letter takes the
    prompt's place.

    Args:
        encode: returns the tokens of a text, with those that the tokenizer puts before every text.

    Raises:
        BadRow: the completion's first token joins all of them.
    """
    for before, ids in ((prompt, prompt_ids), ("\n", encode("\n")), ("a", encode("a"))):
        whole = encode(before + completion)
        if whole[: len(ids)] == ids:
            return whole[len(ids) :]
    raise BadRow(
        "joined by the tokenizer",
        "the tokenizer joins the end of the prompt and the beginning of the completion "
        f"({prompt[-10:]!a} and {completion[:10]!a}); data.as_chat: true writes a header between "
        "them",
    )


def _chat(row: JsonObject, tokenizer: PreTrainedTokenizerBase, supervise: str) -> TokenizedRow:
    """Tokenize messages that the chat template renders."""
    if not tokenizer.chat_template:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path} has no chat template, but the rows are chats; set "
            "model.chat_template"
        )
    messages = row["messages"]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    # Remove the weights: a template that prints all keys would print them.
    given = {i: messages[i].pop("weight", 1) for i in answers}
    if supervise == "last":
        answers = answers[-1:]
    # The located turns are those that differ from the rest of the row.
    rest = int(supervise == "all")
    wanted = [i for i in answers if given[i] != rest]
    text, spans, unprompted = locate(messages, row.get("tools"), tokenizer, wanted)
    # The template has already written bos.
    encoded = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    weights = np.full(len(encoded.ids), rest, float)
    for weight in {given[i] for i in wanted}:
        own = [span for i, span in zip(wanted, spans, strict=True) if given[i] == weight]
        weights[tokens_within(text, encoded.offsets, own)] = weight
    is_thoughtless = supervise != "all" and any(EMPTY_THOUGHTS.match(text, i) for i, _ in spans)
    return TokenizedRow(np.array(encoded.ids, np.int32), weights, unprompted, is_thoughtless)


def tokens_within(text: str, offsets: list[Span], spans: list[Span]) -> np.ndarray:
    """Return which tokens lie inside spans, apart from white space around them.

    Args:
        offsets: the characters of each token, in text order. Some tokenizers omit white space; it
            belongs to the token that follows or contains it.
        spans: characters [start, end).

    Returns:
        bool [tokens].

    Raises:
        BadRow: a token has characters other than white space on both sides of a span's boundary.
    """
    first, last = np.array(offsets, np.int64).reshape(-1, 2).T
    # A token starts where the one before it ends, so that omitted white space belongs to one.
    ends = np.maximum.accumulate(last)
    starts = np.minimum(first, np.append(0, ends)[:-1])
    # [characters + 1]: the last element, at index -1, stands for the text before the first token.
    is_space = np.char.isspace(np.array([f"{text} "]).view("U1"))
    is_inside = np.zeros_like(is_space)
    for start, end in spans:
        is_inside[start:end] = True
    has_inside, has_outside = (
        sums[ends] > sums[starts]
        for sums in (np.append(0, np.cumsum(s & ~is_space)) for s in (is_inside, ~is_inside))
    )
    if (is_joined := has_inside & has_outside).any():
        i = is_joined.argmax()
        raise BadRow(
            "joined by the tokenizer",
            f"one token spans the boundary of an answer ({text[starts[i] : ends[i]]!a}); use a "
            "chat template whose tags are tokens, or whose headers end with a line break",
        )
    # White space alone, or a later byte of a character, belongs with its last character.
    return has_inside | (is_inside[ends - 1] & ~has_outside)


def cut_to_length(
    ids: np.ndarray, weights: np.ndarray, config: DataConfig
) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[str]]:
    """Cut a row into examples of at most max_length tokens.

    Consecutive pieces of a split row overlap by one token, which is only context in the second:
    every target of the row stays a target exactly once.

    Returns:
        (ids, weights) of each example, and a few words for each example that was cut or dropped.
    """
    limit = config.max_length
    if len(ids) <= limit:
        return [(ids, weights)], []
    if config.on_too_long == "drop":
        return [], ["dropped"]
    starts, outcome = [0], "truncated"
    if config.on_too_long == "split":
        # The last token of a piece is also the first of the next.
        starts, outcome = range(0, len(ids) - 1, limit - 1), "pieces of split rows"
    # The first token of a piece is only context: the token that predicts it is in the piece before.
    pieces = [(ids[k : k + limit], np.append(False, weights[k + 1 : k + limit])) for k in starts]
    kept = [piece for piece in pieces if piece[1].any()]
    lost = ["dropped because no supervised token was left"] * (len(pieces) - len(kept))
    return kept, [outcome] * len(kept) + lost
