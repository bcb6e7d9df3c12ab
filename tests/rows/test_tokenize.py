"""From sources to the cache.    pytest tests/rows/test_tokenize.py"""

import copy
import dataclasses
import errno
import fcntl
import gzip
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from harness.cures import refused
from harness.inputs import write_rows
from harness.processes import run
from harness.repository import REPO
from transformers import ByT5Tokenizer

from zerotrain.config.parse import dump_config
from zerotrain.config.schema import Config, DataConfig, ModelConfig, Source, TrainConfig
from zerotrain.data.cache import hold_out, open_cache
from zerotrain.data.caches import make_missing_caches, open_caches
from zerotrain.model.tokenizer import load_tokenizer
from zerotrain.rows.chat_template import set_chat_template
from zerotrain.rows.fixes import explained
from zerotrain.rows.sources import BadRow, RawRow, read_rows
from zerotrain.rows.tokenize import make_caches
from zerotrain.runtime.errors import UserError


def data_config(tmp_path, rows, on_bad_row="error", **changes):
    source = Source(str(write_rows(tmp_path / "rows.jsonl", rows)), on_bad_row=on_bad_row)
    return dataclasses.replace(
        DataConfig([source], cache_dir=str(tmp_path / "cache"), max_length=64), **changes
    )


def config_of(data, tokenizer):
    """A run config with this data section and a copy of the tokenizer."""
    model = Path(data.cache_dir).with_name("tokenizer")
    tokenizer.save_pretrained(model)
    train = TrainConfig(learning_rate=1.0, epochs=1, global_batch_size=1)
    return Config("run", ModelConfig(str(model)), data, train)


def path_of(data, tokenizer):
    """The cache of a data section, which is made if it is missing."""
    return make_caches(config_of(data, tokenizer))[0]


def tokenize(config, tokenizer):
    return open_cache(path_of(config, tokenizer))


@pytest.fixture
def build(tmp_path, sample_tokenizer):
    """A function that tokenizes rows with changes of the data section."""

    def tokenized(rows, tokenizer=sample_tokenizer, **changes):
        return tokenize(data_config(tmp_path, rows, **changes), tokenizer)

    return tokenized


LONG = {"prompt": "p" * 10, "completion": "c" * 100}  # 111 tokens with the end
SHORT = {"prompt": "p" * 10, "completion": "c" * 5}


@pytest.mark.parametrize(
    ("on_too_long", "lengths", "supervised", "count"),
    [
        ("truncate", [64, 16], [54, 6], {"truncated": 1}),
        # 111 tokens as 64 + 48: the second piece starts with the first one's last token as context
        ("split", [64, 48, 16], [54, 47, 6], {"pieces of split rows": 2}),
        ("drop", [16], [6], {"dropped": 1}),
    ],
)
def test_rows_over_max_length(build, on_too_long, lengths, supervised, count):
    data = build([LONG, SHORT], on_too_long=on_too_long)
    assert data.lengths.tolist() == lengths
    masks = [mask for _, mask in data.fetch(range(len(data)))]
    assert data.supervised.tolist() == supervised == [*map(sum, masks)]
    assert data.meta.over_length == count and data.meta.rows_read == 2


@pytest.mark.parametrize(
    ("on_bad_row", "message"),
    [
        ("error", "rows.jsonl:2: completion is empty"),
        ("skip", "none of its rows is left: 1 rejected: empty answer"),
    ],
)
def test_bad_rows_leave_no_half_a_cache(tmp_path, build, on_bad_row, message):
    bad = {**SHORT, "completion": ""}
    rows = [SHORT, bad] if on_bad_row == "error" else [bad]
    refused(message, partial(build, on_bad_row=on_bad_row), rows)
    assert not [p for p in (tmp_path / "cache").glob("[!.]*") if p.suffix != ".lock"]
    refused("rows.jsonl: it has no rows", build, [], [SHORT])


def as_lines(rows):
    return "\n".join(map(json.dumps, rows)).encode()


