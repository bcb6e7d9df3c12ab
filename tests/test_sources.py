"""Reading rows from files of every kind.    pytest tests/test_sources.py"""

import bz2
import csv
import datetime
import gzip
import json
import shutil
import struct
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import run, write_rows

from config.schema import Source
from data.sources import (
    BadRow,
    RawRow,
    fingerprint,
    local_files,
    name_of,
    parse_row,
    read_rows,
    shared_files,
)
from runtime.errors import UserError

ROWS = [{"text": "one"}, {"text": 'two, "quoted"\nand a line'}, {"text": "drei é"}]


def read(source, limit=10_000):
    return [(json.loads(row.text) if not row.problem else row.problem, row.place)
            for _, row in read_rows(source, limit)]  # fmt: skip


def zst(data):
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


def write_jsonl(path):
    write_rows(path, ROWS)


def write_json(path):
    path.write_text(json.dumps(ROWS, indent=2))


def write_csv(path):
    datasets.Dataset.from_list(ROWS).to_csv(path)


def write_parquet(path):
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)


def write_arrow_stream(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)


def write_arrow_file(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "rows.jsonl": write_jsonl,
    "rows.json": write_json,
    "lines.json": write_jsonl,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow_stream,
    "file.arrow": write_arrow_file,
    "folder": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_gives_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert [row for row, _ in read(Source(path=str(tmp_path / name)))] == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zst)]
)
def test_compressed(tmp_path, name, suffix, compress):
    WRITERS[name](tmp_path / name)
    packed = tmp_path / (name + suffix)
    packed.write_bytes(compress((tmp_path / name).read_bytes()))
    assert [row for row, _ in read(Source(path=str(packed)))] == ROWS


def test_gzip_of_several_members(tmp_path):
    """As written by `cat a.gz b.gz` and many loggers."""
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    (tmp_path / "rows.jsonl.gz").write_bytes(b"".join(map(gzip.compress, lines)))
    assert [row for row, _ in read(Source(path=str(tmp_path / "rows.jsonl.gz")))] == ROWS


def test_globs_and_folders_are_sorted(tmp_path):
    for i in (2, 1, 0):
        write_rows(tmp_path / f"part-{i}.jsonl", ROWS[i : i + 1])
    (tmp_path / "notes.txt").write_text("not rows")
    for path in (tmp_path, tmp_path / "part-*.jsonl", tmp_path / "**" / "part-?.jsonl"):
        assert [row for row, _ in read(Source(path=str(path)))] == ROWS


def test_a_folder_is_read_with_its_subfolders(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    write_rows(tmp_path / "a.jsonl", ROWS[:1])
    write_rows(tmp_path / "b" / "deep" / "part.jsonl", ROWS[1:2])
    datasets.Dataset.from_list(ROWS[2:]).save_to_disk(tmp_path / "c")
    # not rows: files of macOS, git and datasets, a link to a parent folder, notes
    for name in ("._a.jsonl", ".a.jsonl", ".git/a.jsonl", "b/._part.jsonl"):
        (tmp_path / name).write_bytes(b"\0\5\x16\7")
    for name in ("dataset_info.json", "b/dataset_infos.json", "b/notes.txt"):
        (tmp_path / name).write_text('{"splits": {}}')
    (tmp_path / "b" / "back").symlink_to(tmp_path)
    (tmp_path / "c" / "cache-1.arrow").write_bytes(b"of Dataset.map")
    assert [row for row, _ in read(Source(path=str(tmp_path)))] == ROWS
    assert local_files(str(tmp_path / "*.json*")) == [str(tmp_path / "a.jsonl")]
    before = fingerprint(Source(path=str(tmp_path)))
    write_rows(tmp_path / "b" / "deep" / "part.jsonl", ROWS)
    assert fingerprint(Source(path=str(tmp_path))) != before


def test_a_file_of_two_sources_is_detected(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        write_rows(tmp_path / name, ROWS)
    (tmp_path / "link.jsonl").symlink_to("b.jsonl")
    names = ["a.jsonl", "*.jsonl", "link.jsonl"]
    paths = [Source(path=str(tmp_path / name)) for name in names]
    assert shared_files(paths[:1]) == shared_files(paths[1:2]) == []
    assert shared_files([paths[0], paths[2]]) == []
    assert shared_files(paths[:2]) == [str(tmp_path / "a.jsonl")]
    assert shared_files(paths[1:]) == [str(tmp_path / "b.jsonl")]


def test_nulls_that_arrow_fills_in_are_absent(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "x", "tool_calls": None}], "tools": None}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    [(row, place)] = read(Source(path=str(tmp_path / "rows.parquet")))
    assert row == {"messages": [{"role": "user", "content": "x"}]} and place == 1


