"""Write files with a checksum and sync them to disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

CHUNK_BYTES = 1 << 18  # stays in the core's cache between checksum and write: 1.6 x faster


class MeasuringFile:
    """A writable file that counts its bytes and computes their checksum."""

    def __init__(self, path: Path) -> None:
        # Our checksum replaces torch's CRC-32, with which torch.save writes 0.3 GB/s per core
        # instead of 1.2.
        torch.serialization.set_crc32_options(False)
        self.raw = path.open("wb")
        self.digest, self.bytes = xxhash.xxh3_64(), 0

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            self.digest.update(chunk)
            self.raw.write(chunk)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self.raw.flush()


def write_measured(path: Path, write: Callable[[Any], Any]) -> dict[str, Any]:
    """Write a file and sync it to disk.

    Returns:
        {"bytes": its size, "xxh3_64": its checksum in hexadecimal}.

    Raises:
        OSError: it cannot be written.
    """
    file = MeasuringFile(path)
    try:
        write(file)
        file.flush()
        os.fsync(file.raw.fileno())
    finally:
        file.raw.close()
    return {"bytes": file.bytes, "xxh3_64": file.digest.hexdigest()}


def checksum(path: Path) -> str:
    """The 64-bit xxh3 of a file, in hexadecimal."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()
