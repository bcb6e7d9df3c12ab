"""Reading rows: files, formats of files, damaged files, bounds.
pytest tests/rows/test_sources.py"""

import bz2
import codecs
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
from decimal import Decimal
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from harness.cures import refused
from harness.inputs import write_rows

from zerotrain.config.schema import Source
from zerotrain.rows import readers
from zerotrain.rows.fixes import explained
from zerotrain.rows.sources import (
    BadRow,
    RawRow,
    fingerprints,
    local_files,
    parse_row,
    read_rows,
    require_distinct,
    unread_files,
)

ROWS = [{"prompt": f'Ä{i}\n"x",', "completion": str(i)} for i in range(5)]


def rows_in(path, columns=None):
    return [parse_row(row, columns or {}) for row in read_rows(Source(path=str(path)))]


def refusal(path):
    return refused(str(path), rows_in, path)


def save(folder, name):
    """ROWS in the format of the file name's extension."""
    path = folder / name
    table = pa.Table.from_pylist(ROWS)
    if name.endswith(".parquet"):
        pq.write_table(table, path)
        return path
    if name.endswith(".arrow"):
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
        return path
    with pa.output_stream(path) as out:  # compressed as the name says
        out.write(codecs.BOM_UTF8)
        if ".csv" in name:
            pyarrow.csv.write_csv(table, out)
        elif ".jsonl" in name and name != "list.jsonl":
            for row in ROWS:  # each of several joined files has a byte order mark
                out.write(codecs.BOM_UTF8 + json.dumps(row, ensure_ascii=False).encode() + b"\n\n")
        else:
            out.write(json.dumps(ROWS, indent=1).encode())
    return path


NAMES = ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow", "a.jsonl.gz", "a.json.zst",
         "a.csv.bz2", "lines.json", "list.jsonl"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    path = save(tmp_path, name)
    if name == "lines.json":  # one object per line, despite the name
        write_rows(path, ROWS)
    assert rows_in(path) == ROWS


PADDED = """
{"n":["u"],"a": {"x": [1, null], "y": null}, "json": {"k": 1, "l": null}, "map": {"k": 2, "l": NaN}}
{"n":["v"],"a": {"x": null, "y": "s"}, "json": "q", "map": null}
"""


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_every_kind_of_file_leaves_out_the_nulls_that_tables_add(tmp_path, name):
    """In objects, maps and the JSON that datasets keeps mixed types in, but not in lists."""
    texts = pa.array(['{"k": 1, "l": null}', '"q"'])
    table = pa.table(
        {
            "n": [["u"], ["v"]],
            "a": [{"x": [1, None]}, {"y": "s"}],
            "json": pa.ExtensionArray.from_storage(pa.json_(), texts),
            "map": pa.array([{"k": 2, "l": None}, None], pa.map_(pa.string(), pa.int64())),
        }
    )
    path = tmp_path / name
    path.write_text(PADDED)
    if name == "a.parquet":
        pq.write_table(table, path, row_group_size=1)  # Arrow cannot join their dictionaries
    elif name == "a.arrow":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    assert rows_in(path) == [
        {"n": ["u"], "a": {"x": [1, None]}, "json": {"k": 1}, "map": {"k": 2}},
        {"n": ["v"], "a": {"y": "s"}, "json": "q"},
    ]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_numbers_of_tables_are_the_numbers_that_were_written(tmp_path, name):
    numbers = {
        "half": pa.array([0.1, None], pa.float16()),
        "single": pa.array([0.1, float("nan")], pa.float32()),
        "double": pa.array([0.1, None], pa.float64()),
        "price": pa.array([Decimal("0.10"), None], pa.decimal128(9, 2)),
        "whole": pa.array([Decimal(10**30), None], pa.decimal256(40, 0)),
        "count": pa.array([3, None], pa.int64()),
        "list": pa.array([[0.1, 1e-8], None], pa.list_(pa.float32())),
        "encoded": pa.array([0.1, None], pa.float32()).dictionary_encode(),
    }
    arguments = pa.StructArray.from_arrays([*numbers.values()], names=[*numbers])
    table = pa.table({"arguments": arguments})
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    expected = dict.fromkeys(numbers, 0.1) | {"whole": 10**30, "count": 3, "list": [0.1, 1e-8]}
    assert rows_in(path) == [{"arguments": expected}, {"arguments": {}}]


