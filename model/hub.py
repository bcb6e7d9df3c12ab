"""Load from the hub or a folder, with a one-line error for any failure, and name the commits of the
hub that were loaded.
"""

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

from config.schema import Config, Source
from data.sources import COMMIT, loaded_commit
from runtime.errors import UserError

CONFIG_FILES = ("config.json",)
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


def from_hub(load: Any, key: str, name: str, run_config: Config, /, **options: Any) -> Any:
    """Call `load(name, ...)` with the revision and trust_remote_code of the run config.

    Args:
        key: config key that gives `name`, for the error.

    Raises:
        UserError: loading failed.
    """
    model = run_config.model
    revision = _tokenizer_revision(run_config) if key == "model.tokenizer" else model.revision
    cure = "read that code, then set model.trust_remote_code: true"
    trust = model.trust_remote_code
    return load_pretrained(load, name, f"{key}: ", cure, trust, revision=revision, **options)


def load_pretrained(
    load: Any,
    name: Any,
    where: str = "",
    cure: str = "this command never runs it",
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Call `load(name, ...)`; code that comes with a model only runs if it is trusted, and nobody
    is asked.

    Raises:
        UserError: loading failed.
    """
    try:
        return load(name, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # the hub, JSON, safetensors and each model raise their own
        reason = _refusal(error, name) or first_line(error)
        if not trust_remote_code and "custom code" in reason:
            reason = f"it needs Python code that comes with it; {cure}"
        raise UserError(f"{where}cannot load {name}: {reason}") from error


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
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


# --------------------------------------------------------------------------------------------------
# Commits


def pin_revisions(config: Config) -> Config:
    """The config with the commits that were loaded in place of branches and tags. Folders have
    none. Model config and tokenizer have been loaded; data sets of the hub are loaded here.

    Raises:
        UserError: a data set cannot be loaded.
    """
    model, data = config.model, config.data
    pinned = replace(
        model,
        revision=_commit(model.name_or_path, model.revision, CONFIG_FILES),
        tokenizer_revision=_commit(model.tokenizer, _tokenizer_revision(config), TOKENIZER_FILES),
    )
    held_out = data.eval_sources
    if isinstance(held_out, dict):
        held_out = {name: _pinned(given) for name, given in held_out.items()}
    else:
        held_out = _pinned(held_out)
    data = replace(data, train_sources=_pinned(data.train_sources), eval_sources=held_out)
    return replace(config, model=pinned, data=data)


def _pinned(given: list[str | Source]) -> list[str | Source]:
    return [
        replace(s, revision=loaded_commit(s)) if isinstance(s, Source) and s.hub else s
        for s in given
    ]


def commits(config: Config) -> dict[str, str]:
    """For what a pinned config takes from the hub: its key -> NAME@COMMIT."""
    found = {
        "model.name_or_path": (config.model.name_or_path, config.model.revision),
        "model.tokenizer": (config.model.tokenizer, config.model.tokenizer_revision),
    }
    for key in ("train_sources", "eval_sources"):
        for i, source in enumerate(config.data.sources(key)):
            if source.hub:
                found[f"data.{key}[{i}]"] = (source.hub, source.revision)
    return {
        key: f"{name}@{revision}"
        for key, (name, revision) in found.items()
        if name and revision and COMMIT.fullmatch(revision)
    }


def _tokenizer_revision(config: Config) -> str | None:
    return (config.model.tokenizer and config.model.tokenizer_revision) or config.model.revision


def _commit(name: str | None, revision: str | None, files: tuple[str, ...]) -> str | None:
    """The commit of a model of the hub that has been loaded, otherwise `revision`."""
    if name is None:
        return None
    for file in () if Path(name).is_dir() else files:
        found = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str):
            return Path(found).parent.name  # models--OWNER--NAME/snapshots/COMMIT/config.json
    return revision
