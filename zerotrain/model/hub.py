"""Load from the hub or a folder, with a one-line error for any failure, and name the commits of the
hub that were loaded.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from zerotrain.config.schema import Config, Source
from zerotrain.data.sources import COMMIT, loaded_commit
from zerotrain.runtime.errors import UserError


def load_pretrained(
    load: Callable[..., Any],
    name: Any,
    key: str = "",
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Call `load(name, ...)`; code that comes with a model only runs if it is trusted, and nobody
    is asked.

    Args:
        key: config key that gives `name`, for the error.

    Raises:
        UserError: loading failed.
    """
    try:
        return load(name, revision=revision, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # the hub, JSON, safetensors and each model raise their own
        reason = _refusal(error, name) or first_line(error)
        if not trust_remote_code and "custom code" in reason:
            reason = "it needs Python code that comes with it; " + (
                "read that code, then add --model.trust_remote_code true to the command"
                if key
                else "this command never runs it"
            )
        raise UserError(f"{key and f'{key}: '}cannot load {name}: {reason}") from error


def _refusal(error: BaseException | None, name: Any) -> str | None:
    """What the hub refused and what to do, if that is why loading failed."""
    login = "log in with `hf auth login`, or set HF_TOKEN, on every node"
    while error is not None:
        if isinstance(error, GatedRepoError):
            return f"it is gated: accept its terms at {ENDPOINT}/{name}, then {login}"
        if isinstance(error, RepositoryNotFoundError):
            return f"no such folder, and no such model at {ENDPOINT}; if it is private, {login}"
        if isinstance(error, RevisionNotFoundError):
            return f"{ENDPOINT}/{name} has no such branch, tag or commit: see model.revision"
        if isinstance(error, LocalEntryNotFoundError):
            return (
                f"not in the cache, and {ENDPOINT} cannot be reached; on a machine with a network: "
                f"`hf download {name}`, then copy the cache (HF_HOME), or give a folder"
            )
        error = error.__cause__ or error.__context__
    return None


def first_line(error: Exception) -> str:
    """The first line of an error's message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# --------------------------------------------------------------------------------------------------
# Commits


def pin_revisions(config: Config) -> Config:
    """The config with the commits that were loaded in place of branches and tags. Folders have
    none. Model config and tokenizer have been loaded; data sets of the hub are loaded here.

    Raises:
        UserError: a data set cannot be loaded.
    """
    model, data = config.model, config.data
    revision = _commit(model.name_or_path, model.revision, "config.json")
    if model.tokenizer is not None:
        name, asked = config.tokenizer_source
        commit = _commit(name, asked, "tokenizer_config.json")
        model = replace(model, tokenizer=f"{name}@{commit}" if commit else name)
    held_out = data.eval_sources
    if isinstance(held_out, dict):
        held_out = {name: _pinned(given) for name, given in held_out.items()}
    else:
        held_out = _pinned(held_out)
    data = replace(data, train_sources=_pinned(data.train_sources), eval_sources=held_out)
    return replace(config, model=replace(model, revision=revision), data=data)


def _pinned(given: list[str | Source]) -> list[str | Source]:
    return [
        replace(s, revision=loaded_commit(s)) if isinstance(s, Source) and s.hub else s
        for s in given
    ]


def _commit(name: str, revision: str | None, file: str) -> str | None:
    """The commit of a model of the hub that has been loaded, otherwise `revision`."""
    found = None if Path(name).is_dir() else try_to_load_from_cache(name, file, revision=revision)
    # models--OWNER--NAME/snapshots/COMMIT/config.json
    return Path(found).parent.name if isinstance(found, str) else revision


def commits(config: Config) -> dict[str, str]:
    """For what a pinned config takes from the hub: its key -> NAME@COMMIT."""
    found = {"model.name_or_path": (config.model.name_or_path, config.model.revision)}
    if config.model.tokenizer is not None:
        found["model.tokenizer"] = config.tokenizer_source
    for key in ("train_sources", "eval_sources"):
        for i, source in enumerate(config.data.sources(key)):
            if source.hub:
                found[f"data.{key}[{i}]"] = (source.hub, source.revision)
    return {
        key: f"{name}@{revision}"
        for key, (name, revision) in found.items()
        if revision and COMMIT.fullmatch(revision)
    }
