"""Find the rows of a source, in files or on the hub, and parse each into a JSON object.

zerotrain/rows/readers.py reads the files. zerotrain/rows/messages.py converts the row formats.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from zerotrain.config.schema import COMMIT
from zerotrain.rows.readers import (
    COMPRESSIONS,
    EXTRA_CELLS,
    MAX_ROW_CHARACTERS,
    READERS,
    BadRow,
    JsonObject,
    parse_json,
    rows_of,
)
from zerotrain.runtime.errors import UserError, describe, first_of, similar
from zerotrain.runtime.files import expanded, files_of, read_text

if TYPE_CHECKING:
    from datasets import Dataset

    from zerotrain.config.schema import Source

MESSAGE_COLUMNS = ("role", "content")  # keys of messages, not of rows, that columns can rename
OPTIONAL_COLUMNS = ("input", "system", "tools")  # a row may lack these
# Files of datasets and LLaMA-Factory that describe a folder, and caches of map() and filter().
NO_ROWS = re.compile(r"dataset_infos?\.json|state\.json|cache-.*\.arrow")
SAVED = re.compile('"filename": "(.+?)"')
# The format and compression in the extensions of a file's name.
FORMAT = re.compile(f"({'|'.join(READERS)})+({'|'.join(COMPRESSIONS)})?$".replace(".", r"\."))
# The number of a part of a data set, and how many parts it has.
PART = re.compile(f"(.*?)([0-9]+)[-_]of[-_]([0-9]+)(?![0-9]).*?{FORMAT.pattern}")
# A word that names a split, or a commit in the hub's cache. In evaluation_code.jsonl the word names
# a topic. The group is two letters, the same for train and training, for val and validation.
SPLIT = re.compile(
    r"(?<![a-z])(?=(?:train(?:ing)?|val|valid|validation|dev|devtest|test|eval|h[eo]ld[-_ ]?out"
    r"|(?:testing|evaluation)(?![-_ ]+[a-z]))(?:s|set|data|[ab])?(?![a-z])|[0-9a-f]{40}/)(..)"
)
# Keys whose value names a split: the first in any words, the second in a single word.
SPLIT_KEYS = re.compile("(.*[_ -])?split"), re.compile("(.*[_ -])?(sub)?set|partition|fold|phase")

# Patterns of texts that are not JSON, with the fix for each. The last one matches every text.
NOT_JSON = {
    r"\[?\{'": "it is Python's text: `python3 -c 'import ast, fileinput, json; [print(json.dumps("
    "ast.literal_eval(line))) for line in fileinput.input() if line.strip()]' OLD > NEW`",
    r"\[": "each row must be whole, on a line of its own, as `jq -c '.[]' OLD > NEW` writes it",
    r".*(\}\s*,|,\s*[\]}]+)$": "remove the comma at its end: `sed "
    r"'s/,[[:space:]]*\([]}]*\)[[:space:]]*$/\1/' OLD > NEW`",
    r"\{(.*,)?$|.*\}\s*\{": "each row must be whole, on a line of its own, as `jq -c . OLD > NEW` "
    "writes it",
    "": "a row is a JSON object on one line",
}


class RawRow(NamedTuple):
    """A row of a source, not parsed yet."""

    file: str
    place: int
    """Line in the file, from 1. In files without lines it is the number of the row."""
    text: str
    """JSON text, as in `readers.Row`."""


# --------------------------------------------------------------------------------------------------
# Files and hub datasets


def local_files(path: str) -> list[str]:
    """Return the files with rows that a file's path, a folder or a glob names, sorted.

    Subfolders are included. Hidden files, descriptions of datasets, caches of `datasets` and files
    of other kinds are left out.

    Raises:
        UserError: no file is found, a link is broken, or the files belong to several splits.
    """
    candidates = files_of(path)
    is_file = Path(expanded(path)).is_file()
    rows = [file for file in candidates if FORMAT.search(file) and _has_rows(Path(file), is_file)]
    if not rows:
        what = "it has no file of rows" if candidates else f"no such file{_near(path)}"
        raise UserError(
            f"{path}: {what}; rows are read from {', '.join(READERS)}, also compressed as "
            f"{', '.join(COMPRESSIONS)}; save other tables, such as .xlsx, as CSV, and plain text "
            "with jq -Rc '{text: .}' OLD > NEW.jsonl"
        )
    if not is_file:
        _require_all_parts(path, rows)
    # Links may lead to a file twice: keep the shortest path.
    paths = {os.path.realpath(file): file for file in sorted(rows, key=len, reverse=True)}
    files = sorted(paths.values())
    common = os.path.commonpath(files)
    splits = {split_of(file.removeprefix(common)): file for file in files}
    # Read together, a test split would be trained on.
    if len(splits) > 1 or "dataset_dict.json" in {Path(f).name for f in candidates}:
        named = first_of([*splits.values()])
        raise UserError(f"{path}: it has several splits ({named}); give the files of one split")
    return files


def _near(path: str) -> str:
    """Return what a path that does not exist may mean, for a message; "" if nothing is near."""
    if unset := re.search(r"\$\{?\w+\}?", expanded(path)):
        return f": the variable {unset[0]} is not set"
    folder = Path(expanded(path)).parent
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return similar(Path(path).name, names)


def _require_all_parts(path: str, files: list[str]) -> None:
    """Refuse files such as train-00000-of-00002.parquet if others of that number are missing.

    Raises:
        UserError: some are missing in the folder of one.
    """
    parts = {}  # (folder, text before the number, number of parts) -> the numbers that are there
    for folder in {Path(file).parent for file in files}:
        for found in filter(None, (PART.fullmatch(file.name) for file in folder.iterdir())):
            parts.setdefault((folder, found[1], int(found[3])), set()).add(found[2])
    for file in map(Path, files):
        if found := PART.fullmatch(file.name):
            present = parts[file.parent, found[1], int(found[3])]
            if len(present) < int(found[3]):
                raise UserError(
                    f"{path}: it has {len(present):,} of the {int(found[3]):,} parts of "
                    f"{file.parent}/{found[1]}*-of-{found[3]}*; add the others or, to use only "
                    "these, give each file as a source of its own"
                )


def unread_files(path: str) -> str:
    """Say which files of a folder or glob are not read as rows; "" if there are none. Descriptions
    and caches of `datasets` are left out.
    """
    read = {*map(os.path.realpath, local_files(path))}
    folder = Path(expanded(path))
    # The hub's client keeps what it has of an interrupted download in a hidden folder.
    pieces = map(str, folder.rglob("*.incomplete")) if folder.is_dir() else ()
    others = sorted(
        Path(file).name
        for file in {*files_of(path), *pieces}
        if not Path(file).is_dir()
        and os.path.realpath(file) not in read
        and not NO_ROWS.fullmatch(Path(file).name)
    )
    return f"{len(others):,} of the files of {path}: {first_of(others)}" if others else ""


def _has_rows(file: Path, is_given: bool) -> bool:
    """Return whether a file belongs to the dataset in its folder.

    Args:
        is_given: True if the source names the file itself, so that others may be missing.

    Raises:
        UserError: it is a broken link, or a file is missing from its saved dataset.
    """
    if not file.exists():
        raise UserError(f"{file}: broken link to {file.readlink()}")
    # save_to_disk lists its files in state.json; map() leaves others beside them.
    state = file.with_name("state.json")
    if file.suffix == ".arrow" and state.is_file():
        saved = [file.with_name(name) for name in SAVED.findall(read_text(str(state)))]
        missing = [name for name in saved if not name.exists()]
        if missing and not is_given:
            raise UserError(
                f"{missing[0]}: missing, but state.json names it; copy it as well or, to use only "
                "the others, give each file as a source of its own"
            )
        return file in saved
    # Opening a FIFO would wait for a writer.
    return file.is_file() and not NO_ROWS.fullmatch(file.name)


def split_of(name: str) -> str:
    """Return the first two letters of the split in a name; "tr", as of train, if it names none."""
    # A held-out split comes before train, as in train_dev.jsonl and test/train.jsonl.
    return min(SPLIT.findall(name.lower()), key="tr".__eq__, default="tr")


def check_split(row: JsonObject, source: "Source") -> None:
    """Reject a row that names a held-out split which is not its source's. The name may be in one of
    SPLIT_KEYS, also within an object such as `meta`.

    Raises:
        BadRow: the splits differ.
    """
    objects = [row, *(value for value in row.values() if isinstance(value, dict))]
    for key, value in chain(*map(dict.items, objects)):
        in_words, in_a_word = (pattern.fullmatch(key.lower()) for pattern in SPLIT_KEYS)
        names_split = in_words or (in_a_word and str(value).isalpha())
        if names_split and split_of(str(value)) not in ("tr", split_of(source.split)):
            raise BadRow(
                "other split",
                f"its {key} is {value}, but its source's split is {source.split}; write such rows "
                f"to a file of their own; data.eval_sources: [{{path: FILE, split: {value}}}] "
                "evaluates on them",
            )


def require_distinct(sets: dict[str, list["Source"]]) -> None:
    """Refuse rows that are given twice, in a set or in the first, the training data, and another.

    Args:
        sets: the sources of each set, by its key in the config.

    Raises:
        UserError: two sources share a file or hub dataset, or two files differ only in their
            format, such as a.jsonl and a.jsonl.gz.
    """
    trained = {}
    for number, (key, sources) in enumerate(sets.items()):
        seen = dict(trained) if number else trained
        for source in sources:
            for file in local_files(source.path) if source.path else [name_of(source)]:
                rows = FORMAT.sub("", os.path.realpath(file))
                if rows in seen:
                    raise UserError(
                        f"{key}: by its name {file} has the same rows as {seen[rows]}; give them "
                        "once (a source's repeat trains on them more often, data.eval_fraction "
                        "holds some out)"
                    )
                seen[rows] = f"{file} in {key}"


def is_cache(source: "Source") -> bool:
    """Whether a source is a token cache, which is used as it is."""
    return source.path is not None and Path(source.path, "examples.arrow").is_file()


def name_of(source: "Source") -> str:
    """Return the name of a source for tables and messages."""
    if source.path is not None:
        return source.path
    return ":".join(filter(None, [source.hub, source.subset, source.split]))


def fingerprints(sources: Iterable["Source"]) -> list[dict[str, str]]:
    """Return each file of each source with a hash of its content; for a hub data set, its name and
    the fingerprint of `datasets`. They change whenever the rows have changed.

    Raises:
        UserError: a file cannot be read, or two have the same content.
    """
    found = []
    seen = {}
    for source in sources:
        found.append({})
        if source.hub is not None:
            found[-1][name_of(source)] = _from_hub(source)._fingerprint
            continue
        for file in local_files(source.path):
            try:
                with Path(file).open("rb") as stream:
                    digest = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
                    is_empty = not stream.tell()
            except OSError as error:
                raise UserError(f"{name_of(source)}: cannot be read: {describe(error)}") from error
            found[-1][os.path.realpath(file)] = digest
            if seen.setdefault(digest, file) != file and not is_empty:
                raise UserError(
                    f"{file}: has the same content as {seen[digest]}; give it once (a source's "
                    "repeat trains on rows more often)"
                )
    return found


def _from_hub(source: "Source") -> "Dataset":
    import datasets

    from zerotrain.model.hub import hub_error  # Files need no hub. Its import takes a second.

    try:
        found = datasets.load_dataset(
            source.hub, source.subset, split=source.split, revision=source.revision
        )
    except Exception as error:  # the hub, the network and file formats each raise their own
        raise hub_error()(
            f"cannot load {name_of(source)} from the hub: {describe(error)}; without a network, "
            "give a file or folder as its path"
        ) from error
    commit = _commit_of(found)
    if commit and COMMIT.fullmatch(source.revision or "") and commit != source.revision:
        # Without a network, `datasets` loads the newest commit in its cache.
        raise UserError(
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
    """Return the commit in a dataset's folder, OWNER___NAME/SUBSET/VERSION/COMMIT."""
    folders = (Path(file["filename"]).parent.name for file in dataset.cache_files)
    return next(filter(COMMIT.fullmatch, folders), None)


