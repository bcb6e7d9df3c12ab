"""Locates each message of a chat in the text that a chat template renders.

A template is a program: it may rewrite history, end the last turn differently from earlier ones, or
write a text that also occurs in another message. So searching its output is not reliable. Instead,
the row is rendered a second time with each character of a message's strings replaced by a label of
that string. If both renderings have the same length and agree everywhere else, then each character
of the first comes either from a known string or from the template. The text that the template
writes between turns is divided by also rendering the messages up to a turn, with and without a
generation prompt.
"""

import copy
import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from transformers.utils.chat_template_utils import render_jinja_template

from data.sources import BadRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Labels are CJK ideographs of extension B: letters without case that neither JSON nor repr escapes
# and that hardly ever occur in text.
FIRST_LABEL, LABELS = 0x20000, 0xA6D0
LABEL_RUN = re.compile(f"([{chr(FIRST_LABEL)}-{chr(FIRST_LABEL + LABELS - 1)}])\\1*")
# Keys of a message that templates need not render: ids only pair calls with results. (Nor the name
# of a tool's result, which repeats that of the call.)
UNRENDERED_KEYS = {"role", "id", "tool_call_id", "type"}
# Markup in brackets, white space, a word, or one other character. Marks are compared as a whole:
# the headers `<|user|>` and `<|assistant|>` have no common prefix.
PIECE = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s+|\w+|.", re.DOTALL)
TAG = re.compile(r"</?[^<>\s]+>")
PROBE = {"role": "user", "content": chr(FIRST_LABEL + LABELS - 1)}

Message = dict[str, Any]

# Some templates write today's date (Llama 3.2, gpt-oss, SmolLM3). With it a row would have other
# tokens every day: for a resumed run, on another node, in the check of an export.
DATE = datetime(2024, 7, 26)  # that of the templates of Llama 3, where they cannot ask for one
FORMAT_CODES = (*"YymBbdeAajHIMSp", "-d", "-m")
FIXED_DATE = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('%{code}', '{DATE.strftime(f'%{code}')}')" for code in FORMAT_CODES)
    + " }}{% endmacro %}\n"  # the line break is removed with the tag (trim_blocks)
)
"""What goes before a template that asks for the date, so that it gets DATE."""


def asks_for_date(template: str) -> bool:
    """Whether what a template renders depends on the day."""
    return "strftime_now" in template


def template_of(tokenizer: "PreTrainedTokenizerBase", tools: list[dict[str, Any]] | None) -> str:
    """The template for rows with these tools, rendering as on DATE."""
    template = tokenizer.get_chat_template(tools=tools)
    return FIXED_DATE + template if asks_for_date(template) else template


def apply_template(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool = False,
) -> str:
    """Render messages as text, as on DATE.

    Raises:
        BadRow: the template raises an exception.
    """
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template_of(tokenizer, tools),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # templates raise anything: TemplateError, TypeError ...
        line = " ".join(str(error).split()) or type(error).__name__
        message = f"the chat template refuses it ({line})"
        raise BadRow("refused by the chat template", message) from error


def marks_generation(template: str) -> bool:
    """Whether a template marks the assistant's text with {% generation %} blocks."""
    return bool(re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template))


# --------------------------------------------------------------------------------------------------
# Labels


@dataclass(frozen=True, eq=False)
class Leaf:
    """A string of a message, and how it was labeled."""

    message: int
    key: str
    """Such as `content` or `tool_calls[0].function.name`."""
    text: str
    labeled: str
    """`text` with the replaced characters set to `label`."""
    label: str

    @cached_property
    def replaced(self) -> str:
        """The characters of the text that were replaced."""
        pairs = zip(self.text, self.labeled, strict=True)
        return "".join(c for c, shown in pairs if shown == self.label)

    @property
    def lead(self) -> str:
        """The part of the text before the first replaced character."""
        return self.text[: self.labeled.index(self.label)]

    @property
    def trail(self) -> str:
        """The part of the text after the last replaced character."""
        return self.text[self.labeled.rindex(self.label) + 1 :]


