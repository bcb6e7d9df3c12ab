"""Finds each assistant turn in the text that a chat template renders.

A template is a program: it may rewrite history, end the last turn differently from earlier ones, or
write a text that also occurs in another message. So the text is not searched. Instead, a
conversation of the same shape is rendered once with labels, letters that occur nowhere else, in
place of its strings. That shows the constant text between them. What of it belongs to a turn is
what follows the prompt that a server would send at that point, up to what the template writes after
the turn when it is the last. A row is then rendered once, and must equal that text with its own
strings in the place of the labels. Any other row is refused, also one with an answer of which
{% generation %} marks leave out a part.
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
"""Characters [start, end)."""

# Labels are CJK ideographs of extension B: letters without case that neither JSON nor repr escapes
# and that hardly ever occur in text.
FIRST_LABEL = 0x20000
# Reasons of bad rows, and what to set
INCOMPLETE = (
    "left out by the chat template",
    "data.supervise: last if it cuts earlier turns, data.ignore_keys for a key that it never "
    "writes, the role of developer messages to system, or model.chat_template",
)
DEVELOPER_CURE = (
    "its role to system, if the template has no developer: jq -c '(.[] | arrays[] | objects | "
    '.role, .from | select(. == "developer")) = "system"\' OLD.jsonl > NEW.jsonl, or '
    "model.chat_template"
)
NO_END_MARK = (
    "without an end mark",
    "model.chat_template to a copy that writes the same after it as after a last message, and then "
    "{{ eos_token }}",
)
NOT_LOCATED = (
    "not located in the chat template",
    "model.chat_template to a name in data/chat_templates or to a copy that writes the header of "
    "an answer, with the same white space, after the last message if add_generation_prompt is set, "
    "or data.supervise: last where only earlier turns are such",
)
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


def label_messages(messages: list[JsonObject]) -> tuple[list[JsonObject], dict[str, str]]:
    """The messages with labels in place of their strings (of a string with thinking tags, in place
    of the parts beside them), and the string of each label.
    """
    strings = {}

    def label(text: str) -> str:
        strings[chr(FIRST_LABEL + len(strings))] = text
        return next(reversed(strings))

    def labeled(value: Any) -> Any:
        if isinstance(value, dict):
            # The name of a tool's result repeats that of the call.
            is_result = value.get("role") == "tool"
            kept = {*UNLABELED_KEYS, "name"} if is_result else UNLABELED_KEYS
            return {k: inner if k in kept else labeled(inner) for k, inner in value.items()}
        if isinstance(value, list):
            return [labeled(inner) for inner in value]
        if not isinstance(value, str) or not value.strip():
            return value
        # The tags stay: templates search for them, and cut what is before or between them.
        parts = THOUGHTS.split(value)
        parts[::2] = [text and label(text) for text in parts[::2]]
        return "".join(parts)

    return labeled(messages), strings


def forms_of(text: str) -> Iterator[str]:
    """What a template may write for a string, the most likely first."""
    yield text
    # within JSON, where quotes and line breaks are escaped, as in the arguments of a call
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    for blank in (None, "\n"):  # what the filter `trim` and a template's strip('\n') remove
        yield text.strip(blank)
        yield text.rstrip(blank)
        yield text.lstrip(blank)


@lru_cache(maxsize=8)  # added_tokens_decoder is built at each access
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of special tokens, as they are within JSON."""
    added = tokenizer.added_tokens_decoder.values()
    return [json.dumps(t.content, ensure_ascii=False)[1:-1] for t in added if t.special]


