"""Finds each assistant turn in the text that a chat template renders.

A template is a program: it may rewrite history, end the last turn differently from earlier ones, or
write a text that also occurs in another message. So the text is not searched. Instead, a
conversation of the same shape is rendered once with labels, letters that occur nowhere else, in
place of its strings. That shows the constant text between them. What of it belongs to a turn is
what {% generation %} marks cover; or, in a template without them, what follows the prompt that a
server would send at that point, up to what the template writes after the turn when it is the last.
A row is then rendered once, and must equal that text with its own strings in the place of the
labels. Any other row is refused.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from zerotrain.data.sources import BadRow
from zerotrain.runtime.errors import UserError, describe

Message = dict[str, Any]
Span = tuple[int, int]
"""Characters [start, end)."""

# Labels are CJK ideographs of extension B: letters without case that neither JSON nor repr escapes
# and that hardly ever occur in text.
FIRST_LABEL = 0x20000
# Reasons of bad rows
INCOMPLETE = "left out by the chat template"
NO_END_MARK = "without an end mark"
NOT_LOCATED = "not located in the chat template"
LABEL = re.compile("[\U00020000-\U0002a6df]")
# Keys that templates need not render: ids only pair calls with results.
UNLABELED_KEYS = {"role", "id", "tool_call_id", "type"}
THOUGHTS = re.compile(r"(\s*</?think>\s*)")  # at which templates split contents
# At the end of a generation prompt; a turn need not have it.
OPEN_THOUGHTS = re.compile(r"<think>\s*(</think>\s*)?$")
# Markup in brackets, white space, a word, or one other character. Constant texts are compared by
# these: `<|end|>` and `<|endoftext|>` have no common prefix.
PIECE = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s+|\w+|.", re.DOTALL)

# Some templates write today's date (Llama 3.2, gpt-oss, SmolLM3). With it a row would have other
# tokens every day: for a resumed run, on another node, in the check of an export. So this goes
# before them, with the date of the templates of Llama 3 where they cannot ask for one.
FIXED_DATE = (
    "{% macro strftime_now(format) %}{{ format | replace('%Y', '2024') | replace('%y', '24') | "
    "replace('%m', '07') | replace('%-m', '7') | replace('%B', 'July') | replace('%b', 'Jul') | "
    "replace('%d', '26') | replace('%-d', '26') | replace('%A', 'Friday') | replace('%a', 'Fri') | "
    "replace('%H', '00') | replace('%M', '00') | replace('%S', '00') }}{% endmacro %}\n"
)


def label_messages(messages: list[Message]) -> tuple[list[Message], list[str], list[int]]:
    """The messages with labels in place of their strings (of a string with thinking tags, in place
    of the parts beside them), the strings, and the numbers of their messages.
    """
    strings: list[str] = []
    owners: list[int] = []

    def labeled(value: Any, message: int) -> Any:
        if isinstance(value, dict):
            # The name of a tool's result repeats that of the call.
            is_result = value.get("role") == "tool"
            kept = {*UNLABELED_KEYS, "name"} if is_result else UNLABELED_KEYS
            return {
                k: inner if k in kept else labeled(inner, message) for k, inner in value.items()
            }
        if isinstance(value, list):
            return [labeled(inner, message) for inner in value]
        if not isinstance(value, str) or not value.strip():
            return value
        parts = THOUGHTS.split(value)
        for i in range(0, len(parts), 2):
            if parts[i]:
                strings.append(parts[i])
                owners.append(message)
                parts[i] = chr(FIRST_LABEL + len(strings) - 1)
        return "".join(parts)

    return [labeled(message, i) for i, message in enumerate(messages)], strings, owners


def forms_of(text: str) -> Iterator[str]:
    """What a template may write for a string, the most likely first."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    for blank in (None, "\n"):
        yield text.strip(blank)
        yield text.rstrip(blank)
        yield text.lstrip(blank)


@lru_cache(maxsize=8)
def special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """A pattern of the texts of special tokens."""
    added = tokenizer.added_tokens_decoder.values()
    texts = [re.escape(token.content) for token in added if token.special]
    return re.compile("|".join(texts) or r"(?!)")