GOOD = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "good"}]
JUDGED = [{**SHORT, "completion": f"is {label!r}", "label": label} for label in (True, 0, 1, False)]
# rows of which nothing but "good" is to be trained on after the command of the message
MENDED = yaml.safe_load("""
a role: {conversations: [&user {role: user, content: p}, {from: it's, value: good}]}
a developer:
  messages: [{role: developer, content: p}, *user, &good {role: assistant, content: good}]
a pair: {prompt: p, chosen: good, rejected: bad}
chats:
  prompt: p
  chosen: &chat [*user, *good]
  rejected: [*user, &bad {role: assistant, content: bad}]
  messages: *chat
  score_chosen: 8.0
ends of chats: {conversations: [*user], chosen: *good, rejected: *bad}
answers to chats: {prompt: [*user], chosen: [*good], rejected: [*bad]}
a pair of Alpaca: {instruction: p, input: "", chosen: good, rejected: bad}
a pair of ms-swift: {messages: *chat, rejected_response: bad}
spans: {messages: [*user, {<<: *bad, train_detail: [{train: false}]}, *user, *good]}
weights: {messages: [*user, {<<: *bad, loss: 1.5}, *user, {<<: *good, loss: 1}]}
weights of turns: {messages: [*user, {<<: *good, weight: "0.5"}, *user, {<<: *bad, weight: 0}]}
weights of turns above 1: {messages: [*user, {<<: *bad, weight: 0}, *user, {<<: *good, weight: 2}]}
names of speakers: {messages: [{<<: *user, name: N}, {<<: *good, name: M}]}
a recorded loss: {messages: [*user, {<<: *good, loss: 0.3}]}
a user's weight: {messages: [{<<: *user, train: true}, *good, *user, {<<: *bad, train: 0}]}
weights in quotes: {messages: [*user, {<<: *bad, train: "0"}, *user, {<<: *good, train: "True"}]}
history: {instruction: p, input: "", output: good, history: [[p, good]], system: s}
a history of three texts: {instruction: p, output: good, history: [[p, bad, c]]}
reasoning: {instruction: p, input: i, output: good, reasoning: r}
reasoning of renamed keys: {question: p, answer: good, thinking: r}
choices: {prompt: p, completion: good, choices: [a, b]}
pairs: {conversation: [{human: p, assistant: good}, {human: p, assistant: good}]}
pairs with a system prompt: {conversation: [{system: s, input: p, output: good}]}
texts: {conversations: [p, good, p, good], source: LIMA}
a number as content: {messages: [*user, {role: assistant, content: 4}]}
a result that is an object: {messages: [*user, *good, {role: tool, content: {a: 1}}, *good]}
tools of a message:
  messages: [{role: system, content: s, tools: [{name: f, parameters: {}}]}, *user, *good]
Anthropic:
  messages:
  - {role: user, content: [{type: text, text: p}]}
  - role: assistant
    content: [&said {type: text, text: good}, {type: tool_use, id: c1, name: f, input: {a: 1}}]
  - {role: user, content: [{type: tool_result, tool_use_id: c1, content: [{type: text, text: r}]}]}
  - {role: assistant, content: [*said]}
OpenAI's responses:
  instructions: s
  input: p
  output:
  - {type: function_call, call_id: c1, name: f, arguments: '{"a": 1}'}
  - {type: function_call_output, call_id: c1, output: r}
  - {type: message, role: assistant, content: [{type: output_text, text: good, logprobs: [1]}]}
turns named by role: {messages: [{user: p}, {assistant: good}, {human: p}, {gpt: good}]}
turns as lists: {conversation: [[user, p], [assistant, good]]}
an object of lists: {conversations: {from: [human, gpt], value: [p, good]}}
Gemini:
  systemInstruction: {parts: [{text: s}]}
  contents: [{role: user, parts: [{text: p}]}, {role: model, parts: [{text: go}, {text: od}]}]
parts of a system prompt: {system: [{text: s}], messages: [*user, *good]}
several answers: {instruction: p, input: "", output: [good, better]}
the number of a choice: {prompt: p, completion: 1, choices: [bad, good]}
splits: {train: [{prompt: p, completion: good}], test: [{prompt: p, completion: bad}]}
axolotl's segments:
  segments: [{label: false, text: p}, {label: true, text: good}, {label: false, text: p}]
segments with numbers: {segments: [{label: 0, text: p}, {label: 1, text: good}]}
a refusal: {input: p, output: [{role: assistant, content: [{type: refusal, refusal: good}]}]}
LLaMA-Factory v1:
  messages:
  - {role: user, content: [{type: text, value: p}], loss_weight: 0.0}
  - role: assistant
    loss_weight: 1.0
    content:
    - {type: text, value: good}
    - {type: tool_call, value: '{"name": "f", "arguments": {"a": 1}}'}
  - {role: tool, content: [{type: text, value: r}], loss_weight: 0.0}
  - {role: assistant, content: [{type: text, value: good}], loss_weight: 1.0}
HH-RLHF:
  chosen: "\\n\\nHuman: p\\n\\nAssistant: good\\n\\nHuman: p\\n\\nAssistant:good"
  rejected: "\\n\\nHuman: p\\n\\nAssistant: bad"
""")
CALL = '{"name": "f", "arguments": {"a": 1}}'
TRAINED = {  # what is trained of a row of MENDED, unless it is "good"
    "turns named by role": "goodgood",
    "history": "goodgood", "pairs": "goodgood", "texts": "goodgood", "a number as content": "4",
    "reasoning": "rgood", "reasoning of renamed keys": "rgood",
    "a result that is an object": "goodgood", "Anthropic": f"good{CALL}good",
    "OpenAI's responses": f"{CALL}good", "LLaMA-Factory v1": f"good{CALL}good",
    "HH-RLHF": "goodgood",
}  # fmt: skip
TABLE = {"prompt": ["p", "p"], "completion": ["a", "b"]}
LISTED = [dict(zip(TABLE, values, strict=True)) for values in zip(*TABLE.values(), strict=True)]
IN_ONE = {  # all rows of a file as one value
    "DataFrame.to_json": {key: dict(enumerate(values)) for key, values in TABLE.items()},
    "its orient index": dict(enumerate(LISTED)),
    "its orient split": {"columns": [*TABLE], "index": [0, 1], "data": [["p", "a"], ["p", "b"]]},
    "Dataset.to_dict": TABLE,
    "a key of all rows": {"version": "1", "data": LISTED},
    "the hub's API": {"rows": [{"row": row} for row in LISTED]},
}
MASKED = [GOOD[0], {**GOOD[1], "content": "bad", "masked": 1}, GOOD[0], {**GOOD[1], "masked": 0}]
CURES = {  # the file as it is, and the answers that are left after the command of the message
    "several lines": ((json.dumps(SHORT, indent=1) * 2).encode(), ["ccccc", "ccccc"]),
    "commas": (b"%s,\n%s,} " % (as_lines([SHORT]), as_lines([SHORT])[:-1]), ["ccccc", "ccccc"]),
    "Python": (f"{SHORT}\n{SHORT}".encode(), ["ccccc", "ccccc"]),
    "Python in CSV": (f'id,messages\n[1],"{GOOD}"'.encode(), ["good"]),
    "UTF-16": (json.dumps(SHORT).encode("utf-16"), ["ccccc"]),
    "UTF-16 in CSV": ("prompt,completion\r\np,é\r\n".encode("utf-16"), ["é"]),
    "semicolons in CSV": (b'prompt;completion\r\n"p;";"c\n"\r\n', ["c\n"]),
    "tabs in CSV": (b'prompt\tcompletion\np\t"c\t"""\n', ['c\t"']),
    "quotes in TSV": (b'prompt\tcompletion\np\t"""c"" d"\n', ['"c" d']),
    "all quoted in TSV": (b'"prompt"\t"completion"\n"p"\t"c"\n', ["c"]),
    "lines in TSV": (b'prompt\tcompletion\np\t"c\nd"\n', ["c\nd"]),
    "Latin-1": ('{"prompt": "p", "completion": "é"}'.encode("latin1"), ["é"]),
    "GBK": (
        '{"prompt": "p", "completion": "今天天气怎么样"}'.encode("gbk"),
        ["今天天气怎么样"],
    ),
    "Cyrillic in CSV": ("prompt,completion\np,Привет".encode("cp1251"), ["Привет"]),
    "half a character in JSON": (b'[{"prompt": "p",\n"completion": "cut \\ud83d"}]', ["cut "]),
    "half a character before an empty line": (
        b'{"prompt": "p", "completion": "cut \\ud83d"}\n\n%s' % as_lines([SHORT]),
        ["cut ", "ccccc"],
    ),
    "half a character": (b'{"prompt": "p", "completion": "cut \\ud83d"}', ["cut "]),
    "old Mac in CSV": (b"prompt,completion\rp,c\r", ["c"]),
    "backslashes in CSV": (b'prompt,completion\n"p","a \\"b\\" \\n"\n', ['a "b" \\n']),
    "weights as text": (as_lines([{**SHORT, "weight": "0.5"}]), ["ccccc"]),
    "weights above 1": (as_lines([{**SHORT, "weight": 1.5}]), ["ccccc"]),
    "labels": (as_lines(JUDGED), ["is True", "is 1"]),
    "a judgment": (as_lines([{**SHORT, "skip": 0}, {**LONG, "skip": 1}]), ["ccccc"]),
    "masks of rows": (as_lines([{**SHORT, "mask": 0}, {**LONG, "mask": 1}]), ["ccccc"]),
    "a number": (as_lines([{**SHORT, "completion": n} for n in (4, True)]), ["4", "true"]),
    "an image": (as_lines([{"messages": GOOD, "image": i} for i in ("x.jpg", None)]), ["good"]),
    "a part with an image": (
        as_lines(
            {"messages": [{"role": "user", "content": [{"type": kind, "text": "p"}]}, GOOD[1]]}
            for kind in ("image_url", "text")
        ),
        ["good"],
    ),
    **{case: (as_lines([row]), [TRAINED.get(case, "good")]) for case, row in MENDED.items()},
    **{f"{c} in JSON": (json.dumps(o, indent=1).encode(), ["a", "b"]) for c, o in IN_ONE.items()},
    "one line in JSON": (json.dumps(TABLE).encode(), ["a", "b"]),
    "labels in a list in JSON": (json.dumps(JUDGED).encode(), ["is True", "is 1"]),
    "labels in CSV": (b"prompt,completion,label\np,good,1\np,bad,0\n", ["good"]),
    "labels in Parquet": (JUDGED[1:3], ["is 1"]),
    "turns in Parquet": ([{"messages": json.dumps(MASKED)}], ["good"]),
    "turns in Arrow": ([{"messages": MASKED}], ["good"]),
    "turns as text": (as_lines([{"messages": json.dumps(MASKED)}]), ["good"]),
    "turns in GZ": (gzip.compress(as_lines([{"messages": MASKED}])), ["good"]),
}
WRITES = (
    "{{ tools | tojson if tools }}{% for m in messages if m.role != 'developer' %}<|{{ m.role }}|>"
    "{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_file(file, content):
    if isinstance(content, bytes):
        file.write_bytes(content)
        return
    table = pa.Table.from_pylist(content)
    if file.suffix == ".parquet":
        pq.write_table(table, file)
    else:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.skipif(not shutil.which("jq"), reason="needs jq")
@pytest.mark.parametrize("case", CURES)
def test_the_command_that_a_message_names_mends_the_file(tmp_path, sample_tokenizer, case):
    content, answers = CURES[case]
    tokenizer = tokenizer_with(sample_tokenizer, WRITES)
    kind = case.rpartition(" in ")[2].lower()
    extensions = {"gz": "jsonl.gz"} | {k: k for k in ("csv", "tsv", "json", "parquet", "arrow")}
    file = tmp_path / f"own.{extensions.get(kind, 'jsonl')}"
    config = data_config(tmp_path, [], train_sources=[str(tmp_path / "own.*")], max_length=500)
    write_file(file, content)
    message = refused(" > NEW", partial(tokenize, config), tokenizer)
    if found := re.search("first (gzip -d .*?); ", message):
        subprocess.run(found[1], shell=True, check=True)
        file = file.with_suffix("")
    found = re.search(r"((?:jq|iconv|sed|tr|python3?) ['-].*?) > NEW(\.[a-z]+)?", message)
    command = found[1].replace('"ROLE"', '"assistant"').replace("VALUE TO TRAIN ON", "0")
    if "ENCODING" in command:
        encoding = re.search(rf"([\w-]+) \({re.escape(answers[0])}\)", message)[1]
        command = command.replace("ENCODING", encoding)
    command = command.replace("LARGEST", "2")
    command = re.sub(r"\bOLD[.a-z]*", str(file), command.replace("NAME", "score"))
    command = command.replace("python -m", f"{sys.executable} -m")
    mended = subprocess.run(command, shell=True, capture_output=True, check=True, cwd=REPO)
    file.unlink()
    file.with_suffix(found[2] or file.suffix).write_bytes(mended.stdout)
    data = tokenize(config, tokenizer)
    texts = [
        sample_tokenizer.decode(ids[mask > 0], skip_special_tokens=True)
        for ids, mask in data.fetch(range(len(data)))
    ]
    assert texts == answers


def test_a_command_for_a_hub_data_set_loads_it_first(tmp_path):
    write_rows(tmp_path / "train.jsonl", JUDGED[1:3])
    raw = RawRow(f"{tmp_path}:train", 1, json.dumps(JUDGED[1]))
    line = explained(BadRow("", "jq -c 'select(.label == 1)' OLD.jsonl > NEW.jsonl"), raw, {})
    command = line.replace("python -c", f"{sys.executable} -c")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, capture_output=True)
    assert json.loads((tmp_path / "NEW.jsonl").read_text())["label"] == 1


