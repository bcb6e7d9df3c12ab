"""Write files and folders whole or not at all, and read text files of strangers."""

import glob
import json
import os
import stat
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from zerotrain.runtime.errors import UserError, describe

MAX_TEXT_BYTES = 1 << 20


def temporary_name(path: Path) -> Path:
    """Return a unique name beside `path`, for a draft that is renamed to `path` when complete."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def sync_folder(path: Path) -> None:
    """Sync to disk the list of files in a folder, or the content of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync all files and folders in `folder` to disk."""
    for path in (folder, *folder.rglob("*")):
        sync_folder(path)


def replace_text(path: Path, text: str | Iterable[str]) -> None:
    """Write a text, or its pieces, to a file atomically: readers see the old text or the new one.
    If `path` is a link, the link is replaced and its target remains.

    Raises:
        OSError: it cannot be written; the old file remains.
    """
    draft = temporary_name(path)
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def open_to_append(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file of a run folder to append bytes. If `path` is a link, the link is removed and its
    target remains: a copied run folder may be a stranger's.
    """
    if path.is_symlink():
        path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "ab", buffering)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to a file of JSON lines in a run folder."""
    with open_to_append(path) as file:
        file.write(json.dumps(record).encode() + b"\n")


def read_text(file: str, key: str = "") -> str:
    """Return the text of a file that may be a stranger's, such as a config.

    Args:
        key: the setting that names the file, as the start of messages.

    Raises:
        UserError: it cannot be read, is not a regular file, is too large or is not UTF-8.
    """
    try:
        status = Path(file).stat()
        if not stat.S_ISREG(status.st_mode):  # a FIFO would block
            raise ValueError("it is not a regular file")
        if status.st_size > MAX_TEXT_BYTES:
            raise ValueError(f"it has more than {MAX_TEXT_BYTES:,} bytes")
        # Read no further than its size: a file of /proc has size 0 and may never end.
        with Path(file).open(encoding="utf-8-sig") as text:
            return text.read(status.st_size)
    except (OSError, ValueError) as error:
        raise UserError(f"{key}cannot read {file}: {describe(error)}") from error


def expanded(path: str) -> str:
    """Return a path without ~ and variables."""
    return os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111


def files_of(path: str) -> list[str]:
    """Return all files of a path, a folder (with subfolders) or a glob, in any order. ~ and
    variables are expanded, hidden files are left out.
    """
    path = expanded(path)
    # As a glob, as a name that may contain brackets, and as a folder.
    patterns = (path, glob.escape(path), f"{glob.escape(path)}/**/*")
    return [f for pattern in patterns for f in glob.glob(pattern, recursive=True)]  # noqa: PTH207
