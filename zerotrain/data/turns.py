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
import re
from bisect import bisect_left
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from zerotrain.data.sources import BadRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]
"""Characters [start, end)."""

# Labels are CJK ideographs of extension B: letters without case that neither JSON nor repr escapes
# and that hardly ever occur in text.
FIRST_LABEL, MAX_LABELS = 0x20000, 9999
LABEL = re.compile(f"[{chr(FIRST_LABEL)}-{chr(FIRST_LABEL + MAX_LABELS)}]")
# Keys that templates need not render: ids only pair calls with results.
UNLABELED_KEYS = {"role", "id", "tool_call_id", "type"}
THOUGHTS = re.compile(r"(\s*</?think>\s*)")  # at which templates split contents
# At the end of a generation prompt; a turn need not have it.
OPEN_THOUGHTS = re.compile(r"<think>\s*(</think>\s*)?$")
# Markup in brackets, white space, a word, or one other character. Constant texts are compared by
# these: `<|end|>` and `<|endoftext|>` have no common prefix.
PIECE = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s+|\w+|.", re.DOTALL)
MAX_LAYOUTS = 4096

# Some templates write today's date (Llama 3.2, gpt-oss, SmolLM3). With it a row would have other
# tokens every day: for a resumed run, on another node, in the check of an export. So this goes
# before them, with the date of the templates of Llama 3 where they cannot ask for one.
FIXED_DATE = (
    "{% macro strftime_now(format) %}{{ format | replace('%Y', '2024') | replace('%y', '24') | "
    "replace('%m', '07') | replace('%-m', '7') | replace('%B', 'July') | replace('%b', 'Jul') | "
    "replace('%d', '26') | replace('%-d', '26') | replace('%A', 'Friday') | replace('%a', 'Fri') | "
    "replace('%H', '00') | replace('%M', '00') | replace('%S', '00') }}{% endmacro %}\n"
)


class Leaf(NamedTuple):
    """A string of a message, or the part of one beside a thinking tag, that a label stands for."""

    message: int
    key: str
    """Of the message."""
    value: str

    def forms(self) -> list[str]:
        """What a template may write for it."""
        text = self.value
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]
        forms = [text, escaped]
        for blank in (None, "\n"):
            forms += [text.strip(blank), text.rstrip(blank), text.lstrip(blank)]
        return forms


def label_messages(messages: list[Message]) -> tuple[list[Message], list[Leaf]]:
    """The messages with labels in place of their strings, and what each label stands for."""
    leaves: list[Leaf] = []

    def labeled(value: Any, message: int, key: str) -> Any:
        if isinstance(value, dict):
            # The name of a tool's result repeats that of the call.
            kept = UNLABELED_KEYS | ({"name"} if value.get("role") == "tool" else set())
            return {
                k: inner if k in kept else labeled(inner, message, key or k)
                for k, inner in value.items()
            }
        if isinstance(value, list):
            return [labeled(inner, message, key) for inner in value]
        if not isinstance(value, str) or not value.strip():
            return value
        parts = THOUGHTS.split(value)
        for i in range(0, len(parts), 2):
            if parts[i]:
                leaves.append(Leaf(message, key, parts[i]))
                parts[i] = chr(FIRST_LABEL + len(leaves) - 1)
        return "".join(parts)

    found = [labeled(message, i, "") for i, message in enumerate(messages)]
    if len(leaves) > MAX_LABELS:
        raise BadRow("too many strings", f"its messages have over {MAX_LABELS:,} strings")
    return found, leaves


@lru_cache(maxsize=8)
def special_pattern(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str]:
    """A pattern of the texts of special tokens."""
    added = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    texts = sorted(added.union(tokenizer.all_special_tokens), key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in texts if text.strip()) or r"(?!)")


def locate(
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    tokenizer: "PreTrainedTokenizerBase",
    wanted: list[int],
    complete: list[int],
) -> tuple[str, list[Span]]:
    """Render messages, and find the turns of the assistant messages `wanted`.

    Args:
        complete: assistant messages that must be complete in the text; templates may cut the
            reasoning of others.

    Returns:
        The text, and the characters of the turns, from the end of the header through the end mark.

    Raises:
        BadRow: the template refuses, changes or leaves out part of the row, or it is not known
            what belongs to a turn.
    """
    source = FIXED_DATE + tokenizer.get_chat_template(tools=tools)
    special_tokens = json.dumps(tokenizer.special_tokens_map, default=str)
    template = Template(tokenizer, source, json.dumps(tools), special_tokens)
    text, _ = template.render(messages)
    labeled, leaves = label_messages(messages)
    layout = _layout(template, json.dumps(labeled))
    return text, layout.spans(text, leaves, wanted, complete)


