"""Read the rows of files as JSON text.

Memory is bounded: at most MAX_ROW_CHARACTERS of a row exist at a time, however well its file is
compressed.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.rows.parquet_pages import count_values

if TYPE_CHECKING:
    import pyarrow

COMPRESSIONS = (".gz", ".zst", ".bz2")
MAX_ROW_CHARACTERS = 8_000_000
MAX_LIST_VALUES = MAX_ROW_CHARACTERS // 4  # each value of an Arrow list takes over 100 bytes
MAX_LINE_CHARACTERS = MAX_ROW_CHARACTERS + 1  # a line that was cut must still be too long
MAX_LIST_OBJECTS = 1 << 16  # each text, object or list in a list takes up to 50 microseconds
# Values in the lists of a Parquet row group. A few bytes can stand for any number of values, and a
# single row may have them all. Token ids take over a byte each, attention masks take none.
FREE_GROUP_VALUES = 1 << 24
VALUES_PER_BYTE = 4
MAX_GROUP_VALUES = 1 << 27
TEXT_AT_ONCE = 1 << 20  # characters that are read of a JSON list
JSON = json.JSONDecoder()
BETWEEN_ROWS = re.compile(r"\s*(,?)\s*(\]?)")  # the text between two rows of a JSON list
SEPARATOR = re.compile(r"[,;|\t]")  # between columns of CSV
# Only a writer of CSV puts such a cell in quotes.
QUOTED_CELL = re.compile(r'"[^"]*+(?:""[^"]*+)++"$')
AS_CSV = (
    'it is neither comma-separated nor .tsv without quotes; `python3 -c "import csv, sys; '
    'csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={!r}))" < OLD > NEW.csv` '
    "converts it"
)
HALF_CHARACTER = (
    "it has half of a character, as \\u escapes of a text that was cut; to leave the halves out: "
    "python3 -c 'import json, sys; text = open(sys.argv[1]).read().strip(); [print(json.dumps(row, "
    'ensure_ascii=False).encode(errors="ignore").decode()) for row in (json.loads(text) if text[0] '
    '== "[" else map(json.loads, filter(str.strip, text.split("\\n"))))]\' OLD > NEW.jsonl'
)
# The first bytes of files, and the end of their names. None: they have to be unpacked.
MAGIC = {
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"BZh": ".bz2",
    b"PAR1": ".parquet",
    b"ARROW1": ".arrow",
    b"PK\x03\x04": None,
    b"\xfd7zXZ": None,
}
EXTRA_CELLS = "cells beyond the header"  # key of a CSV row for those that have no name
ROWS_AT_ONCE = 100  # rows that are decoded from Parquet

JsonObject = dict[str, Any]
"""A parsed row, message, tool call or tool."""
Row = tuple[int, str]
"""The line of a row in the file, or its number in a file without lines, from 1; and its JSON.

