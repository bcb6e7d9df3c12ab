"""From sources to the cache.    pytest tests/test_tokenize.py"""

import copy
import dataclasses
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, environment, wait_until, write_rows

from config.schema import DataConfig, Source
from data.tokenize import cache_path, hold_out, open_cache, tokenize_sources
from runtime.errors import UserError, exit_on_error
from tracking.console import quieten_libraries


def data_config(tmp_path, rows, **changes):
    file = write_rows(tmp_path / "rows.jsonl", rows)
    base = {"train_sources": [str(file)], "cache_dir": str(tmp_path / "cache"), "max_length": 64}
    return DataConfig(**{**base, **changes})


def tokenize(config, tokenizer):
    return tokenize_sources(config.sources("train_sources"), tokenizer, config)


def path_of(config, tokenizer):
    return cache_path(config.sources("train_sources"), tokenizer, config)


def build(tmp_path, tokenizer, rows, **changes):
    return open_cache(tokenize(data_config(tmp_path, rows, **changes), tokenizer))


LONG = {"prompt": "p" * 10, "completion": "c" * 100}  # 111 tokens with the end
SHORT = {"prompt": "p" * 10, "completion": "c" * 5}


@pytest.mark.parametrize(
    ("on_too_long", "lengths", "supervised", "count"),
    [
        ("truncate", [64, 16], [54, 6], {"truncated": 1}),
        # 111 tokens as 64 + 48: the second piece starts with the first one's last token as context
        ("split", [64, 48, 16], [54, 47, 6], {"split": 2}),
        ("drop", [16], [6], {"dropped": 1}),
    ],
)
def test_rows_over_max_length(tmp_path, sample_tokenizer, on_too_long, lengths, supervised, count):
    data = build(tmp_path, sample_tokenizer, [LONG, SHORT], on_too_long=on_too_long)
    assert data.lengths.tolist() == lengths
    assert data.supervised.tolist() == supervised
    assert {k: data.meta[k] for k in count} == count and data.meta["rows_read"] == 2
    assert data.supervised.tolist() == [int(mask.sum()) for mask in data.rows["loss_mask"][:]]


def test_split_keeps_every_target_once(tmp_path, sample_tokenizer):
    whole = build(tmp_path, sample_tokenizer, [LONG], max_length=200)
    pieces = build(tmp_path, sample_tokenizer, [LONG], max_length=20, on_too_long="split")
    assert pieces.meta["supervised_tokens"] == whole.meta["supervised_tokens"] == 101


def test_a_row_that_loses_its_answer_is_dropped_and_counted(tmp_path, sample_tokenizer):
    rows = [{"prompt": "p" * 100, "completion": "c"}, SHORT]
    data = build(tmp_path, sample_tokenizer, rows)
    assert len(data) == 1 and data.meta["without_answer"] == 1


