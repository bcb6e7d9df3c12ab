"""The list of a checkpoint's files, and a check that all of them are there.

Only files that the manifest names are read, and only regular files inside the checkpoint's own
folder. A symbolic link in an untrusted checkpoint could lead to any file of the reader.
"""

import hashlib
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import AfterValidator, TypeAdapter

from zerotrain.checkpoint.run_folder import COMPLETE, MANIFEST
from zerotrain.runtime.errors import UserError, describe

T = TypeVar("T")

# JSON is read into memory as a whole. The manifest of 100,000 ranks has 10 MB.
MAX_JSON_BYTES = 1 << 26


def path_inside(name: str) -> str:
    """Return the path of a file in a folder. Raises ValueError: it could lead out of the folder."""
    if name != os.path.normpath(name) or name.startswith((".", "/")):
        raise ValueError(f"{name!r} is not a path inside the checkpoint")
    return name


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of one file."""

    bytes: int
    xxh3_64: str
    """Checksum of the content, in hexadecimal."""


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    save_id: str
    """Id of the save, the same on all nodes, also where each has a disk of its own."""
    files: dict[Annotated[str, AfterValidator(path_inside)], FileEntry]
    """All files of all ranks, by their path in the checkpoint."""


def stat_inside(folder: Path, name: str, max_bytes: float = math.inf) -> os.stat_result:
    """Return the status of a regular file in a folder that may be untrusted.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, or is reached by a symbolic link, or is larger than
            `max_bytes`.
    """
    folder = folder.resolve()
    path = folder / name
    status = path.lstat()
    # Neither the file (lstat) nor a folder on its way (resolve) may be a link. "../x" is outside.
    if not stat.S_ISREG(status.st_mode) or path.resolve() != path or folder not in path.parents:
        raise ValueError(f"{name} is not a regular file inside its folder")
    if status.st_size > max_bytes:
        raise ValueError(f"{name} has more than {max_bytes:,} bytes")
    return status


def read_json(checkpoint: Path, name: str, kind: type[T]) -> T:
    """Return a JSON file of a checkpoint as an object of `kind`, a dataclass of dataclasses.

    Raises:
        UserError: it cannot be read, or does not fit `kind`.
    """
    try:
        stat_inside(checkpoint, name, MAX_JSON_BYTES)
        # strict: a string of digits is not a number
        return TypeAdapter(kind).validate_json((checkpoint / name).read_bytes(), strict=True)
    except (OSError, ValueError) as error:  # pydantic raises a ValueError
        raise UserError(
            f"{checkpoint / name}: cannot be read: {describe(error)[:200]}; use another checkpoint"
            ", or the version of this code that wrote it"
        ) from error


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint, without checking the files.

    Raises:
        UserError: it cannot be read, or is not a manifest.
    """
    return read_json(checkpoint, MANIFEST, Manifest)


def measure(path: Path) -> dict[str, Any]:
    """Return the FileEntry of a file, as JSON."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_64)
        return {"bytes": file.tell(), "xxh3_64": digest.hexdigest()}


def find_problems(
    checkpoint: Path, files: dict[str, FileEntry], checksums: bool = False
) -> dict[str, str]:
    """Return the problem of each file that is missing or differs from its entry, by name.

    Args:
        checksums: compare the content too, not only the size.
    """
    problems = {}
    for name, entry in files.items():
        try:
            size = stat_inside(checkpoint, name).st_size
            if size != entry.bytes:
                problems[name] = f"has {size:,} bytes instead of {entry.bytes:,}"
            elif checksums and measure(checkpoint / name) != vars(entry):
                problems[name] = "is damaged: its checksum differs from the manifest's"
        except (OSError, ValueError) as error:
            problems[name] = f"cannot be read: {describe(error)}"
    return problems


def inspect(checkpoint: Path) -> tuple[str | None, dict[str, str]]:
    """Return the id of a checkpoint's save, and the problem of each file that is missing or has
    another size. No checksums are computed.
    """
    # An interrupted copy may have a manifest and lack files. COMPLETE is written last.
    try:
        if not (checkpoint / COMPLETE).is_file():
            return None, {COMPLETE: "is missing: not a checkpoint, or its save was interrupted"}
    except OSError as error:
        return None, {COMPLETE: f"cannot be read: {describe(error)}"}
    try:
        manifest = read_manifest(checkpoint)
    except UserError as error:
        return None, {MANIFEST: str(error)}
    return manifest.save_id, find_problems(checkpoint, manifest.files)
