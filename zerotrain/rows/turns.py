"""Locate each assistant turn in the text that a chat template renders.

A template is a program. It may rewrite earlier turns, end the last turn differently, or write text
that also occurs in a message. Searching the text for an answer is therefore unsafe. Instead:

1. Render a conversation of the same shape once, with a placeholder for each string. Placeholders
   (in code: labels) are letters that occur nowhere else. The text between them is constant.
2. Decide which constant text belongs to a turn. A turn starts where the prompt ends that a server
   would send at that point. It ends with what the template writes after it when it is last.
3. Render each row once. It must equal the constant text with the row's strings filled in.

Any other row is rejected. So is a row whose {% generation %} blocks omit part of an answer.
"""

import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from zerotrain.rows.sources import BadRow, JsonObject
from zerotrain.runtime.errors import UserError, describe

Span = tuple[int, int]
"""Character offsets [start, end)."""
Edge = tuple[int, int]
"""The index of a turn's first or last placeholder, and the number of its characters beyond it."""

# Placeholders are CJK ideographs of extension B: letters without case. Neither JSON nor repr
# escapes them, and they almost never occur in text.
FIRST_LABEL = 0x20000
# Reasons for rejecting a row, each with the fix that follows the word "set".
INCOMPLETE = (
    "dropped by the chat template",
    "data.supervise: last if the template cuts earlier turns, data.ignore_keys for a key that it "
    "never writes (reasoning_content for reasoning of any spelling; not tool_calls: answers would "
    "end before them), or model.chat_template",
)
NAME_FIX = (
    "no names of speakers, if the template never writes them: jq -c 'del((.[] | arrays[] | objects "
    '| select(has("role") or has("from"))).name)\' OLD.jsonl > NEW.jsonl, or model.chat_template'
)
DEVELOPER_FIX = (
    "its role to system, if the template has no developer: jq -c '(.[] | arrays[] | objects | "
    '.role, .from | select(. == "developer")) = "system"\' OLD.jsonl > NEW.jsonl, or '
    "model.chat_template"
)
NO_END = (
    "no end-of-turn text",
    "model.chat_template to a copy that writes the same after that message as after a last one, "
    "and then {{ eos_token }}",
)
NOT_LOCATED = (
    "answer not located",
    "model.chat_template to a name in data/chat_templates, or to a copy that writes an answer's "
    "header, with the same white space, after the last message if add_generation_prompt is set; or "
    "data.supervise: last if only earlier turns are affected",
)
LABEL = re.compile("[\U00020000-\U0002a6df]")
# Keys without a placeholder: templates may omit them. Ids only pair calls with results.
UNLABELED_KEYS = {"role", "id", "tool_call_id", "type"}
THOUGHTS = re.compile(r"(\s*</?think>\s*)")  # templates split contents at these tags
# A thinking block, open or empty, that ends a generation prompt. Turns may lack it.
OPEN_THOUGHTS = re.compile(r"<think>\s*(</think>\s*)?$")
EMPTY_THOUGHTS = re.compile(r"\s*<think>\s*</think>")
# A bracketed tag, white space, a word, or one other character. Constant texts are compared piece by
# piece, so that `<|end|>` and `<|endoftext|>` have no common prefix.
PIECE = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s+|\w+|.", re.DOTALL)

# Some templates write today's date (Llama 3.2, gpt-oss, SmolLM3). A row's tokens would change every
# day: in a resumed run, on another node, when an export is checked. This macro precedes every
# template and fixes the date to the default of Llama 3's templates.
FIXED_DATE = (
    "{% macro strftime_now(format) %}{{ format | replace('%Y', '2024') | replace('%y', '24') | "
    "replace('%m', '07') | replace('%-m', '7') | replace('%B', 'July') | replace('%b', 'Jul') | "
    "replace('%d', '26') | replace('%-d', '26') | replace('%A', 'Friday') | replace('%a', 'Fri') | "
    "replace('%H', '00') | replace('%M', '00') | replace('%S', '00') }}{% endmacro %}\n"
)


def label_messages(messages: list[JsonObject]) -> tuple[list[JsonObject], dict[str, str]]:
    """Replace the strings of messages by placeholders.

    In a string with thinking tags, the text around the tags is replaced.

    Returns:
        The new messages, and the string of each placeholder.
    """
    strings = {}

    def label(text: str) -> str:
        strings[chr(FIRST_LABEL + len(strings))] = text
        return next(reversed(strings))

    def labeled(value: Any) -> Any:
        if isinstance(value, dict):
            # A tool result's name only repeats the name in its call.
            is_result = value.get("role") == "tool"
            kept = {*UNLABELED_KEYS, "name"} if is_result else UNLABELED_KEYS
            return {k: inner if k in kept else labeled(inner) for k, inner in value.items()}
        if isinstance(value, list):
            return [labeled(inner) for inner in value]
        if not isinstance(value, str) or not value.strip():
            return value
        # Keep the tags: templates search for them and cut the text before or between them.
        parts = THOUGHTS.split(value)
        parts[::2] = [text and label(text) for text in parts[::2]]
        return "".join(parts)

    return labeled(messages), strings