@lru_cache(maxsize=8)
def _protections(template: str) -> list[re.Pattern[str]]:
    """Patterns of what must not be replaced, tried in this order: white space, which templates
    trim; what JSON escapes; and texts such as </think> that the template looks for, because it
    behaves differently without them.
    """
    escaped = r"[\s\"'\\\x00-\x1f]"
    quoted = {value[1:-1] for _, kind, value in Environment().lex(template) if kind == "string"}
    texts = [t.encode("ascii", "backslashreplace").decode("unicode-escape") for t in quoted]
    texts = sorted((t for t in texts if len(t) > 1), key=len, reverse=True)
    marks = [t for t in texts if re.search(r"\W", t)]
    return [
        re.compile(r"\s"),
        re.compile(escaped),
        *(
            re.compile("|".join([*map(re.escape, some), TAG.pattern, escaped]))
            for some in (marks, texts)
        ),
    ]


class _Labeler:
    def __init__(self, keep: re.Pattern[str]) -> None:
        self.keep, self.leaves = keep, list[Leaf]()

    def message(self, message: Message, number: int) -> Message:
        skipped = UNRENDERED_KEYS | ({"name"} if message["role"] == "tool" else set())
        return {
            k: v if k in skipped else self._value(v, number, k, skipped) for k, v in message.items()
        }

    def _value(self, value: Any, number: int, key: str, skipped: set[str]) -> Any:
        if isinstance(value, dict):
            # Arguments may have any keys: an `id` there is content.
            inner = set() if key.endswith("arguments") else skipped
            return {
                k: v if k in inner else self._value(v, number, f"{key}.{k}", inner)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [self._value(v, number, f"{key}[{i}]", skipped) for i, v in enumerate(value)]
        return self._string(value, number, key) if isinstance(value, str) else value

    def _string(self, text: str, number: int, key: str) -> str:
        if len(self.leaves) >= LABELS - 1:
            raise BadRow("too many strings", f"its messages have over {LABELS:,} strings")
        label, parts, at = chr(FIRST_LABEL + len(self.leaves)), [], 0
        for kept in self.keep.finditer(text):
            parts += [label * (kept.start() - at), kept[0]]
            at = kept.end()
        labeled = "".join([*parts, label * (len(text) - at)])
        if label in labeled:
            self.leaves.append(Leaf(number, key, text, labeled, label))
        return labeled


@dataclass(frozen=True, eq=False)
class Run:
    """Characters [start, end) of the rendered row that came from one string."""

    start: int
    end: int
    leaf: Leaf
    first: bool = True
    """Whether it belongs to the string's first occurrence. Templates may repeat a string: some
    repeat a call's name with its result."""


def _runs(text: str, labeled: str, leaves: list[Leaf]) -> list[Run] | None:
    """Runs of strings in `text`; None if the two renderings differ in anything else."""
    if len(text) != len(labeled):
        return None
    runs, at = [], 0
    for found in LABEL_RUN.finditer(labeled):
        start, end = found.span()
        number = ord(found[1]) - FIRST_LABEL
        if text[at:start] != labeled[at:start] or number >= len(leaves):
            return None
        runs.append(Run(start, end, leaves[number]))
        at = end
    return runs if text[at:] == labeled[at:] else None


def _placed(text: str, runs: list[Run], leaves: list[Leaf]) -> tuple[list[Run], list[Leaf]]:
    """The runs, joined for each occurrence of a string, and the strings that are incomplete."""
    left = {leaf.label: leaf.replaced for leaf in leaves}
    cut = set()
    joined: list[Run] = []
    for run in runs:
        part, rest = text[run.start : run.end], left[run.leaf.label]
        if first := rest.startswith(part):
            if rest == run.leaf.replaced and not _holds(text[: run.start], run.leaf.lead, True):
                cut.add(run.leaf)
            left[run.leaf.label] = rest[len(part) :]
            if rest == part and not _holds(text[run.end :], run.leaf.trail, False):
                cut.add(run.leaf)
        start = run.start
        if joined and joined[-1].leaf is run.leaf and joined[-1].first == first:
            start = joined.pop().start
        joined.append(Run(start, run.end, run.leaf, first))
    return joined, [leaf for leaf in leaves if left[leaf.label] or leaf in cut]


def _holds(text: str, kept: str, at_end: bool) -> bool:
    """Whether characters that were not replaced are present too, apart from tags, which templates
    translate, white space, and the backslashes of JSON.
    """
    size = 4 * len(kept) + 20
    near = text[-size:] if at_end else text[:size]
    near, signs = ("".join(t.replace("\\", "").split()) for t in (near, TAG.sub("", kept)))
    forms = (near, TAG.sub("", near))
    return any(form.endswith(signs) if at_end else form.startswith(signs) for form in forms)


# --------------------------------------------------------------------------------------------------
# A rendered chat


def describe(messages: list[Message], number: int) -> str:
    """Name of a message in error messages, counted from 1."""
    return f"message {number + 1} ({messages[number]['role']})"


class RenderedChat:
    """A row's text, and which message each of its characters came from.

    Raises:
        BadRow: the template raises an exception, or rewrites messages so that this is unknown.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
    ) -> None:
        self.tokenizer, self.messages, self.tools = tokenizer, messages, tools
        self.unprompted = ""
        """What a server's generation prompt has, and the text before a turn located here lacks."""
        self._tails: dict[tuple[int, bool], tuple[str | None, str | None]] = {}
        self.text = apply_template(tokenizer, messages, tools)
        self.text.encode()  # raises UnicodeEncodeError on half of a surrogate pair
        template = tokenizer.get_chat_template(tools=tools)
        for keep in _protections(template):
            labeler = _Labeler(keep)
            self._labeled = [labeler.message(m, i) for i, m in enumerate(messages)]
            try:
                labeled = apply_template(tokenizer, self._labeled, tools)
            except BadRow:  # it looks for a text that was replaced
                continue
            runs = _runs(self.text, labeled, labeler.leaves)
            if runs is not None:
                self.runs, self.missing = _placed(self.text, runs, labeler.leaves)
                return
        raise BadRow(
            "rewritten by the chat template",
            "the template rewrites the messages, so the origin of its text is unknown; set "
            "model.chat_template to another template",
        )

    def check_arguments(self) -> None:
        """Raise BadRow if a number, boolean or null in the arguments of a tool call does not affect
        the text, or if an object is written in Python's syntax instead of JSON.
        """
        for i, message in enumerate(self.messages):
            for j, call in enumerate(message.get("tool_calls") or []):
                arguments = call.get("function", call).get("arguments")
                key = f"tool_calls[{j}].function.arguments"
                shown = repr(arguments)
                as_python = shown != json.dumps(arguments, ensure_ascii=False)
                if isinstance(arguments, dict) and as_python and shown in self.text:
                    raise left_out(f"{key} as JSON", self.messages, i)
                for path in _scalars(arguments):
                    changed = copy.deepcopy(self.messages)
                    other = changed[i]["tool_calls"][j]
                    _alter(other.get("function", other), ["arguments", *path])
                    if apply_template(self.tokenizer, changed, self.tools) == self.text:
                        name = "".join(f"[{step!r}]" for step in path)
                        raise left_out(key + name, self.messages, i)

    # ----------------------------------------------------------------------------------------------
    # Turns

    def turn(self, number: int) -> tuple[int, int]:
        """Characters [start, end) of assistant message `number`: from the end of its generation
        prompt through its own end mark.

        Raises:
            BadRow: they cannot be determined.
        """
        mine, before, after = self._neighbours(number)
        start = self._start(number, mine[0], before)
        end = self._end(number, mine, before, after)
        if any(start < r.end and r.start < end for r in self.runs if r.leaf.message != number):
            raise self._not_located(number)
        return start, end

    def marked_turn(self, number: int, marks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of `marks`, the spans of {% generation %} blocks, that belong to message `number`.

        Raises:
            BadRow: there are none, or one extends beyond the turn.
        """
        mine, before, after = self._neighbours(number)
        low = before.end if before else 0
        start = self._start(number, mine[0], before)
        end = self._end(number, mine, before, after)
        own = [(a, b) for a, b in marks if a < end and start < b]
        if not any(a < run.end and run.start < b for a, b in own for run in mine):
            raise BadRow(
                "left out by the chat template",
                "the template's generation marks leave out " + describe(self.messages, number),
            )
        first, last = own[0][0], own[-1][1]
        if first < start and before:
            tail = self._tail(number, False)
            gap = self.text[low:start]
            low += len(tail) if tail and gap.startswith(tail) else len(gap)
        others = (r for r in self.runs if r.leaf.message != number)
        mixed = any(a < r.end and r.start < b for r in others for a, b in own)
        if mixed or first < low or self.text[end:last].strip():
            raise BadRow(
                "covered by the chat template",
                "the template's generation marks cover more than "
                + describe(self.messages, number)
                + "; move {% generation %} and {% endgeneration %}",
            )
        return own

    def marks(self) -> list[tuple[int, int]]:
        """Characters [start, end) of the {% generation %} blocks.

        Raises:
            BadRow: one covers text of another role than the assistant.
        """
        texts, marks = render_jinja_template(
            conversations=[self.messages],
            tools=self.tools,
            chat_template=template_of(self.tokenizer, self.tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        if texts[0] != self.text:
            raise BadRow(
                "rewritten by the chat template", "the template renders it differently each time"
            )
        spans = sorted((start, end) for start, end in marks[0] if end > start)
        for run in self.runs:
            other = self.messages[run.leaf.message]["role"] != "assistant"
            if other and any(a < run.end and run.start < b for a, b in spans):
                raise BadRow(
                    "covered by the chat template",
                    "the template's generation marks cover "
                    + describe(self.messages, run.leaf.message)
                    + "; move {% generation %} and {% endgeneration %}",
                )
        return spans

    def _neighbours(self, number: int) -> tuple[list[Run], Run | None, Run | None]:
        """Runs of message `number`, the last run before them, and the first one after them."""
        mine = [r for r in self.runs if r.first and r.leaf.message == number]
        if not mine:
            raise self._not_located(number)
        before = [r for r in self.runs if r.end <= mine[0].start]
        after = (r for r in self.runs if r.start >= mine[-1].end)
        return mine, before[-1] if before else None, next(after, None)

    def _start(self, number: int, first: Run, before: Run | None) -> int:
        low, gap = self._gap_before(first, before)
        prompt = self._tail(number, True, follows=before)
        if prompt is not None and gap.startswith(prompt):
            return low + len(prompt)
        plain = self._tail(number, False, follows=before) or ""
        if prompt and prompt != plain:
            # Prompts of reasoning models open a block that turns without reasoning do not have.
            shared = _shared(prompt, gap)
            if prompt.startswith(plain) and prompt[len(plain) : shared].strip():
                self.unprompted = prompt[shared:]
                return low + shared
            raise self._not_located(number)
        if first.leaf.key != "content":  # text before a call may belong to header or call
            raise self._not_located(number)
        return first.start - len(_matching(first.leaf.lead, gap.endswith))

    def _gap_before(self, first: Run, before: Run | None) -> tuple[int, str]:
        low = before.end if before else 0
        return low, self.text[low : first.start]

    def _end(self, number: int, mine: list[Run], before: Run | None, after: Run | None) -> int:
        last = mine[-1]
        gap = self.text[last.end : after.start if after else len(self.text)]
        whole = after is None and number == len(self.messages) - 1
        alone = gap if whole else self._tail(number + 1, False, follows=last)
        prompt = self._tail(number, True, follows=before)
        prompted = prompt and self._gap_before(mine[0], before)[1].startswith(prompt)
        if alone is not None and prompted:
            alone = self._without_prompt(number, last, alone, prompt)
        # If a message in between left no text, its header is still there.
        adjacent = before is not None and before.leaf.message == number - 1
        others = self._tail(number, False, follows=before) if adjacent else None
        if prompted and others == prompt:
            others = None  # possibly a generation prompt, written regardless of the flag
        following = after if after and after.leaf.message == number + 1 else None
        size = len(alone) if whole else self._end_size(last, following, gap, alone, others)
        if size is None:
            raise self._not_located(number)
        end = gap[:size].rstrip()
        trail = _matching(last.leaf.trail, gap.startswith)
        # The line break that follows an end mark belongs to the template, not to the turn.
        return last.end + max(len(trail), len(end) if end[len(trail) :] else size)

    def _end_size(
        self, last: Run, after: Run | None, gap: str, alone: str | None, others: str | None
    ) -> int | None:
        """How many characters of `gap`, the text after the turn's last string, belong to the turn.

        Args:
            alone: what follows that string if the turn is the last message.
            others: what follows the previous message's last string if that message is the last.
        """
        trail = _matching(last.leaf.trail, gap.startswith)  # the end of the string itself
        if alone and alone.removeprefix(trail).strip():
            if gap.startswith(alone):
                return len(alone)
            if gap[len(trail) : (shared := _shared(alone, gap))].strip():
                return shared
        # As the last message it ends with another mark, or none. Within a row it may end like the
        # turns of other roles ...
        if others and others.strip() and gap[len(trail) :].startswith(others):
            return len(trail) + len(others)
        # ... or right before the next message's header.
        if after is not None:
            header = self._header(self.messages[after.leaf.message]["role"])
            shared = _shared(header, gap[len(trail) :], last=True)
            if gap[len(gap) - shared :].strip():
                return len(gap) - shared
        return None

    def _without_prompt(self, number: int, last: Run, tail: str, prompt: str) -> str:
        """The part of `tail` that belongs to the turn: some templates write a generation prompt
        even if add_generation_prompt is false.
        """
        ends = [PIECE.findall(text.rstrip())[-1:] for text in (prompt, tail)]
        if ends[0] != ends[1] or prompt != self._tail(number, False):
            return tail
        following = self._rendered([*self._labeled[: number + 1], PROBE], False) or ""
        rest = following.rpartition(last.leaf.label)[2].partition(PROBE["content"])[0]
        if rest.startswith(tail):
            return tail
        own = rest[: len(rest) - _shared(self._header("user"), rest, last=True)]
        before_prompt = tail[: len(tail) - _shared(prompt, tail, last=True)].strip()
        consistent = own.strip() and tail.startswith(own) and before_prompt in ("", own.strip())
        if not consistent:
            raise self._not_located(number)
        return own

    def _tail(self, number: int, prompt: bool, follows: Run | None = None) -> str | None:
        """What follows the last string if the row has only the first `number` messages, with or
        without a generation prompt; None if the template refuses that, or if the last string is not
        that of `follows`.
        """
        if number == 0:
            return None
        if (number, prompt) not in self._tails:
            text = self._rendered(self._labeled[:number], prompt)
            found = deque(LABEL_RUN.finditer(text or ""), maxlen=1)
            self._tails[number, prompt] = (
                text if text is None or not found else text[found[0].end() :],
                found[0][1] if found else None,
            )
        tail, label = self._tails[number, prompt]
        return tail if follows is None or label in (None, follows.leaf.label) else None

    def _header(self, role: str) -> str:
        """What the template writes before a message of this role that follows another of that role
        or, if it refuses that, before the first message.
        """
        message = {**PROBE, "role": role}
        once = (self._rendered([message], False) or "").partition(PROBE["content"])
        twice = (self._rendered([message, message], False) or "").split(PROBE["content"])
        if len(twice) == 3 and twice[1].startswith(once[2]) and twice[1][len(once[2]) :].strip():
            return twice[1][len(once[2]) :]
        return once[0] if once[1] else ""

    def _rendered(self, messages: list[Message], prompt: bool) -> str | None:
        try:
            return apply_template(self.tokenizer, messages, self.tools, prompt)
        except BadRow:
            return None

    def _not_located(self, number: int) -> BadRow:
        is_last = not any(m["role"] == "assistant" for m in self.messages[number + 1 :])
        return BadRow(
            "rewritten by the chat template",
            f"{describe(self.messages, number)} cannot be located in the text that the template "
            "writes; put {% generation %} marks into a copy of the template "
            "(model.chat_template)" + ("" if is_last else ", or set data.supervise: last"),
        )


def left_out(key: str, messages: list[Message], number: int) -> BadRow:
    """The error for a template that leaves out `key` of message `number`."""
    return BadRow(
        "left out by the chat template",
        f"the template leaves out {key} of {describe(messages, number)}",
    )


def _matching(around: str, fits: Callable[[str], bool]) -> str:
    """`around` as a template may have written it: unchanged, trimmed, or escaped as in JSON."""
    trimmed = around.strip()
    for form in (around, trimmed, json.dumps(around, ensure_ascii=False)[1:-1],
                 json.dumps(trimmed, ensure_ascii=False)[1:-1]):  # fmt: skip
        if form and fits(form):
            return form
    return ""


def _shared(one: str, other: str, last: bool = False) -> int:
    """Number of characters in the longest common prefix, or suffix, of whole pieces."""
    step, size = -1 if last else 1, 0
    for a, b in zip(PIECE.findall(one)[::step], PIECE.findall(other)[::step], strict=False):
        if a != b:
            break
        size += len(a)
    return size


def _scalars(value: Any) -> Iterator[list[Any]]:
    """Paths to all values but strings, objects and lists."""
    if isinstance(value, dict | list):
        for step, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if not isinstance(inner, str | dict | list):
                yield [step]
            else:
                yield from ([step, *rest] for rest in _scalars(inner))


def _alter(holder: Any, path: list[Any]) -> None:
    for step in path[:-1]:
        holder = holder[step]
    value = holder[path[-1]]
    if isinstance(value, bool) or value is None:
        holder[path[-1]] = not value
    else:
        holder[path[-1]] = value + 1 if value < 1 else value / 2


# --------------------------------------------------------------------------------------------------
# Tokens


def tokens_within(
    text: str, offsets: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> list[bool]:
    """Which tokens lie in spans of characters [start, end), apart from white space around them.

    Args:
        offsets: characters [start, end) of each token, in the order of the text. Some tokenizers
            omit white space from them; it belongs to the token that follows or contains it.
        spans: sorted, not overlapping.

    Raises:
        BadRow: a token has characters other than white space on both sides of a span's boundary.
    """
    mask, reached, at = [], 0, 0
    for first, last in offsets:
        first = min(first, reached)
        last = max(first, last)
        if first == last:  # inserted by the tokenizer, such as a dummy prefix
            mask.append(any(start < first < end for start, end in spans))
            continue
        reached = max(reached, last)
        core = text[first:last]
        if core.strip():
            first += len(core) - len(core.lstrip())
            last = first + len(core.strip())
        while at < len(spans) and spans[at][1] <= first:
            at += 1
        inside = at < len(spans) and spans[at][0] < last
        if inside and core.strip():
            start, end = spans[at]
            if first < start or last > end:
                raise BadRow(
                    "joined by the tokenizer",
                    f"one token spans the boundary of an answer ({text[first:last]!a}): use a "
                    "chat template whose marks are tokens, or whose headers end with a line break",
                )
        mask.append(inside)
    return mask