def test_csv_with_bad_lines(tmp_path):
    (tmp_path / "rows.csv").write_bytes(
        b'\xef\xbb\xbfprompt,completion\r\n1,"a\nb"\r\n2\r\n3,\xff\r\n\r\n4,d\r\n'
    )
    assert read(Source(path=str(tmp_path / "rows.csv"))) == [
        ({"prompt": "1", "completion": "a\nb"}, 3),
        ("not CSV (1 cells under a header of 2)", 4),
        ("not UTF-8", 5),
        ({"prompt": "4", "completion": "d"}, 7),
    ]
    (tmp_path / "rows.tsv").write_text("prompt\tcompletion\na,b\tc\n")
    assert read(Source(path=str(tmp_path / "rows.tsv")))[0][0] == {
        "prompt": "a,b", "completion": "c",
    }  # fmt: skip


def test_csv_with_an_open_quote_or_a_late_header(tmp_path):
    (tmp_path / "rows.csv").write_text('prompt,completion\na,"unclosed\nb,c\nd,e\n')
    [(problem, _)] = read(Source(path=str(tmp_path / "rows.csv")))
    assert problem.startswith("not CSV (")
    (tmp_path / "rows.csv").write_text("\n\nprompt,completion\na,b\n")
    assert read(Source(path=str(tmp_path / "rows.csv"))) == [
        ({"prompt": "a", "completion": "b"}, 4)
    ]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_csv_of_any_delimiter(tmp_path, delimiter):
    rows = [["prompt", "completion"], ["a;b,c", "x\ty"]]
    with (tmp_path / "rows.csv").open("w", newline="") as out:
        csv.writer(out, delimiter=delimiter).writerows(rows)
    assert [row for row, _ in read(Source(path=str(tmp_path / "rows.csv")))] == [
        {"prompt": "a;b,c", "completion": "x\ty"}
    ]
    (tmp_path / "rows.csv").write_text("text\none; and, two\n".replace(", ", " "))
    assert read(Source(path=str(tmp_path / "rows.csv")))[0][0] == {"text": "one; and two"}