def test_pictures_of_a_table_do_not_make_it_unreadable(tmp_path):
    """As the hub has them. canonical_row then refuses their keys, and any text of such bytes."""
    row = {"prompt": b"text", "images": [{"bytes": b"\x89PNG", "path": "a.png"}]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    picture = {"bytes": {"bytes": 4}, "path": "a.png"}
    assert rows_in(tmp_path) == [{"prompt": "text", "images": [picture]}]


def test_cells_of_tsv_are_not_quoted(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('prompt\tcompletion\n"Ä\t1"\n"x" y\t"z"\n')
    assert [[*row.values()] for row in rows_in(path)] == [['"Ä', '1"'], ['"x" y', '"z"']]


def test_a_folder_is_read_recursively_with_saved_data_sets(tmp_path, monkeypatch):
    import datasets

    (tmp_path / "deep").mkdir()
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    # leftovers of earlier shards and of map(), also without state.json
    datasets.load_from_disk(tmp_path / "saved").map(lambda row: {"prompt": "mapped"})
    [left] = (tmp_path / "saved").glob("cache-*.arrow")
    for name in ("saved/data-00000-of-00002.arrow", "deep/cache-0a.arrow"):
        (tmp_path / name).write_bytes(left.read_bytes())
    write_rows(tmp_path / "deep/b.jsonl", ROWS[:2])
    write_rows(tmp_path / ".hidden.jsonl", ROWS)
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "deep/up").symlink_to(tmp_path)
    saved = str(tmp_path / "saved/data-00000-of-00001.arrow")
    assert local_files(str(tmp_path)) == [str(tmp_path / "deep/b.jsonl"), saved]
    assert rows_in(tmp_path) == ROWS[:2] + ROWS
    (tmp_path / "deep/up").unlink()
    assert rows_in(tmp_path / "**/*.jsonl") == ROWS[:2]
    assert "no such file" in refusal(tmp_path / "none.jsonl")
    (tmp_path / "x.xlsx").touch()
    assert ".xlsx, as CSV" in refusal(tmp_path / "x.xlsx")
    assert rows_in(save(tmp_path, "x.csv")) == ROWS
    (tmp_path / "x.csv").unlink()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rows_in("~/deep") == rows_in("$HOME/deep") == ROWS[:2]
    (tmp_path / "dataset_dict.json").touch()
    assert "several splits" in refusal(tmp_path)
    assert rows_in(tmp_path / "saved") == ROWS  # the files of one
    os.rename(saved, tmp_path / "elsewhere")  # noqa: PTH104
    assert "data-00000-of-00001.arrow: missing" in refusal(tmp_path / "saved")
    shutil.copy(tmp_path / "elsewhere", saved)
    assert rows_in(tmp_path / "saved") == ROWS
    (tmp_path / "saved/state.json").write_bytes(b"\xe9")
    assert "state.json" in refusal(tmp_path / "saved")


SEVERAL_SPLITS = [
    "data/train-00000-of-00001.parquet data/test-00000-of-00001.parquet",
    "train/0000.parquet test/0000.parquet",
    "train_sft.jsonl test_sft.jsonl",
    "a/train.jsonl a/dev.jsonl",
    "rows.jsonl deep/math_valid.jsonl.gz",
    "rows.jsonl eval.jsonl",
    "rows.jsonl train/testA.jsonl",
    "rows.jsonl Held-out2.json",
    "validation.jsonl test.jsonl",
    f"snapshots/{'a' * 40}/rows.jsonl snapshots/{'b' * 40}/rows.jsonl",
]
ONE_SPLIT = [
    f"snapshots/{'a' * 40}/rows.jsonl",
    "train-0.jsonl training.1.jsonl more.jsonl",
    "contest.jsonl evaluation_code.jsonl latest.jsonl devices.jsonl",
    "test/validation-0.jsonl test/val-1.jsonl",
]


@pytest.mark.parametrize("files", SEVERAL_SPLITS + ONE_SPLIT)
def test_files_of_several_splits_are_refused(tmp_path, files):
    names = files.split()
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if files in ONE_SPLIT:
        assert len(local_files(str(tmp_path))) == len(names)
        return
    assert all(name in refusal(tmp_path) for name in names)
    assert "several splits" in refusal(tmp_path / "**/*")
    assert local_files(str(tmp_path / names[0])) == [str(tmp_path / names[0])]


PARTS = [
    "data/train-0000{}-of-00002.parquet",
    "train-0000{}-of-00002-a09b74b3ef9c3b5{}.parquet",
    "data-0000{}-of-00002.arrow",
    "c4.0000{}-of-00002.json.gz",
    "rows_{}_of_2.jsonl",
]


@pytest.mark.parametrize("name", PARTS)
def test_a_folder_that_lacks_parts_of_a_data_set_is_refused(tmp_path, name):
    """Unless its files are listed, or a glob chooses from the parts that are there."""
    first, second = (tmp_path / name.format(number, number) for number in (0, 1))
    for path in (first, tmp_path / "other-00000-of-00001.jsonl"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    given = [str(tmp_path), str(first)]
    refused("1 of the 2 parts ... give each file as a source of its own", local_files, *given)
    refused("1 of the 2 parts", local_files, str(tmp_path / "**/*of*"))
    second.with_name(f"{second.name}.incomplete").touch()
    refused("1 of the 2 parts ... add the others", local_files, str(tmp_path))
    second.touch()
    assert len(local_files(str(tmp_path))) == 3
    assert local_files(f"{first.with_suffix('')}*") == [str(first)]


def test_a_saved_data_set_that_lacks_a_file_is_refused_unless_files_are_listed(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path, num_shards=2)
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    named = "missing, but state.json names it; ... give each file as a source of its own"
    refused(named, rows_in, tmp_path, tmp_path / "data-00000-of-00002.arrow")


def test_files_that_are_not_read_are_named(tmp_path):
    download = ".cache/huggingface/download/b.jsonl.1a.incomplete"
    unread = ["B.JSONL", "c.jsonl.xz", "d.txt", "e.jsonl.1", "deep/part-00000", download]
    for name in ["a.jsonl", "state.json", "cache-1.arrow", ".hidden", *unread]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    assert unread_files(str(tmp_path)).startswith("6 of the files of ")
    assert unread_files(str(tmp_path / "*")).endswith(": B.JSONL, c.jsonl.xz, d.txt ...")
    assert unread_files(str(tmp_path / "a.jsonl")) == unread_files(str(tmp_path / "*.jsonl")) == ""


def test_no_content_is_given_twice(tmp_path):
    """Several empty files, as Spark writes them, are allowed."""
    for name, text in (("a", "{}"), ("b", ""), ("c", ""), ("d", "[]")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    assert [len(files) for files in fingerprints([Source(str(tmp_path))])] == [4]
    (tmp_path / "d.jsonl").write_text("{}")
    twice = [Source(str(tmp_path / f"{name}.jsonl")) for name in "abcd"]
    named = "d.jsonl: has the same content as ... a.jsonl; give it once"
    refused(named, fingerprints, twice, twice[:3])


def test_no_file_is_given_twice(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz", "a.v2.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    require_distinct({"train": [Source(str(tmp_path / "a.jsonl")), Source(str(tmp_path / "a.v*"))]})
    for names in (["a.jsonl*"], ["a.jsonl.gz", "a.jsonl"], ["a.jsonl", "link*"], ["a.v*"] * 2):
        sources = [Source(str(tmp_path / name)) for name in names]
        once = [Source(sources[0].path.replace("a.jsonl*", "a.jsonl"), repeat=2)]
        named = "train: ... the same rows as ... in train; give them once"
        refused(named, require_distinct, {"train": sources}, {"train": once})
    sets = {"train": [Source(str(tmp_path / "a.jsonl"))], "eval": [Source(str(tmp_path / "a.v*"))]}
    require_distinct({**sets, "other": sets["eval"]})
    sets["other"] = [Source(str(tmp_path / "link.jsonl"))]
    refused("other: ... the same rows as ... in train; give", require_distinct, sets)


def test_errors_of_damaged_files_say_what_is_wrong(tmp_path):
    for name, text, problem, *mended in (
        ("x.json", '[{"text": "a"} {"text": "b"}]', "Expecting ',' delimiter"),
        ("x.csv", 'a,b\n1,2\n3,"4" 5\n', "not CSV after line 2"),
        ("x.csv", "a,a\n1,2\n", "twice: a, a"),
        ("x.jsonl", '[{"text": "a"}]\n{"text": "b"}', "follows the JSON list; write each row on",
         '{"text": "a"}\n{"text": "b"}'),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        assert problem in refusal(tmp_path / name)
        for text in mended:
            (tmp_path / name).write_text(text)
            assert len(rows_in(tmp_path / name)) == 2
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "x.parquet")
    assert "'text' occurs twice" in refusal(tmp_path / "x.parquet")
    table = pa.table({"text": ["a"]})
    with pa.ipc.new_file(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    os.truncate(tmp_path / "x.arrow", (tmp_path / "x.arrow").stat().st_size - 1)
    assert "cannot be read" in refusal(tmp_path / "x.arrow")
    (tmp_path / "link.csv").symlink_to("blob")
    assert "broken link to blob" in refusal(tmp_path)


def test_a_file_of_another_kind_than_its_name_says_is_renamed(tmp_path):
    content = json.dumps(ROWS[0]).encode()
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS[:1]), table)
    for name, data in (
        ("a.jsonl", gzip.compress(content)),
        ("b.jsonl", bz2.compress(content)),
        ("c.jsonl", table.getvalue()),
        ("d.jsonl.gz", content),
        ("e.csv.bz2", gzip.compress(b"prompt,completion\nx,0")),
    ):
        (tmp_path / name).write_bytes(data)
        renamed = re.search("rename it to ([^ ]*)$", refusal(tmp_path / name))[1]
        (tmp_path / name).rename(tmp_path / renamed)
        if name[0] != "e":
            assert rows_in(tmp_path / renamed) == ROWS[:1]


def test_a_path_that_is_not_found_names_what_it_may_mean(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    for name in ("row.jsonl", "rows.json1", "\u201crows.jsonl\u201d"):
        assert re.search(r"did you mean (.*?)\?", refusal(tmp_path / name))[1] == path.name
    assert "the variable ${ROWS_OF_MINE} is not set" in refusal("${ROWS_OF_MINE}/rows.jsonl")
    monkeypatch.setenv("ROWS_OF_MINE", str(tmp_path))
    assert rows_in("${ROWS_OF_MINE}/rows.jsonl") == ROWS


@pytest.mark.skipif(not shutil.which("jq"), reason="needs jq")
def test_plain_text_becomes_rows_by_the_command_of_the_message(tmp_path):
    (tmp_path / "notes.txt").write_text("one\ntwo\n")
    command = re.search(r"with (jq .*?) OLD > NEW.jsonl", refusal(tmp_path / "notes.txt"))[1]
    rows = subprocess.check_output(f"{command} {tmp_path}/notes.txt", shell=True)
    (tmp_path / "notes.jsonl").write_bytes(rows)
    assert rows_in(tmp_path / "notes.jsonl") == [{"text": "one"}, {"text": "two"}]


def test_a_file_that_is_damaged_in_a_row_is_not_to_be_converted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "é"}\n{"text": "ü"}\n{"text": "'.encode() + b'\xff"}\n')
    *_, raw = read_rows(Source(path=str(path)))
    line = explained(BadRow("not UTF-8", ""), raw, {})
    assert "correct it, or remove it" in line and "iconv" not in line


def test_a_row_of_csv_with_more_cells_than_the_header_is_a_bad_row(tmp_path):
    """The message has two cures: quotes, or all names in the first line."""
    path = tmp_path / "x.csv"
    path.write_text("text\nGood\nHello, world\n")
    good, bad = read_rows(Source(path=str(path)))
    assert parse_row(good, {}) == {"text": "Good"}
    named = "the first line of the file; put each cell with a ... in quotes, or name all columns in"
    refused(named, lambda row: parse_row(row, {}), bad)
    for mended in ('text\nGood\n"Hello, world"\n', "text,more\nGood\nHello, world\n"):
        path.write_text(mended)
        assert "Hello" in rows_in(path)[1]["text"]


def test_columns_rename_keys():
    row = RawRow("rows", 1, '{"question": "x", "prompt": "y"}')
    named = "both 'prompt' and 'question' ... data.ignore_keys: [prompt]"
    refused(named, partial(parse_row, row, {"prompt": "question"}), [], ["prompt"])


PEAK = """
import sys, resource, json, time
from zerotrain.config.schema import Source
from zerotrain.rows.readers import MAX_ROW_CHARACTERS
from zerotrain.rows.sources import read_rows
from zerotrain.runtime.errors import UserError
import pyarrow.parquet, pyarrow.compute
before = resource.getrusage(resource.RUSAGE_SELF)
for path in sys.argv[1:]:
    try:
        found = [len(row.text) > MAX_ROW_CHARACTERS for row in read_rows(Source(path=path))]
    except UserError as error:
        found = ["refused"]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    facts = [(usage.ru_maxrss - before.ru_maxrss) / 1024, usage.ru_utime - before.ru_utime]
    print(json.dumps([*facts, len(found), sorted(set(found))]))
"""
MANY, HUGE = 200, "x" * 4_000_000


def giants(path):
    """A small file whose rows take up to 0.8 GB."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * MANY, pa.int32()), pa.array([HUGE]))
    if path.name == "rows.parquet":  # one value in a dictionary, and a run of references to it
        pq.write_table(pa.table({"text": column}), path, compression="zstd")
    elif path.name == "nested.parquet":  # all in one row
        nested = pa.ListArray.from_arrays(pa.array([0, MANY], pa.int32()), column)
        pq.write_table(pa.table({"text": nested}), path, compression="zstd")
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, pa.schema({"text": column.type})) as writer:
            writer.write_batch(pa.record_batch({"text": column}))
    elif path.name == "rows.csv.gz":  # one row of short cells with line breaks
        path.write_bytes(gzip.compress(b"a,b\n" + b'"x\n",' * 20_000_000, 1))
    else:  # a row longer than the limit
        text = "\n".join(json.dumps({"text": HUGE * n}) for n in (1, 3, 1))
        path.write_bytes(gzip.compress(text.encode(), 1))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rows.parquet", [MANY, [False]]),
        ("nested.parquet", [1, [True]]),
        ("rows.arrow", [MANY, [False]]),
        ("a.jsonl.gz", [3, [False, True]]),
        ("rows.csv.gz", [1, ["refused"]]),
    ],
)
def test_small_files_with_huge_rows_take_little_memory(tmp_path, name, expected):
    giants(tmp_path / name)
    command = [sys.executable, "-c", PEAK, str(tmp_path / name)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peak_mib, _, *found = json.loads(out.splitlines()[-1])
    assert found == expected and peak_mib < 700


def lists(rows, values, kind="int8"):
    """A column of equal lists."""
    zeros = pa.array(np.zeros(rows * values, "int8")).cast(kind)
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1) * values, pa.int32()), zeros)


def with_footer_that_says_one_value(path, values):
    """Change the number of values in a file's footer: an integer in 7 bits a byte, times two."""
    true = bytes((2 * values >> shift & 127) | 128 for shift in range(0, 28, 7))
    true = true[:-1] + bytes([true[-1] & 127])
    start = len(data := path.read_bytes()) - 8 - int.from_bytes(path.read_bytes()[-8:-4], "little")
    assert data[start:].count(true) == 2
    path.write_bytes(data[:start] + data[start:].replace(true, b"\x82\x80\x80\x00"))


def test_few_bytes_of_parquet_take_little_memory_and_time(tmp_path):
    """A row of many lists, of one list, and of many objects; rows of long lists; and a footer that
    is wrong.
    """
    struct = pa.struct({"a": pa.int8(), "b": pa.int8()})
    objects = pa.array([{"a": 0, "b": 0}] * 100_000, struct)
    objects = pa.ListArray.from_arrays(pa.array([0, len(objects)], pa.int32()), objects)
    tables = {
        "lists": {f"x{i}": lists(1, 3_000_000) for i in range(6)},
        "list": {"x": lists(1, 20_000_000)},
        "objects": {"x": objects},
        "rows": {"x": lists(100, 200_000)},
        "footer": {"x": lists(1, 20_000_000)},
    }
    files = [tmp_path / f"{name}.parquet" for name in tables]
    for file, columns in zip(files, tables.values(), strict=True):
        pq.write_table(pa.table(columns), file, compression="zstd")
        assert file.stat().st_size < 5000
    with_footer_that_says_one_value(files[-1], 20_000_000)
    command = [sys.executable, "-c", PEAK, *files]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for file, line in zip(files, out.splitlines()[-len(files) :], strict=True):
        peak_mib, seconds, *found = json.loads(line)
        assert found == [1, ["refused"]] and peak_mib < 60 and seconds < 5, file


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_long_rows_of_tokens_are_read_a_few_at_a_time(tmp_path, monkeypatch, version):
    """Token ids take bytes, and a mask beside them takes none."""
    monkeypatch.setattr(readers, "FREE_GROUP_VALUES", 10_000)
    ids = np.random.default_rng(0).integers(0, 30_000, (20, 2_000))
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in ids]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, data_page_version=version)
    monkeypatch.setattr(readers, "MAX_LIST_VALUES", 8_000)
    batches = []
    whole = readers.rows_of
    monkeypatch.setattr(readers, "rows_of", lambda each: whole(map(note, each)))

    def note(batch):
        batches.append(batch.num_rows)
        return batch

    assert rows_in(path) == rows and batches == [2] * 10
    monkeypatch.setattr(readers, "VALUES_PER_BYTE", 0.1)
    size = int(re.search(r"row_group_size=(\d+)", refusal(path))[1])
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=size)
    assert rows_in(path) == rows