def forms_of(text: str) -> Iterator[str]:
    """Yield the forms in which a template may write a string, most likely first."""
    yield text
    # Inside JSON, as in a call's arguments, quotes and line breaks are escaped.
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    for blank in (None, "\n"):  # `trim` and a template's strip('\n') remove these
        yield text.strip(blank)
        yield text.rstrip(blank)
        yield text.lstrip(blank)


@lru_cache(maxsize=8)  # added_tokens_decoder is rebuilt on every access
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of the special tokens, escaped as in JSON."""
    added = tokenizer.added_tokens_decoder.values()
    return [json.dumps(t.content, ensure_ascii=False)[1:-1] for t in added if t.special]


def locate(
    messages: list[JsonObject],
    tools: list[JsonObject] | None,
    tokenizer: PreTrainedTokenizerBase,
    wanted: list[int],
) -> tuple[str, list[Span], str]:
    """Render messages and locate the assistant messages whose indices are in `wanted`.

    Templates may cut the reasoning of other assistant messages.

    Returns:
        The text; the span of each wanted turn, from the end of its header through its end-of-turn
        text; and the end of a server's generation prompt that the text before the turns lacks.

    Raises:
        BadRow: the template rejects, changes or drops part of the row, or a turn is not located.
    """
    # Some tokenizers have a second template, for rows with tools.
    source = tokenizer.get_chat_template(tools=tools)
    template = Template(tokenizer, FIXED_DATE + source, json.dumps(tools))
    # Objects first: a template that expects objects would quote a string again.
    refusals = []
    for changed in (messages, with_arguments_as_text(messages)):
        try:
            text, _ = template.render(changed)
            # Serialized, because a list cannot be a key of the layout cache.
            labeled, strings = label_messages(changed)
            layout = _layout(template, json.dumps(labeled), tuple(wanted))
            return text, layout.spans(text, strings), layout.unprompted
        except BadRow as error:
            refusals.append(error)
    raise refusals[0]


def with_arguments_as_text(messages: list[JsonObject]) -> list[JsonObject]:
    """Return messages whose tool-call arguments are JSON strings, which some templates expect
    (functionary, Reka).
    """

    def changed(value: JsonObject) -> JsonObject:
        if "name" in value and isinstance(value.get("arguments"), dict | list):
            value["arguments"] = json.dumps(value["arguments"], ensure_ascii=False)
        return value

    return json.loads(json.dumps(messages), object_hook=changed)


def with_reasoning(messages: list[JsonObject]) -> list[JsonObject]:
    """Return messages that have their reasoning_content also as reasoning, which servers add and
    some templates read. transformers adds the other names.
    """
    key = "reasoning_content"
    return [{"reasoning": m[key], **m} if key in m else m for m in messages]


class Template(NamedTuple):
    """A chat template and the tools that it renders."""

    tokenizer: PreTrainedTokenizerBase
    source: str
    tools: str
    """The tools as JSON."""

    def render(self, messages: list[JsonObject], prompt: bool = False) -> tuple[str, list[Span]]:
        """Render messages.

        Returns:
            The text, and its spans inside {% generation %} blocks; without blocks, one span of all
            text.

        Raises:
            BadRow: the template raises an exception.
        """
        try:
            [text], blocks = render_jinja_template(
                conversations=[with_reasoning(messages)],
                tools=json.loads(self.tools),
                chat_template=self.source,
                add_generation_prompt=prompt,
                # transformers warns if asked for blocks that the template does not have.
                return_assistant_tokens_mask="endgeneration" in self.source,
                **self.tokenizer.special_tokens_map,
            )
            return text, [span for spans in blocks for span in spans] or [(0, len(text))]
        except TemplateSyntaxError as error:
            raise UserError(
                f"the chat template (of tokenizer {self.tokenizer.name_or_path} or "
                # Without the line that FIXED_DATE adds.
                f"model.chat_template) is not valid Jinja: line {error.lineno - 1}: "
                f"{describe(error)}; correct it, or set model.chat_template to another"
            ) from error
        except Exception as error:  # templates may raise anything: TemplateError, TypeError ...
            problem = f"the chat template rejects the row: {describe(error)}"
            raise BadRow("rejected by the chat template", problem) from error

    def tail(self, messages: list[JsonObject], prompt: bool = False) -> str:
        """Return the rendered text after the last placeholder."""
        return LABEL.split(self.render(messages, prompt)[0])[-1]


class Frame(NamedTuple):
    """The constant text that a template writes around message contents."""

    header: str | None
    """Text that starts an answer in a generation prompt, without a thinking block that answers may
    lack. Empty if an answer directly follows the end of the user's turn. None if rows have a
    different header, or prompts have none.
    """
    thoughts: str
    """Text after the header in a generation prompt, such as an open thinking block."""
    user_end: str
    """Text after the user's content when that turn is last."""
    ends: set[str]
    """Pieces that may end a turn in place of the eos token."""