def locate(
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    tokenizer: PreTrainedTokenizerBase,
    wanted: list[int],
) -> tuple[str, list[Span], str]:
    """Render messages, and find the turns of the assistant messages `wanted`. Templates may cut
    the reasoning of others.

    Returns:
        The text; the characters of the turns, from the end of the header through the end mark; and
        what a server's generation prompt ends with and the text before the turns lacks.

    Raises:
        BadRow: the template refuses, changes or leaves out part of the row, or it is not known
            what belongs to a turn.
    """
    source = tokenizer.get_chat_template(tools=tools)
    template = Template(tokenizer, FIXED_DATE + source, json.dumps(tools))
    refusals = []
    for change in (list, with_arguments_as_text):
        changed = change(messages)
        try:
            text, _ = template.render(changed)
            labeled, strings, owners = label_messages(changed)
            layout = _layout(template, json.dumps(labeled), tuple(owners), tuple(wanted))
            return text, layout.spans(text, strings), layout.unprompted
        except BadRow as error:
            refusals.append(error)
    raise refusals[0]


def with_arguments_as_text(messages: list[Message]) -> list[Message]:
    """The messages with the arguments of tool calls as JSON, as some templates want them
    (functionary, Reka).
    """

    def changed(value: dict[str, Any]) -> dict[str, Any]:
        arguments = value.get("arguments", "")
        if "name" in value and not isinstance(arguments, str):
            value["arguments"] = json.dumps(arguments, ensure_ascii=False)
        return value

    return json.loads(json.dumps(messages), object_hook=changed)


class Template(NamedTuple):
    """A chat template for rows with certain tools."""

    tokenizer: PreTrainedTokenizerBase
    source: str
    tools: str
    """As JSON."""

    def render(self, messages: list[Message], prompt: bool = False) -> tuple[str, list[Span]]:
        """The text, and the spans of its {% generation %} blocks.

        Raises:
            BadRow: the template raises an exception.
        """
        try:
            [text], marks = render_jinja_template(
                conversations=[messages],
                tools=json.loads(self.tools),
                chat_template=self.source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask="endgeneration" in self.source,
                **self.tokenizer.special_tokens_map,
            )
            return text, marks[0] if marks else []
        except TemplateSyntaxError as error:
            raise UserError(
                f"the chat template of tokenizer {self.tokenizer.name_or_path} or of "
                f"model.chat_template is not valid Jinja: line {error.lineno - 1}: "
                f"{describe(error)}; correct it, or set model.chat_template to another"
            ) from error
        except Exception as error:  # templates raise anything: TemplateError, TypeError ...
            roles = ", ".join(message["role"] for message in messages)
            problem = f"the chat template refuses the turns {roles}: {describe(error)}"
            raise BadRow("refused by the chat template", problem) from error

    def tail(self, messages: list[Message], prompt: bool = False) -> str:
        """The text after the last label."""
        return LABEL.split(self.render(messages, prompt)[0])[-1]


class Frame(NamedTuple):
    """What a template writes around the contents of a chat."""

    header: str | None
    """What a generation prompt begins an answer with, without thoughts that answers may lack. Empty
    if a generation prompt follows answers in any case, or never; None if an answer has no header:
    it follows the end of the user's turn.
    """
    opening: str
    """Before the first user's content."""
    user_end: str
    """After the user's content, when that turn is the last."""


@lru_cache(maxsize=256)
def _frame(template: Template) -> Frame:
    roles = ("user", "assistant", "user")
    chat = [{"role": role, "content": chr(FIRST_LABEL + i)} for i, role in enumerate(roles)]
    opening, gap, following, *_ = LABEL.split(template.render(chat)[0])
    end = template.tail(chat[:1])
    prompt = template.tail(chat[:1], prompt=True)
    answer_end = template.tail(chat[:2])
    end_mark = shared_pieces(answer_end, following)
    rest = answer_end.removeprefix(end_mark).strip()  # only after the last answer
    prompts_always = rest not in ("", template.tokenizer.eos_token) and (
        end_mark.strip() or rest in gap
    )
    header = OPEN_THOUGHTS.sub("", shared_pieces(prompt, gap).removeprefix(end))
    if gap.strip() == prompt.strip() == end.strip() and not rest:
        header = None
    elif prompts_always or not header.strip():
        header = ""
    return Frame(header, opening, end)