class Template(NamedTuple):
    """A chat template for rows with certain tools."""

    tokenizer: "PreTrainedTokenizerBase"
    source: str
    tools: str
    """As JSON, as is the next."""
    special_tokens: str

    def render(self, messages: list[Message], prompt: bool = False) -> tuple[str, list[Span]]:
        """The text, and the spans of its {% generation %} blocks.

        Raises:
            BadRow: the template raises an exception.
        """
        has_marks = re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None
        try:
            texts, marks = render_jinja_template(
                conversations=[messages],
                tools=json.loads(self.tools),
                chat_template=self.source,
                return_assistant_tokens_mask=has_marks,
                add_generation_prompt=prompt,
                **json.loads(self.special_tokens),
            )
        except Exception as error:  # templates raise anything: TemplateError, TypeError ...
            line = " ".join(str(error).split()) or type(error).__name__
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise BadRow(
                "refused by the chat template",
                f"the chat template refuses it ({line}), a conversation of the roles {roles}; "
                "data.roles maps roles to others",
            ) from error
        return texts[0], marks[0] if marks else []

    def tail(self, messages: list[Message], prompt: bool = False) -> str:
        """The text after the last label."""
        return LABEL.split(self.render(messages, prompt)[0])[-1]


@lru_cache(maxsize=MAX_LAYOUTS)
def _layout(template: Template, messages: str) -> "Layout":
    return Layout(template, json.loads(messages))


@lru_cache(maxsize=256)
def _header(template: Template) -> str | None:
    """What a generation prompt begins an answer with, without thoughts that answers may lack. None
    if an answer has no header: it follows the end of the user's turn.

    Raises:
        BadRow: a generation prompt follows answers in any case, or never.
    """
    user, answer, reply = (
        {"role": role, "content": chr(FIRST_LABEL + i)}
        for i, role in enumerate(("user", "assistant", "user"))
    )
    _, gap, following, *_ = LABEL.split(template.render([user, answer, reply])[0])
    end, prompt = template.tail([user]), template.tail([user], prompt=True)
    answer_end = template.tail([user, answer])
    end_mark = shared_pieces(answer_end, following)
    # What only follows the last answer is another end mark, or the eos token after it.
    rest = answer_end.removeprefix(end_mark).strip()
    is_end = not end_mark.strip() or rest in ("", template.tokenizer.eos_token)
    if gap.strip() == prompt.strip() == end.strip() and not rest:
        return None
    if prompt.startswith(gap):
        prompt = gap
    header = OPEN_THOUGHTS.sub("", prompt.removeprefix(end))
    if not header.strip() or not is_end or (rest and rest in gap):
        raise BadRow(
            "not located in the chat template",
            "the chat template does not write the header of an answer {% if add_generation_prompt "
            "%} and only then, so answers cannot be told from headers; set model.chat_template to "
            "a name in data/chat_templates or to a copy with {% generation %} marks",
        )
    return header


def shared_pieces(one: str, other: str) -> str:
    """The longest common prefix of whole pieces."""
    size = 0
    for piece, other_piece in zip(PIECE.findall(one), PIECE.findall(other), strict=False):
        if piece != other_piece:
            break
        size += len(piece)
    return one[:size]


