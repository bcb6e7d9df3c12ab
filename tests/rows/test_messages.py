"""Rows of every format become one form; every key is used, metadata or refused.
pytest tests/rows/test_messages.py
"""

import json
from functools import partial

import pytest
import yaml
from harness.cures import refused

from zerotrain.config.schema import DataConfig, Source
from zerotrain.rows.messages import METADATA, canonical_row, detect_format
from zerotrain.rows.sources import RawRow, parse_row


def canonical(row, columns=None, **options):
    """The row in its one form, from JSON and with the format detected, as in a run."""
    config = DataConfig(train_sources=["rows"], **options)
    text = row if isinstance(row, str) else json.dumps(row)
    found = parse_row(RawRow("rows", 1, text), columns or {}, config.ignore_keys)
    source = Source("rows", format=detect_format(found), columns=columns or {})
    return canonical_row(found, source, config)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


ASKED = [user("1+1?"), assistant("2")]
CALL = {"name": "add", "arguments": {"a": 1, "b": 1}}
TOOLS = [{"type": "function", "function": {"name": "add"}}]

# --------------------------------------------------------------------------------------------------
# Formats found in practice

# A row, its format, and its one form.
AS_THEY_ARE = yaml.safe_load(r"""
content lists:
- messages:
  - {role: user, content: [{type: text, text: 1+1}, {type: text, text: "?"}]}
  - {role: assistant, content: [{type: text, text: "2", image_url: null}]}
- messages
- messages: [&question {role: user, content: "1+1?"}, &answer {role: assistant, content: "2"}]
ShareGPT with tools:
- tools: '[{"type": "function", "function": {"name": "add"}}]'
  id: x_0
  conversations:
  - {from: system, value: Be brief.}
  - {from: human, value: "1+1?"}
  - {from: function_call, value: '{"name": "add", "arguments": {"a": 1, "b": 1}}'}
  - {from: observation, value: "2"}
  - {from: gpt, value: "2"}
- sharegpt
- messages:
  - {role: system, content: Be brief.}
  - *question
  - &call {role: assistant, content: "", tool_calls: [&add {name: add, arguments: {a: 1, b: 1}}]}
  - &result {role: tool, content: "2"}
  - *answer
  tools: &tools [{type: function, function: {name: add}}]
TRL:
- prompt: [*question, *answer, &again {role: user, content: "2+2?"}]
  completion: [{role: assistant, content: "4"}]
- conversational
- messages: [*question, {<<: *answer, weight: 0}, *again, {role: assistant, content: "4"}]
prompt and completion:
- {prompt: "1+1?", completion: "2"}
- prompt_completion
- {prompt: "1+1?", completion: "2"}
Alpaca:
- instruction: Add.
  input: 1 1
  output: "2"
  text: "Below is an instruction.\n### Instruction:\nAdd.\n\n### Input:\n1 1\n\n2"
- instruction
- {prompt: "Add.\n\n1 1\n\n", completion: "2"}
calls as OpenAI has them:
- messages:
  - *question
  - role: assistant
    content: null
    refusal: null
    annotations: []
    tool_calls:
    - id: c1
      type: function
      function: {name: add, arguments: '{"a": 1, "b": 1}'}
  - &of_c1 {role: tool, tool_call_id: c1, name: add, content: "2"}
  - &easy {role: assistant, content: "2", reasoning_content: easy}
  parallel_tool_calls: false
- messages
- messages:
  - *question
  - {role: assistant, content: "", tool_calls: [{id: c1, type: function, function: *add}]}
  - *of_c1
  - *easy
ms-swift, with a turn for each call:
- messages:
  - *question
  - {role: assistant, content: Both.}
  - {role: tool_call, content: '{"name": "add", "arguments": {"a": 1, "b": 1}}'}
  - {role: tool_call, content: '{"name": "add", "arguments": {"a": 1, "b": 1}}'}
  - {role: tool_response, content: "2"}
  - {role: tool_response, content: "2"}
  - *answer
- messages
- &called_twice
  messages:
  - *question
  - {role: assistant, content: Both., tool_calls: [*add, *add]}
  - *result
  - *result
  - *answer
OpenAI's parts of responses, and its first form of calls:
- messages:
  - {role: user, content: [{type: input_text, text: "1+1?"}]}
  - {role: assistant, content: [{type: output_text, text: Both.}], function_call: *add}
  - {role: assistant, content: null, tool_calls: null, function_call: *add}
  - {role: function, content: [{type: text, text: "2"}]}
  - {role: function, content: [{type: text, text: "2"}]}
  - {role: assistant, content: [{type: output_text, text: "2"}]}
- messages
- *called_twice
JSON in the strings of a list, with all keys of a table:
- tools: ['{"type": "function", "function": {"name": "add"}, "id": null}']
  messages:
  - '{"tool_calls": null, "role": "user", "content": "1+1?"}'
  - '{"tool_calls": [{"name": "add", "arguments": {"a": 1, "c": null, "b": 1}}],
    "role": "assistant", "content": null}'
  - '{"tool_calls": null, "role": "tool", "content": "2"}'
  - '{"tool_calls": null, "role": "assistant", "content": "2"}'
- messages
- tools: *tools
  messages: [*question, *call, *result, *answer]
gpt-oss, with a turn for each channel:
- messages:
  - *question
  - {role: assistant, channel: analysis, content: easy}
  - role: assistant
    channel: commentary
    content: ""
    tool_calls: [{function: {name: add, arguments: '{"a": 1, "b": 1}'}}]
  - {role: tool, channel: commentary, content: "2"}
  - {role: assistant, channel: analysis, content: easy}
  - {role: assistant, channel: final, content: "2", weight: 1}
- messages
- messages:
  - *question
  - role: assistant
    content: ""
    reasoning_content: easy
    tool_calls: [{function: *add}]
  - *result
  - {<<: *easy, weight: 1}
a refusal in place of an answer:
- messages: [*question, {role: assistant, content: null, refusal: I cannot.}]
- messages
- messages: [*question, {role: assistant, content: I cannot.}]
a refusal among the parts, and a system column as in the messages:
- system: Be brief.
  messages:
  - {role: system, content: [{type: text, text: Be brief.}]}
  - {role: user, content: [{type: text, text: "1+1?"}]}
  - {role: assistant, content: [{type: refusal, refusal: I cannot.}]}
- messages
- messages:
  - {role: system, content: Be brief.}
  - *question
  - {role: assistant, content: I cannot.}
""")


