"""Tokens and mask of one row, with hand-made rows and templates.    pytest tests/test_render.py"""

import copy
import dataclasses
import json

import pytest

from data.options import RenderOptions
from data.render import check_template, mask_method, render
from data.sources import BadRow, RawRow, parse_row
from runtime.errors import UserError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4"},
]


def options(format="messages", **changes):
    base = RenderOptions(format, {}, False, "answers", 1000, "truncate")
    return dataclasses.replace(base, **changes)


def supervised_text(tokenizer, row, opts):
    ids, mask = render(row, tokenizer, opts)
    assert len(ids) == len(mask) and not mask[0]
    return tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m]), tokenizer.decode(ids)


def test_messages_supervise_every_assistant_turn_and_its_end(sample_tokenizer):
    masked, whole = supervised_text(sample_tokenizer, {"messages": CHAT}, options())
    assert masked == "2<|end|>4<|end|>"
    assert whole == (
        "<|system|>Be brief.<|end|><|user|>1+1?<|end|><|assistant|>2<|end|>"
        "<|user|>And 2+2?<|end|><|assistant|>4<|end|>"
    )


def test_the_last_turn_alone(sample_tokenizer):
    masked, _ = supervised_text(sample_tokenizer, {"messages": CHAT}, options(supervise="last"))
    assert masked == "4<|end|>"
    asked_again = [*CHAT, {"role": "user", "content": "Sure?"}]
    masked, _ = supervised_text(
        sample_tokenizer, {"messages": asked_again}, options(supervise="last")
    )
    assert masked == "4<|end|>"


def test_prompt_completion_supervises_the_completion_and_the_end(sample_tokenizer):
    row = {"prompt": "1+1=", "completion": "2"}
    masked, whole = supervised_text(sample_tokenizer, row, options("prompt_completion"))
    assert (masked, whole) == ("2<|end|>", "1+1=2<|end|>")


def test_instruction_rows_join_instruction_and_input(sample_tokenizer):
    row = {"instruction": "Add.", "input": "1 1", "output": "2"}
    masked, whole = supervised_text(sample_tokenizer, row, options("instruction"))
    assert (masked, whole) == ("2<|end|>", "Add.\n\n1 1\n\n2<|end|>")
    for absent in (
        {**row, "input": None},
        {**row, "input": ""},
        {k: row[k] for k in ("instruction", "output")},
    ):
        assert supervised_text(sample_tokenizer, absent, options("instruction"))[1] == (
            "Add.\n\n2<|end|>"
        )


def test_text_supervises_all_but_the_first_token(sample_tokenizer):
    masked, whole = supervised_text(sample_tokenizer, {"text": "1+1=2"}, options("text"))
    assert (masked, whole) == ("+1=2<|end|>", "1+1=2<|end|>")


def test_supervise_all_and_as_chat(sample_tokenizer):
    row = {"prompt": "1+1=", "completion": "2"}
    opts = options("prompt_completion", supervise="all")
    assert supervised_text(sample_tokenizer, row, opts)[0] == "+1=2<|end|>"
    opts = options("prompt_completion", as_chat=True)
    masked, whole = supervised_text(sample_tokenizer, row, opts)
    assert (masked, whole) == ("2<|end|>", "<|user|>1+1=<|end|><|assistant|>2<|end|>")
    masked, _ = supervised_text(sample_tokenizer, {"messages": CHAT}, options(supervise="all"))
    assert masked == "Be brief.<|end|><|user|>1+1?<|end|><|assistant|>2<|end|>" + (
        "<|user|>And 2+2?<|end|><|assistant|>4<|end|>"
    )


def parsed(text, columns):
    return parse_row(RawRow(1, text), columns)


def test_columns_rename_keys():
    row = parsed('{"question": "q", "answer": "a"}', {"prompt": "question", "completion": "answer"})
    assert row == {"prompt": "q", "completion": "a"}
    swapped = parsed('{"a": 1, "b": 2, "c": 3}', {"a": "b", "b": "a"})
    assert swapped == {"a": 2, "b": 1, "c": 3}
    optional = {"instruction": "i", "input": "context", "output": "o"}
    assert parsed('{"i": "x", "o": "y"}', optional) == {"instruction": "x", "output": "y"}


