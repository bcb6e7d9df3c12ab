"""Finds each assistant turn in the text that a chat template renders.

A template is a program: it may rewrite history, end the last turn differently from earlier ones, or
write a text that also occurs in another message. So the text is not searched. Instead, a
conversation of the same shape is rendered with labels, letters that occur nowhere else, in place of
its strings. That shows the constant text between them; what of it belongs to a turn is found by
also rendering the messages up to the turn, or is what {% generation %} marks say. This is done once
per shape (Layout). A row is then rendered once, and must equal the layout with its own strings in
the place of the labels: whatever else the template does to it makes it a bad row.
"""

import contextlib
import json
import re
from bisect import bisect_right
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment
from transformers.utils.chat_template_utils import render_jinja_template

from zerotrain.data.messages import REASONING_KEYS
from zerotrain.data.sources import BadRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]
"""Characters [start, end)."""

# Labels of strings are CJK ideographs of extension B: letters without case that neither JSON nor
# repr escapes and that hardly ever occur in text. Labels of numbers are numbers.
FIRST_LABEL, FIRST_NUMBER, MAX_LABELS = 0x20000, 9182730000, 9999
LABEL = re.compile(f"[{chr(FIRST_LABEL)}-{chr(FIRST_LABEL + MAX_LABELS)}]|918273[0-9]{{4}}")
# Keys of a message that templates need not render: ids only pair calls with results. (Nor the name
# of a tool's result, which repeats that of the call.)
UNRENDERED_KEYS = {"role", "id", "tool_call_id", "type"}
THOUGHTS = re.compile(r"(\s*(?:</?think>\s*)+)(?=\S)")  # what templates look for in contents
# Markup in brackets, white space, a word, or one other character. Constant texts are compared by
# these: the headers `<|user|>` and `<|assistant|>` have no common prefix.
PIECE = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s+|\w+|.", re.DOTALL)
MAX_LAYOUTS = 4096
USER, ANSWER = (
    {"role": role, "content": chr(FIRST_LABEL + MAX_LABELS - i)}
    for i, role in enumerate(("user", "assistant"))
)

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


def marks_generation(template: str) -> bool:
    """Whether a template marks the assistant's text with {% generation %} blocks."""
    return bool(re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template))


def special_pattern(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str]:
    """A pattern of the texts of special tokens."""
    return _special_pattern(tokenizer, tuple(tokenizer.all_special_tokens))


@lru_cache(maxsize=8)
def _special_pattern(tokenizer: "PreTrainedTokenizerBase", named: tuple[str, ...]) -> re.Pattern:
    added = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    texts = sorted({t for t in (*added, *named) if t.strip()}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


# --------------------------------------------------------------------------------------------------
# Labels


class Leaf(NamedTuple):
    """A string or number of a message, or a part of a string, that a label stands for."""

    message: int
    key: str
    """Such as `content` or `tool_calls[0].function.name`."""
    value: Any
    lead: str = ""
    """Text of the message before it that is not labeled."""

    def forms(self) -> list[str]:
        """What a template may write for it."""
        if not isinstance(self.value, str):
            return [json.dumps(self.value), str(self.value)]
        text = self.value
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]
        forms = [text, escaped]
        for blank in (None, "\n"):
            forms += [text.strip(blank), text.rstrip(blank), text.lstrip(blank)]
        return forms


class Run(NamedTuple):
    """Characters [start, end) of a rendered text that are a label."""

    start: int
    end: int
    leaf: int
    is_first: bool
    """Some templates repeat a call's name with its result."""


