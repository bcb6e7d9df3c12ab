"""Reads rows, each a JSON object, from files and from the hub.

data/messages.py then converts the row formats into one form.
"""

import csv
import glob
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from config.schema import DataConfig
from runtime.errors import UserError, describe

if TYPE_CHECKING:
    from datasets import Dataset

    from config.schema import Source

# Row format -> its required keys, tried in this order when data.format is auto. With a prompt that
# is a list, prompt + completion is conversational.
FORMAT_KEYS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "conversational": ("prompt", "completion"),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "dolly": ("instruction", "response"),
    "oasst": ("INSTRUCTION", "RESPONSE"),
    "text": ("text",),
}
CHAT_FORMATS = ("messages", "sharegpt", "conversational")
# Row format -> its optional keys.
OPTIONAL_KEYS = {
    "messages": ("system", "tools"),
    "sharegpt": ("system", "tools"),
    "conversational": ("system", "tools"),
    "prompt_completion": ("system", "history", "tools"),
    "instruction": ("input", "system", "history", "tools"),
    "dolly": ("context", "system", "history", "tools"),
    "oasst": (),
    "text": (),
}
MAY_BE_ABSENT = frozenset().union(*OPTIONAL_KEYS.values())
KINDS = {  # file name extension -> how it is read
    ".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
COMPRESSIONS = (".gz", ".zst", ".bz2")
# Files of datasets and LLaMA-Factory that describe a folder and contain no rows.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
JSON_TYPES = {
    dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number",
    float: "a number", type(None): "null",
}  # fmt: skip
ROWS_AT_ONCE = 1000  # rows of Parquet and Arrow files in memory at a time
CHUNK_CHARACTERS = 1 << 20  # of a JSON list, and of a line that is skipped, in memory at a time
SHOWN_CHARACTERS = 80  # of a row that is too long, in messages


COMMIT = re.compile("[0-9a-f]{40}")


class BadRow(ValueError):
    """A row that cannot be used. `reason` is one of a few short texts, by which skipped rows are
    counted; the message has the details.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TooLong(ValueError):
    """A row has more than data.max_row_characters."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"over data.max_row_characters ({limit:,})")


class RawRow(NamedTuple):
    """One row as it was read."""

    place: int
    """Line of the file, from 1; for files without lines, the number of the row."""
    text: str
    """JSON, unparsed."""
    problem: str = ""
    """Why it cannot be parsed, if reading it has already shown that."""


# --------------------------------------------------------------------------------------------------
# Files and hub data sets


def local_files(path: str) -> list[str]:
    """The files of a path, a folder (with subfolders) or a glob, sorted. A folder written by
    Dataset.save_to_disk counts as one file; hidden files and descriptions of data sets are skipped.

    Raises:
        UserError: there are no files, or one that cannot be read.
    """
    try:
        return _local_files(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {describe(error)}") from error


def _local_files(path: str) -> list[str]:
    here = Path(path)
    if here.is_dir():
        files = sorted(_files_in(here))
        if not files:
            raise UserError(f"folder {path} has no file that can be read ({_readable()})")
        return files
    if here.is_file():
        files = [path]
    else:
        found = glob.glob(path, recursive=True)  # noqa: PTH207, takes absolute ones too
        files = sorted(f for f in found if Path(f).is_file() and Path(f).name not in DESCRIPTIONS)
    if not files:
        kind = "file matches" if glob.has_magic(path) else "such file or folder:"
        raise UserError(f"no {kind} {path}")
    for file in files:
        if not _kind(file):
            raise UserError(f"{file}: unknown file extension (known: {_readable()})")
    return files


def _files_in(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[str]:
    """Files with rows; `above` are the parent folders, to which a symbolic link may lead back."""
    if (folder / "state.json").exists():
        yield str(folder)
        return
    if (folder / "dataset_dict.json").exists():
        raise UserError(f"{folder} has several splits; use the folder of one of them")
    above = (*above, folder.resolve())
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if entry.resolve() not in above:
                yield from _files_in(entry, above)
        elif entry.is_file() and _kind(entry.name) and entry.name not in DESCRIPTIONS:
            yield str(entry)


def shared_files(given: list["Source"]) -> list[str]:
    """The files that belong to more than one of these sources."""
    counts: Counter[str] = Counter()
    for source in given:
        if source.path is not None:
            counts.update({str(Path(file).resolve()) for file in local_files(source.path)})
    return sorted(file for file, count in counts.items() if count > 1)


def _kind(file: str) -> str | None:
    name = Path(file).name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return KINDS.get(Path(name).suffix)


def _readable() -> str:
    return f"{', '.join(KINDS)}; also with {', '.join(COMPRESSIONS)}"


def name_of(source: "Source") -> str:
    """Name of a source in tables and messages."""
    if source.path is not None:
        return source.path
    revision = f"@{source.revision}" if source.revision else ""
    return ":".join(filter(None, [f"{source.hub}{revision}", source.subset, source.split]))


def fingerprint(source: "Source") -> list[Any]:
    """Changes whenever the source's rows may have changed: (path, bytes, modification time in ns)
    of each file; for a hub data set, the fingerprint of `datasets`.
    """
    if source.hub is not None:
        return [name_of(source), _from_hub(source)._fingerprint]
    files = []
    for name in local_files(source.path):
        path = Path(name)
        try:
            parts = sorted(f for f in path.iterdir() if f.is_file()) if path.is_dir() else [path]
            files += [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in parts]
        except OSError as error:
            raise UserError(f"{name}: cannot be read: {describe(error)}") from error
    return files


def _from_hub(source: "Source") -> "Dataset":
    import datasets

    try:
        found = datasets.load_dataset(
            source.hub, source.subset, split=source.split, revision=source.revision
        )
    except Exception as error:  # hub, network and file formats each raise their own
        first_line = next((line for line in str(error).splitlines() if line.strip()), "no reason")
        raise UserError(f"cannot load {name_of(source)} from the hub: {first_line}") from error
    commit = _commit_of(found)
    if commit and COMMIT.fullmatch(source.revision or "") and commit != source.revision:
        raise UserError(  # without network, `datasets` takes the newest commit that it has
            f"cannot load {name_of(source)} from the hub: the newest commit in the cache is "
            f"{commit}; connect to the hub, or set its revision to that commit"
        )
    return found


def loaded_commit(source: "Source") -> str | None:
    """The commit of a hub data set, as it is loaded; its revision if there is none.

    Raises:
        UserError: it cannot be loaded.
    """
    return _commit_of(_from_hub(source)) or source.revision


def _commit_of(dataset: "Dataset") -> str | None:
    """`datasets` prepares OWNER/NAME in a folder OWNER___NAME/SUBSET/VERSION/COMMIT."""
    folders = [Path(file["filename"]).parent.name for file in dataset.cache_files]
    return next(filter(COMMIT.fullmatch, folders), None)


# --------------------------------------------------------------------------------------------------
# Rows


def read_rows(
    source: "Source", max_row_characters: int = DataConfig.max_row_characters
) -> Iterator[tuple[str, RawRow]]:
    """Yield (file, row) in the order of the files, without blank lines. Parsing is left to the
    worker processes that tokenize. Of a longer row than `max_row_characters` only the start is
    kept; text files are never in memory as a whole, however well they compress.

    Raises:
        UserError: a file cannot be read in the format of its extension.
    """
    if source.hub is not None:
        rows = _from_batches(_from_hub(source).with_format("arrow").iter(batch_size=ROWS_AT_ONCE))
        yield from ((name_of(source), row) for row in _limited(rows, max_row_characters))
        return
    for file in local_files(source.path):
        read = _read_folder if Path(file).is_dir() else READERS[_kind(file)]
        try:
            for row in _limited(read(file, max_row_characters), max_row_characters):
                yield file, row
        except (
            OSError, EOFError, ValueError, OverflowError, RecursionError, _arrow_error()
        ) as error:  # fmt: skip
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"{file}: cannot be read: {first_line}") from error


def _limited(rows: Iterator[RawRow], limit: int) -> Iterator[RawRow]:
    for row in rows:
        if len(row.text) > limit:
            row = RawRow(row.place, row.text[:SHOWN_CHARACTERS], str(TooLong(limit)))
        yield row


def _arrow_error() -> type[Exception]:
    import pyarrow

    return pyarrow.ArrowException


def _open(file: str) -> io.BufferedReader:
    """Bytes of a text file, decompressed according to its extension."""
    import pyarrow

    suffix = Path(file).suffix.lower()
    compression = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}.get(suffix)
    stream = io.BufferedReader(pyarrow.input_stream(file, compression=compression))
    head = stream.peek(2)[:2]
    if head in (b"\xff\xfe", b"\xfe\xff") or b"\0" in head:
        stream.close()
        raise ValueError(
            "it is UTF-16 but must be UTF-8: iconv -f UTF-16 -t UTF-8 OLD > NEW converts it"
        )
    return stream


class _Lines:
    """The lines of a file as bytes, without ever holding more than `limit` characters of one.

    Iterating raises TooLong for a longer one, and continues with the next.
    """

    def __init__(self, stream: io.BufferedReader, limit: int) -> None:
        self.stream, self.limit = stream, limit
        self.number = 0
        self.head = b""
        """The start of the last line that was too long."""

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> bytes:
        most_bytes = min(4 * self.limit, 1 << 31)  # UTF-8 has at most 4 bytes per character
        line = self.stream.readline(most_bytes + 2)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) <= most_bytes or line.endswith(b"\n"):
            return line
        self.head, rest = line[: 4 * SHOWN_CHARACTERS], line
        while rest and not rest.endswith(b"\n"):
            rest = self.stream.readline(CHUNK_CHARACTERS)
        raise TooLong(self.limit)


