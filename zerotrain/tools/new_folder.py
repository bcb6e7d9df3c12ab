"""Folders that tools write whole or not at all."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.files import sync_folder, sync_tree, temporary_name

MARK = ".written-by-a-tool"


def own_folder(path: Path) -> Path:
    """Create a folder that a tool fills, empties and fills again, with MARK in it; return it.

    Raises:
        UserError: the folder has files but no mark, or cannot be written.
    """
    if path.exists() and not (path / MARK).exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} has files that this tool did not write; choose a new folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / MARK).touch()
    except OSError as error:
        raise UserError(f"cannot write {path}: {describe(error)}") from error
    return path


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a draft of the folder `out`. After the `with` block it is synced to disk and renamed;
    after an error it is removed.

    Its files get the usual mode, from the umask. safetensors would let only the owner read them,
    but a server may run as a different user.

    Raises:
        UserError: `out` is not empty, holds the current folder, or cannot be written.
    """
    target = out.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{out} is not empty, or not a folder; choose a new one")
    if Path.cwd().is_relative_to(target):
        raise UserError(f"{out} is the current folder; choose a new one")
    draft = temporary_name(target)
    try:
        draft.mkdir(parents=True)
        yield draft
        mode = stat.S_IMODE(draft.stat().st_mode) & 0o666
        for file in filter(Path.is_file, draft.rglob("*")):
            file.chmod(mode)
        sync_tree(draft)
        os.replace(draft, target)  # This also replaces an empty folder.
        sync_folder(target.parent)
    except (OSError, SafetensorError) as error:  # A full disk raises either.
        raise UserError(f"cannot write {out}: {describe(error)}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
