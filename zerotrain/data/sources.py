"""Where rows come from: files and the hub; and what a row is once it is parsed, a JSON object.

zerotrain/data/readers.py reads the files, zerotrain/data/messages.py converts the row formats.
"""

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zerotrain.data.readers import (
    COMPRESSIONS,
    MAX_ROW_CHARACTERS,
    READERS,
    reader_of,
    rows_of,
)
from zerotrain.runtime.errors import UserError, describe

if TYPE_CHECKING:
    from datasets import Dataset

    from zerotrain.config.schema import Source

# Row format -> its required keys, tried in this order when a source's format is auto. With a prompt
# that is a list, prompt + completion is conversational.
FORMAT_KEYS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "conversational": ("prompt", "completion"),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
CHAT_FORMATS = ("messages", "sharegpt", "conversational")
MESSAGE_COLUMNS = ("role", "content")  # keys of each message that data.columns can rename
# Files of datasets and LLaMA-Factory that describe a folder and contain no rows.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json")
COMMIT = re.compile("[0-9a-f]{40}")


class RawRow(NamedTuple):
    """One row as it was read."""

    file: str
    place: int
    """Line of the file, from 1; for files without lines, the number of the row."""
    text: str
    """JSON, unparsed. Bytes that are not UTF-8 are surrogates; a row that is too long is cut, but
    still too long.
    """


class BadRow(ValueError):
    """A row that cannot be used. `reason` is one of a few short texts, by which skipped rows are
    counted; the message has the details.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


# --------------------------------------------------------------------------------------------------
# Files and hub data sets


def local_files(path: str) -> list[str]:
    """The files of a path, a folder (with subfolders) or a glob, sorted, without hidden files,
    descriptions of data sets and files of other kinds.

    Raises:
        UserError: there are none, or a folder that has several splits.
    """
    patterns = (path, glob.escape(path), f"{glob.escape(path)}/**/*")
    found = [f for pattern in patterns for f in glob.glob(pattern, recursive=True)]  # noqa: PTH207
    names = {file: Path(file).name for file in found}
    if "dataset_dict.json" in names.values():
        raise UserError(f"{path}: the folder has several splits; use that of one of them")
    rows = [
        file
        for file, name in names.items()
        if reader_of(name) and name not in DESCRIPTIONS and Path(file).is_file()
    ]
    if not found:
        raise UserError(f"{path}: no such file")
    if not rows:
        what = "unknown file extension" if Path(path).is_file() else "it has no file of rows"
        raise UserError(
            f"{path}: {what}; rows are read from {', '.join(READERS)}, also compressed as "
            f"{', '.join(COMPRESSIONS)}"
        )
    # the shortest path to each file: links may lead to one twice
    paths = {os.path.realpath(file): file for file in sorted(rows, key=len, reverse=True)}
    return sorted(paths.values())


def name_of(source: "Source") -> str:
    """Name of a source in tables and messages."""
    if source.path is not None:
        return source.path
    return ":".join(filter(None, [source.hub, source.subset, source.split]))


def fingerprint(source: "Source") -> list[Any]:
    """Changes whenever the source's rows may have changed: (path, bytes, modification time in ns)
    of each file; for a hub data set, the fingerprint of `datasets`.
    """
    if source.hub is not None:
        return [name_of(source), _from_hub(source)._fingerprint]
    files = [Path(file) for file in local_files(source.path)]
    return [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def _from_hub(source: "Source") -> "Dataset":
    import datasets

    try:
        found = datasets.load_dataset(
            source.hub, source.subset, split=source.split, revision=source.revision
        )
    except Exception as error:  # hub, network and file formats each raise their own
        raise UserError(
            f"cannot load {name_of(source)} from the hub: {describe(error)}; without network, give "
            "a file or folder as its path"
        ) from error
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
    folders = (Path(file["filename"]).parent.name for file in dataset.cache_files)
    return next(filter(COMMIT.fullmatch, folders), None)


def read_rows(source: "Source") -> Iterator[RawRow]:
    """Yield rows in the order of the files. Parsing is left to the processes that tokenize.

    Raises:
        UserError: a file cannot be read in the format of its extension.
    """
    if source.hub is not None:
        parts = [(name_of(source), rows_of(_from_hub(source).data.to_batches()))]
    else:
        parts = [(file, reader_of(file)(file)) for file in local_files(source.path)]
    for name, rows in parts:
        try:
            for place, text in rows:
                yield RawRow(name, place, text)
        except Exception as error:  # each kind of file raises its own
            raise UserError(f"{name}: cannot be read: {describe(error)}") from error


# --------------------------------------------------------------------------------------------------
# Rows


def parse_row(
    raw: RawRow, columns: dict[str, str], ignore_keys: Iterable[str] = ()
) -> dict[str, Any]:
    """Parse a row, remove `ignore_keys`, and rename keys by `columns` ({our key: file's key}).

    Raises:
        BadRow: it is too long, not UTF-8 or not a JSON object, or has a key under both names.
    """
    if len(raw.text) > MAX_ROW_CHARACTERS:
        raise BadRow("over the limit of a row", f"it has over {MAX_ROW_CHARACTERS:,} characters")
    try:
        row = json.loads(raw.text)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            "not UTF-8",
            "not UTF-8, or a character was split by \\u escapes; `iconv -f LATIN1 -t UTF-8 OLD > "
            "NEW` converts a Latin-1 file",
        ) from error
    except (ValueError, RecursionError) as error:
        cure = "a row is a JSON object on one line"
        if split := {"{": ".", "[": "'.[]'"}.get(raw.text[:1]):
            cure = f"each row must be complete on one line, as `jq -c {split} OLD > NEW` writes it"
        raise BadRow("not JSON", f"not JSON ({error}); {cure}") from error
    if not isinstance(row, dict):
        raise BadRow("not an object", f"a row must be a JSON object, not {json_type(row)}")
    for key in ignore_keys:
        row.pop(key, None)
    for known, given in columns.items():
        if given not in row or known in MESSAGE_COLUMNS:
            continue
        if known in row:
            raise BadRow(
                "doubled key",
                f"it has both {known!r} and {given!r} (data.columns); data.ignore_keys: [{known}] "
                "leaves out the former",
            )
        row[known] = row.pop(given)
    return row


def json_type(value: Any) -> str:
    """The name of the type of a value of JSON."""
    return "null" if value is None else type(value).__name__


def detect_format(row: dict[str, Any]) -> str:
    """The first format whose required keys the row has; a null counts as missing.

    Raises:
        BadRow: the row fits no format.
    """
    for name, keys in FORMAT_KEYS.items():
        if name == "conversational" and not isinstance(row.get("prompt"), list):
            continue
        if all(row.get(key) is not None for key in keys):
            return name
    formats = "; ".join(dict.fromkeys(" + ".join(keys) for keys in FORMAT_KEYS.values()))
    cure = (
        "data.columns: {our key: key in the file} renames keys, which in CSV are the first line of "
        "the file"
    )
    if "chosen" in row:
        cure = (
            "of a pair, one answer can be trained on: jq -c '{prompt, completion: .chosen}' "
            "OLD.jsonl > NEW.jsonl, or {messages: .chosen} where it is a list"
        )
    raise BadRow(
        "no row format",
        f"a row with the keys {', '.join(sorted(row))} is no row format ({formats}); {cure}",
    )
