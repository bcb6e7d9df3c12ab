"""Files and folders that are written whole or not at all."""

import os
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path

from zerotrain.runtime.errors import UserError, describe

MAX_TEXT_BYTES = 1 << 20


def temporary_name(path: Path) -> Path:
    """The name of a file or folder beside `path` that is written first and then renamed to `path`;
    nobody else uses it.
    """
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def sync_folder(path: Path) -> None:
    """Sync to disk the names of a folder's files, or a file."""
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
    """Write a text file, from a text or its parts, in one step: readers see the old text or the new
    one. A link in its place is replaced, and the file that it points to remains as it is.

    Raises:
        OSError: it cannot be written; the old file remains.
    """
    draft = temporary_name(path)  # beside it: a rename within one disk is atomic
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_text(file: str, key: str = "") -> str:
    """The text of a file, such as a config, which may be a stranger's.

    Args:
        key: the setting that names the file, for messages.

    Raises:
        UserError: it cannot be read, is no regular file, too large or not UTF-8.
    """
    try:
        status = Path(file).stat()
        if not stat.S_ISREG(status.st_mode):  # a FIFO would block
            raise ValueError("it is no regular file")
        if status.st_size > MAX_TEXT_BYTES:
            raise ValueError(f"it has more than {MAX_TEXT_BYTES:,} bytes")
        # no further than its size: a file of /proc has size 0 and may never end
        with Path(file).open(encoding="utf-8-sig") as text:
            return text.read(status.st_size)
    except (OSError, ValueError) as error:
        raise UserError(f"{key}cannot read {file}: {describe(error)}") from error
