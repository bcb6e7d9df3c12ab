"""Push an exported folder to a repository on the hub."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars

from model.hub import first_line
from runtime.errors import UserError

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write"


def check_push(repo: str, is_public: bool) -> None:
    """Check, before an export that may take long, that its result can be pushed; nothing is
    created.

    Args:
        repo: OWNER/NAME.

    Raises:
        UserError: there is no token that may write there, the hub cannot be reached, or the
            repository is public and `is_public` is not set.
    """
    api = HfApi()
    with _in_one_line(api, repo):
        me = api.whoami()
        owners = [me["name"], *(organization["name"] for organization in me.get("orgs", []))]
        if repo.count("/") != 1 or repo.split("/")[0] not in owners:
            raise UserError(
                f"--push: {repo} is not OWNER/NAME with one of your owners at {api.endpoint}: "
                + ", ".join(owners)
            )
        if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise UserError(f"--push: the token for {api.endpoint} may only read; {LOG_IN}")
        try:
            is_private = api.repo_info(repo).private
        except RepositoryNotFoundError:
            is_private = True
    if not is_private and not is_public:
        raise UserError(f"--push: {repo} is public; add --public, or choose another repository")


def push(folder: Path, repo: str, is_public: bool, message: str) -> str:
    """Push a folder in one commit, which replaces all weights there. The repository is created if
    there is none; one that exists stays public or private.

    Args:
        message: of the commit.

    Returns:
        Its address, and whether it is private.

    Raises:
        UserError: the hub refuses it or cannot be reached; the commit does not exist then.
    """
    api = HfApi()
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _in_one_line(api, repo, f"; {folder} is complete: `hf upload {repo} {folder}` pushes it"):
        url = api.create_repo(repo, private=not is_public, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=message,
            delete_patterns=list(WEIGHTS),  # an export in other files would leave them behind
        )
        return f"{url} ({'private' if api.repo_info(repo).private else 'public'})"


@contextmanager
def _in_one_line(api: HfApi, repo: str, ending: str = "") -> Iterator[None]:
    """Raise UserError for whatever the hub answers, or why it does not."""
    try:
        yield
    except UserError:
        raise
    except LocalTokenNotFoundError as error:
        raise UserError(f"--push: there is no token for {api.endpoint}; {LOG_IN}") from error
    except Exception as error:  # the hub and the network each raise their own
        code = getattr(getattr(error, "response", None), "status_code", None)
        reason = first_line(error).rstrip(".")
        if code in (401, 403):
            said = getattr(error, "server_message", None) or reason
            reason = f"refused ({code}): {said}; {LOG_IN}"
        elif code is None and not isinstance(error, ValueError):  # not about a name or a licence
            reason = f"cannot be reached or does not answer: {reason}"
        raise UserError(f"--push: {api.endpoint}/{repo}: {reason}{ending}") from error
