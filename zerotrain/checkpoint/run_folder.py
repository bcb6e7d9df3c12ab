"""The layout of the run folder: every name in it and what it means.

    OUTPUT_DIR/
        resolved_config.yaml            the run config as it was used
        resolved_ds_config.json         the DeepSpeed config as it was used
        metrics.jsonl                   one line per start, step, evaluation, save, event ...
        launches.jsonl                  one line per attempt, if the launcher notes it
        report.html                     drawn from both
        run.lock                        held while a run writes here
        stop, save_now, profile_now     touched by a user: save and exit, save, or trace some steps
        profile/                        traces of rank 0
        stalls.jsonl                    when a host did not run, as its launcher saw it
        collectives_0, ...              the last collectives of each rank, after a hang
        wandb/, tensorboard/            what trackers write, if they are on
        checkpoints/
            step_00001000/              complete if it has COMPLETE, which is written last
            .step_00001000.ID.tmp       being written or removed; ID has 32 hexadecimal digits

Only exactly these names are ever read, renamed or removed. Anything else in the folder belongs to
the user. No link is followed to write: a link in the place of a file is removed, which does not
touch its target; a link in the place of a folder is an error.
"""

import re
import shutil
from pathlib import Path

from zerotrain.runtime.errors import UserError

METRICS = "metrics.jsonl"
LOCK = "run.lock"
RESOLVED_CONFIG = "resolved_config.yaml"
RESOLVED_DS_CONFIG = "resolved_ds_config.json"
COMPLETE = "COMPLETE"
MANIFEST = "manifest.json"
TRAINER_STATE = "trainer_state.json"
SHARDS = "shards"
"""Folder in a checkpoint, with a file for each rank."""
STOP = "stop"
SAVE_NOW = "save_now"
PROFILE_NOW = "profile_now"
STEP = "step_[0-9]{8}"
r"""Regular expression of a checkpoint's name. \d would match the digits of other scripts too."""
SAVE = rf"{STEP}\.[0-9a-f]{{32}}"
"""Regular expression of a save's name. Its draft is .NAME.tmp, from files.temporary_name."""


def checkpoints_folder(output_dir: str | Path) -> Path:
    return Path(output_dir) / "checkpoints"


def refuse_links(output_dir: str | Path) -> None:
    """Raise UserError if a folder in the run folder is a link, as in a copied run folder: a run
    would write and remove files behind it.
    """
    for name in ("checkpoints", "profile", "wandb", "tensorboard"):
        path = Path(output_dir, name)
        if path.is_symlink():
            raise UserError(
                f"output_dir: {path} is a link, which a run does not follow; remove the link, move "
                "its target there, or choose an output_dir on the disk of the target"
            )


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def shard_name(rank: int) -> str:
    """Return the path of a rank's file in a checkpoint."""
    return f"{SHARDS}/rank_{rank:05d}.pt"


def is_shard(name: str) -> bool:
    """Return whether a file of a checkpoint is a rank's file."""
    return name.startswith(f"{SHARDS}/")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, complete or not, oldest first."""
    return _matching(folder, STEP)


def list_complete(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder` that have COMPLETE, oldest first."""
    return [path for path in list_checkpoints(folder) if (path / COMPLETE).is_file()]


def list_temporary(folder: Path) -> list[Path]:
    """Return the folders that are being written or removed, or were when a run was killed."""
    return _matching(folder, rf"\.?{SAVE}\.tmp")


def remove(path: Path) -> None:
    """Remove one of the folders listed above, or the link in its place. Files that another process
    has open over NFS may remain.
    """
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def take_request(output_dir: str | Path, name: str) -> bool:
    """Remove a file that a user has touched, STOP, SAVE_NOW or PROFILE_NOW, and return whether it
    was there. A file that cannot be removed is ignored.
    """
    try:
        Path(output_dir, name).unlink()
        return True
    except OSError:
        return False


def _matching(folder: Path, pattern: str) -> list[Path]:
    if not folder.is_dir():
        return []
    # glob would treat a folder that cannot be read as empty.
    return sorted(path for path in folder.iterdir() if re.fullmatch(pattern, path.name))
