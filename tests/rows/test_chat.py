"""Which text of a row is supervised, over templates in the style of well-known families and over
generated ones.    pytest tests/rows/test_chat.py
"""

import copy
import dataclasses
import json
import re
from functools import partial

import numpy as np
import pytest
import yaml
from harness.cures import refused
from harness.tokenizers import KINDS, small_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from zerotrain.config.schema import CHAT_TEMPLATES, DataConfig, ModelConfig, Source
from zerotrain.rows.chat_template import end_answers, fit_template, set_chat_template
from zerotrain.rows.render import tokenize_row
from zerotrain.rows.sources import BadRow
from zerotrain.tools.older_transformers import edit_json

CONFIG = DataConfig(train_sources=["rows"])


def byte_tokenizer(use_regex):
    """Bytes and a few merges. Without the regex, merges span the boundaries of words and tags."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["yes.<|end|>\n<|", "no!</s>\n", '|>\n"', "hello"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


WORDS, CROSSING = byte_tokenizer(True), byte_tokenizer(False)


def tokenizer_with(base, template, special=(), eos=None):
    tokenizer = copy.deepcopy(base)
    tokenizer.chat_template = template
    tokenizer.add_tokens(list(special), special_tokens=True)
    if eos:
        tokenizer.add_special_tokens({"eos_token": eos})
    return tokenizer


def family(name, change=lambda template: template):
    template, eos, special, _ = FAMILIES[name]
    return tokenizer_with(WORDS, change(template), special, eos)


def supervised_turns(tokenizer, messages, supervise="answers", ignore_keys=(), **more):
    """The text of each run of supervised tokens."""
    config = dataclasses.replace(CONFIG, supervise=supervise, ignore_keys=[*ignore_keys])
    row = {"messages": copy.deepcopy(messages), **more}
    ids, mask, *_ = tokenize_row(row, tokenizer, Source("rows", format="messages"), config)
    edges = np.flatnonzero(np.diff(mask.astype(int))) + 1
    return [tokenizer.decode(turn) for turn in np.split(ids, edges)[1::2]]


def without_space(texts):
    return ["".join(text.split()) for text in texts]


def assert_supervised(tokenizer, messages, expected):
    assert without_space(supervised_turns(tokenizer, messages)) == without_space(expected)


# --------------------------------------------------------------------------------------------------
# Families

LOOP = "{%% for m in messages %%}%s{%% endfor %%}"
# A template, its end token, its special tokens, and what is supervised of the two answers of CHAT.
FAMILIES = yaml.safe_load(r"""
chatml:
- "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
  {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
- <|im_end|>
- [<|im_start|>, <|im_end|>]
- [2<|im_end|>, 4<|im_end|>]
chatml, another eos at the end:  # OLMo
- "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
  {% if m.role == 'assistant' and loop.last %}{{ eos_token }}{% else %}<|im_end|>\n{% endif %}\
  {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
- <|endoftext|>
- [<|im_start|>, <|im_end|>, <|endoftext|>]
- [2<|im_end|>, 4<|endoftext|>]
phi-3:
- "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}\
  {% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
- <|endoftext|>
- [<|system|>, <|user|>, <|assistant|>, <|end|>, <|endoftext|>]
- [2<|end|>, "4<|end|>\n<|endoftext|>"]
gpt-oss:
- "<|start|>system<|message|>You are a model.<|end|>{% for m in messages %}\
  {% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}\
  {% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% else %}<|start|>{{ m.role }}\
  <|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}\
  <|start|>assistant{% endif %}"
- <|return|>
- [<|start|>, <|message|>, <|channel|>, <|end|>, <|return|>]
- [<|channel|>final<|message|>2<|end|>, <|channel|>final<|message|>4<|return|>]
command-a:
- "{{ bos_token }}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># Preamble\n<|END_OF_TURN_TOKEN|>\
  {% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}\
  <|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content | trim }}{% if loop.last %}<|END_RESPONSE|>\
  {% endif %}<|END_OF_TURN_TOKEN|>{% else %}<|{{ m.role | upper }}_TOKEN|>{{ m.content | trim }}\
  <|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}{% if add_generation_prompt %}\
  <|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
- <|END_OF_TURN_TOKEN|>
- [<|START_OF_TURN_TOKEN|>, <|END_OF_TURN_TOKEN|>, <|CHATBOT_TOKEN|>, <|USER_TOKEN|>,
  <|SYSTEM_TOKEN|>, <|START_RESPONSE|>, <|END_RESPONSE|>]
- [<|START_RESPONSE|>2<|END_OF_TURN_TOKEN|>,
  <|START_RESPONSE|>4<|END_RESPONSE|><|END_OF_TURN_TOKEN|>]
deepseek:
- "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}\
  {% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}\
  <｜end▁of▁sentence｜>{% else %}{{ m.content }}{% endif %}{% endfor %}\
  {% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
- <｜end▁of▁sentence｜>
- [<｜User｜>, <｜Assistant｜>, <｜end▁of▁sentence｜>]
- [2<｜end▁of▁sentence｜>, 4<｜end▁of▁sentence｜>]
llama-3:
- "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n\
  {{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}\
  <|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
- <|eot_id|>
- [<|start_header_id|>, <|end_header_id|>, <|eot_id|>]
- [2<|eot_id|>, 4<|eot_id|>]
qwen3:
- "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}\
  {% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>\
  {{ m.role }}\n{% if m.role == 'assistant' %}{% set text = m.content %}\
  {% set thought = m.reasoning_content or '' %}{% if '</think>' in text %}\
  {% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}\
  {% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}\
  {% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ text }}{% else %}\
  {{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}\
  <|im_start|>assistant\n{% endif %}"
- <|im_end|>
- [<|im_start|>, <|im_end|>]
- [2<|im_end|>, "<think>\n\n</think>\n\n4<|im_end|>"]
exaone 4:  # the thinking block, which the prompt also has, belongs to the answer
- "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}\
  <think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}\
  {% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
- <|im_end|>
- [<|im_start|>, <|im_end|>]
- [<think></think>2<|im_end|>, <think></think>4<|im_end|>]
gemma:
- "{{ bos_token }}{% if messages[0].role == 'system' %}\
  {% set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% else %}\
  {% set first = '' %}{% endif %}{% for m in messages %}\
  {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
  {{ raise_exception('Conversation roles must alternate') }}{% endif %}<start_of_turn>\
  {{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}\
  {{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}\
  <start_of_turn>model\n{% endif %}"
- <eos>
- [<start_of_turn>, <end_of_turn>, <eos>]
- [2<end_of_turn>, 4<end_of_turn>]
mistral:  # the system turn is inside the last user turn
- "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}\
  {% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}\
  {% if m.role == 'user' %}[INST] {% if loop.index0 == ns.last and messages[0].role == 'system' %}\
  {{ messages[0].content }}\n\n{% endif %}{{ m.content }} [/INST]{% elif m.role == 'assistant' %} \
  {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
- </s>
- [</s>]
- [2</s>, 4</s>]
glm-4:
- "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}\
  {% if add_generation_prompt %}<|assistant|>\n{% endif %}"
- <|endoftext|>
- ["[gMASK]", <sop>, <|system|>, <|user|>, <|assistant|>, <|endoftext|>]
- [2<|endoftext|>, 4<|endoftext|>]
qwen1.5:
- "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}\
  {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
  {% if (loop.last and add_generation_prompt) or not loop.last %}<|im_end|>\n{% endif %}\
  {% endfor %}{% if add_generation_prompt and messages[-1].role != 'assistant' %}\
  <|im_start|>assistant\n{% endif %}"
- <|im_end|>
- [<|im_start|>, <|im_end|>]
- [2<|im_end|>, 4<|im_end|>]
words:
- "{% for m in messages %}{{ m.role | title }}: {{ m.content }}\n{% endfor %}\
  {% if add_generation_prompt %}Assistant:{% endif %}"
- </s>
- [</s>]
- [2</s>, 4</s>]
""")
for name in ("chatml", "llama-3"):  # variants that always end with the header of an answer
    template, *rest = FAMILIES[name]
    unasked = re.sub("{% if add_generation_prompt %}(.*){% endif %}", r"\1", template, flags=re.S)
    FAMILIES[f"{name}, unasked headers"] = (unasked, *rest)
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4"},
]


# These write no end-of-turn text after answers, or none after the last one.
NO_ENDS = {"glm-4", "qwen1.5", "words"}


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_is_its_content_and_its_own_end(family, as_tokens):
    template, eos, special, (first, last) = FAMILIES[family]
    tokenizer = tokenizer_with(WORDS, template, special if as_tokens else (), eos)
    if family in NO_ENDS:
        refused("has no end-of-turn text", partial(supervised_turns, tokenizer), CHAT)
    end_answers(tokenizer)
    assert (tokenizer.chat_template == template) == (family not in NO_ENDS)
    for messages, expected in (
        ([SYSTEM, *CHAT], [first, last]),
        ([*CHAT, *CHAT], [first, first.replace("2", "4"), first, last]),
    ):
        assert_supervised(tokenizer, messages, expected)
    assert without_space(supervised_turns(tokenizer, [*CHAT, CHAT[0]])) in map(
        without_space, ([first, last], [first, first.replace("2", "4")])
    )


# --------------------------------------------------------------------------------------------------
# Tool calls, reasoning, weights

CALLS = (
    LOOP % "{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<out>{{ m.content }}</out>"
    "{% elif m.tool_calls %}<|bot|><calls>{% for c in m.tool_calls %}"
    "{{ c.type ~ ' ' ~ c.function.name ~ ' ' ~ c.function.arguments | tojson ~ ';' }}{% endfor %}"
    "</calls>{{ eos_token }}{% else %}<|bot|>{{ m.content }}{{ eos_token }}{% endif %}"
    + "{% if add_generation_prompt %}<|bot|>{% endif %}"
)


def row_with_calls(*arguments):
    calls = [
        {"type": "function", "function": {"name": name, "arguments": a}}
        for name, a in zip(("add", "sub"), arguments, strict=False)
    ]
    return [
        CHAT[0],
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": '{"sum": 2}'},
        CHAT[1],
    ]


@pytest.mark.parametrize("written", ["ARGUMENTS | tojson", "(ARGUMENTS + '')", "ARGUMENTS"])
@pytest.mark.parametrize("arguments", [{"a": 1, "b": "x y"}, '{"a": 1, "b": "x y"}', {}])
def test_tool_calls_are_supervised(arguments, written):
    """Functionary's templates concatenate arguments, so arguments must be strings."""
    written = written.replace("ARGUMENTS", "c.function.arguments")
    template = CALLS.replace("c.function.arguments | tojson", written)
    tokenizer = tokenizer_with(WORDS, template, ["</s>"], "</s>")
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
    assert supervised_turns(tokenizer, row_with_calls(arguments, arguments)) == [
        f"<calls>function add {shown};function sub {shown};</calls></s>",
        "2</s>",
    ]


ENDED = "the same after that message as after a last one, and then {{ eos_token }}"
LOST = {
    "the second call": ("in m.tool_calls", "in m.tool_calls[:1]", "2 ... incomplete"),
    "a text among the arguments": (" ~ c.function.arguments | tojson", "", "2 ... incomplete"),
    "the result": ("<out>{{ m.content }}", "<out>", "3 ... incomplete"),
    "the end": ("</calls>{{ eos_token }}", "</calls>", "2 ... end-of-turn"),
    "the end but for a text": ("</calls>{{ eos_token }}", "</calls><|call|>", "2 ... end-of-turn"),
    "an id where it is last": (
        "';' }}", "';' }}{% if m != messages[-1] %}, 1{% endif %}", "2 ... end-of-turn"
    ),
}  # fmt: skip


@pytest.mark.parametrize("lost", LOST)
def test_parts_of_tool_calls_that_a_template_drops_are_named(lost):
    before, after, problem = LOST[lost]
    assert before in CALLS
    row = row_with_calls({"b": "x"}, {"b": "y"})

    def read(template):
        return supervised_turns(tokenizer_with(WORDS, template, ["</s>"], "</s>"), row)

    cure = ENDED if "end-of-turn" in problem else "or model.chat_template"
    refused(f"message {problem} ... {cure}", read, CALLS.replace(before, after), CALLS)


def test_a_call_may_end_with_a_token_of_its_own():
    """As with gpt-oss."""
    template = CALLS.replace("</calls>{{ eos_token }}", "</calls><|call|>")
    tokenizer = tokenizer_with(WORDS, template, ["<|call|>"], "</s>")
    call, answer = supervised_turns(tokenizer, row_with_calls({}))
    assert (call, answer) == ("<calls>function add {};</calls><|call|>", "2</s>")


def test_tools_that_a_template_drops_are_refused():
    for key in ("tools", "functions"):
        tools = {key: [{"name": "add"}]}
        read = partial(supervised_turns, family("chatml"), CHAT, "answers", **tools)
        refused("drops the tools; ... data.ignore_keys: [tools]", read, [], ["tools"])
        supervised_turns(family("chatml", "{{{{ tools }}}}{}".format), CHAT, **tools)


# A thought as rows have it: with keys beside the content, or as parts of it.
REASONED = yaml.safe_load("""
- {reasoning_content: easy}
- {thinking: easy}
- {reasoning: easy}
- {reasoning: "easy\\n", reasoning_content: easy}
- {reasoning: easy, reasoning_details: [{type: reasoning.text, text: easy, format: x, index: 0}]}
- reasoning_details: [{type: reasoning.summary, summary: ea}, {type: reasoning.text, text: sy}]
- reasoning_details: '[{"type": "reasoning.text", "text": "easy", "signature": "x"}]'
- content: [{type: thinking, thinking: easy, signature: x}, {type: text, text: "2"}]
- content: [{type: thinking, thinking: [{type: text, text: easy}]}, {type: text, text: "2"}]
- content: [{type: reasoning, text: easy}, {type: text, text: "2"}]
- content:
  - {type: reasoning, id: x, summary: [{type: summary_text, text: easy}]}
  - {type: output_text, text: "2"}
""")


@pytest.mark.parametrize("thought", REASONED, ids=str)
def test_every_spelling_of_reasoning_is_supervised(thought):
    expected = ["<think>\neasy\n</think>\n\n2<|im_end|>"]
    for key in ("m.reasoning_content", "m.thinking", "m.reasoning"):
        tokenizer = family("qwen3", partial(re.sub, "m.reasoning_content", key))
        for turns in ([{**CHAT[1], **thought}], [{**CHAT[1], "content": "", **thought}, CHAT[1]]):
            if len(turns) == 1 or "content" not in thought:
                assert supervised_turns(tokenizer, [CHAT[0], *turns]) == expected
    read = partial(supervised_turns, family("chatml"), [CHAT[0], {**CHAT[1], **thought}], "answers")
    refused("incomplete ... (reasoning_content for ", read, [], ["reasoning_content"])


@pytest.mark.parametrize("ignored", [[], ["channel"]])
def test_analysis_is_never_an_answer(ignored):
    chat = [CHAT[0], {**CHAT[1], "content": "easy", "channel": "analysis"}]
    final = {**CHAT[1], "channel": "final"}
    read = partial(supervised_turns, ignore_keys=ignored)
    for name in ("analysis", "Analysis"):
        alone = [CHAT[0], {**chat[1], "channel": name}]
        for tokenizer in (family("qwen3"), family("chatml")):
            refused("no answer follows the reasoning", partial(read, tokenizer), alone)
    assert read(family("qwen3"), [*chat, final]) == ["<think>\neasy\n</think>\n\n2<|im_end|>"]
    refused("incomplete", partial(read, family("chatml")), [*chat, final])
    cure = partial(supervised_turns, ignore_keys=[*ignored, "reasoning_content"])
    assert cure(family("chatml"), [*chat, final]) == ["2<|im_end|>"]
    tokenizer = tokenizer_with(WORDS, None, ["<|return|>"], "<|return|>")
    set_chat_template(tokenizer, ModelConfig("", chat_template="gpt-oss"))
    [turn] = read(tokenizer, [*chat, final])
    assert turn == (
        "<|channel|>analysis<|message|>easy<|end|><|start|>assistant"
        "<|channel|>final<|message|>2<|return|>"
    )


def test_reasoning_of_earlier_turns_that_a_template_cuts_is_refused():
    tokenizer = family("qwen3")
    early = [CHAT[0], {**CHAT[1], "thinking": "easy"}, *CHAT[2:]]
    named = "message 2 ... data.supervise: last ... , data.ignore_keys"
    refused(named, partial(supervised_turns, tokenizer), early)
    assert supervised_turns(tokenizer, early, "last") == ["<think>\n\n</think>\n\n4<|im_end|>"]
    assert len(supervised_turns(family("chatml"), early, ignore_keys=["thinking"])) == 2


def test_a_turn_of_weight_0_is_context():
    """And templates do not see the weights."""
    tokenizer = family("chatml", lambda t: t.replace("m.content", "m.content ~ m.weight"))
    for weight, expected in ((0, ["4<|im_end|>"]), (1, ["2<|im_end|>", "4<|im_end|>"])):
        row = [CHAT[0], {**CHAT[1], "weight": weight}, *CHAT[2:]]
        assert supervised_turns(tokenizer, row) == expected
    row = [*CHAT[:3], {**CHAT[3], "weight": 0}]
    assert supervised_turns(tokenizer, row) == ["2<|im_end|>"]
    text = tokenizer.apply_chat_template(row, tokenize=False)
    every_other = supervised_turns(tokenizer, row, "all")
    assert "".join(every_other).count("<|im_end|>") == text.count("<|im_end|>") - 1


def test_generation_blocks_that_omit_part_of_an_answer_are_refused():
    """With a block for each part, as in TRL's diffusion_gemma_training, and without one of them."""
    parts = ["{{ '<think>\n' }}", "{{ m.reasoning_content }}", "{{ '\n</think>\n\n' }}",
             "{{ m.content }}", "{{ '<|im_end|>\n' }}"]  # fmt: skip
    thought = {**CHAT[1], "reasoning_content": "easy"}
    for left_out in (None, *range(4)):
        marked = "".join(
            part if i == left_out else f"{{% generation %}}{part}{{% endgeneration %}}"
            for i, part in enumerate(parts)
        )
        content = (
            f"{{% if m.role == 'assistant' %}}{marked}{{% else %}}{{{{ m.content }}}}<|im_end|>\n"
        )
        template = FAMILIES["chatml"][0].replace(
            "{{ m.content }}<|im_end|>\n", content + "{% endif %}"
        )
        tokenizer = family("chatml", lambda _, template=template: template)
        chat = [CHAT[0], thought, CHAT[2], thought]
        if left_out is None:
            assert_supervised(tokenizer, chat, ["<think>easy</think>2<|im_end|>"] * 2)
        else:
            refused("message 2 ... %} blocks", partial(supervised_turns, tokenizer), chat)


def test_templates_whose_turns_cannot_be_located_are_refused():
    """In GLM's templates only the next user's tag follows an answer, so that tag ends it."""
    special = [*FAMILIES["chatml"][2], "<|user|>", "<|assistant|>"]
    chatml, end = FAMILIES["chatml"][0], "<|im_end|>\n"
    ask, header = "{% if add_generation_prompt %}", "<|im_start|>assistant\n"
    next_user = f"{{% if m.role == 'assistant' %}}<|im_start|>user\n{{% else %}}{end}{{% endif %}}"
    always = chatml.replace(ask + header, header + ask + "<|user|>")
    joined = "m.content.split('<think>') | join(messages[0].content)"
    chat = [CHAT[0], {**CHAT[1], "content": "2<think>2"}, *CHAT[2:]]
    read, by_name = partial(supervised_turns, messages=chat), tokenizer_with(WORDS, None, special)
    set_chat_template(by_name, ModelConfig("", chat_template="chatml"))
    for template, problem in (
        (chatml.replace("m.content", joined), "text inside"),
        (chatml.replace(end, next_user), "end-of-turn"),
        (
            chatml.replace(end, next_user.replace("<|im_start|>", end + "<|im_start|>")),
            "end-of-turn",
        ),
        (always.replace("m.role }}\n", "m.role }}\n<|user|>"), "end-of-turn"),
        (chatml.replace(ask, ask + "  "), "does not start with"),
        (chatml.replace(ask, ask + "<|im_start|>my"), "does not start with"),
        (chatml.replace("m.content", "m.content | upper"), "template rewrites"),
    ):
        tokenizer = tokenizer_with(WORDS, template, special)
        line = refused(problem, read, tokenizer, tokenizer_with(WORDS, chatml, special), by_name)
        assert "to a copy that writes" in line
    only_earlier = chatml.replace("m.content", joined.replace("n(", "n('' if loop.last else "))
    tokenizer = tokenizer_with(WORDS, only_earlier, special)
    refused("text inside ... ; or data.supervise: last", read, tokenizer)
    assert supervised_turns(tokenizer, chat, "last") == ["4<|im_end|>"]
    template = (
        LOOP
        % "{% if m.role == 'user' %}{% if loop.first %}<|user|>{% endif %}{{ '\n' ~ m.content }}"
        "{% else %}<|assistant|>{{ '\n' ~ m.content }}<|user|>{% endif %}"
        + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert_supervised(tokenizer_with(WORDS, template, special), CHAT, ["2<|user|>", "4<|user|>"])


NAMED = yaml.safe_load("""
alpaca: 2</s>
chatml: 2<|im_end|>
deepseek: 2</s>
gemma: 2<end_of_turn>
gpt-oss: <|channel|>final<|message|>2<|return|>
llama3: 2<|eot_id|>
mistral: 2</s>
olmo: 2</s>
phi: 2<|end|>
plain: 2</s>
qwen: 2<|im_end|>
zephyr: 2</s>
""")


@pytest.mark.parametrize("name", NAMED)
def test_named_templates(name):
    """In a tokenizer without their end-of-turn tokens, eos takes their place."""
    source = (CHAT_TEMPLATES / f"{name}.jinja").read_text()
    assert NAMED.keys() == {file.stem for file in CHAT_TEMPLATES.glob("*.jinja")}
    mark = NAMED[name].partition("2")[2]
    tokenizer = tokenizer_with(WORDS, None, [mark], "</s>")
    for end in (mark, mark if name == "gpt-oss" else "</s>"):
        tokenizer.chat_template = fit_template(source, tokenizer)
        for messages in (CHAT[:2], [SYSTEM, *CHAT[:2]]):
            assert_supervised(tokenizer, messages, [NAMED[name].replace(mark, end)])
        tokenizer = tokenizer_with(WORDS, None, [], "</s>")


@pytest.mark.parametrize("name", NAMED)
def test_named_templates_begin_rows_as_the_tokenizer_begins_texts(name):
    tokenizer = tokenizer_with(WORDS, None, ["<s>", "</s>"], "</s>")
    bos = ("<s>", tokenizer.convert_tokens_to_ids("<s>"))
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[bos]
    )
    set_chat_template(tokenizer, ModelConfig("", chat_template=name))
    row, source = {"messages": CHAT[:2]}, Source("rows", format="messages")
    ids, weights, *_ = tokenize_row(row, tokenizer, source, CONFIG)
    assert [i for i, token in enumerate(ids) if token == bos[1]] == [0] and not weights[0]


def test_a_template_in_json_is_read_as_json(tmp_path):
    """As processors save it, and tokenizers their config."""
    chatml = FAMILIES["chatml"][0]

    def read(name, text):
        (tmp_path / name).write_text(text)
        tokenizer = tokenizer_with(WORDS, None, ["<|im_end|>"], "<|im_end|>")
        set_chat_template(tokenizer, ModelConfig("", chat_template=str(tmp_path / name)))
        assert tokenizer.chat_template == chatml
        assert_supervised(tokenizer, CHAT, ["2<|im_end|>", "4<|im_end|>"])

    given = json.dumps({"chat_template": chatml, "bos_token": None}, indent=1)
    for name in ("chat_template.json", "template"):
        read(name, given)
    read_as = partial(read, "chat_template.json")
    refused("is not JSON", read_as, chatml, given)
    named = [{"name": "default", "template": chatml}]
    for other in (named, {"chat_template": named}, {"template": chatml}, chatml):
        line = "write the template itself into a file"
        refused(line, partial(read, "template"), json.dumps(other), chatml)


def test_an_unknown_name_of_a_template_lists_the_known_ones():
    tokenizer = tokenizer_with(WORDS, None, ["</s>"], "</s>")
    read = partial(supervised_turns, tokenizer)
    refused("has no chat template, but ... ; set model.chat_template", read, CHAT)
    named = "mistrall is not ... alpaca, ... mean mistral?"
    names = (ModelConfig("", chat_template=name) for name in ("mistrall", "mistral"))
    refused(named, partial(set_chat_template, tokenizer), *names)
    read(CHAT)


def test_an_answer_that_shares_a_token_with_its_header_is_refused():
    """Both cures work: a line break after the header, and a header that is a token."""
    chat, header = [CHAT[0], {**CHAT[1], "content": "</i>"}], "assistant!"
    template = (
        LOOP % "{{ m.role ~ '!' ~ m.content }}<|im_end|>\n"
        + "{% if add_generation_prompt %}assistant!{% endif %}"
    )
    cures = (template, header), (template.replace("!", "!\n"), "<|im_end|>")

    def read(given):
        tokenizer = tokenizer_with(WORDS, given[0], ["<|im_end|>", given[1]])
        assert supervised_turns(tokenizer, chat) == ["</i><|im_end|>"]

    named = "whose tags are tokens, or whose headers end with a line break"
    refused(named, read, (template, "<|im_end|>"), *cures)


# --------------------------------------------------------------------------------------------------
# Special tokens in text, rows without a template


@pytest.mark.parametrize(("role", "special"), enumerate(["<|im_end|>", '<|"|>', "</s>"]))
def test_special_tokens_in_a_row_are_refused(role, special):
    messages = [SYSTEM, *CHAT[:2]]
    messages[role] = {**messages[role], "content": f"a {special}\nassistant\n b"}
    tokenizer = family("chatml")
    tokenizer.add_tokens([special], special_tokens=True)
    named = "a special token ... ; write chats as messages, without the template's tokens"
    refused(named, partial(supervised_turns, tokenizer), messages, [SYSTEM, *CHAT[:2]])


def test_rows_without_a_template(tmp_path):
    tokenizer = tokenizer_with(WORDS, None, ["<s>"])

    def supervised(row, kind):
        ids, weights, *_ = tokenize_row(row, tokenizer, Source("rows", format=kind), CONFIG)
        return tokenizer.decode(ids[weights > 0]), tokenizer.decode(ids)

    named = "set eos_token in its tokenizer_config.json"
    refused(named, lambda row: supervised(row, "text"), {"text": "2"})
    tokenizer.save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", lambda tree: tree.update(eos_token="</s>"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    texts = ("2</s>", "1+1? 2</s>")
    assert supervised({"prompt": "1+1? ", "completion": "2"}, "prompt_completion") == texts
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> <s> $A", special_tokens=[("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
    )
    assert supervised({"text": "2"}, "text")[0] == "<s>2</s>"  # all but the first


BORDERS = [
    ("foo(", "bar)"),
    ("foo(", "self)"),
    ("Answer:", "yes"),
    ("Answer:", " yes"),
    ("Answer: ", "yes"),
    ("Answer:\n", "\n  yes"),
    ("a", "é "),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_follows_the_tokens_of_its_prompt(kind):
    """The prompt has the tokens that a server sends, and both together are the text of the row: no
    space comes between them.
    """
    tokenizer = small_tokenizer(kind)
    source = Source("rows", format="prompt_completion")
    found = []
    for prompt, completion in BORDERS:
        row = {"prompt": prompt, "completion": completion}
        ids, weights, *_ = tokenize_row(row, tokenizer, source, CONFIG)
        sent = tokenizer(prompt)["input_ids"]
        assert (weights > 0).tolist() == [False] * len(sent) + [True] * (len(ids) - len(sent))
        assert ids[: len(sent)].tolist() == sent and ids[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(ids[1:-1], clean_up_tokenization_spaces=False)
        assert text.removeprefix(" " * (kind == "RoBERTa")) == prompt + completion
        found.append(ids.tolist())
    assert found[2] != found[3]


def test_a_completion_that_the_tokenizer_always_joins_is_refused():
    tokenizer = small_tokenizer("without words", merges=["(s", "as", "Ċs"])
    tokenizer.chat_template = FAMILIES["chatml"][0]

    def read(as_chat):
        row = {"prompt": "foo(", "completion": "self"}
        config = dataclasses.replace(CONFIG, as_chat=as_chat)
        return tokenize_row(row, tokenizer, Source("rows", format="prompt_completion"), config)

    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "assistant\n"], special_tokens=True)
    refused("('foo(' and 'self'); ... data.as_chat: true", read, False, True)


# --------------------------------------------------------------------------------------------------
# Generated templates


@dataclasses.dataclass(frozen=True)
class Style:
    """A template that is put together from parts of the families."""

    opener: str
    end_of_user: str
    end_of_turn: str
    end_of_row: str
    separator: str
    preamble: str
    prompts: str
    trims: bool
    cuts_thoughts: bool

    def template(self, start="", stop=""):
        """The Jinja text, with `start` and `stop` around each answer and its end."""

        def text(value):  # an expression, since Jinja removes line breaks after tags
            return "{{ " + json.dumps(value) + " }}"

        def header(role):
            return "{{ " + json.dumps(self.opener).replace("ROLE", f'" ~ {role} ~ "') + " }}"

        cut = (
            "{% if m.role == 'assistant' and not loop.last and '</think>' in c %}"
            "{% set c = c.split('</think>')[-1] %}{% endif %}"
        )
        content = "{{ c | trim }}" if self.trims else "{{ c }}"
        prompt, thought = header("'assistant'"), text("<think>\n")
        return (
            f"{text(self.preamble)}{{% for m in messages %}}{{% set c = m.content %}}"
            f"{cut if self.cuts_thoughts else ''}{header('m.role')}"
            f"{{% if m.role == 'assistant' %}}{text(start)}{content}"
            f"{{% if loop.last %}}{text(self.end_of_row)}{{% else %}}{text(self.end_of_turn)}"
            f"{{% endif %}}{text(stop)}{{% else %}}{content}{text(self.end_of_user)}{{% endif %}}"
            f"{text(self.separator)}{{% endfor %}}"
            + {
                "asked": f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}",
                "always": prompt,
                "never": "",
                "thinking": f"{{% if add_generation_prompt %}}{prompt}{thought}{{% endif %}}",
            }[self.prompts]
        )


ENDS = ["<|end|>", "</s>", "<|eot|>", "<|return|>"]
CONTENTS = st.lists(
    st.sampled_from(
        ["yes.", "no!", "hello", "user", "assistant", "2", '"', "'", "é", "👍", "|>", "<|", "\n",
         " ", "<|end|>", "</s>", "<|user|>\n", "<|assistant|>\n", "<think>", "</think>",
         "{", "}", "\\", "[INST]", "\U00020000"]
    ),
    min_size=1, max_size=5,
).map("".join).filter(str.strip)  # fmt: skip
STYLES = st.builds(
    Style,
    opener=st.sampled_from(
        ["<|ROLE|>\n", "<|ROLE|>", "<|start|>ROLE\n", "<|h|>ROLE<|/h|>\n\n", "[ROLE] ", "ROLE: "]
    ),
    end_of_user=st.sampled_from(["", *ENDS]),
    end_of_turn=st.sampled_from(["", *ENDS]),
    end_of_row=st.sampled_from(["", *ENDS, "<|end|>\n<|last|>"]),
    separator=st.sampled_from(["", "\n"]),
    preamble=st.sampled_from(["", "<s>", "<|start|>system\nBe kind.<|end|>\n"]),
    prompts=st.sampled_from(["asked", "always", "never", "thinking"]),
    trims=st.booleans(),
    cuts_thoughts=st.booleans(),
)
SPECIAL = ["<|end|>", "</s>", "<|eot|>", "<|last|>", "<|return|>", "<|start|>", "<|user|>",
           "<|assistant|>", "<|h|>", "<|/h|>", "<think>", "</think>"]  # fmt: skip


@settings(max_examples=100, deadline=None)
@example(  # the first answer has an end within the row, but none when it is last
    style=Style("<|ROLE|>\n", "", "<|end|>", "", "", "", "asked", False, True),
    contents=["yes.", '</think>yes."', "yes.", "yes."],
    as_tokens=False,
    base=WORDS,
)
@given(
    style=STYLES,
    contents=st.lists(CONTENTS, min_size=2, max_size=6),
    as_tokens=st.booleans(),
    base=st.sampled_from([WORDS, CROSSING]),
)
def test_no_generated_template_supervises_another_turn(style, contents, as_tokens, base):
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": c}
        for i, c in enumerate(contents[: len(contents) // 2 * 2])
    ]
    tokenizer = tokenizer_with(base, style.template(), SPECIAL if as_tokens else ())
    marked = tokenizer.apply_chat_template(
        messages, chat_template=style.template("\1", "\2"), tokenize=False
    )
    answers = re.findall("\1(.*?)\2", marked, re.DOTALL)
    try:
        turns = supervised_turns(tokenizer, messages)
    except BadRow:
        ordinary = (
            as_tokens
            and base is WORDS
            and style.prompts == "asked"
            and style.end_of_turn
            and style.end_of_row == style.end_of_turn
            and style.opener.endswith("\n")
            and not any(special in content for content in contents for special in SPECIAL)
        )
        assert not ordinary
        return
    assert without_space(["".join(turns)]) == without_space(["".join(answers)])
    for message, answer in zip(messages[1::2], answers, strict=True):
        content, answer = (re.sub(r"</?think>|\s", "", t) for t in (message["content"], answer))
        assert content in answer, "a turn was cut"
