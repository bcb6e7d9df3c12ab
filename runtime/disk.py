"""Sync to disk, and explain why a folder cannot be used."""

import os
import pwd
import stat
from pathlib import Path

from runtime.errors import describe


def sync_folder(folder: Path) -> None:
    """Sync the names of a folder's files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync a folder, its files and its subfolders to disk."""
    for parent, _, files in os.walk(folder):
        for path in (*(Path(parent) / name for name in files), Path(parent)):
            sync_folder(path)  # a file is synced in the same way


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