LINES = {  # the setting that a message names, and the row
    "columns: {prompt: question, completion: answer}": {"question": "p", "answer": 4},
    "columns: {completion: response}": {"prompt": "p", "response": "good"},
    "columns: {output: response, input: context}": {
        "instruction": "p", "context": "", "response": "good"
    },
    "columns: {instruction: question, output: answer, input: context}": {
        "question": "p", "answer": "good", "context": "c"
    },
    "columns: {messages: dialogue}": {"dialogue": GOOD},
    "columns: {text: content}": {"content": "good", "id": 1},
}  # fmt: skip


@pytest.mark.parametrize("named", LINES)
def test_the_columns_that_a_message_names_read_the_row(tmp_path, build, named):
    row = LINES[named]
    refused(f"set {named} of the source", build, [row])
    columns = yaml.safe_load(f"{{{named}}}")["columns"]
    file = str(tmp_path / "rows.jsonl")
    if row.get("answer") == 4:
        with pytest.raises(UserError, match=r'jq -c ..."answer" . numbers'):
            build([row], train_sources=[Source(file, columns=columns)])
        row = {**row, "answer": "4"}
    build([row], train_sources=[Source(file, columns=columns)])


def test_no_columns_are_named_for_a_row_that_lacks_its_question(build):
    for row in (
        {"prompt": None, "completion": "good"},
        {"completion": "good"},
        {"instruction": None, "input": "p", "output": "good"},
        {"question": None, "text2": "p", "answer": "good"},
    ):
        assert "set columns" not in refused("rows.jsonl:1: ", build, [row])