class Layout:
    """A rendered conversation of labels, and where its turns are."""

    def __init__(self, template: Template, messages: list[Message]) -> None:
        self.template, self.messages = template, messages
        self.text, self.marks = template.render(messages)
        self.constants = LABEL.split(self.text)
        self.places = [found.start() for found in LABEL.finditer(self.text)]
        self.labels = [ord(self.text[place]) - FIRST_LABEL for place in self.places]
        self.turns: dict[int, list[Span]] = {}
        for tool in json.loads(template.tools) or []:
            if str(tool.get("function", tool).get("name")) not in self.text:
                raise BadRow("left out by the chat template", "the template leaves out the tools")
        for number, message in enumerate(messages):
            for call in message.get("tool_calls", []):
                arguments = call.get("function", call).get("arguments")
                if isinstance(arguments, dict) and arguments and repr(arguments) in self.text:
                    raise self._refused(number, "is not written with its arguments as JSON")

    def spans(
        self, text: str, leaves: list[Leaf], wanted: list[int], complete: list[int]
    ) -> list[Span]:
        """The turns `wanted` in the text of a row with these strings; see locate."""
        for number, leaf in enumerate(leaves):
            is_needed = (
                leaf.message in complete or self.messages[leaf.message]["role"] != "assistant"
            )
            if is_needed and number not in self.labels:
                raise self._refused(leaf.message, f"lacks its {leaf.key}")
        shifts = self._shifts(text, leaves)
        return [
            (
                start + shifts[bisect_left(self.places, start)],
                end + shifts[bisect_left(self.places, end)],
            )
            for number in wanted
            for start, end in self._turn(number, leaves)
        ]

    def _shifts(self, text: str, leaves: list[Leaf]) -> list[int]:
        """By how much longer the row's text is than this one after 0, 1, 2 ... labels."""
        shifts, at = [0], len(self.constants[0])
        is_same = text.startswith(self.constants[0])
        for label, following in zip(self.labels, self.constants[1:], strict=True):
            forms = leaves[label].forms() if label < len(leaves) else []
            fitting = [form for form in forms if text.startswith(form + following, at)]
            if not is_same or not fitting:
                is_same = False
                break
            shifts.append(shifts[-1] + len(fitting[0]) - 1)
            at += len(fitting[0] + following)
        if not is_same or at != len(text):
            raise BadRow(
                "rewritten by the chat template",
                "the template rewrites the messages, so the origin of its text is unknown; "
                "data.supervise: last may help where it rewrites earlier turns, else set "
                "model.chat_template to another template",
            )
        return shifts

    def _turn(self, number: int, leaves: list[Leaf]) -> list[Span]:
        if number not in self.turns:
            owners = [leaves[label].message for label in self.labels]
            is_first = [label not in self.labels[:i] for i, label in enumerate(self.labels)]
            own = [i for i, owner in enumerate(owners) if owner == number and is_first[i]]
            if not own or set(owners[own[0] : own[-1] + 1]) != {number}:
                raise self._refused(number, "is not in one piece")
            first, last = own[0], own[-1]
            if self.marks:
                spans = self._marked_turn(number, first, last)
            else:
                spans = [(self._start(number, first), self._end(number, last))]
            # The line break that follows an end mark belongs to the template, not to the turn.
            start, end = spans[-1]
            spans[-1] = (start, start + len(self.text[start:end].rstrip()))
            if spans[-1][1] <= self.places[last] + 1:
                raise self._refused(number, "has no end mark, or another one than as the last turn")
            self.turns[number] = spans
        return self.turns[number]

    def _marked_turn(self, number: int, first: int, last: int) -> list[Span]:
        places = self.places[first : last + 1]
        following = [*self.places, len(self.text)][last + 1]
        spans = [
            (a, b)
            for a, b in self.marks
            if any(a <= place < b for place in places) or places[-1] < a < b <= following
        ]
        covered = [place for place in self.places if any(a <= place < b for a, b in spans)]
        if covered != places:
            raise self._refused(number, "is not what the generation marks cover")
        with contextlib.suppress(BadRow):  # some templates mark the header too
            spans[0] = (max(spans[0][0], self._start(number, first)), spans[0][1])
        return spans

    def _start(self, number: int, first: int) -> int:
        """Where the text begins that a server would ask for."""
        before, header = self.constants[first], _header(self.template)
        if header and header in before:
            return self.places[first] - len(before.rpartition(header)[2])
        prompt = self.template.tail(self.messages[:number], prompt=True)
        own = before.removeprefix(prompt)
        if not before.startswith(prompt) or (own.strip() and header):
            raise self._refused(number, "does not begin as the generation prompt does")
        return self.places[first] - len(own)

    def _end(self, number: int, last: int) -> int:
        """Where the text ends that also follows the turn when it is the last."""
        end, after = self.template.tail(self.messages[: number + 1]), self.constants[last + 1]
        return (
            self.places[last] + 1 + len(end if after.startswith(end) else shared_pieces(end, after))
        )

    def _refused(self, number: int, problem: str) -> BadRow:
        return BadRow(
            "not located in the chat template",
            f"message {number + 1} ({self.messages[number]['role']}) {problem} in the text that "
            "the chat template writes; set model.chat_template to a name in data/chat_templates "
            "or to a copy with {% generation %} marks, or data.supervise: last, or leave a key out "
            "with data.ignore_keys",
        )
