"""Files and folders that are written whole or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import UserError, describe


def draft_of(path: Path) -> Path:
    """A name beside `path` that nobody else uses, for what will be renamed to `path`."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def sync_folder(folder: Path) -> None:
    """Sync the names of a folder's files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync all files and folders in `folder` to disk."""
    for parent, _, files in os.walk(folder):
        for name in files:
            sync_folder(Path(parent, name))
        sync_folder(Path(parent))


def replace_text(path: Path, text: str) -> None:
    """Write a text file at once: readers see the old text or the new one. A link in its place is
    replaced, and the file that it points to remains as it is.

    Raises:
        OSError: it cannot be written; the old file remains.
    """
    draft = draft_of(path)
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A draft of the folder `out`, to be filled within `with`. It is synced to disk and then
    renamed; after an error it is removed.

    Raises:
        UserError: `out` is not empty, holds the current folder, or cannot be written.
    """
    target = out.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{out} is not empty, or not a folder; choose a new one")
    if Path.cwd().is_relative_to(target):
        raise UserError(f"{out} is the current folder; choose a new one")
    draft = draft_of(target)
    try:
        draft.mkdir(parents=True)
        yield draft
        sync_tree(draft)
        os.replace(draft, target)  # an empty folder is replaced too
        sync_folder(target.parent)
    except OSError as error:
        raise UserError(f"cannot write {out}: {describe(error)}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
