"""The manifest of a checkpoint: which files it has, their sizes and checksums.

Only files that the manifest names are read, and only regular ones that lie in the checkpoint's own
folder: a symbolic link could lead to any file of whoever reads a checkpoint of somebody else.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from zerotrain.checkpoint.run_folder import MANIFEST

T = TypeVar("T")

MAX_JSON_BYTES = 1 << 26
MAX_NAME_BYTES = 255  # of a name of a file on Linux; ours have 60


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of one file."""

    bytes: Annotated[int, Field(ge=0)]
    xxh3_64: str
    """In hexadecimal."""


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    made_by: dict[str, Any]
    files: dict[str, FileEntry]
    """By path in the checkpoint."""

    @property
    def save_id(self) -> str | None:
        return self.made_by.get("save_id")


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of `checkpoint`; its files are not checked.

    Raises:
        OSError, ValueError: it cannot be read, has another shape, or names a file outside of
            `checkpoint`.
    """
    manifest = read_json(checkpoint, MANIFEST, Manifest)
    if not isinstance(manifest.save_id, str | None):
        raise ValueError("its save_id is not a string")
    for name in manifest.files:
        path = PurePosixPath(name)
        is_inside = not path.is_absolute() and ".." not in path.parts and str(path) == name
        if not is_inside or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"it names {name[:80]!r}, which is not a path in the checkpoint")
    return manifest


def file_problem(
    checkpoint: Path, name: str, entry: FileEntry, checksums: bool = False
) -> str | None:
    """What is wrong with one file of a manifest; None if nothing is."""
    try:
        size = stat_inside(checkpoint, name).st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:
        return f"{name}: {error}"
    if size != entry.bytes:
        return f"{name} has {size:,} bytes instead of {entry.bytes:,}"
    if checksums and checksum(checkpoint / name) != entry.xxh3_64:
        return f"{name} is damaged: its checksum differs from the manifest's"
    return None


def stat_inside(checkpoint: Path, name: str) -> os.stat_result:
    """The status of a regular file of a checkpoint.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else, such as a symbolic link, or in a folder that is one.
    """
    path = checkpoint.resolve() / name
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or path.resolve() != path:
        raise ValueError(f"{name} is not a regular file inside its folder")
    return status


def measure(path: Path) -> dict[str, Any]:
    """The entry of a file that has been written: {"bytes": ..., "xxh3_64": ...}."""
    return {"bytes": path.stat().st_size, "xxh3_64": checksum(path)}


def checksum(path: Path) -> str:
    """The 64-bit xxh3 of a file, in hexadecimal."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def read_json(checkpoint: Path, name: str, kind: type[T]) -> T:
    """A JSON file of a checkpoint as an object of `kind`, a dataclass of dataclasses.

    Raises:
        OSError, ValueError: it cannot be read, or has another shape; in one line.
    """
    if stat_inside(checkpoint, name).st_size > MAX_JSON_BYTES:
        raise ValueError(f"{name} has more than {MAX_JSON_BYTES:,} bytes")
    try:
        return TypeAdapter(kind).validate_json((checkpoint / name).read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise ValueError(f"{name}: {where}{first['msg']}") from None