def locate(
    messages: list[JsonObject],
    tools: list[JsonObject] | None,
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
    # Some tokenizers have two templates, of which one is for rows with tools.
    source = tokenizer.get_chat_template(tools=tools)
    template = Template(tokenizer, FIXED_DATE + source, json.dumps(tools))
    # Objects come first: a template that wants them would quote text once more.
    refusals = []
    for changed in (messages, with_arguments_as_text(messages)):
        try:
            text, _ = template.render(changed)
            # as JSON, since lists cannot be keys of the cache of layouts
            labeled, strings = label_messages(changed)
            layout = _layout(template, json.dumps(labeled), tuple(wanted))
            return text, layout.spans(text, strings), layout.unprompted
        except BadRow as error:
            refusals.append(error)
    raise refusals[0]


def with_arguments_as_text(messages: list[JsonObject]) -> list[JsonObject]:
    """The messages with the arguments of tool calls as JSON, as some templates want them
    (functionary, Reka).
    """

    def changed(value: JsonObject) -> JsonObject:
        if "name" in value and isinstance(value.get("arguments"), dict | list):
            value["arguments"] = json.dumps(value["arguments"], ensure_ascii=False)
        return value

    return json.loads(json.dumps(messages), object_hook=changed)


class Template(NamedTuple):
    """A chat template for rows with certain tools."""

    tokenizer: PreTrainedTokenizerBase
    source: str
    tools: str
    """As JSON."""

    def render(self, messages: list[JsonObject], prompt: bool = False) -> tuple[str, list[Span]]:
        """The text; and its spans within {% generation %} marks, if it has any, else all of it.

        Raises:
            BadRow: the template raises an exception.
        """
        try:
            [text], marks = render_jinja_template(
                conversations=[messages],
                tools=json.loads(self.tools),
                chat_template=self.source,
                add_generation_prompt=prompt,
                # transformers warns where it is asked for marks that a template does not have
                return_assistant_tokens_mask="endgeneration" in self.source,
                **self.tokenizer.special_tokens_map,
            )
            return text, [span for spans in marks for span in spans] or [(0, len(text))]
        except TemplateSyntaxError as error:
            raise UserError(
                f"the chat template of tokenizer {self.tokenizer.name_or_path} or of "
                # less the line of FIXED_DATE
                f"model.chat_template is not valid Jinja: line {error.lineno - 1}: "
                f"{describe(error)}; correct it, or set model.chat_template to another"
            ) from error
        except Exception as error:  # templates raise anything: TemplateError, TypeError ...
            problem = f"the chat template refuses the row: {describe(error)}"
            raise BadRow("refused by the chat template", problem) from error

    def tail(self, messages: list[JsonObject], prompt: bool = False) -> str:
        """The text after the last label."""
        return LABEL.split(self.render(messages, prompt)[0])[-1]


@lru_cache(maxsize=256)
def _frame(template: Template) -> tuple[str | None, str, str, set[str]]:
    """What a template writes around the contents of a chat.

    Returns:
        What a generation prompt begins an answer with, without thoughts that answers may lack: ""
        if it cannot be told from the end of the user's turn, None if rows have another header or
        prompts have none; what follows it in a prompt; what follows the user's content when that
        turn is the last; and the pieces that turns may end with instead of eos.
    """
    chat, _ = label_messages([{"role": r, "content": r} for r in ("user", "assistant", "user")])
    # gap: from the user's content to the answer; following: from the answer to the next user's
    opening, gap, following, *_ = LABEL.split(template.render(chat)[0])
    user_end = template.tail(chat[:1])
    prompt = template.tail(chat[:1], prompt=True)
    answer_end = template.tail(chat[:2])
    end = shared_pieces(answer_end, following)
    # what only the last answer has, but eos
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
    # A header after the last answer would be taken for its end: with these templates only eos is
    # one. With GLM's the user's header is the end, as nothing else follows answers.
    if is_unasked or (rest and not header) or (others and opening.rstrip().endswith(final)):
        ends.clear()
    # If a piece follows in both, the header goes on, but differs, maybe in white space. With
    # Mistral's [/INST] there is none: nothing follows the end of the user's turn.
    if in_prompt & in_row or (in_row and not (header or is_unasked)):
        header = None
    return header, prompt.removeprefix(shared), user_end, ends


def shared_pieces(one: str, other: str) -> str:
    """The longest common prefix of whole pieces, or all of `one`."""
    if other.startswith(one):
        return one
    pieces = [PIECE.findall(text) for text in (one, other)]
    return "".join(os.path.commonprefix(pieces))  # noqa: RUF071 - lists, not paths


class Layout:
    """A rendered conversation of labels, and where its turns are.

    Attributes:
        labels: the labels in the order of the text; one may occur several times, or never.
        constants: the text before, between and after them.
        turns: of each of the messages `wanted` the index in `labels` of its first label, with the
            number of characters of the turn before it, and of its last label, with the number of
            characters after it.
        unprompted: what the generation prompt ends with before the first of these that lacks it, a
            block of thoughts in most cases.
    """

    def __init__(self, template: Template, messages: str, wanted: tuple[int, ...]) -> None:
        self.template = template
        self.messages = json.loads(messages)
        self.unprompted = ""
        self.text, spans = template.render(self.messages)
        # What belongs to answers, by {% generation %} marks
        self.marked = {i for start, end in spans for i in range(start, end)}
        self.constants = LABEL.split(self.text)
        self.labels = LABEL.findall(self.text)
        for tool in json.loads(template.tools) or []:
            if str(tool.get("function", tool).get("name")) not in self.text:
                raise BadRow(
                    INCOMPLETE[0],
                    "the chat template leaves out the tools; set model.chat_template to one that "
                    "writes them, or data.ignore_keys: [tools]",
                )
        for number, message in enumerate(self.messages):
            for call in message.get("tool_calls", []):
                arguments = call.get("function", call).get("arguments")
                # Python's 'quotes', which no server can parse: arguments as text may help
                if arguments and repr(arguments) in self.text:
                    raise self._refused(number, "is not written with its arguments as JSON")
            # templates may cut the reasoning of answers that are not supervised
            is_needed = number in wanted or message["role"] != "assistant"
            if is_needed and not {*LABEL.findall(str(message))} <= {*self.labels}:
                raise self._refused(number, "is not complete", INCOMPLETE)
        self.turns = [self._turn(number) for number in wanted]

    def spans(self, text: str, strings: dict[str, str]) -> list[Span]:
        """The turns in the text of a row, which must be this layout's text with the row's strings
        in place of the labels.
        """
        places = []  # of the strings
        expected = self.constants[0]
        for label, following in zip(self.labels, self.constants[1:], strict=True):
            at = len(expected)
            # no string: a character of the template that only looks like a label
            forms = forms_of(strings.get(label, ""))
            form = next((form for form in forms if text.startswith(form + following, at)), "")
            places.append((at, at + len(form)))
            expected += form + following
        if expected != text:
            raise BadRow(
                "rewritten by the chat template",
                "the template rewrites the messages, so the origin of its text is unknown; "
                "data.supervise: last may help where it rewrites earlier turns, else set "
                "model.chat_template to another template",
            )
        return [
            (places[first][0] - before, places[last][1] + after)
            for (first, before), (last, after) in self.turns
        ]

    def _turn(self, number: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """A turn up to its end mark: what also follows it when it is the last, or else (gpt-oss,
        OLMo) follows a user's turn. The line break after it belongs to the template, not to the
        turn.
        """
        *_, user_end, ends = _frame(self.template)
        labels = LABEL.findall(str(self.messages[number]))
        # The first place of each: a tool's result may repeat the name of the call.
        own = sorted(map(self.labels.index, labels))
        if not own or {*self.labels[own[0] : own[-1]]} - {*labels}:
            raise self._refused(number, "is not in one piece")
        first, last = own[0], own[-1]
        # What follows the turn here begins with its end mark. What follows it as the last turn does
        # too, or else (gpt-oss, OLMo) what follows a user's turn. That is all of it, less eos: text
        # that both happen to share is no end.
        after, eos = self.constants[last + 1], str(self.template.tokenizer.eos_token)
        for alone in (self.template.tail(self.messages[: number + 1]), user_end):
            mark = shared_pieces(alone, after).rstrip()
            if mark:
                break
        mark = "".join(mark.rpartition(eos)[:2]) or mark
        rest = alone.removeprefix(mark).strip()
        is_end = mark and rest in ("", eos) and PIECE.findall(mark)[-1] in ends
        if not (is_end or mark.endswith(eos)):
            raise self._refused(
                number, "has no end mark, or another one than as the last turn", NO_END_MARK
            )
        before = self._opening(number, self.constants[first])
        # If the marks leave out part of an answer, the row is refused rather than the part left
        # out. The end mark is learned in any case.
        start, end = (self.text.index(self.labels[i]) for i in (first, last))
        inside = range(start - before, end + 1)
        if any(i not in self.marked and not self.text[i].isspace() for i in inside):
            raise self._refused(
                number, "is not all within the template's generation marks", INCOMPLETE
            )
        return (first, before), (last, len(mark))

    def _opening(self, number: int, before: str) -> int:
        """How many characters of the text before a turn's first label follow what a server would
        send.
        """
        header, thoughts, *_ = _frame(self.template)
        if header and header in before:
            # the last one: `before` is all that follows the content before, such as an empty turn
            rest = before.rpartition(header)[2]
            self.unprompted = self.unprompted or thoughts.removeprefix(
                shared_pieces(thoughts, rest)
            )
            return len(rest)
        # No header is known, or another one is written here: compare with the prompt of this point.
        prompt = self.template.tail(self.messages[:number], prompt=True)
        shared = shared_pieces(prompt, before)
        if header is None or shared.strip() != prompt.strip():
            raise self._refused(number, "does not begin as the generation prompt does")
        return len(before) - len(shared)

    def _refused(
        self, number: int, problem: str, reason_and_cure: tuple[str, str] = NOT_LOCATED
    ) -> BadRow:
        reason, cure = reason_and_cure
        if self.messages[number]["role"] == "developer":
            cure = DEVELOPER_CURE
        return BadRow(
            reason,
            f"message {number + 1} ({self.messages[number]['role']}) {problem} in the text that "
            f"the chat template writes; set {cure}",
        )


_layout = lru_cache(maxsize=4096)(Layout)  # rows of one shape share theirs
