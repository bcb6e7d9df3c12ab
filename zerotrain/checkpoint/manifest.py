"""What a checkpoint consists of, and whether all of it is there.

Only files that the manifest names are read, and only regular ones that lie in the checkpoint's own
folder: a symbolic link in an untrusted checkpoint could lead to any file of the reader.
"""

import hashlib
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from pydantic import TypeAdapter

from zerotrain.checkpoint.run_folder import COMPLETE, MANIFEST
from zerotrain.runtime.errors import UserError, describe

T = TypeVar("T")

MAX_JSON_BYTES = 1 << 26  # a manifest of 100,000 ranks has 10 MB; read whole into memory


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of one file."""

    bytes: int
    xxh3_64: str
    """The checksum of its content, in hexadecimal."""


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    save_id: str
    """Identifies the save: on nodes with disks of their own, the parts of one checkpoint share it.
    """
    files: dict[str, FileEntry]
    """The files of all ranks, by their path in the checkpoint."""


def stat_inside(folder: Path, name: str, max_bytes: float = math.inf) -> os.stat_result:
    """The status of a regular file of a folder that may be untrusted.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else, such as a symbolic link, or in a folder that is one; or it
            is larger.
    """
    folder = folder.resolve()
    path = folder / name
    status = path.lstat()
    # lstat and resolve: neither the file nor a folder on its way may be a link; "../x" leaves it
    if not stat.S_ISREG(status.st_mode) or path.resolve() != path or folder not in path.parents:
        raise ValueError(f"{name} is not a regular file inside its folder")
    if status.st_size > max_bytes:
        raise ValueError(f"{name} has more than {max_bytes:,} bytes")
    return status


def read_json(checkpoint: Path, name: str, kind: type[T]) -> T:
    """A JSON file of a checkpoint as an object of `kind`, a dataclass of dataclasses.

    Raises:
        UserError: it cannot be read, or has another shape.
    """
    try:
        stat_inside(checkpoint, name, MAX_JSON_BYTES)
        # strict: a string of digits is no number, as no save writes one
        return TypeAdapter(kind).validate_json((checkpoint / name).read_bytes(), strict=True)
    except (OSError, ValueError) as error:  # pydantic's is a ValueError, too
        raise UserError(
            f"{checkpoint / name} cannot be read ({describe(error)[:200]}); use another checkpoint"
        ) from error


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of `checkpoint`; its files are not checked.

    Raises:
        UserError: it cannot be read, or has another shape.
    """
    return read_json(checkpoint, MANIFEST, Manifest)


def measure(path: Path) -> dict[str, Any]:
    """The FileEntry of a file that has been written, as JSON."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_64)
        return {"bytes": file.tell(), "xxh3_64": digest.hexdigest()}


def find_problems(
    checkpoint: Path, files: dict[str, FileEntry], checksums: bool = False
) -> dict[str, str]:
    """What is wrong with each file that is missing or is not the manifest's, by its size or, with
    `checksums`, by its content.
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
    """The save that a checkpoint is of, and what is wrong with each of its files that is missing or
    has another size. No checksums are computed.
    """
    # written last: a copy that was interrupted may have a manifest and lack files
    if not (checkpoint / COMPLETE).is_file():
        return None, {COMPLETE: "is missing: it is no checkpoint, or its save was interrupted"}
    try:
        manifest = read_manifest(checkpoint)
    except UserError as error:
        return None, {MANIFEST: str(error)}
    return manifest.save_id, find_problems(checkpoint, manifest.files)