def test_keys_that_answers_may_refer_to_are_not_ignored(build):
    for row in (
        {**SHORT, "history": "a"},
        {"messages": GOOD, "documents": ["a"]},
        {"messages": GOOD, "images": ["a"]},
        {"messages": [{**GOOD[0], "choices": ["a", "b"]}, GOOD[1]]},
        {**SHORT, "previous": [["a", "b"]]},
        {**SHORT, "image_base64": "a"},
    ):
        assert "ignore_keys" not in refused("rows.jsonl:1: ", build, [row])
    for row, named in (
        ({"messages": []}, "'messages' is empty"),
        ({"text": None}, "all its values are null"),
    ):
        refused(named, build, [row])


HELD_BACK = {
    "documents of a chat": {"messages": GOOD, "documents": ["a"]},
    "context of a prompt in messages": {"prompt": GOOD[:1], "completion": GOOD[1:], "context": "a"},
    "a held-out split": {"test": [SHORT]},
    "questions about a text": {"context": "a", "qas": [{"question": "p", "answer": "good"}]},
    "turns of other speakers": {"dialogue": [{"speaker": "A", "text": "p"}]},
    "an answer alone": {"prompt": None, "completion": "good"},
    "a question alone": {"prompt": "p", "completion": None},
}


@pytest.mark.parametrize("case", HELD_BACK)
def test_no_command_trains_on_a_part_of_a_row_alone(build, case):
    line = refused("rows.jsonl:1: ", build, [HELD_BACK[case]])
    assert not re.search("> NEW|columns: {text|trains on", line), line