# --------------------------------------------------------------------------------------------------
# Templates without generation marks

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ '\n' }}{{ m.content }}<|end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '\n' }}{% endif %}"
)
# As Qwen's: tools in a system block, calls and answers as turns
TOOLS = (
    "{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>\n{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}call {{ c.function | tojson }}{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As Qwen3's and DeepSeek-R1's: reasoning is cut once the user has asked again
THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip() %}{% endif %}"
    "<|{{ m.role }}|>\n{{ text }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OTHER_PROMPT = CHATML.replace("%}<|assistant|>", "%}<|bot|>")
WITHOUT_PROMPT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def with_template(sample_tokenizer):
    def change(template):
        tokenizer = copy.deepcopy(sample_tokenizer)
        tokenizer.chat_template = template
        return tokenizer

    return change


def test_turns_are_found_by_rendering_prefixes(with_template):
    tokenizer = with_template(CHATML)
    masked, whole = supervised_text(tokenizer, {"messages": CHAT}, options())
    assert masked == "2<|end|>4<|end|>", "neither headers nor the line break after the end mark"
    assert whole.count("<|end|>\n") == 5
    masked, _ = supervised_text(tokenizer, {"messages": CHAT}, options(supervise="last"))
    assert masked == "4<|end|>"


def test_marks_and_prefixes_give_the_same_mask(with_template):
    marked = CHATML.replace(
        "{{ m.content }}<|end|>",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|end|>{% endif %}",
    )
    rows = [
        CHAT,
        CHAT[1:3],
        [*CHAT, *CHAT[1:]],
        [CHAT[1], {"role": "assistant", "content": "é\n x "}],
    ]
    for supervise in ("answers", "last"):
        for messages in rows:
            both = [
                render({"messages": messages}, with_template(t), options(supervise=supervise))
                for t in (CHATML, marked)
            ]
            assert both[0] == both[1] and any(both[0][1])


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
TOOL_ROW = {
    "messages": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"sum": 2}'},
        {"role": "assistant", "content": "It is 2."},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "adds"}}],
}


def test_tools_calls_and_system_turns_survive(with_template):
    masked, whole = supervised_text(with_template(TOOLS), TOOL_ROW, options())
    assert '"description": "adds"' in whole and "Use tools." in whole and '{"sum": 2}' in whole
    assert masked == 'call {"name": "add", "arguments": {"a": 1, "b": 1}}<|end|>It is 2.<|end|>'


def test_arguments_and_tools_may_be_json_in_strings(with_template):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
    messages = [{**m, "tool_calls": [call]} if "tool_calls" in m else m
                for m in TOOL_ROW["messages"]]  # fmt: skip
    as_text = {"messages": messages, "tools": json.dumps(TOOL_ROW["tools"])}
    both = [render(row, with_template(TOOLS), options()) for row in (as_text, TOOL_ROW)]
    assert both[0] == both[1]


def test_contents_that_a_template_writes_as_json_survive(with_template):
    as_json = "{{ m.content | tojson if m.role == 'tool' else m.content }}"
    template = TOOLS.replace("{{ m.content }}", as_json)
    assert template != TOOLS
    row = {**TOOL_ROW, "messages": [*TOOL_ROW["messages"]]}
    row["messages"][3] = {"role": "tool", "content": '{"city": "Orléans"}\n'}
    assert any(render(row, with_template(template), options())[1])


LEFT_OUT = {
    "tools whose name is in the text": (
        CHATML,
        {
            "messages": [{"role": "user", "content": "please add 1"}, *CHAT[2:3]],
            "tools": TOOL_ROW["tools"],
        },
        "leaves out the tools",
    ),
    "system whose text is in the user's": (
        NO_SYSTEM,
        {"messages": [{"role": "system", "content": "1+1"}, *CHAT[1:]]},
        "leaves out the system turn",
    ),
    "tools": (CHATML, {"messages": CHAT, "tools": TOOL_ROW["tools"]}, "leaves out the tools"),
    "calls": (CHATML, {"messages": TOOL_ROW["messages"]}, "leaves out tool calls"),
    "system": (NO_SYSTEM, {"messages": CHAT}, "leaves out the system turn"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_a_template_leaves_out_is_refused(with_template, case):
    template, row, message = LEFT_OUT[case]
    with pytest.raises(BadRow, match=message):
        render(row, with_template(template), options())


def test_templates_that_rewrite_earlier_turns_are_detected(with_template):
    thought = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>easy</think>\n\n2"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>also</think>\n\n4"},
    ]
    tokenizer = with_template(THINKING)
    with pytest.raises(BadRow, match=r"rewrites an assistant turn.*<think>.*supervise: last"):
        render({"messages": thought}, tokenizer, options())
    marked = THINKING.replace("{{ text }}", "{% generation %}{{ text }}{% endgeneration %}")
    with pytest.raises(BadRow, match="rewrites an assistant turn"):
        render({"messages": thought}, with_template(marked), options())
    masked, whole = supervised_text(tokenizer, {"messages": thought}, options(supervise="last"))
    assert masked == "<think>also</think>\n\n4<|end|>" and "easy" not in whole
    masked, _ = supervised_text(tokenizer, {"messages": thought[:2]}, options())
    assert masked == "<think>easy</think>\n\n2<|end|>", "one turn is not rewritten"


