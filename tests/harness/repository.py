"""Lists and copies the files of this repository."""

import shutil
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SAMPLE = REPO / "data" / "sample"


def repository_files():
    """List the files that git would track, committed or not, with or without a repository."""
    command = ["git", "grep", "--no-index", "--exclude-standard", "--files-with-matches", ""]
    return subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def copy_repository(folder):
    """Copy the repository's files into a folder."""
    for name in repository_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, folder / name)