@pytest.mark.parametrize("case", AS_THEY_ARE)
def test_rows_as_they_are_found(case):
    row, format, expected = AS_THEY_ARE[case]
    assert detect_format(row) == format
    assert canonical(row) == expected


# Each row with what its message must name. If that is a cure: how it is followed, by a setting
# (default: the cure as the message spells it) or in the row.
REFUSED = yaml.safe_load("""
other keys:
- {question: "1+1?", answer: "2"}
- "columns: {our key: key in the file}"
- "columns: {prompt: question, completion: answer}"
other keys of messages:
- messages: [{speaker: human, text: "1+1?"}, {speaker: bot, text: "2"}]
- "columns: {role: KEY, content: KEY}"
- "columns: {role: speaker, content: text}"
another key of the tools:
- messages: [{role: user, content: "1+1?"}, {role: assistant, content: "2"}]
  apis: &tools [{type: function, function: {name: add}}]
- "columns: {our key: key in the file}"
- "columns: {tools: apis}"
a class:
- {text: a, label: 1}
- "data.ignore_keys: [label]"
keys that YAML would read:
- {text: a, "no": 1, "b: [c, d]": 2, "e#": 3}
- "data.ignore_keys: ['b: [c, d]', e#, 'no']"
a system prompt without a chat:
- {prompt: "1+1?", completion: "2", system: Be brief., tools: *tools}
- "data.as_chat: true"
a call of two functions:
- messages:
  - &a {role: user, content: a}
  - {role: assistant, content: "", tool_calls: [{function: [{name: f}, {name: f}]}]}
- function
calls after a turn of weight 0:
- messages:
  - *a
  - &unweighted {role: assistant, content: b, train: false}
  - {role: assistant, content: "", tool_calls: [&add {name: add, arguments: {a: 1, b: 1}}]}
- "message 3 of 'messages': it calls tools directly after another turn of the assistant; write
  both as one turn (of weight 0 if either has it)"
- messages: [*a, {<<: *unweighted, tool_calls: [*add]}]
two thoughts in a row:
- messages:
  - *a
  - &thought {role: assistant, content: "", thinking: b, tool_calls: [*add]}
  - *thought
- "or the tool's result between them"
- messages: [*a, *thought, {role: tool, content: "2"}, *thought]
a question without content:
- messages: [{role: user, content: null}, &b {role: assistant, content: b}]
- "message 1 of 'messages': the user has no content; write it"
- messages: [*a, *b]
an empty question:  # cells of CSV have no null
- messages: [{role: user, content: " "}, *b]
- "message 1 of 'messages': the user has no content; write it"
- messages: [*a, *b]
an empty prompt:
- {prompt: "", completion: b}
- prompt is empty; write it
- {prompt: a, completion: b}
an empty instruction:
- {instruction: "", input: "", output: b}
- instruction is empty; write it
- {instruction: "", input: a, output: b}
two answers in a row:
- messages: [*a, *b, {role: assistant, content: c}]
- "message 3 of 'messages': it answers directly after another turn of the assistant; write both as
  one turn ... or the user's turn"
- messages: [*a, {role: assistant, content: b c}]
- messages: [*a, *b, *a, {role: assistant, content: c}]
an answer without the tool's result:
- messages: [*a, &adds {role: assistant, content: "", tool_calls: [*add]}, *b]
- or the user's turn or the tool's result between them
- messages: [*a, *adds, {role: tool, content: ""}, *b]
a prompt that ends in an answer:
- {prompt: [*a, *b], completion: [{role: assistant, content: c}]}
- "message 1 of 'completion': it answers directly after"
- {prompt: [*a], completion: [{role: assistant, content: b c}]}
reasoning of weight 0 alone:
- messages: [*a, {role: assistant, channel: analysis, content: c, weight: 0}, *b]
- (of weight 0 if either has it)
- messages: [*a, {role: assistant, thinking: c, content: b, weight: 0}, *a, *b]
reasoning without an answer:
- messages: [*a, {role: assistant, channel: analysis, content: b}, *a, *b]
- no answer follows the reasoning
two systems:
- {system: a, messages: [{role: system, content: b}, *a, *b]}
- its key system and its system turn differ; write all in one of them
- {system: a b, messages: [*a, *b]}
- messages: [{role: system, content: a b}, *a, *b]
a commentary:
- messages: [*a, {role: assistant, channel: commentary, content: b}]
- channel
reasoning that differs:
- messages: [*a, {role: assistant, content: b, thinking: a, reasoning: c}]
- its reasoning and thinking differ; write one of them
- messages: [*a, {role: assistant, content: b, reasoning: c}]
an answer and a refusal:
- messages: [*a, {role: assistant, content: b, refusal: a}]
- its content and refusal differ; write one of them
- messages: [*a, *b]
reasoning between texts:
- messages: [*a, {role: assistant, content: [{text: a}, {type: thinking, thinking: b}]}]
- it has text before its reasoning; write the reasoning first
- messages: [*a, {role: assistant, content: [{type: thinking, thinking: b}, {text: a}]}]
encrypted reasoning:
- messages: [*a, {role: assistant, content: b, reasoning_details: [{type: reasoning.encrypted}]}]
- not text
an empty part:
- messages: [{role: user, content: [{text: null}]}, *b]
- message 1
a list per column:
- {prompt: [a, b], completion: [c, d]}
- write a row for each
- {prompt: a, completion: c}
an empty answer:
- messages: [*a, {role: assistant, content: " "}]
- message 2
a call of no object:
- messages:
  - *a
  - {role: assistant, content: null, tool_calls: [{id: c1, type: function, function: f}]}
- "'function'"
arguments that no tool can read:
- messages:
  - *a
  - role: assistant
    content: ""
    tool_calls: [{id: c1, type: function, function: {name: add, arguments: "1"}}]
- "arguments of add ... or write a single value as {NAME: VALUE}"
- messages:
  - *a
  - {role: assistant, content: "", tool_calls: [{id: c1, type: function, function: *add}]}
tools that are not functions:
- {messages: [*a, *b], tools: [{type: web_search, name: f}]}
- 'write it as {"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}'
- {messages: [*a, *b], tools: [{type: function, function: {name: NAME, parameters: {}}}]}
two lists of tools:
- {messages: [*a, *b], tools: [{name: f}], functions: [{name: g}]}
- "its tools and its functions differ; write all as tools"
- {messages: [*a, *b], tools: [{name: f}, {name: g}]}
the wrong type:
- {prompt: [a], completion: b}
- "'prompt'"
""")