def read_rows(source: "Source") -> Iterator[RawRow]:
    """Yield the rows of a source in the order of its files. They are parsed later, in parallel.

    Raises:
        UserError: a file cannot be read in the format of its extension.
    """
    if source.hub is not None:
        parts = [(name_of(source), rows_of(_from_hub(source).data.to_batches()))]
    else:
        parts = [(file, READERS[FORMAT.search(file)[1]](file)) for file in local_files(source.path)]
    for name, rows in parts:
        try:
            for row in rows:
                yield RawRow(name, *row)
        except Exception as error:  # each kind of file raises its own type
            raise UserError(f"{name}: cannot be read: {describe(error)}") from error


# --------------------------------------------------------------------------------------------------
# Parsing


def parse_row(raw: RawRow, columns: dict[str, str], ignore_keys: Iterable[str] = ()) -> JsonObject:
    """Return a row as an object, without `ignore_keys` and with its keys renamed.

    Args:
        columns: {our key: key in the file}.

    Raises:
        BadRow: the row is too long, not UTF-8 or not a JSON object; it lacks a renamed key, or has
            it under both names.
    """
    if len(raw.text) > MAX_ROW_CHARACTERS:
        raise BadRow("over the limit of a row", f"it has over {MAX_ROW_CHARACTERS:,} characters")
    try:
        row = parse_json(raw.text)
    except (ValueError, RecursionError) as error:
        fix = next(fix for pattern, fix in NOT_JSON.items() if re.match(pattern, raw.text))
        raise BadRow("not JSON", f"not JSON ({error}); {fix}") from error
    if not isinstance(row, dict):
        raise BadRow("not an object", "a row must be a JSON object")
    if EXTRA_CELLS in row:
        raise BadRow(
            "more cells than the header",
            "it has more cells than the first line of the file; put each cell with a "
            "comma or line break in quotes, or name all columns in the first line",
        )
    # ignore_keys are spelled as in the file. They go first, so that another key can take the name.
    for key in ignore_keys:
        row.pop(key, None)
    keys = ", ".join(sorted(row))
    for known, given in columns.items():
        if known in MESSAGE_COLUMNS or (given not in row and known in {*row, *OPTIONAL_COLUMNS}):
            continue
        if given not in row:
            raise BadRow(
                "missing key",
                f"it has no value for {given!r}, which the source's columns name for {known}; it "
                f"has {keys}",
            )
        if known in row:
            raise BadRow(
                "doubled key",
                f"it has both {known!r} and {given!r}, which columns rename to it; "
                f"data.ignore_keys: [{known}] ignores the former",
            )
        row[known] = row.pop(given)
    return row