def test_few_bytes_that_stand_for_many_values_are_refused_unparsed(tmp_path, monkeypatch):
    """A row group of Parquet, an Arrow list, and a JSON list under gzip."""
    monkeypatch.setattr(readers, "FREE_GROUP_VALUES", 1 << 18)
    row = {"text": "a", "x": [0] * 100, "y": [0] * 100}
    frame = pd.DataFrame([row] * 2000)
    path = tmp_path / "rows.parquet"
    frame.to_parquet(path, compression="zstd")
    assert path.stat().st_size < 10_000
    size = int(re.search(r"to_parquet\(FILE, row_group_size=(\d+)\)", refusal(path))[1])
    frame.to_parquet(path, row_group_size=size)
    assert rows_in(path) == [row] * 2000
    monkeypatch.setattr(readers, "MAX_LIST_VALUES", 9)
    monkeypatch.setattr(
        readers, "TEXT_AT_ONCE", 1 << 23
    )  # otherwise it is parsed again after each piece
    for lists in ([[0] * 10], [[0] * 5] * 2):
        pq.write_table(pa.table({"x": lists}), path)
        if len(lists) == 1:
            assert "over 9 values; split the row" in refusal(path)
    assert len(rows_in(path)) == 2
    path = tmp_path / "rows.json.gz"
    path.write_bytes(gzip.compress(b'[{"a":[' + b"[]," * 3_000_000 + b"[]]}]"))
    assert "row 1 of the list is not JSON, or too long" in refusal(path)


def test_a_json_list_of_any_size_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "TEXT_AT_ONCE", 7)
    text = json.dumps([{"text": "a,]" * n, "ü": [n, {}]} for n in range(20)], indent=1)
    path = tmp_path / "rows.json"
    path.write_text(f" \n{text}\n", encoding="utf-8-sig")
    assert rows_in(path) == json.loads(text)
    path.write_text(text[:-5])
    assert "is not JSON" in refusal(path)


def test_a_fifo_is_refused_unopened(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    assert "no file of rows" in refusal(tmp_path)