def _read_lines(file: str, limit: int) -> Iterator[RawRow]:
    first = True
    with _open(file) as stream:
        lines = _Lines(stream, limit)
        while True:
            problem = ""
            try:
                raw = next(lines)
                text = raw.decode("utf-8-sig" if lines.number == 1 else "utf-8")
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                text = raw.decode("utf-8", errors="backslashreplace")
                problem = f"not UTF-8 (byte {error.start} of the line)"
            except TooLong as error:
                text, problem = lines.head.decode("utf-8", errors="ignore"), str(error)
            if text := text.strip():
                if first and text in ("{", "[", "[{"):
                    cure = (
                        "jq -c . OLD > NEW.jsonl writes one object per line"
                        if text == "{"
                        else "a list of rows needs a name that ends in .json"
                    )
                    raise ValueError(
                        f"each row must be on one line, but the JSON spans several: {cure}"
                    )
                first = False
                yield RawRow(lines.number, text, problem)


def _read_json(file: str, limit: int) -> Iterator[RawRow]:
    """A list of objects or, despite the extension, one object per line."""
    with _open(file) as stream:
        if not stream.peek(64)[:64].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _read_lines(file, limit)
            return
        elements = _elements(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), limit)
        yield from (RawRow(number, text) for number, text in enumerate(elements, start=1))


