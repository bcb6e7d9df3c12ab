"""Rows from files. Everything after this file sees one row format: a JSON object with a known
set of keys.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.errors import UserError

# Row format -> the keys that make a row one of it, looked for in this order when data.format is
# auto.
FORMAT_KEYS = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}


def read_lines(files: list[str]) -> Iterator[dict[str, Any]]:
    """Yield `{"file", "line", "json"}` for each row, unparsed, in the order of the files; `line`
    counts from 1.

    Blank lines are no rows. Parsing is left to the tokenising processes, of which there are
    several.

    Raises:
        UserError: a file has no row, or is not UTF-8.
    """
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"no such file: {file}")
        rows = 0
        with Path(file).open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{file}:{number}: not UTF-8 (byte {error.start} of the line)"
                    ) from error
                if text:
                    rows += 1
                    yield {"file": file, "line": number, "json": text}
        if not rows:
            raise UserError(f"{file}: has no rows")


def parse_row(text: str, columns: dict[str, str]) -> dict[str, Any]:
    """One line of JSON as a row, its keys renamed by `columns` (`{our key: the file's key}`).

    Raises:
        ValueError: not a JSON object, or a renamed key is missing.
    """
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row is a JSON object, this is a {type(row).__name__}")
    for ours, theirs in columns.items():
        if theirs not in row:
            raise ValueError(f"key {theirs!r} (data.columns) is missing")
        row[ours] = row.pop(theirs)
    return row


def detect_format(row: dict[str, Any]) -> str:
    """The format whose keys the row has.

    Raises:
        ValueError: it has none of them.
    """
    for name, keys in FORMAT_KEYS.items():
        if all(key in row for key in keys):
            return name
    wanted = "; ".join(f"{name}: {' + '.join(keys)}" for name, keys in FORMAT_KEYS.items())
    raise ValueError(
        f"keys {sorted(row)} fit no row format ({wanted}); rename them with data.columns"
    )


def fingerprint(files: list[str]) -> list[tuple[str, int, int]]:
    """(path, bytes, modification time in ns) of each file: changes when its rows may have."""
    stats = [(str(Path(file).resolve()), Path(file).stat()) for file in files]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