@pytest.mark.parametrize("case", REFUSED)
def test_unusable_rows_are_refused_with_a_fix_that_works(case):
    row, named, *cures = REFUSED[case]

    def read(cure):
        if isinstance(cure, dict):
            return canonical(cure)
        [(key, value)] = yaml.safe_load(cure).items()
        return canonical(row, **{key.removeprefix("data."): value})

    refused(named, read, row, *cures or [named] * named.startswith("data."))


def test_reasoning_is_trained_once():
    answer = assistant("<think>why</think>2", reasoning_content="why")
    refused("thinking block", canonical, {"messages": [ASKED[0], answer]}, {"messages": ASKED})
    row = {"messages": [ASKED[0], assistant("2", reasoning_details="null")]}
    assert canonical(row) == {"messages": ASKED}


def test_no_cure_is_named_where_it_would_not_help():
    """A chat template renders neither plain text nor keys of a message."""
    for row in ({"text": "a", "system": "b"}, {"messages": [{**ASKED[0], "tools": TOOLS}]}):
        assert "as_chat" not in refused("unknown", canonical, row)


FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "int"}}}}
SCHEMA = json.dumps(FUNCTION["parameters"])


@pytest.mark.parametrize("key", ["tools", "functions"])
def test_tools_have_one_form(key):
    tool = {"type": "function", "function": FUNCTION}
    for given in (
        tool,
        FUNCTION,
        FUNCTION | {"type": "function"},
        FUNCTION | {"parameters": SCHEMA},
        {"name": "add", "input_schema": FUNCTION["parameters"]},
        {"name": "add", "inputSchema": SCHEMA},
        {"function": FUNCTION},
        {"function": json.dumps(FUNCTION)},
        {"type": "function", "function": json.dumps(FUNCTION | {"parameters": SCHEMA})},
    ):
        for listed in ([given, tool], [json.dumps(given), tool], json.dumps([given, tool])):
            row = canonical({"messages": ASKED, key: listed})
            assert json.dumps(row["tools"]) == json.dumps([tool, tool])
    for none in ("null", "[]", "{}", "None", [], None):
        assert canonical({"messages": ASKED, key: none}) == {"messages": ASKED}
        uncalled = [ASKED[0], assistant("2", tool_calls=none)]
        assert canonical({"messages": uncalled}) == {"messages": ASKED}