Bytes that are not UTF-8 are surrogates. A row that is too long is cut just above the limit, so that
parse_row still rejects it.
"""


class BadRow(Exception):
    """A row that cannot be used.

    Skipped rows are counted by `reason`, one of a few short texts. The message has the details.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def parse_json(text: str) -> Any:
    """Return the value of a JSON text, without keys whose value is null.

    Tables give each object of a column all keys of that column. NaN is read as null.

    Raises:
        BadRow: an object has a key twice, or the text is not UTF-8.
        ValueError: the text is not JSON.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(text, object_pairs_hook=_object, parse_constant=lambda _: None)
    try:
        # Python's parser accepts half a surrogate pair. Tokenizers cannot encode it.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRow("not UTF-8", HALF_CHARACTER) from error
    return value


def _object(pairs: Iterable[tuple[str, Any]]) -> JsonObject:
    """Return a JSON object without nulls."""
    found = {}
    for key, value in pairs:
        if key in found:
            raise BadRow("doubled key", f"the key {key!r} occurs twice in an object")
        if value is not None:
            found[key] = value
    return found


def open_text(file: str) -> io.TextIOWrapper:
    """Open a text file, decompressed according to its extension."""
    import pyarrow

    with Path(file).open("rb") as stream:
        head = stream.read(max(map(len, MAGIC)))
    suffix = Path(file).suffix
    kind = next((MAGIC[magic] for magic in MAGIC if head.startswith(magic)), "")
    if kind is None:
        raise ValueError("it is a zip or xz archive; unpack it")
    if kind and kind != suffix:
        raise ValueError(f"it is a {kind} file; rename it to {Path(file).name}{kind}")
    if head and suffix in COMPRESSIONS and kind != suffix:
        raise ValueError(f"it is not a {suffix} file; rename it to {Path(file).stem}")
    stream = io.BufferedReader(pyarrow.input_stream(file))
    if stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise ValueError("it is UTF-16; `iconv -f UTF-16 -t UTF-8 OLD > NEW` converts it")
    # Bytes that are not UTF-8 become surrogates, which parse_row rejects. Only \n ends a line:
    # cells of CSV may contain \r.
    return io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="\n")


def begins_list(file: str) -> bool:
    """Return whether a text file is one JSON list."""
    with open_text(file) as stream:
        return stream.read(TEXT_AT_ONCE).lstrip().startswith("[")


def _lines(file: str) -> Iterator[str]:
    """Yield the lines of a text file, each cut to MAX_LINE_CHARACTERS."""
    with open_text(file) as stream:
        while line := stream.readline(MAX_LINE_CHARACTERS):
            rest = line  # read and drop the text over the limit
            while rest and not rest.endswith("\n"):
                rest = stream.readline(MAX_LINE_CHARACTERS)
            yield line.removeprefix("\ufeff")  # joined files have a mark in the middle


def _read_json(file: str) -> Iterator[Row]:
    """Yield the lines of a file or, if it begins with `[`, the elements of the list."""
    with open_text(file) as stream:
        text = stream.read(TEXT_AT_ONCE)
        if not text.lstrip().startswith("["):
            for number, line in enumerate(_lines(file), start=1):
                if row := line.strip():
                    yield number, row
            return
        position = text.index("[") + 1
        number = 0
        while not (between := BETWEEN_ROWS.match(text, position))[2]:
            start = between.end()
            try:
                if bool(number) != bool(between[1]):
                    raise ValueError("Expecting ',' delimiter")
                _, end = JSON.raw_decode(text, start)
            except (ValueError, RecursionError) as error:
                # The row is not JSON, or its end has not been read yet.
                text = text[position:]
                position = 0
                if len(text) > MAX_ROW_CHARACTERS or not (more := stream.read(TEXT_AT_ONCE)):
                    what = f"row {number + 1} of the list is not JSON, or too long"
                    raise ValueError(f"{what}: {error}") from None
                text += more
                continue
            number += 1
            yield number, text[start:end]
            position = end
        if (text[between.end() :] + stream.read(TEXT_AT_ONCE)).strip():
            raise ValueError("text follows the JSON list; write each row on one line")


def _read_csv(file: str) -> Iterator[Row]:
    """Yield rows of cells that commas separate and quotes may enclose. In .tsv tabs separate them,
    and quotes are text.
    """
    csv.field_size_limit(MAX_ROW_CHARACTERS)
    is_tsv = ".tsv" in Path(file).suffixes
    dialect = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {}
    characters = 0  # in the lines since the last row: cells may contain line breaks

    def lines() -> Iterator[str]:
        nonlocal characters
        for line in _lines(file):
            characters += len(line)
            if characters > MAX_LINE_CHARACTERS:
                raise csv.Error(f"the row has over {MAX_ROW_CHARACTERS:,} characters")
            yield line

    # Without strict, an unclosed quote would turn the rest of the file into one cell.
    reader = csv.DictReader(lines(), restkey=EXTRA_CELLS, strict=True, **dialect)
    try:
        header = reader.fieldnames or []
        if len(header) == 1 and (separator := SEPARATOR.search(header[0])):
            raise ValueError(AS_CSV.format(separator[0]))
        if len({*header}) < len(header):
            raise ValueError(f"its header names a column twice: {', '.join(header)}")
        for row in reader:
            cells = row.values()
            # Tabs and line breaks in quoted cells would give more or fewer cells than the header.
            is_plain = all(isinstance(c, str) and not QUOTED_CELL.match(c) for c in cells)
            if is_tsv and (header[0].startswith('"') or not is_plain):
                raise csv.Error(AS_CSV.format("\t"))
            characters = 0
            yield reader.line_num, json.dumps(row, ensure_ascii=False)
    except csv.Error as error:
        problem = f"not CSV after line {reader.line_num} ({error})"
        raise ValueError(problem + _csv_fix(file)) from error


def _csv_fix(file: str) -> str:
    """Return how to convert a file with other line ends or quotes than CSV; "" if unknown."""
    with open_text(file) as stream:
        head = stream.read(TEXT_AT_ONCE)
    if "\r" in head and "\n" not in head:
        return "; its lines end with \\r: tr '\\r' '\\n' < OLD > NEW.csv"
    if '\\"' in head:
        return """; its quotes have a \\ before them: sed 's/\\\\"/""/g' OLD.csv > NEW.csv"""
    return ""


# --------------------------------------------------------------------------------------------------
# Arrow and Parquet


def _read_parquet(file: str) -> Iterator[Row]:
    """Yield the rows of a Parquet file.

    Strings stay in Parquet's dictionaries, where a repeated value exists once.
    """
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(file)
    columns = [*metadata.schema]
    lists = [i for i, column in enumerate(columns) if column.max_repetition_level]
    groups = [*map(metadata.row_group, range(metadata.num_row_groups))]
    with Path(file).open("rb") as stream:
        at_once = [
            rows_at_once(group.num_rows, [count_values(stream, group.column(i)) for i in lists])
            for group in groups
        ]
    # Arrow ignores read_dictionary for columns other than strings.
    parquet = pyarrow.parquet.ParquetFile(
        file,
        page_checksum_verification=True,
        read_dictionary=[column.path for column in columns],
    )
    # One row group at a time: Arrow cannot join dictionaries that are inside lists.
    yield from rows_of(
        batch for group, rows in enumerate(at_once) for batch in parquet.iter_batches(rows, [group])
    )


def rows_at_once(rows: int, lists: Iterable[tuple[int, int]]) -> int:
    """Return how many rows of a Parquet row group to decode at once.

    Args:
        lists: the values and the bytes of each column that is inside a list.

    Raises:
        ValueError: the group, or a row of it, has too many values in lists.
    """
    values, size = map(sum, zip((0, 0), *lists, strict=True))
    in_a_row = MAX_ROW_CHARACTERS // 2  # a value and a comma
    if values > rows * in_a_row:
        raise ValueError(f"a row has over {in_a_row:,} values in lists; split the row")
    limit = min(MAX_GROUP_VALUES, max(FREE_GROUP_VALUES, VALUES_PER_BYTE * size))
    if values > limit:
        fitting = max(1, rows * limit // values // 2)  # rows have more values than their mean
        raise ValueError(
            f"a row group has over {limit:,} values in lists; write smaller ones: "
            f"to_parquet(FILE, row_group_size={fitting}) of pandas"
        )
    return max(1, min(ROWS_AT_ONCE, rows * MAX_LIST_VALUES // max(values, 1)))


def _read_arrow(file: str) -> Iterator[Row]:
    """Yield the rows of an Arrow file or stream.

    The file is not memory-mapped, because reading a truncated map would kill the process.
    """
    import pyarrow

    with pyarrow.OSFile(file) as stream:
        if stream.read(6) == b"ARROW1":  # a file with a footer; datasets writes streams
            reader = pyarrow.ipc.open_file(stream)
            yield from rows_of(map(reader.get_batch, range(reader.num_record_batches)))
        else:
            stream.seek(0)
            yield from rows_of(pyarrow.ipc.open_stream(stream))


def rows_of(batches: "Iterable[pyarrow.RecordBatch]") -> Iterator[Row]:
    """Yield the rows of Arrow batches as JSON."""
    number = 0
    for batch in batches:
        batch.validate(full=True)  # wrong offsets would read other memory
        for row in batch.to_struct_array():
            number += 1
            text = io.StringIO()
            for piece in _pieces(row):  # a few bytes of Arrow can stand for large texts
                text.write(piece)
                if text.tell() > MAX_ROW_CHARACTERS:
                    break
            yield number, text.getvalue()


def _pieces(row: "pyarrow.StructScalar") -> Iterator[str]:
    """Yield the JSON of a row in pieces."""
    encoder = json.JSONEncoder(ensure_ascii=False, default=_plain)
    before = "{"
    for key, value in _plain(row).items():
        yield f"{before}{json.dumps(key)}: "
        plain = _plain(value)
        # A list of token ids is one piece: a piece for each number would take five times as long.
        is_numbers = isinstance(plain, list) and isinstance(next(iter(plain), None), int)
        yield from [encoder.encode(plain)] if is_numbers else encoder.iterencode(plain)
        before = ", "
    yield "}"


def _plain(value: "pyarrow.Scalar") -> Any:
    """Return an Arrow value as a Python value. Its elements may still be Arrow values."""
    import pyarrow

    if not value.is_valid:
        return None
    if isinstance(value, pyarrow.StructScalar):
        return _object(value.items())
    if isinstance(value, pyarrow.ListScalar):  # also a map
        if len(value) > MAX_LIST_VALUES:
            raise ValueError(f"a row has a list of over {MAX_LIST_VALUES:,} values; split the row")
        if isinstance(value, pyarrow.MapScalar):
            return _object(value)
        kind = value.values.type
        is_number = pyarrow.types.is_integer(kind) or pyarrow.types.is_boolean(kind)
        if is_number and not value.values.null_count:  # scalars would be a hundred times slower
            return value.values.to_numpy(zero_copy_only=False).tolist()
        if len(value) > MAX_LIST_OBJECTS:
            raise ValueError(f"a row has a list of over {MAX_LIST_OBJECTS:,} values; split the row")
        return list(value)
    if isinstance(value, pyarrow.DictionaryScalar | pyarrow.RunEndEncodedScalar):
        return _plain(value.value)
    plain = value.as_py()
    if isinstance(value, pyarrow.FloatScalar | pyarrow.HalfFloatScalar):
        # The shortest number with these bits, as the writer knew it: 0.1, not 0.10000000149011612.
        return float(str(value.type.to_pandas_dtype()(plain)))
    if isinstance(plain, Decimal):  # as JSON has numbers
        return int(plain) if plain.as_tuple().exponent >= 0 else float(plain)
    if isinstance(value, pyarrow.JsonScalar) and len(plain) <= MAX_ROW_CHARACTERS:
        return parse_json(plain)
    if isinstance(plain, bytes):
        try:
            return plain.decode()
        except UnicodeDecodeError:  # a picture: an object is refused where a text must be
            return {"bytes": len(plain)}
    return plain if isinstance(plain, str | int | float) else str(plain)  # dates


Reader = Callable[[str], Iterator[Row]]
READERS: dict[str, Reader] = {
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
