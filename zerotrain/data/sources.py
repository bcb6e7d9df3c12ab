"""Where rows come from: files and the hub; and what a row is once it is parsed, a JSON object.

zerotrain/data/readers.py reads the files, zerotrain/data/messages.py converts the row formats.
"""

import glob
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.data.readers import COMPRESSIONS, KINDS, RawRow, kind_of, read_file, rows_of
from zerotrain.runtime.errors import UserError, describe

if TYPE_CHECKING:
    from datasets import Dataset

    from zerotrain.config.schema import Source

# Row format -> its required and its optional keys, tried in this order when a source's format is
# auto. With a prompt that is a list, prompt + completion is conversational.
FORMAT_KEYS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "conversational": ("prompt", "completion"),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL_KEYS = {
    "messages": ("system", "tools"),
    "sharegpt": ("system", "tools"),
    "conversational": ("system", "tools"),
    "prompt_completion": ("system", "tools"),
    "instruction": ("input", "system", "tools"),
    "text": (),
}
CHAT_FORMATS = ("messages", "sharegpt", "conversational")
MESSAGE_COLUMNS = ("role", "content")  # keys of each message that data.columns can rename
# Files of datasets and LLaMA-Factory that describe a folder and contain no rows.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
JSON_TYPES = {
    dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number",
    float: "a number", type(None): "null",
}  # fmt: skip
ROWS_AT_ONCE = 1000  # of a hub data set
COMMIT = re.compile("[0-9a-f]{40}")