BAD_ROWS = {
    "too long": ([LONG], {"on_too_long": "error"}, ":1: 111 tokens are over data.max_length (64)"),
    "not JSON": ('{"prompt": "a", "completion": "b"}\n{"prompt": \n', {}, ":2: not JSON"),
    "no object": ('{"prompt": "a", "completion": "b"}\n[1]\n', {},
                  ":2: a row must be a JSON object"),
    "missing key": ([SHORT, {"prompt": "p"}], {}, ":2: key 'completion' is missing"),
    "wrong type": ([SHORT, {"prompt": "p", "completion": 3}], {}, "'completion' is a number"),
    "an unknown key": ([{**SHORT, "weight": 0}], {}, ":1: data.format prompt_completion: key 'we"),
    "an ignored key": ([{**SHORT, "a": 0}], {"ignore_keys": ["completion"]}, ":1: keys ['a', 'pr"),
    "another format": ([SHORT, {"text": "x"}], {}, ":2: key 'prompt' is missing (data.format prompt"
                       "_completion; this row is text, but all rows of a source must have one "
                       "format)"),
    "a doubled key": ('{"text": "a", "text": "b"}', {}, ":1: an object has key 'text' twice"),
    "half a character": ('{"text": "ab\\ud83d"}', {}, ":1: \\ud83d in 'ab'... is half of a"),
    "an unfinished line": ('{"text": "a"}\n{"text": "a\n', {}, ":2: not JSON (the line ends"),
    "several lines": ('{\n  "text": "a"\n}\n', {}, "jq -c . OLD > NEW.jsonl writes one object per"),
    "a list": ('[\n {"text": "a"}\n]\n', {}, "a list of rows needs a name that ends in .json"),
    "a list on a line": ('[{"text": "a"}]', {}, ":1: a row must be a JSON object, not a list;"),
    "no format": ([{"a": 1}], {}, ":1: keys ['a'] fit no row format"),
    "no format yet": ([{"a": 1}], {"columns": {"prompt": "a"}},
                      "text: text) though data.columns has renamed some: "),
    "no answer": ([{"messages": [{"role": "user", "content": "x"}]}], {},
                  ":1: no message has the role assistant"),
    "empty file": ("\n\n", {}, "has no rows"),
    "not UTF-8": (b'{"text": "a"}\n{"text": "\xff"}\n', {}, ":2: not UTF-8 (byte 10 of the line)"),
    "NUL": (b'{"text": "a"}\n{"text": "\0"}\n', {}, ":2: the row has a NUL byte"),
    "long": ([{"text": "x"}, {"text": "x" * 99}], {"max_row_characters": 50},
             ":2: over data.max_row_characters (50)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_named_by_file_and_line(tmp_path, sample_tokenizer, case):
    rows, changes, message = BAD_ROWS[case]
    config = data_config(tmp_path, rows if isinstance(rows, list) else [], **changes)
    if not isinstance(rows, list):
        (tmp_path / "rows.jsonl").write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    with pytest.raises(UserError) as caught:
        tokenize(config, sample_tokenizer)
    assert message in str(caught.value) and "rows.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"], "half a cache"


def test_bom_blank_lines_and_crlf_are_read(tmp_path, sample_tokenizer):
    config = data_config(tmp_path, [])
    text = '\ufeff{"text": "1"}\r\n\r\n{"text": "2"}\r\n'
    (tmp_path / "rows.jsonl").write_text(text, newline="")
    data = open_cache(tokenize(config, sample_tokenizer))
    assert data.rows["place"][:].tolist() == [1, 3]


def test_the_cache_is_reused_and_keyed_by_what_matters(tmp_path, sample_tokenizer):
    config = data_config(tmp_path, [SHORT])
    path = tokenize(config, sample_tokenizer)
    before = (path / "meta.json").stat().st_mtime_ns
    assert tokenize(config, sample_tokenizer) == path
    assert (path / "meta.json").stat().st_mtime_ns == before

    for change in ({"max_length": 12}, {"ignore_keys": ["a"]}, {"roles": {"a": "user"}}):
        assert path_of(dataclasses.replace(config, **change), sample_tokenizer) != path
    budget = dataclasses.replace(config, micro_batch_tokens=99999)
    assert path_of(budget, sample_tokenizer) == path
    write_rows(tmp_path / "rows.jsonl", [SHORT, SHORT])
    os.utime(tmp_path / "rows.jsonl", ns=(1, 1))
    assert path_of(config, sample_tokenizer) != path


def test_a_damaged_cache_is_one_line(tmp_path, sample_tokenizer, chat_rows):
    """Mapping a truncated file and reading behind its end would end the process with SIGBUS."""
    folder = build(tmp_path, sample_tokenizer, chat_rows).folder
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert {"meta.json", "lengths.npy"} < {path.name for path in files} and len(files) >= 6
    for path in files:
        content = path.read_bytes()
        for damaged in {content[: len(content) // 2], None} - {content}:
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            with pytest.raises(UserError, match=r"is damaged \(.*\); delete it, and the rows"):
                open_cache(folder)
        path.write_bytes(content)
    (folder / "meta.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is damaged"):
        open_cache(folder)


def test_the_cache_key_has_special_tokens_and_no_transient_state(tmp_path, sample_tokenizer):
    config = data_config(tmp_path, [SHORT])
    tokenizer = copy.deepcopy(sample_tokenizer)
    before = path_of(config, tokenizer)
    tokenizer(["1", "1 1"], padding=True, truncation=True, max_length=3)
    assert path_of(config, tokenizer) == before
    tokenizer.bos_token = "<|system|>"
    assert path_of(config, tokenizer) != before


def test_several_processes_give_the_same_tokens_as_one(tmp_path, sample_tokenizer):
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(3000)]
    (tmp_path / "two").mkdir()
    one = build(tmp_path, sample_tokenizer, rows, workers=1)
    two = build(tmp_path / "two", sample_tokenizer, rows, workers=2)
    assert one.meta["content"] == two.meta["content"]
    assert one.rows["input_ids"][2500].tolist() == two.rows["input_ids"][2500].tolist()


def test_the_pieces_of_a_split_row_are_held_out_together(tmp_path, sample_tokenizer):
    rows = [{"text": "x" * 50} for _ in range(40)]
    data = build(tmp_path, sample_tokenizer, rows, max_length=20, on_too_long="split")
    assert len(data) == 120
    train, held = hold_out(data, 0.25, seed=3)
    lines = [set(part.rows["row"][:].tolist()) for part in (train, held)]
    assert not lines[0] & lines[1] and len(held) == 30
    with pytest.raises(UserError, match="a single row cannot be divided"):
        hold_out(build(tmp_path, sample_tokenizer, rows[:1]), 0.5, seed=3)


def test_hold_out_splits_without_loss_or_overlap(tmp_path, sample_tokenizer):
    data = build(tmp_path, sample_tokenizer, [{"text": f"{i}"} for i in range(200)])
    train, held = hold_out(data, 0.1, seed=3)
    lines = train.rows["row"][:].tolist(), held.rows["row"][:].tolist()
    assert len(held) == 20 and sorted(lines[0] + lines[1]) == list(range(200))
    assert train.meta["content"] != data.meta["content"]
    for part in (train, held):
        assert [len(ids) for ids in part.rows["input_ids"][:]] == np.asarray(part.lengths).tolist()


# --------------------------------------------------------------------------------------------------
# Bad rows that are skipped

GOOD_AND_BAD = (
    b'\xef\xbb\xbf{"text": "first"}\r\n'
    b'{"text": "not utf-8 \xff"}\n'
    b'{"text": 3}\n'
    b'{"text": null}\n'
    b'{"txet": "a"}\n'
    b"\n"
    b'{"text": "a\0b"}\n'
    b'{"text": "half\n'
    b'{"text": ""}\n'
    b'{"text": "last"}'
)


def test_bad_rows_are_skipped_counted_and_listed(tmp_path, sample_tokenizer):
    config = data_config(tmp_path, [], on_bad_row="skip")
    (tmp_path / "rows.jsonl").write_bytes(GOOD_AND_BAD)
    data = open_cache(tokenize(config, sample_tokenizer))
    texts = [sample_tokenizer.decode(ids) for ids in data.rows["input_ids"][:]]
    assert texts == ["first<|end|>", "last<|end|>"]
    assert data.meta["rejected"] == {
        "not UTF-8": 1, "wrong type": 1, "null": 1, "missing key": 1, "NUL byte": 1, "not JSON": 1,
        "empty answer": 1,
    }  # fmt: skip
    assert data.meta["rows_read"] == 9 and len(data) == 2
    listed = [json.loads(line) for line in data.rejected_rows.read_text().splitlines()]
    assert [line["place"] for line in listed] == [2, 3, 4, 5, 7, 8, 9]
    assert all(line["file"].endswith("rows.jsonl") and line["problem"] for line in listed)
    assert listed[1] == {**listed[1], "reason": "wrong type", "text": '{"text": 3}'}


def test_a_ten_megabyte_row(tmp_path, sample_tokenizer):
    rows = [{"text": "x"}, {"text": "word " * 2_000_000}]
    data = build(tmp_path, sample_tokenizer, rows, on_bad_row="skip")
    assert len(data) == 1 and list(data.meta["rejected"]) == ["over data.max_row_characters"]
    listed = json.loads(data.rejected_rows.read_text())
    assert listed["place"] == 2 and len(listed["text"]) == 80


def test_nothing_but_bad_rows_is_an_error(tmp_path, sample_tokenizer):
    with pytest.raises(UserError, match="none of its 2 rows is left: 2 rejected"):
        build(tmp_path, sample_tokenizer, [{"text": 1}, {"text": 2}], on_bad_row="skip")
    with pytest.raises(UserError, match="none of its first 1 rows shows its format"):
        config = data_config(tmp_path, [], on_bad_row="skip")
        (tmp_path / "rows.jsonl").write_text("{]\n")
        tokenize(config, sample_tokenizer)


def test_a_template_that_is_not_jinja_is_named_and_no_row(tmp_path, sample_tokenizer):
    tokenizer = copy.deepcopy(sample_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}\n{{ m.content }}{% endif %}"
    rows = [{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}]
    with pytest.raises(UserError, match=r"is not valid Jinja: line 2: .*'endif'") as caught:
        build(tmp_path, tokenizer, rows)
    assert "rows.jsonl" not in str(caught.value) and "model.chat_template" in str(caught.value)


# --------------------------------------------------------------------------------------------------
# Several sources


def test_each_source_has_its_own_format_and_columns(tmp_path, sample_tokenizer):
    write_rows(tmp_path / "a.jsonl", [{"text": "one"}] * 3)
    write_rows(tmp_path / "b.jsonl", [{"q": "two", "a": "2"}] * 2)
    sources = [
        str(tmp_path / "a.jsonl"),
        Source(path=str(tmp_path / "b.jsonl"), columns={"prompt": "q", "completion": "a"}),
    ]
    data = build(tmp_path, sample_tokenizer, [], train_sources=sources)
    assert data.meta["source_rows"] == [3, 2]
    assert data.meta["formats"] == ["text", "prompt_completion"]
    assert data.rows["source"][:].tolist() == [0, 0, 0, 1, 1]
    assert data.supervised.tolist()[3:] == [2, 2] and min(data.supervised[:3]) >= 2
    train, held = hold_out(data, 0.4, seed=1)
    for part in (train, held):
        of = np.bincount(part.rows["source"][:], minlength=2).tolist()
        assert part.meta["source_rows"] == of


def test_ignored_keys_and_roles_reach_the_rows(tmp_path, sample_tokenizer):
    turns = [{"from": "human", "value": "1+1?", "mood": "glad"}, {"from": "critic", "value": "2"}]
    rows = [{"conversations": turns, "images": ["a.png"]}]
    with pytest.raises(UserError, match=r":1: data.format sharegpt: key 'images'"):
        build(tmp_path, sample_tokenizer, rows)
    source = Source(path=str(tmp_path / "rows.jsonl"), roles={"critic": "assistant"})
    ignored = {"ignore_keys": ["images", "mood"]}
    data = build(tmp_path, sample_tokenizer, rows, train_sources=[source], **ignored)
    said = sample_tokenizer.decode(data.rows["input_ids"][0])
    assert said == "<|user|>1+1?<|end|><|assistant|>2<|end|>"
    assert data.meta["formats"] == ["sharegpt"]


def test_weights_are_not_part_of_the_cache(tmp_path, sample_tokenizer):
    config = data_config(tmp_path, [SHORT])
    weighted = dataclasses.replace(
        config, train_sources=[Source(path=config.train_sources[0], weight=2.0)]
    )
    assert path_of(config, sample_tokenizer) == path_of(weighted, sample_tokenizer)


# --------------------------------------------------------------------------------------------------
# Killed and concurrent processes


class Tokenizing:
    """tokenize_sources and open_cache in a forked process, which ends as commands do."""

    def __init__(self, config, tokenizer, folder, user=None):
        self.out = folder / f"out-{time.monotonic_ns()}"
        self.errors = self.out.with_suffix(".errors")
        self.pid, self.returncode = os.fork(), None
        if self.pid == 0:
            os.setsid()
            sys.stdout, sys.stderr = self.out.open("w"), self.errors.open("w")
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            code = 0
            try:
                exit_on_error(partial(self._tokenize, config, tokenizer))
            except SystemExit as end:
                code = end.code
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _tokenize(self, config, tokenizer):
        path = tokenize_sources(config.sources("train_sources"), tokenizer, config)
        open_cache(path)
        print(path, flush=True)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, seconds=120):
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self.returncode, self.out.read_text(), self.errors.read_text()


@pytest.fixture
def start_tokenizing(tmp_path, sample_tokenizer):
    quieten_libraries(is_first=True)

    def start(cache="cache", folder=tmp_path, user=None):
        rows = str(tmp_path / "rows.jsonl")
        config = DataConfig(train_sources=[rows], cache_dir=str(tmp_path / cache), workers=2)
        return Tokenizing(config, sample_tokenizer, folder, user)

    return start


def test_a_killed_process_leaves_no_incomplete_cache(tmp_path, sample_tokenizer, start_tokenizing):
    write_rows(tmp_path / "rows.jsonl", [{"text": f"row {i} " * 40} for i in range(6_000)])
    cache = tmp_path / "cache"
    killed = start_tokenizing()
    wait_until(lambda: list(cache.glob("*/progress")), killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not list(cache.glob("*/meta.json")), "killed before it was whole"
    assert len([p for p in cache.iterdir() if p.is_dir()]) == 1, "what it had written so far"

    # Two that start at the same time share one cache; what the killed one left is deleted.
    ended = [process.wait() for process in [start_tokenizing() for _ in range(2)]]
    assert [code for code, *_ in ended] == [0, 0], ended
    assert ended[0][1] == ended[1][1]
    folders = list(cache.iterdir())
    assert [str(f) for f in folders] == [ended[0][1].strip()]
    data = open_cache(folders[0])
    assert len(data) == 6_000
    assert sample_tokenizer.decode(data.rows[17]["input_ids"]).startswith("row 17 row 17")


def test_a_process_that_was_stopped_leaves_the_cache_to_another(
    tmp_path, start_tokenizing, monkeypatch
):
    monkeypatch.setattr("data.tokenize.LEASE_SECONDS", 1.0)
    write_rows(tmp_path / "rows.jsonl", [{"text": f"row {i} " * 40} for i in range(4_000)])
    cache = tmp_path / "cache"
    stopped = start_tokenizing()
    wait_until(lambda: list(cache.glob("*/progress")), stopped)
    os.killpg(stopped.pid, signal.SIGSTOP)
    ended = [start_tokenizing().wait()]
    os.killpg(stopped.pid, signal.SIGCONT)
    ended.append(stopped.wait())
    assert [code for code, *_ in ended] == [0, 0], ended
    assert ended[0][1] == ended[1][1]
    [folder] = cache.iterdir()
    assert len(open_cache(folder)) == 4_000


FLOCK = """
#include <errno.h>
int flock(int file, int operation) {
    if (FAILS) errno = ENOLCK;
    return FAILS ? -1 : 0;
}
"""
SCRIPT = """
import sys
from transformers import AutoTokenizer
from config.schema import DataConfig
from data.tokenize import tokenize_sources

config = DataConfig(train_sources=[sys.argv[1]], cache_dir=sys.argv[2], workers=2)
tokenizer = AutoTokenizer.from_pretrained("data/sample/model")
tokenize_sources(config.sources("train_sources"), tokenizer, config)
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc builds the shim")
def test_the_lock_holds_where_flock_does_not(tmp_path):
    """On some shared disks flock always succeeds; on NFS without lockd it fails with ENOLCK."""
    write_rows(tmp_path / "rows.jsonl", [{"text": f"row {i} " * 40} for i in range(2_000)])
    (tmp_path / "flock.c").write_text(FLOCK)
    both = []
    for fails in (0, 1):
        shim = tmp_path / f"flock-{fails}.so"
        build = ["gcc", "-shared", "-fPIC", f"-DFAILS={fails}", "-o", shim, tmp_path / "flock.c"]
        subprocess.run(build, check=True)
        command = [sys.executable, "-c", SCRIPT, tmp_path / "rows.jsonl", tmp_path / "cache"]
        both.append(subprocess.Popen(
            command, cwd=REPO, env={**environment(), "LD_PRELOAD": str(shim)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ))  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("tokenized 2,000 rows" in err for _, err in outputs) == 1, outputs
    [folder] = (tmp_path / "cache").iterdir()
    assert len(open_cache(folder)) == 2_000


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_file_of_another_user_is_named_with_its_owner(
    tmp_path, sample_tokenizer, start_tokenizing, monkeypatch
):
    monkeypatch.setattr("data.tokenize.LEASE_SECONDS", 0.3)
    cache = tmp_path / "cache"
    write_rows(tmp_path / "rows.jsonl", [SHORT])
    config = data_config(tmp_path, [SHORT], max_length=2048, workers=2)
    tmp_path.chmod(0o700)
    code, _, errors = start_tokenizing(user=65534).wait()
    assert code == 2 and len(errors.splitlines()) == 1, errors
    assert f"{tmp_path}/rows.jsonl: cannot be read: Permission denied" in errors
    for folder in (tmp_path, *tmp_path.parents):  # pytest's are for their owner only
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o055)
    ours = path_of(config, sample_tokenizer)
    lock = Path(f"{ours}.lock")

    def refused(path, mode):
        code, _, errors = start_tokenizing(user=65534).wait()
        assert code == 2 and len(errors.splitlines()) == 1, errors
        belongs = f"error: data.cache_dir: {path} belongs to root and has mode {mode}, so"
        assert errors.startswith(belongs) and f"let root run `chmod -R g+rwX {cache}" in errors

    cache.mkdir(mode=0o700)
    refused(cache, "0700")
    cache.chmod(0o755)
    refused(cache, "0755")
    cache.chmod(0o1777)
    lock.write_text("held by a process that is dead\n")
    lock.chmod(0o600)
    refused(lock, "0600")
    lock.unlink()
    tokenize(config, sample_tokenizer)
    (ours / "meta.json").chmod(0o600)
    refused(ours / "meta.json", "0600")
    ours.chmod(0o700)
    refused(ours, "0700")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("size", ["4k", "300k", "1100k", "2m"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, start_tokenizing, size):
    """Full while the rows are read, while they are tokenized, and while they are saved."""
    write_rows(tmp_path / "rows.jsonl", [{"text": f"row {i} " * 40} for i in range(2_000)])
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        code, _, errors = start_tokenizing("disk/cache").wait()
        left = list(disk.glob("cache/*"))
    finally:
        subprocess.run(["umount", disk], check=True)
    assert code == 2 and left == [], errors
    [line] = errors.splitlines()
    assert line.startswith(f"error: data.cache_dir: cannot write {disk}/cache: "), line
    assert "No space left on device" in line and "make room there" in line


def test_a_cache_is_on_disk_before_it_has_its_name(tmp_path, sample_tokenizer, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def recorded_fsync(descriptor):
        events.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def recorded_replace(source, target):
        events.append(f"renamed {source}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    path = tokenize(data_config(tmp_path, [SHORT]), sample_tokenizer)
    [rename] = [i for i, event in enumerate(events) if event.endswith("/cache")
                and event.startswith("renamed ")]  # fmt: skip
    work = events[rename].removeprefix("renamed ")
    files = {str(file.relative_to(path)) for file in path.rglob("*")}
    assert {f"{work}/{file}" for file in files} | {work} <= set(events[:rename])
    assert "rows/state.json" in files and events[rename + 1] == str(path.parent)
