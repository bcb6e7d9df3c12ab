"""Find and verify checkpoints."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.manifest import file_problem, read_manifest
from zerotrain.checkpoint.run_folder import (
    COMPLETE,
    TRAINER_STATE,
    checkpoint_name,
    list_checkpoints,
    list_drafts,
)
from zerotrain.checkpoint.shards import shard_name
from zerotrain.checkpoint.state import read_state
from zerotrain.config.schema import CheckpointConfig
from zerotrain.runtime.errors import UserError, describe, some

Part = tuple[str | None, str | None]
"""Of a checkpoint in one node's folder: why it cannot be used, None if it can; and its save_id."""


def inspect_part(checkpoint: Path, checksums: bool = False) -> Part:
    """Check that every file of the manifest exists and has its size, and with `checksums` also its
    checksum. With checkpoint.node_local it has the files of one node's ranks only.
    """
    if not checkpoint.is_dir():
        return "it does not exist", None
    if not (checkpoint / COMPLETE).is_file():
        return "it has no COMPLETE: the save was interrupted", None
    try:
        manifest = read_manifest(checkpoint)
        read_state(checkpoint)
    except (OSError, ValueError) as error:
        return f"its manifest or trainer state cannot be read ({describe(error)})", None
    if TRAINER_STATE not in manifest.files:
        return f"its manifest does not name {TRAINER_STATE}", None
    files = manifest.files.items()
    problems = (file_problem(checkpoint, name, entry, checksums) for name, entry in files)
    return next(filter(None, problems), None), manifest.save_id


def checkpoint_problem(checkpoint: Path, checksums: bool = False) -> str | None:
    """Why `checkpoint` cannot be used on its own; None if it can."""
    problem, _ = inspect_part(checkpoint, checksums)
    if problem is None and (missing := missing_ranks(checkpoint)):
        return (
            f"it is a per-node checkpoint without rank{'s' * (len(missing) > 1)} "
            f"{some(missing, 8)}; combine those of all nodes with gather_checkpoint.py"
        )
    return problem


def missing_ranks(checkpoint: Path) -> list[int]:
    """The ranks of the save whose files are on other nodes."""
    files = read_manifest(checkpoint).files
    ranks = range(read_state(checkpoint).run.world_size)
    return [rank for rank in ranks if shard_name(rank) not in files]


def joint_problem(parts: Mapping[str, Part]) -> str | None:
    """Why the parts of one checkpoint in the folders of all nodes cannot be used together; None if
    they can.
    """
    for node, (problem, _) in parts.items():
        if problem is not None:
            return f"{node}: {problem}" if len(parts) > 1 else problem
    if len({save_id for _, save_id in parts.values()}) > 1:
        return "its nodes hold different saves"
    return None


def find_checkpoint(
    config: CheckpointConfig,
    folder: Path,
    on_each_node: Callable[[Callable[[], Any]], dict[str, Any]] | None = None,
) -> tuple[Path | None, list[str]]:
    """The checkpoint that `checkpoint.resume` selects, complete on every node, and a line for each
    one that is skipped.

    Args:
        on_each_node: Nodes.run_on_each_node, if all ranks call this together, for the same result;
            None for a single process.

    Raises:
        UserError: a given path is not a usable checkpoint, or `folder` has a later one; no
            checkpoint is usable; or resume is none and the folder has checkpoints, with which those
            of a second run would be mixed.
    """
    on_each_node = on_each_node or (lambda work: {"": work()})

    def inspect(checkpoint: Path) -> Part:
        if config.node_local:
            return inspect_part(checkpoint)
        return checkpoint_problem(checkpoint), ""

    found = on_each_node(lambda: {path.name: inspect(path) for path in list_checkpoints(folder)})
    names = sorted({name for its in found.values() for name in its}, reverse=True)
    absent = ("it does not exist", None)
    passed_over: list[str] = []

    def newest(names: Iterable[str]) -> Path | None:
        for name in names:
            problem = joint_problem({node: its.get(name, absent) for node, its in found.items()})
            if problem is None:
                return folder / name
            passed_over.append(f"skipping {folder / name}: {problem}")
        return None

    if config.resume == "none":
        if names:
            raise UserError(
                f"{folder} has checkpoints of an earlier run; choose another output_dir, "
                "or checkpoint.resume auto"
            )
        return None, []
    if config.resume != "auto":
        given = Path(config.resume)
        if problem := joint_problem(on_each_node(lambda: inspect(given))):
            raise UserError(f"checkpoint.resume: {given} is not a usable checkpoint: {problem}")
        step = next(iter(on_each_node(lambda: read_state(given).progress.step).values()))
        if later := newest(name for name in names if name > checkpoint_name(step)):
            raise UserError(
                f"{given} is at step {step}, but {folder} has the later {later.name}; "
                "remove the later ones, or choose another output_dir"
            )
        return given, []
    if checkpoint := newest(names):
        return checkpoint, passed_over
    if names:
        fix = "restore one, or remove them to start at step 0"
        raise UserError(f"no usable checkpoint in {folder}: {'; '.join(passed_over)}; {fix}")
    drafts = on_each_node(lambda: [str(path) for path in list_drafts(folder)])
    interrupted = dict.fromkeys(path for its in drafts.values() for path in its)
    return None, [f"{path} is from an interrupted save" for path in interrupted]