class BadRow(ValueError):
    """A row that cannot be used. `reason` is one of a few short texts, by which skipped rows are
    counted; the message has the details.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason, self.message = reason, message

    def __str__(self) -> str:
        return self.message


# --------------------------------------------------------------------------------------------------
# Files and hub data sets


def local_files(path: str) -> list[str]:
    """The files of a path, a folder (with subfolders) or a glob, sorted. A folder written by
    Dataset.save_to_disk counts as one file; hidden files and descriptions of data sets are skipped.

    Raises:
        UserError: there are no files, or one that cannot be read.
    """
    readable = f"{', '.join(KINDS)}; also with {', '.join(COMPRESSIONS)}"
    try:
        if Path(path).is_dir():
            files = sorted(_files_in(Path(path)))
            if not files:
                raise UserError(f"folder {path} has no file that can be read ({readable})")
            return files
        if Path(path).exists():
            files = [path]
        else:
            found = glob.glob(path, recursive=True)  # noqa: PTH207, takes absolute ones too
            files = sorted(f for f in found if Path(f).name not in DESCRIPTIONS)
            files = [f for f in files if not Path(f).is_dir()]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {describe(error)}") from error
    if not files:
        kind = "file matches" if glob.has_magic(path) else "such file or folder:"
        raise UserError(f"no {kind} {path}")
    for file in files:
        if not kind_of(file):
            raise UserError(f"{file}: unknown file extension (known: {readable})")
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
        elif kind_of(entry.name) and entry.name not in DESCRIPTIONS:
            yield str(entry)


def shared_files(given: list["Source"]) -> list[str]:
    """The files that belong to more than one of these sources."""
    counts: Counter[str] = Counter()
    for source in given:
        if source.path is not None:
            counts.update({str(Path(file).resolve()) for file in local_files(source.path)})
    return sorted(file for file, count in counts.items() if count > 1)


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
            parts = sorted(path.iterdir()) if path.is_dir() else [path]
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
        raise UserError(f"cannot load {name_of(source)} from the hub: {describe(error)}") from error
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


def read_rows(source: "Source") -> Iterator[tuple[str, RawRow]]:
    """Yield (file, row) in the order of the files. Parsing is left to the processes that tokenize.

    Raises:
        UserError: a file cannot be read in the format of its extension.
    """
    import pyarrow

    if source.hub is not None:
        batches = _from_hub(source).with_format("arrow").iter(batch_size=ROWS_AT_ONCE)
        parts = (part for table in batches for part in table.to_batches())
        yield from ((name_of(source), row) for row in rows_of(parts))
        return
    for file in local_files(source.path):
        try:
            for row in read_file(file):
                yield file, row
        except (
            OSError, EOFError, ValueError, OverflowError, RecursionError, pyarrow.ArrowException
        ) as error:  # fmt: skip
            raise UserError(f"{file}: cannot be read: {describe(error)}") from error


# --------------------------------------------------------------------------------------------------
# Rows


def parse_row(
    raw: RawRow, columns: dict[str, str], ignore_keys: Iterable[str] = ()
) -> dict[str, Any]:
    """Parse a row, remove `ignore_keys`, and rename keys by `columns` ({our key: file's key}).

    Raises:
        BadRow: reading it showed a problem, it is not a JSON object, it has a NUL byte or half of a
            surrogate pair, an object has a key twice, or a key to rename is missing.
    """
    if raw.problem:
        raise BadRow(raw.problem.split(" (")[0], raw.problem)
    if "\0" in raw.text:
        raise BadRow("NUL byte", "the row has a NUL byte")
    try:
        row = load_json(raw.text)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at column {error.colno}; each row must be complete on one line"
        raise BadRow("not JSON", f"not JSON ({why})") from error
    except RecursionError as error:
        raise BadRow("not JSON", "JSON that is nested too deeply") from error
    if not isinstance(row, dict):
        problem = f"a row must be a JSON object, not {json_type(row)}"
        if isinstance(row, list):
            problem += "; a file that is one list needs a name that ends in .json"
        raise BadRow("not an object", problem)
    for key in ignore_keys:
        row.pop(key, None)
    columns = {ours: key for ours, key in columns.items() if ours not in MESSAGE_COLUMNS}
    renamed = {ours: row.pop(theirs) for ours, theirs in columns.items() if theirs in row}
    for ours, theirs in columns.items():
        if ours in row:
            raise BadRow(
                "doubled key",
                f"it has both {ours!r} and {theirs!r}, which data.columns renames to {ours!r}; "
                f"data.ignore_keys: [{ours}] leaves out the former",
            )
        if ours not in renamed and not any(ours in keys for keys in OPTIONAL_KEYS.values()):
            raise BadRow("missing key", f"key {theirs!r} (data.columns) is missing")
    return {**row, **renamed}


def load_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        BadRow: an object has a key twice, or a string a NUL byte or half of a surrogate pair.
        json.JSONDecodeError, RecursionError: the text cannot be parsed.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except (BadRow, json.JSONDecodeError):
        raise
    except ValueError as error:  # a number of 5,000 digits
        raise BadRow("not JSON", f"JSON that cannot be parsed ({error})") from error
    if "\\u" in text:  # characters that JSON can escape but text cannot contain
        for string in strings_in(value):
            if "\0" in string:
                raise BadRow("NUL byte", "a string has a NUL byte")
            if half := re.search("[\ud800-\udfff]", string):
                before = string[: half.start()][-20:]
                raise BadRow(
                    "not text",
                    f"half of a surrogate pair follows {before!r}: the program that wrote the file "
                    "split a character",
                )
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        doubled = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise BadRow("doubled key", f"an object has key {doubled!r} twice")
    return found


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
    if {"chosen", "rejected"} <= row.keys():
        why = "two answers to compare, for another loss: write the chosen one alone as a row"
    elif "message_id" in row or "message_tree_id" in row:
        why = "one message of a tree: write each path from root to leaf as a row of `messages`"
    else:
        formats = "; ".join(dict.fromkeys(" + ".join(keys) for keys in FORMAT_KEYS.values()))
        why = f"no row format ({formats}); data.columns: {{our key: key in the file}} renames keys"
    raise BadRow("no row format", f"a row with the keys {', '.join(sorted(row))} is {why}")
