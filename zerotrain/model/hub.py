"""Load models and tokenizers from a folder or the hub. Any failure is one line.

Also names the commits and files that were loaded.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeAlias

import xxhash
from huggingface_hub import is_offline_mode, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.utils import http_backoff
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from zerotrain.config.schema import ModelConfig
from zerotrain.runtime.errors import EnvironmentFailure, UserError, describe

# How much of each weight file the fingerprint reads.
SAMPLES = 128
SAMPLE_BYTES = 256
MAX_ERROR_CHARACTERS = 400  # Longer messages of libraries are cut.
NO_TOKENIZER = "it has no tokenizer; save the model's there, or set model.tokenizer to its folder"
LFS_BYTES = 1024  # Pointers of Git LFS are smaller.
NOT_A_MODEL = {
    "COMPLETE": "a checkpoint",
    "resolved_config.yaml": "the folder of a run",
    "adapter_config.json": "an adapter",
}
"""What a folder is, by a file that models lack."""

Base: TypeAlias = dict[str, str | None]
"""The name_or_path and revision of a pretrained model, and the fingerprint of its weight files. A
missing entry counts as None.
"""


@cache
def is_hub_silent() -> bool:
    """Whether the hub is overloaded or does not answer within seconds. It is asked once: without a
    network, loading would repeat each request for half a minute.
    """
    try:
        answer = http_backoff("HEAD", ENDPOINT, max_retries=1, retry_on_status_codes=(), timeout=10)
        return answer.status_code >= 429  # Too many requests, or a server error.
    except Exception:  # The network failed, or HF_HUB_OFFLINE is set.
        return True


def hub_error() -> type[UserError]:
    """Return the class of error to raise after a load from the hub failed: EnvironmentFailure if
    the hub does not answer and the user has not set HF_HUB_OFFLINE.
    """
    is_hub_silent.cache_clear()  # It may have answered before.
    return EnvironmentFailure if is_hub_silent() and not is_offline_mode() else UserError


def load_pretrained(
    load: Callable[..., Any],
    source: str,
    key: str = "",
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Return `load(name, ...)`. Code that comes with a model runs only if it is trusted; the user
    is never asked.

    Args:
        source: a folder, or ID@REVISION.
        key: the config key that gives `source`, for messages.

    Raises:
        UserError: loading failed.
        EnvironmentFailure: loading from the hub failed, and the hub does not answer.
    """
    name, revision = split_revision(source)
    place = f"{key and f'{key}: '}cannot load {source}"
    is_here = Path(name).is_dir()
    # A name that begins with a folder of this machine means a folder, although the hub may have it.
    if "/" in name and Path(name).parent.is_dir() and not is_here:
        raise UserError(f"{place}: there is no such folder in {Path.cwd()}")
    try:
        return load(
            name,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_files_only=not is_here and is_hub_silent(),
            **options,
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    # Each library raises its own. When the Rust code of tokenizers panics, it is a BaseException.
    except BaseException as error:
        reason = summarize(error)
        if "backend tokenizer" in reason:
            reason = NO_TOKENIZER
        if not trust_remote_code and "custom code" in reason:
            reason = "it needs its Python code: read it, then give --model.trust_remote_code true"
        if is_here:
            raise UserError(f"{place}: {_what_else(Path(name)) or reason}") from error
        place += f": there is no such folder in {Path.cwd()}, and"
        raise hub_error()(f"{place} {reason}") from error


def _what_else(folder: Path) -> str | None:
    """Say what a folder without a model is, or which file it lacks; None if unknown."""
    for file in folder.iterdir():
        if kind := NOT_A_MODEL.get(file.name):
            return f"it is {kind}: give what python -m scripts.export makes of its run"
        if file.is_file() and file.stat().st_size < LFS_BYTES and b"git-lfs" in file.read_bytes():
            return f"{file.name} is a pointer of Git LFS: run git lfs pull in that folder"
    return None


def split_revision(source: str) -> tuple[str, str | None]:
    """Return (folder, None), or (hub id, branch, tag or commit) of ID@REVISION."""
    name, _, revision = source.partition("@")
    return (source, None) if Path(source).exists() else (name, revision or None)


def source_of(base: Base) -> str:
    """Return the folder or ID@REVISION of a pretrained model."""
    return "@".join(filter(None, map(base.get, ("name_or_path", "revision"))))


def summarize(error: Exception) -> str:
    """Return the beginning of an error's message, in one line."""
    return shorten(describe(error), MAX_ERROR_CHARACTERS)


def pin_revisions(model: ModelConfig) -> ModelConfig:
    """Return the section with loaded commits in place of branches and tags. Folders stay."""
    return replace(
        model,
        name_or_path=_at_commit(model.name_or_path, "config.json"),
        tokenizer=model.tokenizer and _at_commit(model.tokenizer, "tokenizer_config.json"),
    )


def _at_commit(source: str, file: str) -> str:
    """Return ID@COMMIT of a hub model that has been loaded; other sources unchanged."""
    name, revision = split_revision(source)
    found = None if Path(name).is_dir() else try_to_load_from_cache(name, file, revision=revision)
    # models--OWNER--NAME/snapshots/COMMIT/config.json
    return f"{name}@{Path(found).parent.name}" if isinstance(found, str) else source


# --------------------------------------------------------------------------------------------------
# Files of a pretrained model


def weight_files(source: str, download: bool = True) -> list[Path]:
    """Return the files from which transformers reads the weights of a folder or hub id. The list is
    empty if they have other names.

    Args:
        download: download files that are not in the hub's cache.

    Raises:
        UserError: they are not in the cache, and cannot or must not be downloaded.
    """
    name, revision = split_revision(source)
    options = {"revision": revision, "local_files_only": not download}
    try:
        for first in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
            found = cached_file(name, first, _raise_exceptions_for_missing_entries=False, **options)
            if found:
                files = [found]
                if found.endswith(".json"):
                    files, _ = get_checkpoint_shard_files(name, found, **options)
                return [*map(Path, files)]
    except OSError as error:
        raise UserError(f"model.name_or_path: cannot load {source}: {summarize(error)}") from error
    return []


def describe_base(source: str) -> Base:
    """Describe a model whose weights have been loaded. A checkpoint need not hold the frozen
    weights in its files; whoever reads the checkpoint compares this description.
    """
    name, revision = split_revision(source)
    files = weight_files(source)
    digest = fingerprint(files) if files else None
    return {"name_or_path": name, "revision": revision, "fingerprint": digest}


def is_same_base(one: Base, other: Base) -> bool:
    """Whether two descriptions name the same weights. They may have moved to another folder."""
    digest = one.get("fingerprint")
    return one == other if digest is None else digest == other.get("fingerprint")


def fingerprint(files: Iterable[Path]) -> str:
    """Return a sampled checksum of weight files: the 64-bit xxh3 of their sizes and of 128 samples
    of each. It detects a different model of the same shape, since training changes nearly every
    weight. It can miss a change of a few tensors.
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
