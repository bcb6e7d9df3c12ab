"""Renders a parsed row into token ids and a loss mask."""

import copy
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from data.messages import canonical_row
from data.options import RenderOptions
from data.sources import BadRow
from data.special_text import encode, special_spans, special_spans_of_chat
from data.turns import (
    RenderedChat,
    apply_template,
    describe,
    left_out,
    marks_generation,
    tokens_within,
)
from runtime.errors import UserError

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
    row: dict[str, Any],
    tokenizer: "PreTrainedTokenizerBase",
    options: RenderOptions,
    specials: list[str] | None = None,
    unprompted: list[str] | None = None,
) -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of one parsed row, not truncated; options.format is not "auto".

    `mask[t]` says whether token t is a target. Token 0 never is, since nothing predicts it.

    Args:
        specials: receives the texts of special tokens in the row's own text.
        unprompted: receives what a server's generation prompt has and the text before an answer
            lacks, if anything.

    Raises:
        BadRow: a key is missing or of the wrong type, an answer is empty, or the chat template
            changes or leaves out part of the row.
    """
    row = canonical_row(row, options)
    try:
        specials = [] if specials is None else specials
        if "messages" in row:
            ids, mask, missing = _render_chat(row, tokenizer, options, specials)
            if unprompted is not None and missing:
                unprompted.append(missing)
        elif "text" in row:
            ids = _plain_ids(row["text"], tokenizer, options, specials, start=True, end=True)
            ids = _with_end(_with_start(ids, tokenizer), tokenizer)
            mask = [True] * len(ids)
        else:
            prompt = _plain_ids(row["prompt"], tokenizer, options, specials, start=True)
            prompt = _with_start(prompt, tokenizer)
            # A tokenizer that ends every text with eos would put it before the completion.
            if prompt and tokenizer("")["input_ids"][-1:] == [tokenizer.eos_token_id]:
                prompt = prompt[:-1]
            completion = _plain_ids(row["completion"], tokenizer, options, specials, end=True)
            completion = _with_end(completion, tokenizer)
            ids, mask = prompt + completion, [False] * len(prompt) + [True] * len(completion)
    except (UnicodeEncodeError, TypeError) as error:  # half of a surrogate pair
        raise BadRow("not text", f"the tokenizer refuses it ({_one_line(error)})") from error
    if options.supervise == "all" and "messages" not in row:
        mask = [True] * len(ids)
    if mask:
        mask[0] = False
    if not any(mask):
        raise BadRow("empty answer", "no token is supervised: the answer is empty")
    return ids, mask


def _plain_ids(
    text: str,
    tokenizer: "PreTrainedTokenizerBase",
    options: RenderOptions,
    specials: list[str],
    start: bool = False,
    end: bool = False,
) -> list[int]:
    """Token ids of a text without a template, with the tokenizer's own start if `start`."""
    spans = special_spans(tokenizer, text, start, end)
    plain = _check_specials(text, spans, options, specials)
    if not tokenizer.is_fast:  # has no offsets
        return tokenizer(text, add_special_tokens=start, split_special_tokens=bool(plain))[
            "input_ids"
        ]
    return encode(tokenizer, text, plain, start)[0]


def _check_specials(
    text: str, spans: list[tuple[int, int]], options: RenderOptions, specials: list[str]
) -> list[tuple[int, int]]:
    """Those of the spans of special tokens that are tokenized as plain text; adds to `specials`.

    Raises:
        BadRow: there are some, and data.special_tokens_in_text is refuse.
    """
    specials += [text[a:b] for a, b in spans]
    if spans and options.special_tokens_in_text == "refuse":
        raise BadRow(
            "text of a special token",
            f"its text has {specials[-1]!r}, a special token; data.special_tokens_in_text: escape "
            "tokenizes it as plain text",
        )
    return spans if options.special_tokens_in_text == "escape" else []