def test_a_prompt_that_differs_from_the_header_is_refused(with_template):
    with pytest.raises(BadRow, match=r"message 2 \(assistant\) cannot be located in the text"):
        render({"messages": CHAT[1:]}, with_template(OTHER_PROMPT), options())
    with pytest.raises(BadRow) as refused:
        render({"messages": CHAT[1:]}, with_template(OTHER_PROMPT), options(supervise="last"))
    assert "data.supervise" not in str(refused.value), "it is set to last already"


def test_a_row_that_begins_with_an_assistant_turn(with_template):
    masked, _ = supervised_text(with_template(CHATML), {"messages": CHAT[2:]}, options())
    assert masked == "2<|end|>4<|end|>"


def test_without_a_generation_prompt_the_header_counts_as_the_answers_own(with_template):
    masked, _ = supervised_text(with_template(WITHOUT_PROMPT), {"messages": CHAT[1:]}, options())
    assert masked.startswith("assistant: 2")


def test_a_last_turn_that_is_rendered_otherwise_ends_at_the_same_mark(with_template):
    """As Qwen3's: the last turn gets an empty think block, so no prefix matches the row."""
    tokenizer = with_template(
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    masked, _ = supervised_text(tokenizer, {"messages": CHAT}, options())
    assert masked == "2<|end|><think></think>4<|end|>"
    with_mark = [*CHAT[:2], {"role": "assistant", "content": "a<|end|>b"}, *CHAT[3:]]
    masked, _ = supervised_text(tokenizer, {"messages": with_mark}, options())
    assert masked == "a<|end|>b<|end|><think></think>4<|end|>", "a mark in the text ends nothing"


@pytest.mark.parametrize("opened, written, missing", [
    ("<think>", "", ["<think>"]),  # DeepSeek-R1
    ("<think></think>", "<think>hm", ["</think>"]),  # Qwen3.5 without thinking
    ("<think>", "<think></think>", []),
])  # fmt: skip
def test_a_generation_prompt_that_rows_do_not_have_is_noticed(
    with_template, opened, written, missing
):
    answer = f"{{{{ '{written}' if m.role == 'assistant' }}}}{{{{ m.content }}}}"
    template = CHATML.replace("{{ m.content }}", answer)
    found: list[str] = []
    tokenizer = with_template(template.removesuffix("{% endif %}") + opened + "{% endif %}")
    render({"messages": CHAT}, tokenizer, options(), unprompted=found)
    assert found == missing


def test_an_end_mark_that_has_no_role_is_known(with_template):
    """As Gemma's <end_of_turn>: special, but neither eos nor bos."""
    tokenizer = with_template(CHATML.replace("<|end|>", "<end_of_turn>"))
    tokenizer.add_tokens(["<end_of_turn>"], special_tokens=True)
    masked, _ = supervised_text(tokenizer, {"messages": CHAT}, options())
    assert masked == "2<end_of_turn>4<end_of_turn>"


def test_marks_that_cover_too_few_turns_are_refused(with_template):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if loop.last %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    )
    with pytest.raises(BadRow, match=r"marks leave out message 3 \(assistant\)"):
        render({"messages": CHAT}, with_template(template), options())
    masked, _ = supervised_text(
        with_template(template), {"messages": CHAT}, options(supervise="last")
    )
    assert masked == "4"


MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("start", ["", "\n", "  {% if 1 %}\n{% endif %}", "{{- '' }} ", "\n  "])
def test_a_template_that_asks_for_the_date_renders_the_same_every_day(
    with_template, template, start
):
    """White space at its start stays, too."""
    asks = start + "{% set today = strftime_now('%d %b %Y, %-d') %}{{ today }}" + template
    knows = asks.replace("strftime_now('%d %b %Y, %-d')", "'26 Jul 2024, 26'")
    found, expected = (
        render({"messages": CHAT}, with_template(text), options()) for text in (asks, knows)
    )
    assert found == expected