@lru_cache(maxsize=256)
def _frame(template: Template) -> Frame:
    """Render a short chat and name the parts of its constant text."""
    chat, _ = label_messages([{"role": r, "content": r} for r in ("user", "assistant", "user")])
    # gap: text from the user's content to the answer. following: from the answer to the next user.
    opening, gap, following, *_ = LABEL.split(template.render(chat)[0])
    user_end = template.tail(chat[:1])
    prompt = template.tail(chat[:1], prompt=True)
    answer_end = template.tail(chat[:2])
    end = shared_pieces(answer_end, following)
    # Text that is written only after the last answer, without the eos token.
    rest = answer_end.removeprefix(end).strip().removesuffix(str(template.tokenizer.eos_token))
    is_unasked = rest and rest in prompt
    shared = OPEN_THOUGHTS.sub("", shared_pieces(prompt, gap))
    header = shared.removeprefix(user_end).lstrip()
    in_prompt, in_row = (
        {*PIECE.findall(THOUGHTS.sub("", text.removeprefix(shared)).lstrip())}
        for text in (prompt, gap)
    )
    ends = {*special_tokens(template.tokenizer), *PIECE.findall(answer_end + user_end)}
    *others, final = PIECE.findall(end.rstrip()) or [""]
    # A header that always follows the last answer would be mistaken for its end: in these templates
    # only eos ends a turn. In GLM's, the user's header does, because nothing else follows answers.
    if is_unasked or (rest and not header) or (others and opening.rstrip().endswith(final)):
        ends.clear()
    # A piece that follows in both belongs to a header that differs, perhaps in white space. If only
    # the end of the user's turn precedes an answer, as with Mistral's [/INST], nothing follows.
    if in_prompt & in_row or (in_row and not (header or is_unasked)):
        header = None
    return Frame(header, prompt.removeprefix(shared), user_end, ends)


def shared_pieces(one: str, other: str) -> str:
    """Return the longest common prefix in whole pieces, or `one` if `other` starts with it."""
    if other.startswith(one):
        return one
    pieces = [PIECE.findall(text) for text in (one, other)]
    return "".join(os.path.commonprefix(pieces))  # noqa: RUF071 - lists, not paths