REFUSED = {
    "utf-16.csv": ("prompt,completion\na,b\n".encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    "utf-16.jsonl": ('{"text": "a"}\n'.encode("utf-16-le"), "iconv -f UTF-16 -t UTF-8"),
    "utf-16.json": ('[{"text": "a"}]'.encode("utf-16-be"), "iconv -f UTF-16 -t UTF-8"),
    "quote.csv": (b'text,"id"x\na,1\n', "its header is not CSV"),
    "twice.csv": (b"text,id,text\na,1,b\n", "its header names column 'text' twice"),
    "pretty.json": (b'{\n  "data": [\n  ]\n}', "jq -c . OLD > NEW.jsonl"),
    "cut.json": (b'[{"text": "a"} {"text": "b"}]', "Expecting ',' delimiter"),
    "more.json": (b'[{"text": "a"}]\n[{"text": "b"}]', "Extra data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_would_be_misread_is_refused_with_the_remedy(tmp_path, name):
    content, cure = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: cannot be read: ") as caught:
        read(Source(path=str(tmp_path / name)))
    assert cure in str(caught.value) and "\n" not in str(caught.value)


def test_the_index_column_of_pandas_is_not_content(tmp_path):
    from data.messages import METADATA

    (tmp_path / "rows.csv").write_text(",text\n0,a\n")
    [(row, _)] = read(Source(path=str(tmp_path / "rows.csv")))
    assert row == {"": "0", "text": "a"} and "" in METADATA


def test_a_key_twice_in_an_element_of_a_list(tmp_path):
    (tmp_path / "rows.json").write_text('[ {"text": "a"} ,\n {"text": "b", "text": "c"}]\n')
    one, two = [row for _, row in read_rows(Source(path=str(tmp_path / "rows.json")))]
    assert parse_row(one, {}) == {"text": "a"} and two.place == 2
    with pytest.raises(BadRow, match="key 'text' twice"):
        parse_row(two, {})


def test_a_renamed_key_does_not_hide_another():
    row = RawRow(1, '{"prompt": "x", "question": "y"}')
    with pytest.raises(BadRow, match=r"both 'prompt' and 'question'.*data.ignore_keys: \[prompt\]"):
        parse_row(row, {"prompt": "question"})
    assert parse_row(row, {"prompt": "question"}, ["prompt"]) == {"prompt": "y"}


def test_bytes_and_dates_of_parquet(tmp_path):
    rows = [{"text": b"hello", "on": datetime.date(2026, 1, 2)}, {"text": b"\xff", "on": None}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = read(Source(path=str(tmp_path / "rows.parquet")))
    assert [row for row, _ in found] == [{"text": "hello", "on": "2026-01-02"}, "not UTF-8"]


def test_a_json_list_with_half_a_surrogate_pair(tmp_path):
    (tmp_path / "rows.json").write_text('[{"text": "\\ud800"}, {"text": "é"}]')
    found = [row.text for _, row in read_rows(Source(path=str(tmp_path / "rows.json")))]
    assert found == ['{"text": "\\ud800"}', '{"text": "é"}']


def test_extensions_in_capitals(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl")
    packed = tmp_path / "ROWS.JSONL.GZ"
    packed.write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    assert [row for row, _ in read(Source(path=str(packed)))] == ROWS


BROKEN = {
    "deep.json": b"[" * 100_000,
    "number.json": b'[{"a": ' + b"9" * 5000 + b"}]",
    "rows.parquet": b"PAR1 not parquet",
    "rows.arrow": b"neither stream nor file",
    "rows.jsonl.gz": b"\x1f\x8b\x08\x00broken",
    "rows.jsonl.zst": b"not zstd",
    "rows.json": b'[{"text": "a"}, {',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_not_what_its_name_says(tmp_path, name):
    (tmp_path / name).write_bytes(BROKEN[name])
    with pytest.raises(UserError, match=f"{name}: cannot be read: ") as caught:
        read(Source(path=str(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_found_or_read_is_named(tmp_path):
    (tmp_path / "rows.xlsx").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    for path, message in {
        "nowhere.jsonl": "no such file or folder: ",
        "*.nothing": "no file matches ",
        "rows.xlsx": "unknown file extension (known: .jsonl",
        "empty": "has no file that can be read",
        "splits": "has several splits",
    }.items():
        with pytest.raises(UserError) as caught:
            local_files(str(tmp_path / path))
        assert message in str(caught.value)


def test_a_hub_data_set_with_subset_and_split(tmp_path):
    """A local folder laid out like a hub data set is loaded in the same way as a hub id."""
    folder = tmp_path / "set"
    (folder / "math").mkdir(parents=True)
    write_rows(folder / "math" / "train.jsonl", ROWS)
    write_rows(folder / "math" / "test.jsonl", ROWS[:1])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: math\n  data_files:\n"
        "  - {split: train, path: math/train.jsonl}\n"
        "  - {split: test, path: math/test.jsonl}\n---\n"
    )
    source = Source(hub=str(folder), subset="math", split="test")
    assert [row for row, _ in read(source)] == ROWS[:1]
    assert name_of(source) == f"{folder}:math:test"
    assert fingerprint(source) != fingerprint(Source(hub=str(folder), subset="math"))
    with pytest.raises(UserError, match=r"cannot load .*:math:dev from the hub: "):
        read(Source(hub=str(folder), subset="math", split="dev"))


def test_a_fingerprint_changes_with_the_files(tmp_path):
    write_rows(tmp_path / "a.jsonl", ROWS)
    source = Source(path=str(tmp_path))
    before = fingerprint(source)
    assert fingerprint(source) == before
    write_rows(tmp_path / "b.jsonl", ROWS)
    assert fingerprint(source) != before


def test_a_bad_row_is_named_wherever_rows_are_read(tmp_path):
    """Not only in training: data/train_tokenizer.py reads rows too."""
    from data.train_tokenizer import texts_of

    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not UTF-8"):
        list(texts_of(str(tmp_path / "rows.jsonl")))


# --------------------------------------------------------------------------------------------------
# Hostile files

READ_EACH = """
import json, resource, sys
from config.schema import Source
from data.sources import read_rows
from runtime.errors import UserError

list(read_rows(Source(path=sys.argv[1])))  # what is imported is no part of the growth
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[2:]:
    try:
        said = [row.problem for _, row in read_rows(Source(path=path))]
    except UserError as error:
        said = str(error)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    print(json.dumps([path, said, grown]), flush=True)
"""


def read_in_a_child(good, *paths):
    """{file name: problems of its rows or the UserError} and MiB by which the peak memory grew."""
    finished = run([sys.executable, "-c", READ_EACH, good, *paths])
    assert finished.code == 0, finished
    lines = [json.loads(line) for line in finished.output.splitlines()]
    assert [path for path, *_ in lines] == [str(path) for path in paths]
    return {Path(path).name: said for path, said, _ in lines}, lines[-1][2]


def test_a_corrupt_file_is_one_line_and_never_a_signal(tmp_path):
    """An offset beyond the buffer ended in SIGBUS, a truncated map would."""
    offsets = struct.pack("<iii", 0, 10, 20)
    table = pa.table({"text": ["a" * 10, "b" * 10]})
    datasets.Dataset(table).save_to_disk(tmp_path / "folder")
    pyarrow.parquet.write_table(table, tmp_path / "good.parquet", write_page_checksum=True)
    for name, new in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as out, new(out, table.schema) as to:
            to.write_table(table)
    bad = []
    for kind in ("file.arrow", "stream.arrow"):
        whole = (tmp_path / kind).read_bytes()
        for name, content in {
            "offset": whole.replace(offsets, struct.pack("<iii", 0, 10, 2**30)),
            "negative": whole.replace(offsets, struct.pack("<iii", 0, -1, 20)),
            "cut": whole[: whole.index(offsets) + 8],
            "empty": b"",
        }.items():
            bad.append(tmp_path / f"{name}-{kind}")
            bad[-1].write_bytes(content)
    whole = (tmp_path / "good.parquet").read_bytes()
    flipped = whole.replace(b"bbbb", b"b\x07bb")
    for name, content in {"cut": whole[:-9], "flipped": flipped, "short": whole[:12]}.items():
        bad.append(tmp_path / f"{name}.parquet")
        bad[-1].write_bytes(content)
    for name, state in {"outside": '{"_data_files": [{"filename": "../file.arrow"}]}',
                        "no-list": '{"_data_files": 3}', "no-json": "["}.items():  # fmt: skip
        shutil.copytree(tmp_path / "folder", bad_folder := tmp_path / name)
        (bad_folder / "state.json").write_text(state)
        bad.append(bad_folder)
    shutil.copytree(tmp_path / "folder", cut := tmp_path / "cut-folder")
    [data] = cut.glob("*.arrow")
    data.write_bytes(data.read_bytes()[:200])
    said, _ = read_in_a_child(tmp_path / "file.arrow", *bad, cut)
    for path in (*bad, cut):
        assert f"{path}: cannot be read: " in said[path.name], said
        assert "\n" not in said[path.name]


def test_a_compressed_file_is_read_in_little_memory(tmp_path):
    """300 kB of gzip are a row of 300 MB, which took 966 MiB."""
    write_jsonl(tmp_path / "good.jsonl")
    long = b"x" * 300_000_000
    paths = [tmp_path / name for name in ("line.jsonl.gz", "element.json.zst", "cell.csv.zst")]
    good = b'{"text": "a"}'
    paths[0].write_bytes(gzip.compress(good + b'\n{"text": "' + long + b'"}\n' + good))
    paths[1].write_bytes(zst(b"[" + good + b', {"text": "' + long[:50_000_000] + b'"}]'))
    paths[2].write_bytes(zst(b'text\n"' + (b"x" * 99 + b"\n") * 300_000 + b'"\n'))
    assert paths[0].stat().st_size < 306_000
    said, grown_mib = read_in_a_child(tmp_path / "good.jsonl", *paths)
    assert said["line.jsonl.gz"] == ["", "over data.max_row_characters (8,000,000)", ""]
    assert "element 2 of its list is over data.max_row_characters" in said["element.json.zst"]
    assert said["cell.csv.zst"][0] == "over data.max_row_characters (8,000,000)"
    assert grown_mib < 250, grown_mib


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_a_json_list_is_read_in_chunks(tmp_path, monkeypatch, chunk):
    """Wherever a chunk ends: in a number, a word, an escape, a character of several bytes."""
    monkeypatch.setattr("data.sources.CHUNK_CHARACTERS", chunk)
    rows = [{"text": 'a"\\é\u2028', "n": -1234.5e6, "w": [True, None, -0]}, 12345, "s", [], {}]
    file = tmp_path / "rows.json"
    for text in (json.dumps(rows), json.dumps(rows, indent=2, ensure_ascii=False) + "\n\n"):
        file.write_text(text, encoding="utf-8-sig")
        assert [row for row, _ in read(Source(path=str(file)))] == rows
        for cut in range(1, len(text.rstrip())):
            file.write_text(text[:cut])
            with pytest.raises(UserError, match="cannot be read: "):
                read(Source(path=str(file)))
    file.write_text('["' + "x" * 500 + '"]')
    with pytest.raises(UserError, match=r"element 1 of its list is over .* \(50\)"):
        read(Source(path=str(file)), 50)
