"""Files and folders that are written whole or not at all, and why a folder cannot be used."""

import os
import pwd
import shutil
import stat
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
    renamed; after an error it is removed. Its files get the usual mode, from the umask: safetensors
    creates them for the owner alone, and a server may run as another user.

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
        mode = stat.S_IMODE(draft.stat().st_mode) & 0o666
        for file in filter(Path.is_file, draft.rglob("*")):
            file.chmod(mode)
        sync_tree(draft)
        os.replace(draft, target)  # an empty folder is replaced too
        sync_folder(target.parent)
    except OSError as error:
        raise UserError(f"cannot write {out}: {describe(error)}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def explain(error: OSError, key: str, folder: Path) -> str:
    """One line: why `folder`, given by the config key `key`, cannot be used, and what to do.

    Without permission it names the file in the way and its owner: a folder that two users share
    has the files of both.
    """
    if not isinstance(error, PermissionError):
        cure = f"make room there, or set {key} to a folder on another disk"
        return f"{key}: cannot write {folder}: {describe(error)}; {cure}"
    path = Path(error.filename or folder)
    while not _is_seen(path) and path != path.parent:
        path = path.parent
    about = path.stat()
    try:
        owner = pwd.getpwuid(about.st_uid).pw_name
    except KeyError:
        owner = f"user {about.st_uid}"
    return (
        f"{key}: {path} belongs to {owner} and has mode {stat.S_IMODE(about.st_mode):04o}, so this "
        f"process may not use it; let {owner} run `chmod -R g+rwX {folder}` (with a common group, "
        f"and umask 002 from then on), or set {key} to a folder of your own"
    )


def _is_seen(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False