class Layout:
    """A conversation rendered with placeholders, and the location of its turns.

    Attributes:
        labels: the placeholders in text order; one may occur several times or never.
        constants: the text before, between and after the placeholders.
        turns: two edges for each wanted message: the index in `labels` of its first placeholder,
            and how many characters of the turn precede it; the same for the last placeholder and
            the characters after it.
        unprompted: the end of the generation prompt, usually a thinking block, that is missing
            before a wanted turn; taken from the first turn that lacks any.
    """

    def __init__(self, template: Template, messages: str, wanted: tuple[int, ...]) -> None:
        self.template = template
        self.messages = json.loads(messages)
        self.text, spans = template.render(self.messages)
        # Characters inside {% generation %} blocks.
        self.marked = {i for start, end in spans for i in range(start, end)}
        self.constants = LABEL.split(self.text)
        self.labels = LABEL.findall(self.text)
        for tool in json.loads(template.tools) or []:
            if tool["function"]["name"] not in self.text:
                raise BadRow(
                    INCOMPLETE[0],
                    "the chat template drops the tools; set model.chat_template to one that writes "
                    "them, or data.ignore_keys: [tools]",
                )
        for number, message in enumerate(self.messages):
            for call in message.get("tool_calls", []):
                arguments = call.get("function", call).get("arguments")
                # Python's 'quotes', which no server can parse. Arguments as strings may help.
                if arguments and repr(arguments) in self.text:
                    raise self._rejected(
                        number, "has tool-call arguments that are not written as JSON"
                    )
            # Templates may cut the reasoning of answers that are not supervised.
            is_needed = number in wanted or message["role"] != "assistant"
            lost = [key for key in message if {*LABEL.findall(str(message[key]))} - {*self.labels}]
            if is_needed and lost:
                fix = NAME_FIX if lost == ["name"] else INCOMPLETE[1]
                raise self._rejected(number, "is incomplete", (INCOMPLETE[0], fix))
        located = [self._locate(number) for number in wanted]
        self.turns = [(start, end) for start, end, _ in located]
        self.unprompted = next((lacking for *_, lacking in located if lacking), "")

    def spans(self, text: str, strings: dict[str, str]) -> list[Span]:
        """Return the spans of the turns in a row's text.

        Raises:
            BadRow: the text is not this layout with the row's strings in place of the placeholders.
        """
        string_spans = []
        expected = self.constants[0]
        for label, following in zip(self.labels, self.constants[1:], strict=True):
            at = len(expected)
            # A template's own character that looks like a placeholder has no string.
            forms = forms_of(strings.get(label, ""))
            form = next((form for form in forms if text.startswith(form + following, at)), "")
            string_spans.append((at, at + len(form)))
            expected += form + following
        if expected != text:
            raise BadRow(
                "rewritten by the chat template",
                "the chat template rewrites the messages, so answers cannot be located; set "
                "model.chat_template to a name in data/chat_templates, or to a copy that writes "
                "messages as they are",
            )
        return [
            (string_spans[first][0] - before, string_spans[last][1] + after)
            for (first, before), (last, after) in self.turns
        ]

    def _locate(self, number: int) -> tuple[Edge, Edge, str]:
        """Return the edges of a turn, and the end of the generation prompt that the row lacks.

        A turn ends with the text that follows it both here and when it is last. If there is none
        (gpt-oss, OLMo), it ends with the text that ends a user's turn. A line break after that
        belongs to the template.
        """
        frame = _frame(self.template)
        labels = LABEL.findall(str(self.messages[number]))
        # Use first occurrences: a tool result may repeat the name of the call.
        own = sorted(map(self.labels.index, labels))
        if not own or {*self.labels[own[0] : own[-1]]} - {*labels}:
            raise self._rejected(number, "has no text, or has another message's text inside")
        first, last = own[0], own[-1]
        # The whole end must follow in both places, except eos: a text that both happen to begin
        # with may be part of something else.
        after, eos = self.constants[last + 1], str(self.template.tokenizer.eos_token)
        for alone in (self.template.tail(self.messages[: number + 1]), frame.user_end):
            end = shared_pieces(alone, after).rstrip()
            if end:
                break
        end = "".join(end.rpartition(eos)[:2]) or end
        rest = alone.removeprefix(end).strip()
        is_end = end and rest in ("", eos) and PIECE.findall(end)[-1] in frame.ends
        if not (is_end or end.endswith(eos)):
            raise self._rejected(
                number, "has no end-of-turn text, or ends differently when it is last", NO_END
            )
        before, lacking = self._opening(number, self.constants[first])
        # {% generation %} blocks say what to train on. If they omit part of an answer, reject the
        # row instead of training on the rest. The end-of-turn text is always trained on.
        answer = range(
            self.text.index(self.labels[first]) - before, self.text.index(self.labels[last]) + 1
        )
        if any(i not in self.marked and not self.text[i].isspace() for i in answer):
            raise self._rejected(
                number, "is only partly inside the template's {% generation %} blocks", INCOMPLETE
            )
        return (first, before), (last, len(end)), lacking

    def _opening(self, number: int, before: str) -> tuple[int, str]:
        """Return how many characters between the server's prompt and a turn's first placeholder
        belong to the turn, and the end of that prompt that the row lacks.
        """
        header, thoughts, *_ = _frame(self.template)
        if header and header in before:
            # Search from the right: `before` may contain an empty turn with its own header.
            rest = before.rpartition(header)[2]
            # After an open block the server's model would reason. A row with an empty block has
            # different text, and often different tokens.
            is_empty = EMPTY_THOUGHTS.match(rest) and not EMPTY_THOUGHTS.match(thoughts)
            shared = "" if is_empty else shared_pieces(thoughts, rest)
            return len(rest), thoughts.removeprefix(shared)
        # The header is unknown or differs here: compare with the prompt at this point.
        prompt = self.template.tail(self.messages[:number], prompt=True)
        shared = shared_pieces(prompt, before)
        if header is None or shared.strip() != prompt.strip():
            raise self._rejected(number, "does not start with the generation prompt")
        return len(before) - len(shared), ""

    def _rejected(
        self, number: int, problem: str, reason_and_fix: tuple[str, str] = NOT_LOCATED
    ) -> BadRow:
        reason, fix = reason_and_fix
        if self.messages[number]["role"] == "developer":
            fix = DEVELOPER_FIX
        return BadRow(
            reason,
            f"message {number + 1} ({self.messages[number]['role']}) {problem} in the rendered "
            f"text; set {fix}",
        )


_layout = lru_cache(maxsize=4096)(Layout)  # rows of the same shape share a layout