def label_messages(
    messages: list[Message], kept: re.Pattern[str]
) -> tuple[list[Message], list[Leaf]]:
    """The messages with labels, but for matches of `kept`, and what each label stands for."""
    leaves: list[Leaf] = []

    def label(message: int, key: str, value: Any, lead: str = "") -> str:
        leaves.append(Leaf(message, key, value, lead.strip()))
        if len(leaves) > MAX_LABELS - 2:
            raise BadRow("too many strings", f"its messages have over {MAX_LABELS:,} strings")
        return chr(FIRST_LABEL + len(leaves) - 1)

    def labeled(value: Any, message: int, key: str, hidden: set[str]) -> Any:
        if key.endswith("arguments"):
            hidden = set()  # which may have any keys: an `id` there is content
        if isinstance(value, dict):
            return {
                k: v if k in hidden else labeled(v, message, f"{key}.{k}" if key else k, hidden)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [labeled(v, message, f"{key}[{i}]", hidden) for i, v in enumerate(value)]
        if not isinstance(value, str):
            return FIRST_NUMBER + ord(label(message, key, value)) - FIRST_LABEL
        if not value.strip():
            return label(message, key, value) if key == "content" else value
        parts = kept.split(value)  # in turn what is replaced and what is not
        for i in range(0, len(parts), 2):
            if parts[i]:
                parts[i] = label(message, key, parts[i], parts[i - 1] if i else "")
        return "".join(parts)

    out = []
    for i, message in enumerate(messages):
        hidden = UNRENDERED_KEYS | ({"name"} if message["role"] == "tool" else set())
        if message.get("tool_calls") and not message.get("content"):
            hidden = {*hidden, "content"}
        out.append(labeled(message, i, "", hidden))
    return out, leaves


# --------------------------------------------------------------------------------------------------
# Templates


class Located(NamedTuple):
    """A rendered chat."""

    text: str
    spans: list[Span]
    """Of the turns asked for."""
    contents: list[Span]
    """What came from strings of the row."""
    unprompted: str
    """What a server's generation prompt has, and the text before one of the turns lacks."""


def chat_template(
    tokenizer: "PreTrainedTokenizerBase", tools: list[dict[str, Any]] | None
) -> "ChatTemplate":
    """The tokenizer's template for rows with these tools, and the layouts learnt of it."""
    source = tokenizer.get_chat_template(tools=tools)
    return _chat_template(tokenizer, source, str(tokenizer.special_tokens_map), json.dumps(tools))


@lru_cache(maxsize=256)
def _chat_template(
    tokenizer: "PreTrainedTokenizerBase", source: str, special_tokens: str, tools: str
) -> "ChatTemplate":
    return ChatTemplate(tokenizer, source, json.loads(tools))


class ChatTemplate:
    """A chat template for rows with certain tools."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", source: str, tools: Any) -> None:
        self.tokenizer, self.source, self.tools = tokenizer, source, tools
        self.is_marked = marks_generation(source)
        self.layouts: dict[str, Layout | BadRow] = {}

    def render(self, messages: list[Message], prompt: bool = False) -> tuple[str, list[Span]]:
        """The text as on DATE, and the spans of its {% generation %} blocks.

        Raises:
            BadRow: the template raises an exception.
        """
        has_date = asks_for_date(self.source)
        try:
            texts, marks = render_jinja_template(
                conversations=[messages],
                tools=self.tools,
                chat_template=FIXED_DATE + self.source if has_date else self.source,
                return_assistant_tokens_mask=self.is_marked,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # templates raise anything: TemplateError, TypeError ...
            line = " ".join(str(error).split()) or type(error).__name__
            fixes = [_fix_of_role(message["role"]) for message in messages]
            problem = f"the chat template refuses it ({line})" + max(fixes, default="")
            raise BadRow("refused by the chat template", problem) from error
        return texts[0], sorted(span for span in marks[0] if span[0] < span[1]) if marks else []

    def constants(self, messages: list[Message], prompt: bool = False) -> list[str]:
        """The text between the labels of messages; of each one "" if the template refuses them or
        leaves one out.
        """
        try:
            texts = LABEL.split(self.render(messages, prompt)[0])
        except BadRow:
            texts = []
        return texts if len(texts) == len(messages) + 1 else [""] * (len(messages) + 1)

    def locate(self, messages: list[Message], wanted: list[int], complete: list[int]) -> Located:
        """Render messages, and find the turns of the assistant messages `wanted`.

        Args:
            complete: assistant messages that must be complete in the text; templates may cut the
                reasoning of others.

        Raises:
            BadRow: the template refuses, changes or leaves out part of the row, or it is not known
                what belongs to a turn.
        """
        text, _ = self.render(messages)
        text.encode()  # raises UnicodeEncodeError on half of a surrogate pair
        if not self.shows_tools:
            raise BadRow("left out by the chat template", "the template leaves out the tools")
        for kept in (THOUGHTS, self.marks):
            labeled, leaves = label_messages(messages, kept)
            layout = self._layout(labeled, leaves)
            spans = None if isinstance(layout, BadRow) else layout.fit(text, leaves)
            if spans:
                return layout.located(text, spans, wanted, complete)
        if isinstance(layout, BadRow):
            raise layout
        raise BadRow(
            "rewritten by the chat template",
            "the template rewrites the messages, so the origin of its text is unknown; "
            "data.supervise: last may help where it rewrites earlier turns, else set "
            "model.chat_template to another template",
        )

    def _layout(self, labeled: list[Message], leaves: list[Leaf]) -> "Layout | BadRow":
        key = repr(labeled)
        if key not in self.layouts:
            if len(self.layouts) >= MAX_LAYOUTS:
                self.layouts.clear()
            try:
                special = special_pattern(self.tokenizer).search(key + json.dumps(self.tools))
                if special:
                    raise BadRow(
                        "text of a special token",
                        f"its tools, or an id, key or tag of its messages, have {special[0]!r}, a "
                        "special token; only contents can have it as text",
                    )
                self.layouts[key] = Layout(self, labeled, leaves)
            except BadRow as error:
                self.layouts[key] = error
        return self.layouts[key]

    # ----------------------------------------------------------------------------------------------
    # What all conversations share

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """Texts such as [TOOL_CALLS] in contents for which the template may look."""
        tokens = Environment().lex(self.source)
        quoted = {value[1:-1].strip() for _, kind, value in tokens if kind == "string"}
        texts = [t for t in quoted if len(t) > 2 and re.search(r"\W", t) and "\\" not in t]
        found = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
        return re.compile(rf"(\s*(?:(?:</?think>{'|' + found if found else ''})\s*)+)(?=\S)")

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the tools, if any, are in the text."""
        texts = self.constants([USER])
        text, names = "".join(texts), []
        for tool in self.tools or []:
            names.append(str(tool.get("function", tool).get("name")))
        without = ChatTemplate(self.tokenizer, self.source, None).constants([USER])
        return not names or not text or (texts != without and all(n in text for n in names))

    @cached_property
    def prompt(self) -> str:
        """The generation prompt that follows a user's turn, "" if there is none."""
        asked, plain = self.constants([USER], True)[-1], self.constants([USER])[-1]
        # Some templates write a part of it in any case.
        return asked[min(shared(plain, asked), len(self.before_header(asked))) :]

    @cached_property
    def openers(self) -> set[str]:
        """Pieces with which headers of turns begin."""
        bos, gap = self.tokenizer.bos_token or "", self.constants([USER, ANSWER, USER])[2]
        heads = [self.constants([first])[0].removeprefix(bos) for first in (USER, ANSWER)]
        found = {PIECE.findall(head)[0] for head in heads if head} - {bos, self.tokenizer.eos_token}
        if found.isdisjoint(PIECE.findall(gap)):  # there is something before the first header
            size = shared(heads[0], gap, from_end=True)
            found |= set(PIECE.findall(gap[len(gap) - size :])[:1]) if size < len(gap) else set()
        return {piece for piece in found if len(piece) > 1 and piece.strip()}

    @cached_property
    def writes_prompt(self) -> bool:
        """Whether a generation prompt follows the last turn in any case."""
        asked, answered = self.constants([USER])[-1], self.constants([USER, ANSWER])
        following = self.constants([USER, ANSWER, USER])[2]
        same = asked[len(asked) - shared(asked, answered[2], from_end=True) :].strip()
        is_whole = answered[1].strip() == asked.strip()
        return bool(same) and is_whole and not following.startswith(answered[2])

    def before_header(self, text: str) -> str:
        """The part of `text` before the first header of a turn in it."""
        at = 0
        for piece in PIECE.findall(text):
            if piece in self.openers:
                break
            at += len(piece)
        return text[:at]


def shared(one: str, other: str, from_end: bool = False) -> int:
    """Number of characters in the longest common prefix, or suffix, of whole pieces."""
    size, order = 0, slice(None, None, -1 if from_end else 1)
    for a, b in zip(PIECE.findall(one)[order], PIECE.findall(other)[order], strict=False):
        if a != b:
            break
        size += len(a)
    return size


# --------------------------------------------------------------------------------------------------
# Layouts


class Layout:
    """A rendered conversation of labels, and where its turns are.

    Raises:
        BadRow: the template refuses it.
    """

    def __init__(self, template: ChatTemplate, messages: list[Message], leaves: list[Leaf]) -> None:
        self.template, self.messages = template, messages
        # without values, which are those of one row
        self.leaves = [leaf._replace(value=None) for leaf in leaves]
        self.text, self.marks = template.render(messages)
        self.runs: list[Run] = []
        self._turns: dict[int, tuple[list[Span], str]] = {}
        seen = set()
        for found in LABEL.finditer(self.text):
            leaf = (
                int(found[0]) - FIRST_NUMBER if found[0].isdigit() else ord(found[0]) - FIRST_LABEL
            )
            if leaf >= len(leaves):
                raise BadRow("not text", f"its text has {found[0]!a}")
            self.runs.append(Run(*found.span(), leaf, leaf not in seen))
            seen.add(leaf)
        self.missing = [leaf for number, leaf in enumerate(self.leaves) if number not in seen]
        self.between = LABEL.split(self.text)
        for i, message in enumerate(messages):
            for call in message.get("tool_calls") or []:
                arguments = call.get("function", call).get("arguments")
                if isinstance(arguments, dict) and arguments and repr(arguments) in self.text:
                    raise left_out("arguments of tool calls, as JSON,", messages, i)

    def fit(self, text: str, leaves: list[Leaf]) -> list[Span] | None:
        """Where the runs are in `text`, if it is this layout with these strings."""
        spans, at = [], len(self.between[0])
        if not text.startswith(self.between[0]):
            return None
        for run, following in zip(self.runs, self.between[1:], strict=True):
            for form in leaves[run.leaf].forms():
                if text.startswith(form, at) and text.startswith(following, at + len(form)):
                    break
            else:
                return None
            spans.append((at, at + len(form)))
            at += len(form) + len(following)
        return spans if at == len(text) else None

    def located(
        self, text: str, spans: list[Span], wanted: list[int], complete: list[int]
    ) -> Located:
        """The turns in `text`, whose runs have these spans.

        Raises:
            BadRow: the template leaves out part of the row, or it is not known what belongs to a
                turn.
        """
        for leaf in self.missing:
            if self.messages[leaf.message]["role"] != "assistant" or leaf.message in complete:
                raise left_out(leaf.key, self.messages, leaf.message)
        ends = [run.end for run in self.runs]

        def moved(position: int) -> int:
            before = bisect_right(ends, position)
            return position + (spans[before - 1][1] - ends[before - 1] if before else 0)

        turns, unprompted = list[Span](), ""
        for number in wanted:
            own, lacking = self._turn(number)
            turns += [(moved(start), moved(end)) for start, end in own]
            unprompted = unprompted or lacking
        return Located(text, turns, spans, unprompted)

    def _turn(self, number: int) -> tuple[list[Span], str]:
        """The spans of assistant message `number`, from the end of its header through its own end
        mark, and what the text before it lacks of a generation prompt.
        """
        if number not in self._turns:
            own = [
                i
                for i, run in enumerate(self.runs)
                if run.is_first and self.leaves[run.leaf].message == number
            ]
            if not own:
                raise self._not_located(number)
            header_end, unprompted = self._header_end(own[0])
            if self.template.is_marked:
                spans = self._marked_turn(number, own[0], own[-1])
            else:
                start = self._start(number, own[0]) if header_end is None else header_end
                spans = [(start, self._end(number, own[-1]))]
            for run in self.runs:
                is_other = self.leaves[run.leaf].message != number
                if is_other and any(a < run.end and run.start < b for a, b in spans):
                    raise self._not_located(number)
            self._turns[number] = spans, unprompted
        return self._turns[number]

    def _header_end(self, first: int) -> tuple[int | None, str]:
        """Where the generation prompt before a run ends, if it is there, and what it lacks."""
        gap, prompt = self.between[first], self.template.prompt
        of_user = self.template.constants([USER])[0]
        pieces, lead = PIECE.findall(prompt), self.leaves[self.runs[first].leaf].lead
        written = gap[: gap.rindex(lead)] if lead and lead in gap else gap
        # Prompts of reasoning models open a block that turns without reasoning do not have.
        for count in range(len(pieces), 0, -1):
            header, rest = "".join(pieces[:count]), "".join(pieces[count:])
            is_there = header in written and header not in of_user if rest else header in gap
            if header.strip() and is_there:
                return self.runs[first].start - len(gap) + gap.rindex(header) + len(header), rest
        return None, ""

    def _start(self, number: int, first: int) -> int:
        gap, leaf = self.between[first], self.leaves[self.runs[first].leaf]
        low = self.runs[first].start - len(gap)
        if leaf.key == "content":  # a template without generation prompts
            return low + (gap.rindex(leaf.lead) if leaf.lead and leaf.lead in gap else len(gap))
        end_of_user = self.template.constants([USER])[-1]
        is_reply = number > 0 and self.messages[number - 1]["role"] == "user"
        if is_reply and end_of_user.strip() and gap.startswith(end_of_user):
            return low + len(end_of_user)
        raise self._not_located(number)  # text before a call may belong to either

    def _end(self, number: int, last: int) -> int:
        run, gap, template = self.runs[last], self.between[last + 1], self.template
        tail = gap
        if number < len(self.messages) - 1:
            with contextlib.suppress(BadRow):
                tail = LABEL.split(template.render(self.messages[: number + 1])[0])[-1]
        if template.writes_prompt and template.before_header(tail) == tail:
            raise self._not_located(number)
        tail = template.before_header(tail)
        size = len(tail) if gap.startswith(tail) else shared(tail, gap)
        if not gap[:size].strip() and last + 1 < len(self.runs):
            # As the last message it ends with another mark, or none.
            if self.leaves[self.runs[last + 1].leaf].message != number + 1:
                raise self._not_located(number)
            tail = template.before_header(gap).removesuffix(template.tokenizer.bos_token or "")
            if tail == gap:
                following = {**USER, "role": self.messages[number + 1]["role"]}
                head = template.constants([following])[0]
                tail = gap[: len(gap) - shared(head, gap, from_end=True)]
            if tail == gap:
                raise self._not_located(number)
            size = len(tail)
        # The line break that follows an end mark belongs to the template, not to the turn.
        return run.end + (len(gap[:size].rstrip()) or size)

    def _marked_turn(self, number: int, first: int, last: int) -> list[Span]:
        before, after = self.between[first], self.between[last + 1]
        mine = self.runs[first : last + 1]
        low, high = mine[0].start - len(before), mine[-1].end + len(after)
        # Blocks without any string are the end of this turn, unless the next begins with one.
        is_last = number == len(self.messages) - 1
        until = mine[-1].end
        if is_last or self.messages[number + 1]["role"] != "assistant":
            until = high
        spans = [(a, b) for a, b in self.marks if mine[0].start < b and a < until]
        for run in mine:
            if not any(a <= run.start and run.end <= b for a, b in spans):
                raise BadRow(
                    "left out by the chat template",
                    f"the template's generation marks leave out {self.leaves[run.leaf].key} of "
                    + describe(self.messages, number),
                )
        start, end = spans[0][0], spans[-1][1]
        lead, trail = self.text[start : mine[0].start], self.text[mine[-1].end : end]
        has_end = self.template.before_header(lead).strip() not in ("", lead.strip())
        if start < low or end > high or has_end or self.template.before_header(trail) != trail:
            raise BadRow(
                "covered by the chat template",
                "the template's generation marks cover more than "
                + describe(self.messages, number)
                + "; move {% generation %} and {% endgeneration %}",
            )
        # Some templates mark the turn's own header too.
        header = self.template.prompt.partition("<think>")[0].strip()
        if header and header in lead:
            spans[0] = (start + lead.index(header) + len(header), spans[0][1])
        return spans

    def _not_located(self, number: int) -> BadRow:
        is_last = not any(m["role"] == "assistant" for m in self.messages[number + 1 :])
        return BadRow(
            "rewritten by the chat template",
            f"{describe(self.messages, number)} cannot be located in the text that the template "
            "writes; put {% generation %} marks into a copy of the template "
            "(model.chat_template)" + ("" if is_last else ", or set data.supervise: last"),
        )


# --------------------------------------------------------------------------------------------------
# Errors


def describe(messages: list[Message], number: int) -> str:
    """Name of a message in error messages, counted from 1."""
    return f"message {number + 1} ({messages[number]['role']})"


def left_out(key: str, messages: list[Message], number: int) -> BadRow:
    """The error for a template that leaves out `key` of message `number`, with the fix."""
    role = messages[number]["role"]
    fixes = [_fix_of_role(role)]
    if role == "assistant" and any(m["role"] == role for m in messages[number + 1 :]):
        fixes.append("; data.supervise: last trains on the last turn only")
    if key in (*REASONING_KEYS, "name"):
        fixes.append(f"; data.ignore_keys: [{key}] leaves it out of the rows")
    return BadRow(
        "left out by the chat template",
        f"the template leaves out {key} of {describe(messages, number)}"
        + ("".join(fixes) or "; set model.chat_template to another template"),
    )


def _fix_of_role(role: str) -> str:
    if role in ("system", "user", "assistant", "tool"):
        return ""
    other = "system" if role == "developer" else "tool"
    return f"; data.roles: {{{role}: {other}}} gives it a role that templates know"