def test_the_cache_is_reused_and_keyed_by_what_matters(tmp_path, sample_tokenizer):
    config = data_config(tmp_path, [SHORT])
    path = tokenize(config, sample_tokenizer).folder
    before = (path / "meta.json").stat().st_mtime_ns
    assert tokenize(config, sample_tokenizer).folder == path
    assert (path / "meta.json").stat().st_mtime_ns == before

    for change in ({"max_length": 12}, {"ignore_keys": ["a"]}):
        assert path_of(dataclasses.replace(config, **change), sample_tokenizer) != path
    assert path_of(dataclasses.replace(config, micro_batch_tokens=9), sample_tokenizer) == path

    # the content decides: of the same size and time, and then the old one in another file
    rows = tmp_path / "rows.jsonl"
    status = rows.stat()
    for letter in "dc":
        os.replace(rows, tmp_path / "before")
        write_rows(rows, [{**SHORT, "completion": letter * 5}])
        os.utime(rows, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (path_of(config, sample_tokenizer) == path) == (letter == "c")
    assert rows.stat().st_size == status.st_size
    # and it is read once: afterwards a link for the files' status is enough
    path.rename(path.with_name("renamed"))
    for link in path.parent.glob(".links/*"):
        link.write_text("renamed")
    assert path_of(config, sample_tokenizer).name == "renamed"


def test_a_rank_starts_the_program_if_a_cache_is_missing(tmp_path, sample_tokenizer, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "__init__.py").touch()  # another package of this name
    monkeypatch.chdir(tmp_path)
    config = config_of(data_config(tmp_path, [SHORT]), sample_tokenizer)
    tokenizer = load_tokenizer(config.model)
    make_missing_caches(config, tokenizer)
    [rows] = open_caches(config, tokenizer)
    assert len(rows) == 1
    write_rows(tmp_path / "rows.jsonl", [SHORT, {**SHORT, "completion": ""}])
    refused("rows.jsonl:2: ", partial(make_missing_caches, config), tokenizer)
    write_rows(tmp_path / "rows.jsonl", [SHORT, SHORT])
    make_caches(config)
    monkeypatch.setattr(sys, "executable", "/bin/false")  # it is not started again
    make_missing_caches(config, tokenizer)
    assert len(open_caches(config, tokenizer)[0]) == 2


def test_training_rows_are_not_held_out_although_both_sets_have_a_cache(tmp_path, sample_tokenizer):
    files = [write_rows(tmp_path / f"{i}.jsonl", [SHORT] * i) for i in (1, 2)]

    def config(train, held_out):
        sets = {"eval_sources": {"own": [Source(str(held_out))]}, "train_sources": [str(train)]}
        return config_of(data_config(tmp_path, [], **sets), sample_tokenizer)

    for given in (files, reversed(files)):
        make_caches(config(*given))
    tokenizer = load_tokenizer(config(*files).model)
    named = "data.eval_sources.own: ... has the same rows as ... in data.train_sources; give"
    refused(named, lambda given: make_missing_caches(given, tokenizer), config(files[0], files[0]))


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """A cache that the program in data/README.md has written."""
    monkeypatch.chdir(tmp_path)
    page = (REPO / "data" / "README.md").read_text()
    program, columns = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(program, {})
    exec(program.replace('"tokens")', '"weighted")').replace("with pa", columns + "with pa"), {})
    return tmp_path / "tokens"


def test_a_cache_of_another_program_is_a_source(tmp_path, build, tokens, sample_tokenizer):
    rows = build([], train_sources=["tokens"])
    assert [ids.tolist() for ids, _ in rows.fetch([1, 0])] == [[74, 75, 76, 0], [72, 73, 0]]
    named = "tokens: it has ... allowed are 2 to data.max_length (3)"
    refused(named, lambda length: build([], train_sources=["tokens"], max_length=length), 3, 4)
    weighted = build([], train_sources=["weighted"])
    assert weighted.of_targets(np.arange(2))[1].tolist() == [0.5, 1, 0.25, 0.25]
    # made of two sources, and then the one source of a run
    several = data_config(tmp_path, [SHORT], train_sources=[
        str(write_rows(tmp_path / f"{i}.jsonl", [SHORT] * i)) for i in (1, 2)
    ])  # fmt: skip
    folder = path_of(several, sample_tokenizer)
    config = config_of(data_config(tmp_path, [], train_sources=[str(folder)]), sample_tokenizer)
    make_caches(config)
    [rows] = open_caches(config, sample_tokenizer)
    assert rows.meta.source_examples == [3] and rows.meta.formats == ["token cache"]
    sources = ["tokens", str(tmp_path / "1.jsonl")]
    named = "is the only source of its set; make one cache of all sources"
    refused(named, lambda sources: build([], train_sources=sources), sources, [str(folder)])


@pytest.mark.parametrize(
    "column, values",
    [
        ("weights", [[0.5, 1.0], [0.25]]),
        ("weights", [[0.5, 1.5], [0.25, 0.25]]),
        ("weight", [1.5, 0.25]),
        ("input_ids", [[72, 73, 0], [74, 75, 76, 296]]),
        ("input_ids", [[72, None, 0], [74, 75, 76, 0]]),
        ("loss_mask", [[False, True, True], [True, False, True, False]]),
        ("supervised", [2, 1]),
        ("place", [None, 1]),
    ],
)
def test_examples_that_cannot_be_trained_on_are_refused(
    build, tokens, sample_tokenizer, column, values
):
    if column.startswith("weight"):
        tokens = tokens.with_name("weighted")
    with pa.OSFile(str(tokens / "examples.arrow")) as file:
        table = pa.ipc.open_stream(file).read_all()
    field = table.schema.get_field_index(column)
    table = table.set_column(field, column, pa.array(values, table.schema.field(column).type))
    with pa.ipc.new_stream(str(tokens / "examples.arrow"), table.schema) as stream:
        stream.write_table(table)
    read = partial(build, [], train_sources=[tokens.name])
    if "use the tokenizer that made it" in refused(f"{tokens.name}: ", read, sample_tokenizer):
        read(tokenizer_with(sample_tokenizer, None))


def turns(weight):
    return [*GOOD, GOOD[0], {**GOOD[1], "weight": weight}]


@pytest.mark.parametrize("supervise", ["answers", "last", "all"])
def test_weights_of_source_row_and_message_are_multiplied(tmp_path, build, supervise):
    file = write_rows(tmp_path / "chats.jsonl", [{"messages": turns(0.5), "weight": 0.5}])
    data = build([], train_sources=[Source(str(file), loss_weight=0.5)], supervise=supervise)
    [_, weights] = data.of_targets(np.array([0]))
    answer = len("good") + 1  # with the end token
    assert data.weight[0] == weights.sum() and (weights == 0.125).sum() == answer
    others = {"answers": answer, "last": 0, "all": data.lengths[0] - 1 - answer}
    assert (weights == 0.25).sum() == others[supervise] == len(weights) - answer
    assert not build([SHORT, SHORT | {"weight": 1}]).is_weighted


@pytest.mark.parametrize("weight", [0, -0.5, 1.5, "0.5", [1]])
def test_impossible_weights_are_bad_rows(build, weight):
    refused("rows.jsonl:1: weight is", build, [SHORT | {"weight": weight}], [SHORT])
    if weight:
        refused("rows.jsonl:1: ... weight is", build, [{"messages": turns(weight)}], [SHORT])


def test_rows_that_change_while_they_are_read_are_not_cached(tmp_path, build, monkeypatch):
    def read_and_change(source):
        yield from read_rows(source)
        write_rows(tmp_path / "rows.jsonl", [SHORT] * 2)

    monkeypatch.setattr("zerotrain.rows.tokenize.read_rows", read_and_change)
    refused("changed while it was read; start again", build, [SHORT])
    assert not list((tmp_path / "cache").glob("*/meta.json"))
    monkeypatch.undo()
    assert len(build([SHORT] * 2)) == 2


def test_rows_of_other_splits_are_bad_rows(tmp_path, build, sample_tokenizer):
    splits = ["train", "test", None, "train_sft", "validation", "test"]
    keys = ["Split", "Split", "Split", "data_split", "subset", "split"]
    rows = [{"text": "a", key: split} for key, split in zip(keys, splits, strict=True)]
    rows[5] = {"text": "a", "meta": rows[5]}
    rows += [{"text": "a", "subset": "test of arithmetic"}, {"text": "a", "dataset": "eval"}]
    line = refused("rows.jsonl:2: its Split is test ... a file of their own", build, rows, rows[:1])
    named = re.search(r"data.eval_sources: (\[.*?\])", line)[1]
    [source] = yaml.safe_load(named.replace("FILE", str(tmp_path / "own.jsonl")))
    write_rows(tmp_path / "own.jsonl", rows[1:2])
    build(rows[:1], eval_sources={"own": [Source(**source)]})
    data = build(rows, on_bad_row="skip")
    assert data.meta.rejected == {"other split": 3}
    held_out = Source(str(tmp_path / "rows.jsonl"), split="test", on_bad_row="skip")
    config = data_config(tmp_path, rows, train_sources=[held_out])
    assert tokenize(config, sample_tokenizer).meta.rejected == {"other split": 1}


def test_a_damaged_cache_is_one_line(tmp_path, build, chat_rows):
    """Mapping a truncated file and reading behind its end would end the process with SIGBUS. Both
    cures of the message work: another folder, and another cache in this one.
    """
    folder = build(chat_rows).folder
    for path in (folder / "meta.json", folder / "examples.arrow"):
        content = path.read_bytes()
        for damaged in (content[: len(content) // 2], None):
            path.unlink(missing_ok=True)
            if damaged:
                path.write_bytes(damaged)
            refused("cannot read ... ; delete it to tokenize", open_cache, folder)
        path.write_bytes(content)
    data = open_cache(folder)
    assert len(data) == 70
    for numbers in (data.lengths, data.lengths.cumsum(dtype="int32")):  # the latter are offsets
        path.write_bytes(content.replace(numbers.tobytes(), numbers.tobytes()[:-1] + b"\xff"))
        refused("cannot read", open_cache, folder)
    assert len(build(chat_rows, cache_dir=str(tmp_path / "own"))) == 70
    shutil.rmtree(folder)
    assert len(build(chat_rows)) == 70


def test_a_pool_gives_the_same_tokens_as_one_process(tmp_path, build, monkeypatch):
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(2000)]
    one = build(rows, cache_dir=str(tmp_path / "one"))
    monkeypatch.setattr("zerotrain.rows.tokenize.MIN_POOL_BATCHES", 2)
    two = build(rows, cache_dir=str(tmp_path / "two"))
    assert one.meta.content == two.meta.content and two.folder != one.folder


def test_a_cache_dir_that_cannot_be_written_is_one_line(tmp_path, build):
    (tmp_path / "file").touch()
    named = "data.cache_dir: cannot write ... ; set it to a folder that you can write to"
    folders = [str(tmp_path / name) for name in ("file", "own")]
    refused(named, lambda folder: build([SHORT], cache_dir=folder), *folders)


def test_a_disk_without_locks_works(build, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert len(build([SHORT])) == 1


def test_hold_out_splits_without_loss_or_overlap(build):
    data = build([{"text": f"{i}"} for i in range(200)])
    refused("none to train on; lower it", lambda share: hold_out(data, share, 3), 0.999, 0.9)
    train, held = hold_out(data, 0.1, seed=3)
    rows = [*train.column("row"), *held.column("row")]
    assert len(held) == 20 and sorted(rows) == list(range(200))
    assert train.meta.content != data.meta.content
    for part in (train, held):
        assert [ids.size for ids, _ in part.fetch(range(len(part)))] == part.lengths.tolist()


GOOD_AND_BAD = (
    b'\xef\xbb\xbf{"text": "first"}\r\n'
    b'{"text": "not utf-8 \xff"}\n'
    b'{"text": 3}\n'
    b'{"text": "a", "b": 1}\n'
    b"\n"
    b'{"text": "a\0b"}\n'
    b'{"text": "half\n'
    b"[1]\n"
    b'{"text": "\\ud83d"}\n'
    b'{"text": ""}\n'
    b'{"text": "last"}'
)


def test_bad_rows_are_skipped_counted_and_listed(tmp_path, sample_tokenizer):
    config = data_config(tmp_path, [], on_bad_row="skip")
    (tmp_path / "rows.jsonl").write_bytes(GOOD_AND_BAD)
    data = tokenize(config, sample_tokenizer)
    texts = [sample_tokenizer.decode(ids) for ids, _ in data.fetch(range(len(data)))]
    assert texts == ["first<|end|>", "last<|end|>"]
    assert data.meta.rejected == {
        "not UTF-8": 2, "wrong type": 1, "unknown key": 1, "not JSON": 2, "not an object": 1,
        "empty answer": 1,
    }  # fmt: skip
    assert data.meta.rows_read == 10 and len(data) == 2
    listed = [*map(json.loads, (data.folder / "rejected_rows.jsonl").read_text().splitlines())]
    assert [line["place"] for line in listed] == [2, 3, 4, 6, 7, 8, 9, 10]
    assert all(line["file"].endswith("rows.jsonl") and line["problem"] for line in listed)
    assert listed[1] == {**listed[1], "reason": "wrong type", "text": '{"text": 3}'}


def test_each_source_has_its_own_format_and_columns_and_decides_on_bad_rows(tmp_path, build):
    text = write_rows(tmp_path / "a.jsonl", [{"text": "one"}] * 3)
    refused(
        "rows of other formats into a file and source of their own", build, [{"text": "a"}, SHORT]
    )
    named = write_rows(tmp_path / "b.jsonl", [{"q": "two", "a": "2"}] * 2 + [{"q": "no answer"}])
    skipping = Source(str(named), columns={"prompt": "q", "completion": "a"}, on_bad_row="skip")
    data = build([], train_sources=[str(text), skipping])
    assert data.meta.source_examples == [3, 2] and data.meta.rejected == {"missing key": 1}
    assert data.meta.formats == ["text", "prompt_completion"]
    assert data.supervised.tolist()[3:] == [2, 2] and min(data.supervised[:3]) >= 2
    sources = [dataclasses.replace(skipping, on_bad_row=how) for how in ("error", "skip")]
    named = "b.jsonl:3: it has no value for 'a' ... (a source {path: FILE, on_bad_row: skip} leaves"
    refused(named, lambda source: build([], train_sources=[source]), *sources)


GPT_OSS = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}<|call|>{% else %}{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = [{"role": role, "content": role} for role in ("user", "assistant") * 2]


def tokenizer_with(sample_tokenizer, template):
    tokenizer = copy.deepcopy(sample_tokenizer)
    tokenizer.add_tokens(["<|return|>", "<|call|>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def test_every_supervised_turn_has_its_end_token(tmp_path, build, sample_tokenizer):
    tokenizer = tokenizer_with(sample_tokenizer, GPT_OSS)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    rows = [{"messages": TURNS}, {"messages": [TURNS[0], call, *TURNS[:2]]}]
    whole = build(rows, tokenizer)
    ends = {"<|call|>", "<|end|>", "<|return|>"}
    assert {*tokenizer.convert_ids_to_tokens(whole.meta.end_tokens)} == ends
    cut = build(
        rows[:1], tokenizer, cache_dir=str(tmp_path / "cut"),
        max_length=int(whole.lengths[0]) - 2  # ends in <|assistant|>
    )  # fmt: skip
    assert tokenizer.convert_ids_to_tokens(cut.meta.end_tokens) == ["<|end|>"]


def test_tokens_that_end_answers_are_those_of_every_source(tmp_path, build, sample_tokenizer):
    """A token that ends earlier turns is one of them, although another source ends differently."""
    tokenizer = copy.deepcopy(sample_tokenizer)
    tokenizer.eos_token = "<|tool|>"
    sources = [
        str(write_rows(tmp_path / f"{i}.jsonl", [row]))
        for i, row in enumerate([{"messages": TURNS}, {"text": "one"}])
    ]
    meta = build([], tokenizer, train_sources=sources).meta
    assert sorted(tokenizer.convert_ids_to_tokens(meta.end_tokens)) == ["<|end|>", "<|tool|>"]


@pytest.mark.parametrize("thinks", [True, False])
def test_rows_without_what_the_generation_prompt_ends_with_are_counted(
    build, sample_tokenizer, thinks
):
    thought = "<think>\n" if thinks else ""
    template = GPT_OSS.replace("<|assistant|>{% endif", "<|assistant|>" + thought + "{% endif")
    data = build([{"messages": TURNS}] * 3, tokenizer_with(sample_tokenizer, template))
    assert data.meta.unprompted == ({thought: 3} if thinks else {})


EMPTY = "<think>\n\n</think>\n\n"
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}"
    + EMPTY
    + "{% endif %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is false %}" + EMPTY + "{% else %}PROMPT{% endif %}{% endif %}"
)


@pytest.mark.parametrize("prompt", ["<think>\n", ""])
def test_a_server_of_rows_with_empty_thinking_blocks_gets_their_prompt(
    build, sample_tokenizer, prompt
):
    """As in the templates of Qwen3.5 and Nemotron 3, whose prompts open a block, and of Qwen3,
    whose prompts do not. chat_template_kwargs are in the template that an export gets.
    """
    rows = [{"messages": TURNS[:2]}] * 3
    tokenizer = tokenizer_with(sample_tokenizer, THINKS.replace("PROMPT", prompt))
    opened = build(rows, tokenizer)
    assert opened.meta.unprompted == ({prompt: 3} if prompt else {})
    assert "3 rows have an empty thinking block" in opened.meta.masks
    set_chat_template(tokenizer, ModelConfig("", chat_template_kwargs={"enable_thinking": False}))
    closed = build(rows, tokenizer)
    assert closed.meta.unprompted == {}
    assert closed.table["input_ids"].equals(opened.table["input_ids"])
    served = copy.deepcopy(sample_tokenizer)
    served.chat_template = closed.meta.chat_template
    text = served.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|assistant|>" + EMPTY)


def test_values_for_a_template_need_one(sample_tokenizer):
    tokenizer = tokenizer_with(sample_tokenizer, None)
    config = ModelConfig("", chat_template_kwargs={"enable_thinking": False})
    named = "chat_template_kwargs: ... has no chat template, or several; set model.chat_template"
    cure = dataclasses.replace(config, chat_template="chatml")
    refused(named, partial(set_chat_template, tokenizer), config, cure)


def test_a_template_that_is_not_valid_jinja_is_no_fault_of_the_rows(build, sample_tokenizer):
    tokenizer = tokenizer_with(sample_tokenizer, "{% for m in messages %}\n{{ m.content }\n")
    mended = tokenizer_with(sample_tokenizer, GPT_OSS)
    for how in ("error", "skip"):
        read = partial(build, [{"messages": TURNS}] * 3, on_bad_row=how)
        line = refused("not valid Jinja: line 2: ... ; correct it", read, tokenizer, mended)
        assert "rows.jsonl" not in line


def test_a_template_that_is_not_a_text_of_utf_8_is_one_line(tmp_path, sample_tokenizer):
    """Also where the trainer looks for the caches."""
    config = config_of(data_config(tmp_path, [{"messages": TURNS}]), sample_tokenizer)
    file = tmp_path / "template.jinja"
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, chat_template=str(file))
    )
    for work in (
        lambda _: make_caches(config),
        lambda _: make_missing_caches(config, sample_tokenizer),
    ):
        file.write_bytes(f"{{# \xe9 #}}{GPT_OSS}".encode("latin-1"))
        refused(f"model.chat_template: cannot read {file}", work, None)
        file.write_text(f"{{# \xe9 #}}{GPT_OSS}")
        work(None)


def test_a_tokenizer_without_offsets_is_refused(build, sample_tokenizer):
    named = "has no tokenizer.json ... set model.tokenizer"
    refused(named, partial(build, [SHORT]), ByT5Tokenizer(), sample_tokenizer)


# --------------------------------------------------------------------------------------------------
# Killed and concurrent processes


def test_a_lost_process_of_the_pool_is_one_line(tmp_path, sample_tokenizer, monkeypatch):
    monkeypatch.setattr("zerotrain.rows.tokenize.MIN_POOL_BATCHES", 2)
    rows = [{"text": f"row {i} " * 100} for i in range(3_000)]  # a pipe holds less than a batch
    config = config_of(data_config(tmp_path, rows, max_length=2048), sample_tokenizer)

    def kill_one(*_):
        for process in multiprocessing.active_children()[:1]:
            process.kill()

    line = refused("was killed", partial(make_caches, show=kill_one), config)
    (tmp_path / "FILE").write_text(dump_config(config))
    command = re.search("with: (.*)", line)[1].replace("python", sys.executable)
    run(command.replace("FILE", f"{tmp_path}/FILE").split(), code=0)


def test_a_killed_process_leaves_no_incomplete_cache(tmp_path, sample_tokenizer):
    """Two that start at the same time then share one cache."""
    rows = [{"text": f"row {i} " * 40} for i in range(4_000)]
    config = config_of(data_config(tmp_path, rows, max_length=2048), sample_tokenizer)
    cache = tmp_path / "cache"

    def start():
        process = multiprocessing.get_context("fork").Process(target=make_caches, args=[config])
        process.start()
        return process

    killed, deadline = start(), time.monotonic() + 200
    while not list(cache.glob(".*.tmp/examples.arrow")):
        assert killed.is_alive() and time.monotonic() < deadline
    killed.kill()
    killed.join()
    [draft] = cache.glob(".*.tmp")
    assert not list(cache.glob("*/meta.json")), "killed before it was whole"
    name = draft.name.split(".")[1]
    for process in (start(), start()):
        process.join()
        assert process.exitcode == 0
    assert {p.name for p in cache.glob("[!.]*")} == {name, f"{name}.lock"}
    data = open_cache(cache / name)
    assert len(data) == 4_000
    [(ids, _)] = data.fetch([17])
    assert sample_tokenizer.decode(ids).startswith("row 17 row 17")
