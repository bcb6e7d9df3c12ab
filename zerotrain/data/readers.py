"""Reads rows from files, each as JSON text, in bounded memory: of no row more than
MAX_ROW_CHARACTERS exist at a time, however well its file compresses.
"""

import csv
import io
import json
import re
import stat
from collections.abc import Iterable, Iterator
from itertools import chain, count, product
from pathlib import Path
from struct import unpack_from
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow

KINDS = {  # file name extension -> how it is read
    ".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
MAX_ROW_CHARACTERS = 8_000_000
MAX_LINE_BYTES = 4 * MAX_ROW_CHARACTERS + 4  # UTF-8 has at most 4 bytes per character
MAX_BATCH_CHARACTERS = 1 << 26  # of Parquet and Arrow rows that exist as Python objects
ROWS_AT_ONCE = 1000  # decoded from Parquet at a time
TEXTS = ("string", "large_string", "binary", "large_binary")  # types of Arrow
ARROW_FILE = b"ARROW1\0\0"
DICTIONARY_BATCH, RECORD_BATCH = 2, 3  # kinds of an Arrow message
OLD_COMPRESSION = b"ARROW:experimental_compression"  # key of a message's metadata, of Arrow 0.17
SPACE = re.compile(r"[ \t\r\n]*")
SHOWN_CHARACTERS = 80  # of a bad row, in messages
TOO_LONG = f"over {MAX_ROW_CHARACTERS:,} characters (does its file lack line breaks?)"


class RawRow(NamedTuple):
    """One row as it was read."""

    place: int
    """Line of the file, from 1; for files without lines, the number of the row."""
    text: str
    """JSON, unparsed."""
    problem: str = ""
    """Why it cannot be parsed, if reading it has already shown that."""


def kind_of(file: str) -> str | None:
    """How a file is read, by its extension; None if that is unknown."""
    name = Path(file).name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return KINDS.get(Path(name).suffix)


def read_file(file: str) -> Iterator[RawRow]:
    """The rows of a file, or of a folder of Dataset.save_to_disk, without blank lines.

    Raises:
        OSError, EOFError, ValueError, OverflowError, RecursionError, pyarrow.ArrowException: it
            cannot be read in the format of its extension.
    """
    read = _read_folder if Path(file).is_dir() else READERS[kind_of(file)]
    for row in read(file):
        yield _checked(row)


def _checked(row: RawRow) -> RawRow:
    """The row, with a problem and only the start of its text if it cannot be used."""
    problem = row.problem
    if len(row.text) > MAX_ROW_CHARACTERS:
        problem = TOO_LONG
    else:
        try:
            row.text.encode()
        except UnicodeEncodeError:  # bytes that are not UTF-8 were read as surrogates
            problem = problem or "not UTF-8"
    if not problem:
        return row
    start = row.text[:SHOWN_CHARACTERS].encode(errors="backslashreplace").decode()
    return RawRow(row.place, start, problem)


def _open(file: str) -> io.BufferedReader:
    """Bytes of a text file, decompressed according to its extension."""
    import pyarrow

    if not stat.S_ISREG(Path(file).stat().st_mode):
        raise ValueError("it is not a regular file; write it to one first")
    compression = COMPRESSIONS.get(Path(file).suffix.lower())
    stream = io.BufferedReader(pyarrow.input_stream(file, compression=compression))
    head = stream.peek(2)[:2]
    if head in (b"\xff\xfe", b"\xfe\xff") or b"\0" in head:
        stream.close()
        raise ValueError(
            "it is UTF-16 but must be UTF-8: iconv -f UTF-16 -t UTF-8 OLD > NEW converts it"
        )
    return stream


def _lines(stream: io.BufferedReader) -> Iterator[tuple[int, str]]:
    """Number and text of each line; of one that is too long, the start that shows it."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES):
        number += 1
        rest = line
        while len(rest) > 1 << 19 and not rest.endswith(b"\n"):
            rest = stream.readline(1 << 20)
        yield number, line.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")


def _read_lines(file: str) -> Iterator[RawRow]:
    with _open(file) as stream:
        for number, line in _lines(stream):
            if text := line.strip():
                yield RawRow(number, text)


def _read_json(file: str) -> Iterator[RawRow]:
    """A list of objects or, despite the extension, one object per line."""
    with _open(file) as stream:
        if not stream.peek(64)[:64].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _read_lines(file)
            return
        text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        for number, element in enumerate(_elements(text), start=1):
            yield RawRow(number, element)


def _elements(stream: io.TextIOBase) -> Iterator[str]:
    """The texts of the elements of a JSON list, of which a few at a time are in memory.

    Raises:
        ValueError: it is not JSON, or an element is too long: its end is not known then.
    """
    text, at, is_whole = stream.read(4 * MAX_ROW_CHARACTERS), 0, False
    at = SPACE.match(text).end() + 1  # the bracket
    for number in count(1):
        if not is_whole and len(text) - at < 2 * MAX_ROW_CHARACTERS:
            more = stream.read(4 * MAX_ROW_CHARACTERS)
            text, at, is_whole = text[at:] + more, 0, not more
        at = SPACE.match(text, at).end()
        if text[at : at + 1] == "]":
            break
        if number > 1:
            if text[at : at + 1] != ",":
                raise ValueError(f"no comma or bracket follows element {number - 1} of its list")
            at = SPACE.match(text, at + 1).end()
        try:
            end = json.JSONDecoder().raw_decode(text, at)[1]
        except json.JSONDecodeError as error:
            why = error.msg if is_whole else f"{error.msg}, or it is {TOO_LONG}"
            raise ValueError(f"element {number} of its list: {why}") from error
        yield text[at:end]
        at = end
    if text[at + 1 :].strip() or stream.read(1):
        raise ValueError("text follows its list")


def _read_csv(file: str) -> Iterator[RawRow]:
    number = characters = 0

    def lines() -> Iterator[str]:
        nonlocal number, characters
        for number, line in _lines(stream):
            characters += len(line)
            if characters > MAX_ROW_CHARACTERS + 2:  # the line break does not count
                raise ValueError(f"the record that goes on in line {number} is {TOO_LONG}")
            if line.strip() or characters > len(line):
                yield line

    csv.field_size_limit(MAX_ROW_CHARACTERS)
    with _open(file) as stream:
        unread = lines()
        first = next(unread, "")
        # strict: otherwise an unclosed quote would turn the rest of the file into one cell
        reader = csv.reader(chain([first], unread), delimiter=_delimiter(first, file), strict=True)
        try:
            header = next(reader, [])
        except csv.Error as error:
            raise ValueError(f"its header is not CSV ({error})") from error
        if doubled := [name for name in header if name and header.count(name) > 1]:
            raise ValueError(f"its header names column {doubled[0]!r} twice; rename one of them")
        while True:
            characters = 0
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield RawRow(number, "", f"not CSV ({error})")
                continue
            problem = ""
            if len(cells) != len(header):
                problem = f"not CSV ({len(cells)} cells under a header of {len(header)})"
            row = dict(zip(header, cells, strict=False))
            yield RawRow(number, json.dumps(row, ensure_ascii=False), problem)


def _delimiter(header: str, file: str) -> str:
    """Tab in .tsv; otherwise a comma or, if the header has none, a semicolon or tab in it."""
    if ".tsv" in Path(file).name.lower():
        return "\t"
    return next((mark for mark in ",;\t" if mark in header), ",")


# --------------------------------------------------------------------------------------------------
# Arrow and Parquet


def _read_parquet(file: str) -> Iterator[RawRow]:
    """Strings stay in Parquet's dictionaries: a value that is repeated exists once, not in each
    row. An encoding that shares prefixes would have to be expanded for that.
    """
    import pyarrow.parquet

    about = pyarrow.parquet.read_metadata(file)
    columns = [about.schema.column(i) for i in range(about.num_columns)]
    texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    for group, column in product(range(about.num_row_groups), range(about.num_columns)):
        if "DELTA_BYTE_ARRAY" in about.row_group(group).column(column).encodings:
            raise ValueError("its encoding DELTA_BYTE_ARRAY is not read; write it as JSONL")
    parquet = pyarrow.parquet.ParquetFile(
        file, page_checksum_verification=True, read_dictionary=texts
    )
    yield from rows_of(parquet.iter_batches(batch_size=ROWS_AT_ONCE))


def _read_arrow(file: str) -> Iterator[RawRow]:
    yield from rows_of(_batches(file))


def _read_folder(folder: str) -> Iterator[RawRow]:
    """Rows of a folder of Dataset.save_to_disk, whose state.json lists its Arrow files."""
    try:
        files = json.loads((Path(folder) / "state.json").read_text())["_data_files"]
        names = [file["filename"] for file in files]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("its state.json does not list its Arrow files") from None
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError("its state.json lists files outside of it")
    yield from rows_of(chain.from_iterable(_batches(f"{folder}/{name}") for name in names))


def _batches(file: str) -> "Iterator[pyarrow.RecordBatch]":
    """The record batches of an Arrow file.

    It is read rather than memory-mapped: where a map lacks its end, access ends the process. The
    format with a footer is the stream format between two marks, and is read as that.

    Raises:
        ValueError: it has compressed buffers, of which nothing bounds what they take.
    """
    import pyarrow

    with pyarrow.OSFile(file) as stream:
        start = len(ARROW_FILE) if stream.read(len(ARROW_FILE)) == ARROW_FILE else 0
        if start:
            stream.seek(max(stream.size() - 6, 0))
            if stream.read() != ARROW_FILE[:6]:
                raise ValueError("its end is missing")
        stream.seek(start)
        for message in pyarrow.ipc.MessageReader.open_stream(stream):
            if _is_compressed(message.metadata.to_pybytes()):
                raise ValueError("its buffers are compressed; write it as Parquet or JSONL")
        stream.seek(start)
        yield from pyarrow.ipc.open_stream(stream)


def _is_compressed(message: bytes) -> bool:
    """Whether a message of Arrow, a flatbuffer that pyarrow has verified, says that its buffers are
    compressed: Message.header.compression, for a dictionary Message.header.data.compression.
    """

    def field(table: int, index: int) -> int | None:
        """Where a field of a table is; None if it is absent."""
        fields = table - unpack_from("<i", message, table)[0]
        at = 4 + 2 * index
        is_there = at < unpack_from("<H", message, fields)[0]
        offset = unpack_from("<H", message, fields + at)[0] if is_there else 0
        return table + offset if offset else None

    def pointed_at(place: int) -> int:
        return place + unpack_from("<I", message, place)[0]

    root = pointed_at(0)
    kind, header = field(root, 1), field(root, 2)
    if kind is None or header is None or message[kind] not in (DICTIONARY_BATCH, RECORD_BATCH):
        return False
    batch: int | None = pointed_at(header)
    if message[kind] == DICTIONARY_BATCH:
        data = field(batch, 1)
        batch = None if data is None else pointed_at(data)
    is_marked = OLD_COMPRESSION in message
    return is_marked or (batch is not None and field(batch, 3) is not None)


def rows_of(batches: "Iterable[pyarrow.RecordBatch]") -> Iterator[RawRow]:
    """The rows of Arrow batches as JSON, without nulls."""
    number = 0
    for batch in batches:
        batch.validate(full=True)  # offsets beyond a buffer would read other memory
        for part in _parts(batch):
            if part.num_rows == 1 and _size(part) > MAX_ROW_CHARACTERS:
                number += 1
                yield RawRow(number, "", TOO_LONG)
                continue
            for row in part.to_pylist():
                number += 1
                try:
                    yield RawRow(number, json.dumps(_plain(row), ensure_ascii=False))
                except UnicodeDecodeError:
                    yield RawRow(number, ascii(row), "not UTF-8")


def _parts(batch: "pyarrow.RecordBatch") -> "Iterator[pyarrow.RecordBatch]":
    """The batch, halved until each part is small as Python objects: a few bytes of Arrow can stand
    for a large text in every row.
    """
    if batch.num_rows <= 1 or _size(batch) <= MAX_BATCH_CHARACTERS:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _parts(batch.slice(0, half))
    yield from _parts(batch.slice(half))


def _size(array: "pyarrow.RecordBatch | pyarrow.Array") -> int:
    """Characters of an array's values, at least 8 for each value, at any depth.

    Raises:
        ValueError: it has a type that is not read.
    """
    import pyarrow
    import pyarrow.compute as compute
    from pyarrow import types

    if isinstance(array, pyarrow.RecordBatch):
        return sum(map(_size, array.columns))
    kind, size = array.type, 8 * len(array)
    if types.is_struct(kind):
        return size + sum(map(_size, array.flatten()))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return size + _size(array.flatten())
    if types.is_dictionary(kind):
        sizes = compute.binary_length(array.dictionary)
        return size + (compute.sum(sizes.take(array.indices)).as_py() or 0)
    if str(kind) in TEXTS:
        return size + (compute.sum(compute.binary_length(array)).as_py() or 0)
    if types.is_primitive(kind) or types.is_null(kind) or types.is_decimal(kind):
        return size
    raise ValueError(f"it has a column of the type {kind}; write it as JSONL")


def _plain(value: Any) -> Any:
    """An Arrow value as JSON, without nulls: Arrow gives every object of a column all keys of the
    column.
    """
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return value if isinstance(value, str | int | float | None) else str(value)  # dates, decimals


READERS = {
    "lines": _read_lines,
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
