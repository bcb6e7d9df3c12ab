"""Files and folders that are written whole or not at all, and why a folder cannot be used."""

import os
import pwd
import stat
import uuid
from pathlib import Path

from zerotrain.runtime.errors import UserError, describe

MAX_BYTES = 1_000_000  # of a config file; the recipes have 2,000


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


def explain(error: OSError, key: str, folder: Path) -> str:
    """One line: why `folder`, given by the config key `key`, cannot be used, and what to do.

    Without permission it names the file in the way and its owner: a folder that two users share
    has the files of both.
    """
    if not isinstance(error, PermissionError):
        fix = f"make room there, or set {key} to a folder on another disk"
        return f"{key}: cannot write {folder}: {describe(error)}; {fix}"
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


def read_text(file: str, key: str = "") -> str:
    """The text of a small file, such as a config.

    Args:
        key: the setting that names the file, for messages.

    Raises:
        UserError: it cannot be read, is not a regular file of UTF-8, or has over a million bytes.
    """
    try:
        if Path(file).exists() and not Path(file).is_file():
            raise UserError(f"{key}cannot read {file}: it is not a file")
        with Path(file).open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{key}cannot read {file}: {describe(error)}") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{file}: has over {MAX_BYTES:,} bytes, so it is not a config")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text (byte {error.start})") from error