def test_an_end_mark_in_a_prompt_stays(sample_tokenizer):
    row = {"prompt": "<|user|>1+1?<|end|>", "completion": "2"}
    masked, whole = supervised_text(sample_tokenizer, row, options("prompt_completion"))
    assert (masked, whole) == ("2<|end|>", "<|user|>1+1?<|end|>2<|end|>")


def test_a_start_mark_in_the_text_is_not_doubled(sample_tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(sample_tokenizer)
    tokenizer.bos_token = "<|system|>"
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", start)]
    )
    for text in ("abc", "<|system|>abc"):
        ids, _ = render({"text": text}, tokenizer, options("text"))
        assert ids[0] == start and start not in ids[1:]


def test_no_template_and_no_offsets_are_refused(with_template):
    with pytest.raises(UserError, match="has no chat template"):
        check_template(with_template(None), "x")

    class Slow:
        chat_template, is_fast = CHATML, False

    with pytest.raises(UserError, match=r"has no fast version"):
        check_template(Slow(), "x")


def test_the_mask_method_is_described(with_template, sample_tokenizer):
    assert "generation marks" in mask_method(sample_tokenizer, "answers")
    assert "verified row by row" in mask_method(with_template(CHATML), "answers")
    assert mask_method(with_template(CHATML), "all") == "every token"


# --------------------------------------------------------------------------------------------------
# Bad rows

USER = {"role": "user", "content": "x"}
BAD = {
    "no answer": ("messages", {"messages": [USER]}, "empty answer"),
    "empty turn": ("messages", {"messages": [USER, {"role": "assistant", "content": " \n"}]},
                   "empty answer"),
    "no messages": ("messages", {"messages": []}, "wrong type"),
    "messages of text": ("messages", {"messages": "hello"}, "wrong type"),
    "message of text": ("messages", {"messages": ["hello"]}, "wrong type"),
    "no role": ("messages", {"messages": [{"content": "x"}]}, "missing key"),
    "no content": ("messages", {"messages": [{"role": "user"}]}, "missing key"),
    "null content": ("messages", {"messages": [{"role": "user", "content": None}]}, "null"),
    "number": ("messages", {"messages": [{"role": "user", "content": 3}]}, "wrong type"),
    "tools": ("messages", {"messages": CHAT, "tools": "add"}, "wrong type"),
    "tools of text": ("messages", {"messages": CHAT, "tools": [3]}, "wrong type"),
    "calls of text": (
        "messages",
        {"messages": [USER, {"role": "assistant", "tool_calls": 5}]},
        "wrong type",
    ),
    "a call's function of text": (
        "messages",
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": "add"}]}]},
        "wrong type",
    ),
    "call without a name": (
        "messages",
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "wrong type",
    ),
    "missing": ("prompt_completion", {"prompt": "x"}, "missing key"),
    "null": ("prompt_completion", {"prompt": None, "completion": "x"}, "null"),
    "wrong type": ("prompt_completion", {"prompt": "x", "completion": 3}, "wrong type"),
    "empty": ("prompt_completion", {"prompt": "x", "completion": " "}, "empty answer"),
    "empty text": ("text", {"text": ""}, "empty answer"),
    "half a surrogate pair": ("text", {"text": "a\ud800b"}, "not text"),
    "half a pair in chat": (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": "\ud800"}]},
        "not text",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_says_why(sample_tokenizer, case):
    kind, row, reason = BAD[case]
    with pytest.raises(BadRow) as caught:
        render(row, sample_tokenizer, options(kind))
    assert caught.value.reason == reason and "\n" not in str(caught.value)


UNPARSABLE = {
    '{"a": ': "not JSON",
    "[1]": "not an object",
    '{"text": "a\0b"}': "NUL byte",
    '{"text": "a\\u0000b"}': "NUL byte",
    "[" * 100_000: "not JSON",
    '{"a": ' + "9" * 5000 + "}": "not JSON",
}


@pytest.mark.parametrize("text", UNPARSABLE, ids=lambda text: text[:12])
def test_a_row_that_cannot_be_parsed_says_why(text):
    with pytest.raises(BadRow) as caught:
        parsed(text, {})
    assert caught.value.reason == UNPARSABLE[text]


def test_a_backslash_u0000_in_a_string_is_text():
    assert parsed(r'{"text": "\\u0000"}', {}) == {"text": r"\u0000"}
