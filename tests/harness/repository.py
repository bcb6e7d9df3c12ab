"""The files of this repository, for tests that copy or list them."""

import shutil
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SAMPLE = REPO / "data" / "sample"


def repository_files():
    """The repository's files, including those not committed yet; in a checkout without git, those
    that are not made by commands.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True
    )
    names = listed.stdout.splitlines()
    if listed.returncode != 0:
        made = {".venv", "runs", "wandb", "__pycache__", ".cache", ".pytest_cache", ".ruff_cache"}
        files = [path.relative_to(REPO) for path in REPO.rglob("*")]
        names = [str(f) for f in files if not made & set(f.parts) and "egg-info" not in str(f)]
    return [name for name in names if (REPO / name).is_file()]


def copy_repository(folder):
    """Copy the repository's files into a folder."""
    for name in repository_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, folder / name)