@pytest.mark.parametrize(
    "tool",
    ["add", 1, {"description": "d"}, {"name": ""}, {"name": 1}, {"function": "add"},
     {"function": [{"name": "add"}]}, {"name": "add", "parameters": "a: int"},
     {"name": "add", "parameters": []}, {"name": "add", "parameters": {"properties": SCHEMA}},
     {"type": "object", "name": "add"}, {"add": FUNCTION},
     {"name": "add", "input_schema": {}, "parameters": {}}],
)  # fmt: skip
def test_what_is_not_recognisably_a_tool_is_a_bad_row(tool):
    refused("tool", canonical, {"messages": ASKED, "tools": [tool]})


@pytest.mark.parametrize(
    "role",
    ["function", "ipython", "environment", "tool_response", "tool_result", "function_response"],
)
def test_results_of_tools_are_turns_of_the_tool(role):
    turns = canonical({"messages": [*ASKED, {"role": role, "content": "a"}]})["messages"]
    assert turns[2]["role"] == "tool"
    other = {"messages": [*ASKED, {"role": f"{role}s", "content": "a"}]}
    assert 'assistant"' not in refused(f"'{role}s'", canonical, other)


def test_a_key_that_occurs_twice_is_refused():
    """At any level, also within JSON in a string."""
    for text in (
        '{"text": "a", "text": "a"}',
        '{"messages": [{"role": "user", "content": "a", "content": null}]}',
        json.dumps({"messages": '[{"role": "user", "content": "a", "content": "b"}]'}),
    ):
        refused("occurs twice", canonical, text)


