"""Which files the weights of a run were read from. A checkpoint need not hold frozen weights that
these files have; whoever reads it checks that they are still the same.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import xxhash
from huggingface_hub import snapshot_download, try_to_load_from_cache
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

SAMPLES, SAMPLE_BYTES = 128, 256  # of each file
PROCESSOR_FILES = "*processor_config.json"

Base: TypeAlias = dict[str, str | None]
"""name_or_path and revision of a pretrained model, and a fingerprint of its files."""


def describe_base(name: str, revision: str | None) -> Base:
    """A folder or a model of the hub's cache whose weights have been loaded."""
    files = weight_files(name, revision)
    digest = fingerprint(files) if files else None
    return {"name_or_path": name, "revision": revision, "fingerprint": digest}


def is_same_base(one: Base, other: Base) -> bool:
    """Whether two descriptions are of the same weights, which may have moved."""
    digest = one["fingerprint"]
    return one == other if digest is None else digest == other["fingerprint"]


def weight_files(name: str, revision: str | None) -> list[Path]:
    """The files that transformers reads weights from, in its order of preference, of a folder or of
    the hub's cache; none if they have other names.
    """
    for first in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        if Path(name).is_dir():
            found = Path(name) / first
        else:
            cached = try_to_load_from_cache(name, first, revision=revision)
            found = Path(cached) if isinstance(cached, str) else Path()
        if found.is_file():
            if found.suffix != ".json":
                return [found]
            names = json.loads(found.read_text(encoding="utf-8"))["weight_map"].values()
            return [found.parent / name for name in sorted(set(names))]
    return []


def processor_files(name: str, revision: str | None, fetch: bool = False) -> dict[str, str]:
    """{name: text} of the files that say how a multimodal model prepares what is not text, of a
    folder or of the hub's cache. Training does not use them, servers do.

    Args:
        fetch: ask the hub, as one rank of each machine does.
    """
    folder = name
    if not Path(name).is_dir():
        folder = snapshot_download(
            name, revision=revision, allow_patterns=PROCESSOR_FILES, local_files_only=not fetch
        )
    files = sorted(Path(folder).glob(PROCESSOR_FILES))
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def fingerprint(files: Iterable[Path]) -> str:
    """The 64-bit xxh3 of the sizes of files and of bytes at 128 places of each, in hexadecimal.
    Training changes nearly every weight, so it tells a model from another one of the same shape;
    it need not tell files that differ in a few tensors.
    """
    digest = xxhash.xxh3_64()
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as content:
            for k in range(SAMPLES):
                content.seek(size * k // SAMPLES)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()
