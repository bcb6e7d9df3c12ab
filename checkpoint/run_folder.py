"""The layout of the run folder: every name in it and what it means.

    OUTPUT_DIR/
        resolved_config.yaml            the run config as it was used
        resolved_ds_config.json         the DeepSpeed config as it was used
        metrics.jsonl                   one line per step, evaluation and save
        rejected_rows.jsonl             rows that were rejected, if any
        run.lock                        held while a run writes here
        stop, save_now                  touched by a user: save and exit, or save
        flight_records/                 if TORCH_FR_BUFFER_SIZE is set: each rank's last collectives
        checkpoints/
            step_00001000/              complete if it has COMPLETE, which is written last
            step_00001000.tmp           being written
            step_00001000.old           being removed
            step_00001000.universal.H   converted for another world size, ZeRO stage or optimizer

Imports only the standard library, because agents on other hosts read the folder too.
"""

import re
from pathlib import Path

METRICS, LOCK, REJECTED_ROWS = "metrics.jsonl", "run.lock", "rejected_rows.jsonl"
RESOLVED_CONFIG, RESOLVED_DS_CONFIG = "resolved_config.yaml", "resolved_ds_config.json"
COMPLETE, MANIFEST, TRAINER_STATE = "COMPLETE", "manifest.json", "trainer_state.json"
SHARDS = "deepspeed"
"""Folder of DeepSpeed's shards in a checkpoint, which DeepSpeed calls the tag."""
RNG = "rng"
REQUESTS = ("stop", "save_now")


def checkpoints_folder(output_dir: str | Path) -> Path:
    return Path(output_dir) / "checkpoints"


def flight_records_folder(output_dir: str | Path) -> Path:
    return Path(output_dir) / "flight_records"


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def draft_path(folder: Path, step: int) -> Path:
    """The folder in which the checkpoint of a step is written until it is complete."""
    return folder / f"{checkpoint_name(step)}.tmp"


def converted_path(folder: Path, checkpoint: str, manifest_hash: str) -> Path:
    return folder / f"{checkpoint}.universal.{manifest_hash}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, complete or not, oldest first."""
    return _matching(folder, r"step_\d{8}")


def list_complete(folder: Path) -> list[Path]:
    """Checkpoints in `folder` that have COMPLETE, oldest first."""
    return [path for path in list_checkpoints(folder) if (path / COMPLETE).is_file()]


def list_drafts(folder: Path) -> list[Path]:
    """Checkpoints being written, or whose save was interrupted."""
    return _matching(folder, r"step_\d{8}\.tmp")


def list_hidden(folder: Path) -> list[Path]:
    """Checkpoints being removed, or whose removal was interrupted."""
    return _matching(folder, r"step_\d{8}\.old")


def list_converted(folder: Path) -> list[Path]:
    """Converted checkpoints, complete or not."""
    return _matching(folder, r"step_\d{8}\.universal\..+")


def hide_checkpoint(path: Path) -> Path:
    """Rename a checkpoint before it is removed, so that an interrupted removal does not leave a
    checkpoint with COMPLETE and missing files.
    """
    return path.rename(path.with_suffix(".old"))


def take_requests(output_dir: str | Path) -> tuple[bool, bool]:
    """Whether a user has touched OUTPUT_DIR/stop and OUTPUT_DIR/save_now; both are removed."""
    files = [Path(output_dir) / name for name in REQUESTS]
    stop, save = (file.exists() for file in files)
    for file in files:
        file.unlink(missing_ok=True)
    return stop, save


def _matching(folder: Path, pattern: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if re.fullmatch(pattern, path.name))