def _with_end(ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def _with_start(ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Drop a doubled start mark: one from the text, one from the tokenizer."""
    start = tokenizer.bos_token_id
    return ids[1:] if start is not None and ids[:2] == [start, start] else ids


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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


def _render_chat(
    row: dict[str, Any],
    tokenizer: "PreTrainedTokenizerBase",
    options: RenderOptions,
    specials: list[str],
) -> tuple[list[int], list[bool], str]:
    """Token ids, loss mask, and RenderedChat.unprompted."""
    supervise = options.supervise
    given, tools = row["messages"], row.get("tools")
    messages = [{k: v for k, v in message.items() if k != "weight"} for message in given]
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    unweighted = [i for i in assistants if given[i].get("weight") == 0]
    answers = assistants[-1:] if supervise == "last" else assistants
    answers = [i for i in answers if i not in unweighted]
    if not answers:
        which = "the last assistant turn has" if supervise == "last" else "all assistant turns have"
        raise BadRow("empty answer", f"no token is supervised: {which} weight 0")
    if supervise == "all":
        chat, spans = _located(tokenizer, messages, tools, answers, unweighted)
    else:
        chat, spans = _located(tokenizer, messages, tools, answers, answers)
    try:
        own = special_spans_of_chat(chat)
    except BadRow:
        if options.special_tokens_in_text != "allow":
            raise
        own = []
    plain = _check_specials(chat.text, own, options, specials)
    ids, offsets = encode(tokenizer, chat.text, plain, is_added=False)
    mask = tokens_within(chat.text, offsets, spans)
    return ids, [not m for m in mask] if supervise == "all" else mask, chat.unprompted


def _located(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    answers: list[int],
    wanted: list[int],
) -> tuple[RenderedChat, list[tuple[int, int]]]:
    """The rendered row, and the character spans of the turns `wanted` in its text.

    Arguments of tool calls are passed as objects, which most templates write as JSON, and if that
    fails as JSON in strings, which other templates insert between their marks.

    Args:
        answers: assistant turns that must be complete; templates may cut the reasoning of others.
    """
    failure: BadRow | None = None
    for form in _argument_forms(messages):
        try:
            chat = RenderedChat(tokenizer, form, tools)
            _check_survival(chat, answers)
            if not marks_generation(tokenizer.get_chat_template(tools=tools)):
                return chat, [chat.turn(i) for i in wanted]
            marks = chat.marks()
            return chat, [span for i in wanted for span in chat.marked_turn(i, marks)]
        except BadRow as error:
            if failure is None or failure.reason == "refused by the chat template":
                failure = error
    raise failure or AssertionError("no form was tried")


def _argument_forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    yield messages
    as_text, changed = copy.deepcopy(messages), False
    for message in as_text:
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            if isinstance(function.get("arguments"), dict | list):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
                changed = True
    if changed:
        yield as_text


def _check_survival(chat: RenderedChat, answers: list[int]) -> None:
    """Raise BadRow if the template leaves out part of the row: many templates silently drop tools,
    reasoning or system turns, and those of reasoning models cut earlier answers.
    """
    for leaf in chat.missing:
        role = chat.messages[leaf.message]["role"]
        if leaf.key.startswith("tool_calls"):
            raise left_out(f"tool calls: {leaf.key}", chat.messages, leaf.message)
        if role != "assistant":
            key = f"the {role} turn" if leaf.key == "content" else leaf.key
            raise left_out(key, chat.messages, leaf.message)
        if leaf.message not in answers:
            continue
        if leaf.key != "content":
            raise left_out(leaf.key, chat.messages, leaf.message)
        earlier = any(m["role"] == "assistant" for m in chat.messages[leaf.message + 1 :])
        raise BadRow(
            "rewritten by the chat template",
            f"the template rewrites an assistant turn, {describe(chat.messages, leaf.message)}, "
            "possibly its <think> block; "
            + (
                "data.supervise: last trains on the last turn only"
                if earlier
                else "set model.chat_template to another template"
            ),
        )
    chat.check_arguments()
    if chat.tools:
        names = [tool.get("function", tool).get("name") for tool in chat.tools]
        if any(isinstance(name, str) and name not in chat.text for name in names):
            raise BadRow("left out by the chat template", "the template leaves out the tools")
        try:
            same = apply_template(chat.tokenizer, chat.messages, None) == chat.text
        except BadRow:  # it needs the tools
            same = False
        if same:
            raise BadRow("left out by the chat template", "the template leaves out the tools")


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