def _elements(stream: io.TextIOBase, limit: int) -> Iterator[str]:
    """The texts of the elements of a JSON list. In memory are one element and what is read ahead.

    Raises:
        ValueError: it is not JSON, or an element is too long; its end is not known then.
    """
    decoder, text, at, count = json.JSONDecoder(), "", 0, 0

    def read_more() -> bool:
        nonlocal text, at
        more = stream.read(max(CHUNK_CHARACTERS, len(text) - at))
        text, at = text[at:] + more, 0
        return bool(more)

    def next_sign() -> str:
        nonlocal at
        while (at := _skip_space(text, at)) == len(text) and read_more():
            pass
        return text[at : at + 1]

    next_sign()
    at += 1  # the bracket
    while next_sign() != "]":
        while True:
            problem = None
            try:
                end = decoder.raw_decode(text, at)[1]
                if end < len(text):  # otherwise a number may continue
                    break
            except json.JSONDecodeError as error:
                # "-Infinity", the longest word, may be incomplete, and so may a string
                if error.pos < len(text) - 10 and not error.msg.startswith("Unterminated string"):
                    raise
                problem = error
            if len(text) - at > limit:
                raise ValueError(f"element {count + 1} of its list is {TooLong(limit)}")
            if not read_more():
                if problem is not None:
                    raise problem
                break
        yield text[at:end]
        at, count = end, count + 1
        if next_sign() == ",":
            at += 1
            next_sign()
        elif text[at : at + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    at += 1
    if next_sign():
        raise json.JSONDecodeError("Extra data", text, at)


def _skip_space(text: str, at: int) -> int:
    """The first position at or after `at` that is not white space, or the end."""
    return re.compile(r"[^ \t\r\n]|\Z").search(text, at).start()


def _dump(row: Any) -> str:
    """JSON; lone surrogates, which UTF-8 cannot encode, are escaped."""
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(row)
    return text


class _Records:
    """The lines of a CSV file as text, with which csv.reader cannot exceed `limit` characters in
    one record, whose quoted cells may have many lines.
    """

    def __init__(self, lines: _Lines) -> None:
        self.lines, self.size = lines, 0

    def __iter__(self) -> "_Records":
        return self

    def __next__(self) -> str:
        line = next(self.lines).decode(
            "utf-8-sig" if self.lines.number == 1 else "utf-8", errors="surrogateescape"
        )
        self.size += len(line)
        if self.size > self.lines.limit + 2:  # the line break does not count
            raise TooLong(self.lines.limit)
        return line


def _read_csv(file: str, limit: int) -> Iterator[RawRow]:
    csv.field_size_limit(2**31 - 1)
    with _open(file) as stream:
        lines = _Records(_Lines(stream, limit))
        # strict: otherwise an unclosed quote would turn the rest of the file into one cell
        head = list(_up_to_header(lines))
        delimiter = _delimiter(head[-1], file) if head else ","
        reader = csv.reader(chain(head, lines), delimiter=delimiter, strict=True)
        try:
            header = next(filter(None, reader), [])
        except csv.Error as error:
            raise ValueError(f"its header is not CSV ({error})") from error
        if doubled := [name for name, count in Counter(filter(None, header)).items() if count > 1]:
            raise ValueError(f"its header names column {doubled[0]!r} twice; rename one of them")
        while True:
            lines.size = 0
            try:
                cells = next(reader)
            except StopIteration:
                return
            except (csv.Error, TooLong) as error:
                problem = f"not CSV ({error})" if isinstance(error, csv.Error) else str(error)
                yield RawRow(lines.lines.number, "", problem)
                continue
            if not cells:
                continue
            row = dict(zip(header, cells, strict=False))
            problem = ""
            if len(cells) != len(header):
                problem = f"not CSV ({len(cells)} cells under a header of {len(header)})"
            text = _dump(row)
            if re.search("[\udc80-\udcff]", "".join(cells)):  # kept by surrogateescape
                problem = "not UTF-8"
            yield RawRow(lines.lines.number, text, problem)


def _up_to_header(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield line
        if line.strip():
            return


def _delimiter(header: str, file: str) -> str:
    """Tab in .tsv; otherwise a comma or, if the header has none, a semicolon or tab in it."""
    if ".tsv" in Path(file).name.lower():
        return "\t"
    return next((mark for mark in ",;\t" if mark in header), ",")


def _read_parquet(file: str, limit: int) -> Iterator[RawRow]:
    import pyarrow.parquet

    parquet = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
    yield from _from_batches(parquet.iter_batches(batch_size=ROWS_AT_ONCE))


def _read_arrow(file: str, limit: int) -> Iterator[RawRow]:
    yield from _from_batches(_batches(file))


def _read_folder(folder: str, limit: int) -> Iterator[RawRow]:
    """Rows of a folder of Dataset.save_to_disk, whose state.json lists its Arrow files."""
    try:
        files = json.loads((Path(folder) / "state.json").read_text())["_data_files"]
        names = [file["filename"] for file in files]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("its state.json does not list its Arrow files") from None
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError("its state.json lists files outside of it")
    yield from _from_batches(chain.from_iterable(_batches(f"{folder}/{name}") for name in names))


def _batches(file: str) -> Iterator[Any]:
    """The record batches of an Arrow file.

    It is read rather than memory-mapped: where a map lacks its end, access ends the process.
    """
    import pyarrow

    with pyarrow.OSFile(file) as stream:
        try:
            reader = pyarrow.ipc.open_file(stream)
        except pyarrow.ArrowInvalid:  # the IPC stream format
            stream.seek(0)
            yield from pyarrow.ipc.open_stream(stream)
            return
        yield from map(reader.get_batch, range(reader.num_record_batches))


def _from_batches(batches: Iterable[Any]) -> Iterator[RawRow]:
    number = 0
    for batch in batches:
        batch.validate(full=True)  # offsets beyond a buffer would read other memory
        for first in range(0, batch.num_rows, ROWS_AT_ONCE):
            for row in batch.slice(first, ROWS_AT_ONCE).to_pylist():
                number += 1
                try:
                    yield RawRow(number, _dump(_plain(row)))
                except UnicodeDecodeError:
                    yield RawRow(number, ascii(row), "not UTF-8")


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


def parse_row(
    raw: RawRow, columns: dict[str, str], ignore_keys: Iterable[str] = ()
) -> dict[str, Any]:
    """Parse a row, remove `ignore_keys`, and rename keys by `columns` ({our key: file's key}).

    Raises:
        BadRow: reading it showed a problem, it is not a JSON object, it has a NUL byte or half of a
            surrogate pair, an object has a key twice, or a key to rename is missing.
    """
    text = raw.text
    if raw.problem:
        raise BadRow(raw.problem.split(" (")[0], raw.problem)
    if "\0" in text:
        raise BadRow("NUL byte", "the row has a NUL byte")
    try:
        row = load_json(text)
    except BadRow:
        raise
    except json.JSONDecodeError as error:
        message = f"not JSON ({error.msg} at column {error.colno})"
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            message = (
                f"not JSON (the line ends inside the {'list' if text[0] == '[' else 'object'}; "
                "each row must be complete on one line)"
            )
        raise BadRow("not JSON", message) from error
    except (RecursionError, ValueError) as error:  # nested too deeply; a number of 5,000 digits
        raise BadRow("not JSON", f"JSON that cannot be parsed ({error})") from error
    if not isinstance(row, dict):
        problem = f"a row must be a JSON object, not {json_type(row)}"
        if isinstance(row, list):
            problem += "; a file that is one list needs a name that ends in .json"
        raise BadRow("not an object", problem)
    for key in ignore_keys:
        row.pop(key, None)
    if not columns:
        return row
    renamed = {ours: row.pop(theirs) for ours, theirs in columns.items() if theirs in row}
    for ours, theirs in columns.items():
        if ours in row:
            raise BadRow(
                "doubled key",
                f"it has both {ours!r} and {theirs!r}, which data.columns renames to {ours!r}; "
                f"data.ignore_keys: [{ours}] leaves out the former",
            )
        if ours not in renamed and ours not in MAY_BE_ABSENT:
            raise BadRow("missing key", f"key {theirs!r} (data.columns) is missing")
    return {**row, **renamed}


def load_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        BadRow: an object has a key twice, or a string a NUL byte or half of a surrogate pair.
        ValueError, RecursionError: the text cannot be parsed.
    """
    value = json.loads(text, object_pairs_hook=_object)
    if "\\u" in text:
        _check_escapes(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        doubled = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise BadRow("doubled key", f"an object has key {doubled!r} twice")
    return found


def _check_escapes(value: Any) -> None:
    """Raise BadRow for characters that JSON can escape but text cannot contain."""
    for text in strings_in(value):
        if "\0" in text:
            raise BadRow("NUL byte", "a string has a NUL byte")
        if half := re.search("[\ud800-\udfff]", text):
            escape = half[0].encode("unicode_escape").decode()
            raise BadRow(
                "not text",
                f"{escape} in {text[: half.start()][-20:]!r}... is half of a surrogate pair; "
                "the program that wrote the file split a character",
            )


def json_type(value: Any) -> str:
    """The JSON name of the type of a value."""
    return JSON_TYPES[type(value)]


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a value, at any depth; keys do not count."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_in(inner)


def detect_format(row: dict[str, Any], renamed: bool = False) -> str:
    """The first format whose required keys the row has; a null counts as missing.

    Args:
        renamed: whether data.columns renamed keys, for the message.

    Raises:
        BadRow: the row fits no format, or is a single message of a tree.
    """
    if row.get("message_tree_id") is not None or {"message_id", "parent_id", "role"} <= row.keys():
        raise BadRow(
            "no row format",
            "it is part of a tree of messages (OASST's export), not a conversation; write each "
            "path from a root to a leaf as a row with `messages`",
        )
    for name, keys in FORMAT_KEYS.items():
        if name == "conversational" and not isinstance(row.get("prompt"), list):
            continue
        if all(row.get(key) is not None for key in keys):
            return name
    raise BadRow(
        "no row format",
        f"keys {sorted(row)} fit no row format ("
        + "; ".join(map(describe_format, FORMAT_KEYS))
        + (") though data.columns has renamed some" if renamed else "); data.columns renames keys"),
    )


def describe_format(name: str) -> str:
    """Name and required keys of a format, for messages."""
    lists = " as lists" if name == "conversational" else ""
    return f"{name}: {' + '.join(FORMAT_KEYS[name])}{lists}"