def shared_pieces(one: str, other: str, step: int = 1) -> str:
    """The longest common prefix of whole pieces; with step -1 the longest common suffix."""
    pieces = [PIECE.findall(text)[::step] for text in (one, other)]
    return "".join(os.path.commonprefix(pieces)[::step])  # noqa: RUF071 - lists, not paths


class Layout:
    """A rendered conversation of labels, and where its turns are.

    Attributes:
        text: the rendered text: constants[0], a label, constants[1], a label ... constants[-1].
        labels: their numbers in the order of the text; a label may occur several times, or never.
        places: the characters of `text` at which they are.
        turns: spans of `text`, of the messages `wanted`.
        unprompted: what the generation prompt ends with before the first or the last of these, and
            the text there does not have: a block of thoughts, in most cases.
    """

    def __init__(
        self,
        template: Template,
        messages: str,
        owners: tuple[int, ...],
        wanted: tuple[int, ...],
    ) -> None:
        self.template = template
        self.messages = json.loads(messages)
        self.owners = owners
        self.text, self.marks = template.render(self.messages)
        self.constants = LABEL.split(self.text)
        self.places = [found.start() for found in LABEL.finditer(self.text)]
        self.labels = [ord(label) - FIRST_LABEL for label in LABEL.findall(self.text)]
        self._check_complete(wanted)
        self.turns = [span for number in wanted for span in self._turn(number)]
        lacking = map(self._lacking, {*wanted[:1], *wanted[-1:]})
        self.unprompted = next(filter(None, lacking), "")

    def _check_complete(self, wanted: tuple[int, ...]) -> None:
        for tool in json.loads(self.template.tools) or []:
            if str(tool.get("function", tool).get("name")) not in self.text:
                raise BadRow(
                    INCOMPLETE,
                    "the chat template leaves out the tools; set model.chat_template to one that "
                    "writes them, or data.ignore_keys: [tools]",
                )
        for number, message in enumerate(self.messages):
            for call in message.get("tool_calls", []):
                arguments = call.get("function", call).get("arguments")
                if arguments and repr(arguments) in self.text:
                    raise self._refused(number, "is not written with its arguments as JSON")
        for label, owner in enumerate(self.owners):
            is_needed = owner in wanted or self.messages[owner]["role"] != "assistant"
            if is_needed and label not in self.labels:
                raise self._refused(owner, "is not complete", INCOMPLETE)

    def spans(self, text: str, strings: list[str]) -> list[Span]:
        """The turns in the text of a row with these strings, which must be this layout's text with
        the strings in place of the labels.
        """
        # by how much longer the row's text is than this one after 0, 1, 2 ... labels
        shifts = [0]
        expected = self.constants[0]
        for label, following in zip(self.labels, self.constants[1:], strict=True):
            forms = forms_of(strings[label]) if label < len(strings) else []
            at = len(expected)
            form = next((form for form in forms if text.startswith(form + following, at)), "")
            shifts.append(shifts[-1] + len(form) - 1)
            expected += form + following
        if expected != text:
            raise BadRow(
                "rewritten by the chat template",
                "the template rewrites the messages, so the origin of its text is unknown; "
                "data.supervise: last may help where it rewrites earlier turns, else set "
                "model.chat_template to another template",
            )
        edges = np.array(self.turns, int)
        return (edges + np.array(shifts)[np.searchsorted(self.places, edges)]).tolist()

    def _lacking(self, number: int) -> str:
        prompt = ""
        with contextlib.suppress(BadRow):  # of the messages before
            prompt = self.template.tail(self.messages[:number], prompt=True)
        before = self.constants[self._labels_of(number)[0]]
        shared = "" if before.startswith(prompt) else shared_pieces(prompt, before)
        return prompt.removeprefix(shared) if shared.strip() else ""

    def _labels_of(self, number: int) -> tuple[int, int]:
        """Where the first and the last label of a message are in `labels`."""
        own = [
            i
            for i, label in enumerate(self.labels)
            if self.owners[label] == number and label not in self.labels[:i]
        ]
        if not own or any(self.owners[i] != number for i in self.labels[own[0] : own[-1]]):
            raise self._refused(number, "is not in one piece")
        return own[0], own[-1]

    def _turn(self, number: int) -> list[Span]:
        """The spans of a turn up to its end mark. The line break that follows it belongs to the
        template, not to the turn; so does the header of the user's next turn, where a template
        writes it after every answer. In GLM's, though, this header is all there is, and so the end
        mark.
        """
        first, last = self._labels_of(number)
        if self.marks:
            spans = self._marked_turn(number, first, last)
        else:
            spans = [(self._start(number, first), self._end(number, last))]
        start, end = spans[-1]
        rest = max(start, self.places[last] + 1)  # after the content
        tail = self.text[rest:end].rstrip()
        header = shared_pieces(tail, _frame(self.template).opening.rstrip(), step=-1)
        mark = tail.removesuffix(header).rstrip() or tail
        if not THOUGHTS.sub("", mark):
            raise self._refused(
                number, "has no end mark, or another one than as the last turn", NO_END_MARK
            )
        if mark == header and len(PIECE.findall(mark)) > 1:
            raise self._refused(number, "ends with the header of the user's next turn")
        return [*spans[:-1], (start, rest + len(mark))]

    def _marked_turn(self, number: int, first: int, last: int) -> list[Span]:
        """The blocks between the neighboring messages' strings, apart from a header in them. What
        is marked between two answers belongs to the first one, but for the second one's string.
        """
        low = self.places[first - 1] + 1 if first else 0
        if first and self.messages[self.owners[self.labels[first - 1]]]["role"] == "assistant":
            low = self.places[first]
        high = [*self.places, len(self.text)][last + 1]
        spans = [(a, b) for a, b in self.marks if a < high and low < b and self.text[a:b].strip()]
        covered = [place for place in self.places if any(a <= place < b for a, b in spans)]
        if covered != self.places[first : last + 1]:
            raise self._refused(number, "is not what the generation marks cover")
        with contextlib.suppress(BadRow):  # some templates mark the header too
            start = self._start(number, first)
            spans = [(max(a, start), b) for a, b in spans if b > start]
        return spans

    def _start(self, number: int, first: int) -> int:
        """Where the text begins that a server would ask for."""
        before = self.constants[first]
        header = _frame(self.template).header
        if header == "":
            raise BadRow(
                NOT_LOCATED,
                "the chat template does not write the header of an answer after the last message "
                "if add_generation_prompt is set, and only then, so answers cannot be told from "
                "headers; set model.chat_template to a copy that writes it there, between {% if "
                "add_generation_prompt %} and {% endif %}",
            )
        if header and header in before:
            return self.places[first] - len(before.rpartition(header)[2])
        end = self.template.tail(self.messages[:number])
        prompt = self.template.tail(self.messages[:number], prompt=True)
        shared = shared_pieces(prompt, before)
        has_header = shared.removeprefix(end).strip() or before.strip() == prompt.strip()
        if not (shared == prompt if header is None else has_header):
            raise self._refused(number, "does not begin as the generation prompt does")
        return self.places[first] - len(before) + len(OPEN_THOUGHTS.sub("", shared))

    def _end(self, number: int, last: int) -> int:
        """Where the text ends that also follows the turn when it is the last, or else (gpt-oss,
        OLMo) a user's turn.
        """
        end = self.template.tail(self.messages[: number + 1])
        user_end = _frame(self.template).user_end
        after = self.constants[last + 1]
        if not after.startswith(end):
            end = shared_pieces(after, end)
            if not end.strip() and after.startswith(user_end):
                end = user_end
        return self.places[last] + 1 + len(end)

    def _refused(self, number: int, problem: str, reason: str = NOT_LOCATED) -> BadRow:
        cures = {
            INCOMPLETE: "data.supervise: last if it cuts earlier turns, data.ignore_keys for a key "
            "that it never writes, or model.chat_template",
            NO_END_MARK: "model.chat_template to a copy that writes {{ eos_token }} after it",
            NOT_LOCATED: "model.chat_template to a name in data/chat_templates or to a copy with "
            "{% generation %} marks, or data.supervise: last where only earlier turns are such",
        }
        return BadRow(
            reason,
            f"message {number + 1} ({self.messages[number]['role']}) {problem} in the text that "
            f"the chat template writes; set {cures[reason]}",
        )


_layout = lru_cache(maxsize=4096)(Layout)  # rows of one shape share theirs
