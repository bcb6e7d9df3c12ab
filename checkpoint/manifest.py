"""The manifest of a checkpoint: which files it has, their sizes and checksums."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import Field

from checkpoint.files import checksum, read_json
from checkpoint.run_folder import MANIFEST

MAX_NAME_BYTES = 255  # of a name of a file on Linux; ours have 60


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of one file."""

    bytes: Annotated[int, Field(ge=0)]
    xxh3_64: str
    """In hexadecimal."""


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json. No other files of a checkpoint are opened."""

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
    manifest = read_json(checkpoint / MANIFEST, Manifest)
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
    path = checkpoint / name
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != entry.bytes:
        return f"{name} has {path.stat().st_size:,} bytes instead of {entry.bytes:,}"
    if checksums and checksum(path) != entry.xxh3_64:
        return f"{name} is damaged: its checksum differs from the manifest's"
    return None