def test_a_column_that_a_row_lacks_is_named():
    row = {"question": "1+1?", "answer": "2"}
    columns = {"prompt": "question", "completion": "answer", "system": "reply"}
    wrong = columns | {"completion": "reply"}
    refused("'reply' ... it has answer, question", partial(canonical, row), wrong, columns)


@pytest.mark.parametrize(
    "key",
    ["weight", "train", "training", "trainable", "loss", "loss_weight", "loss_scale", "supervised"],
)
def test_every_spelling_of_a_weight_becomes_weight(key):
    """test_chat.py tests what weight 0 does to the mask."""
    for given, weight in ((False, 0), (0, 0), (True, 1), (1, 1)):
        turns = [{**user("1?"), key: False}, assistant("1", **{key: given})]
        assert canonical({"messages": turns})["messages"][1]["weight"] == weight
    fraction = [user("1?"), assistant("1", **{key: 0.3})]
    if key in ("weight", "loss_weight", "loss_scale"):
        assert canonical({"messages": fraction})["messages"][1]["weight"] == 0.3
    else:
        refused(f"{key} is 0.3, but must be 0 (false) or 1", canonical, {"messages": fraction})
    wanted = {"messages": [{**user("1?"), key: 1}, assistant("1")]}
    refused(f"{key} is 1, but must be", canonical, wanted)


@pytest.mark.parametrize(
    "key",
    ["train_detail", "training_detail", "mask", "masked", "loss_mask", "ignore", "isTrainable",
     "no_loss", "kto_tag", "label", "weight", "chosen", "rejected"],
)  # fmt: skip
def test_no_message_tells_to_ignore_a_key_that_may_exclude_rows(key):
    for row in (
        {"messages": ASKED, key: False},
        {"prompt": "1+1?", "completion": "2", key: False},
        {"messages": [ASKED[0], assistant("2", **{key: [False]})]},
    ):
        assert "ignore_keys" not in refused(key, canonical, row)


def test_a_key_that_may_be_a_judgment_is_not_only_to_be_ignored():
    for key, value in (("is_correct", False), ("status", "rejected"), ("skip", 1)):
        for row in (
            {"text": "a", key: value},
            {"messages": [user("a"), assistant("b") | {key: value}]},
        ):
            refused("VALUE TO TRAIN ON ... ignore_keys", canonical, row)
    assert "jq" not in refused("unknown", canonical, {"text": "a", "annotation": "a longer text"})


@pytest.mark.parametrize("key", ["image", "images", "videos", "audios", "image_path", "audio_url"])
def test_keys_of_media_are_refused_as_parts_of_media_are(key):
    part = {"type": "image_url", "image_url": {"url": "a.png"}}
    for row in (
        {"messages": ASKED, key: ["a.png"]},
        {"messages": [{**ASKED[0], key: "a.png"}, ASKED[1]]},
        {"messages": [user([{"type": "text", "text": "a"}, part]), ASKED[1]]},
        {"prompt": "a", "completion": "b", key: "a.png"},
    ):
        assert "ignore_keys" not in refused("not text", canonical, row)
    assert canonical({"messages": ASKED, key: []}) == {"messages": ASKED}


def test_every_key_is_used_or_refused():
    """At every level, a key with a value is in the result, is metadata, or is refused by name."""
    for key in ("annotation", "audio", "Answer2", "label", "thoughts"):
        extra = {key: "something"}
        part = {"type": "text", "text": "a", **extra}
        for row in (
            {"messages": ASKED, **extra},
            {"messages": [user("a"), assistant("b", **extra)]},
            {"messages": [user("a"), assistant("", tool_calls=[{**CALL, **extra}])]},
            {"messages": [user([part]), assistant("b")]},
        ):
            refused(key, canonical, row)
    for key in METADATA:
        assert canonical({"messages": ASKED, key: "something"}) == {"messages": ASKED}
