"""Find and verify checkpoints."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpoint.manifest import FileEntry, file_problem, read_manifest
from checkpoint.run_folder import (
    COMPLETE,
    RNG,
    TRAINER_STATE,
    checkpoint_name,
    list_checkpoints,
    list_drafts,
)
from checkpoint.state import TrainerState, read_state
from config.schema import CheckpointConfig
from runtime.errors import UserError, describe, some


@dataclass(frozen=True)
class NodeCheckpoint:
    """What a folder holds of a checkpoint: all of it, or with checkpoint.node_local one node's."""

    problem: str | None
    """Why it cannot be used; if set, the other fields are unknown."""
    save_id: str | None = None
    ranks: frozenset[int] = frozenset()
    """The ranks whose shards and RNG states are here."""
    state: TrainerState | None = None

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks of the save whose files are on other nodes."""
        return sorted(set(range(self.state.run.world_size)) - self.ranks)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ranks": sorted(self.ranks)}

    @classmethod
    def of(cls, values: dict[str, Any]) -> "NodeCheckpoint":
        """What `as_json` was called on."""
        ranks, state = frozenset(values["ranks"]), values["state"]
        return cls(values["problem"], values["save_id"], ranks, state and TrainerState.of(state))


def read_node_checkpoint(checkpoint: Path) -> tuple[NodeCheckpoint, dict[str, FileEntry]]:
    """What `checkpoint` says about itself, and the files of its manifest, which are not checked."""
    if not (checkpoint / COMPLETE).is_file():
        return NodeCheckpoint("it has no COMPLETE: the save was interrupted"), {}
    try:
        manifest = read_manifest(checkpoint)
        state = read_state(checkpoint)
    except (OSError, ValueError) as error:
        problem = f"its manifest or trainer state cannot be read ({describe(error)})"
        return NodeCheckpoint(problem), {}
    if TRAINER_STATE not in manifest.files:
        return NodeCheckpoint(f"its manifest does not name {TRAINER_STATE}"), {}
    if state.run.schedule is None:
        return NodeCheckpoint(f"its {TRAINER_STATE} has no schedule"), {}
    names = (re.fullmatch(rf"{RNG}/rank_([0-9]{{5,7}})\.pt", name) for name in manifest.files)
    ranks = frozenset(int(name[1]) for name in names if name)
    return NodeCheckpoint(None, manifest.save_id, ranks, state), manifest.files


def inspect_checkpoint(checkpoint: Path, checksums: bool = False) -> NodeCheckpoint:
    """What `checkpoint` holds, after checking that every file of its manifest exists and has its
    size, and with `checksums` also its checksum.
    """
    part, files = read_node_checkpoint(checkpoint)
    problems = (file_problem(checkpoint, name, entry, checksums) for name, entry in files.items())
    problem = next(filter(None, problems), None)
    return part if problem is None else NodeCheckpoint(problem)


def checkpoint_problem(checkpoint: Path, checksums: bool = False) -> str | None:
    """Why `checkpoint` cannot be used on its own; None if it can."""
    part = inspect_checkpoint(checkpoint, checksums)
    if part.problem is None and part.missing_ranks:
        return (
            f"it is a per-node checkpoint without {format_ranks(part.missing_ranks)}; "
            "scripts/gather_checkpoint.py combines those of all nodes"
        )
    return part.problem


def joint_problem(parts: Mapping[str, NodeCheckpoint | None]) -> str | None:
    """Why the per-node checkpoints of one step cannot be used together; None if they can."""
    for node, part in parts.items():
        if part is None:
            return f"it is missing on {node}"
        if part.problem is not None:
            return f"{node}: {part.problem}" if len(parts) > 1 else part.problem
    return "its nodes hold different saves" if is_inconsistent(parts) else None


def is_inconsistent(parts: Mapping[str, NodeCheckpoint | None]) -> bool:
    """Whether nodes hold different saves, or some none, as after a crash between the renames or
    the removals of two nodes. Damaged ones are not counted.
    """
    sound = [part for part in parts.values() if part is None or part.problem is None]
    return len({part and part.save_id for part in sound}) > 1


def node_checkpoints(
    found: Mapping[str, Mapping[str, NodeCheckpoint]], name: str
) -> dict[str, NodeCheckpoint | None]:
    """The parts of the checkpoint `name` in the surveys of all nodes."""
    return {node: its.get(name) for node, its in found.items()}


def format_ranks(ranks: Iterable[int]) -> str:
    """E.g. "rank 3" or "ranks 0, 1, 2 ..."."""
    ranks = sorted(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {some(ranks, 8)}"


def alone(work: Callable[[], Any], catch: Any = None) -> dict[str, Any]:
    """Nodes.run_on_each_node for a single process."""
    return {"": work()}


def survey(
    folder: Path, run_on_each_node: Callable[..., dict[str, Any]]
) -> dict[str, dict[str, NodeCheckpoint]]:
    """What every node's `folder` holds of each checkpoint, by node and by the checkpoint's name."""
    found = run_on_each_node(
        lambda: {path.name: inspect_checkpoint(path).as_json() for path in list_checkpoints(folder)}
    )
    return {
        node: {name: NodeCheckpoint.of(values) for name, values in its.items()}
        for node, its in found.items()
    }


def inspect_on_each_node(
    checkpoint: Path, checksums: bool, run_on_each_node: Callable[..., dict[str, Any]]
) -> dict[str, NodeCheckpoint]:
    """What every node holds of one checkpoint, by node."""
    found = run_on_each_node(lambda: inspect_checkpoint(checkpoint, checksums).as_json())
    return {node: NodeCheckpoint.of(values) for node, values in found.items()}


def find_checkpoint(
    config: CheckpointConfig, folder: Path, run_on_each_node: Callable[..., dict[str, Any]] = alone
) -> tuple[Path | None, list[str]]:
    """The checkpoint that `checkpoint.resume` selects, complete on every node, and a line for each
    one that is skipped. Called by all ranks together; the result is the same on all ranks.

    Args:
        run_on_each_node: Nodes.run_on_each_node.

    Raises:
        UserError: a given path is not a usable checkpoint, or `folder` has a later one; no
            checkpoint is usable; or resume is none and the folder has checkpoints, with which those
            of a second run would be mixed.
    """
    resume, checksums = config.resume, config.verify == "checksums"
    found = survey(folder, run_on_each_node)
    names = sorted({name for its in found.values() for name in its}, reverse=True)
    passed_over: list[str] = []

    def newest(names: Iterable[str]) -> Path | None:
        for name in names:
            problem = joint_problem(node_checkpoints(found, name))
            if problem is None and checksums:  # reads all of it, so only the candidate is checked
                problem = joint_problem(inspect_on_each_node(folder / name, True, run_on_each_node))
            if problem is None:
                return folder / name
            passed_over.append(f"skipping {folder / name}: {problem}")
        return None

    if resume == "none":
        if names:
            raise UserError(
                f"{folder} has checkpoints of an earlier run; choose another output_dir, "
                "or checkpoint.resume auto"
            )
        return None, []
    if resume != "auto":
        given = Path(resume)
        parts = inspect_on_each_node(given, checksums, run_on_each_node)
        if problem := joint_problem(parts):
            raise UserError(f"checkpoint.resume: {resume} is not a usable checkpoint: {problem}")
        step = next(iter(parts.values())).state.progress.step
        if later := newest(name for name in names if name > checkpoint_name(step)):
            raise UserError(
                f"{given} is at step {step}, but {folder} has the later {later.name}; "
                "remove the later ones, or choose another output_dir"
            )
        return given, []
    if checkpoint := newest(names):
        return checkpoint, passed_over
    if names:
        remedy = "remove them to start at step 0"
        if bare := [node for node, its in found.items() if not its]:
            remedy = (
                f"{', '.join(bare)} has no checkpoints at all: restore its folder, or set "
                "checkpoint.resume to a copy that scripts/gather_checkpoint.py has made and every "
                f"node has; or {remedy}"
            )
        raise UserError(f"no usable checkpoint in {folder}: {'; '.join(passed_over)}; {remedy}")
    drafts = run_on_each_node(lambda: [str(path) for path in list_drafts(folder)])
    interrupted = dict.fromkeys(path for its in drafts.values() for path in its)
    return None, [f"{path} is from an interrupted save" for path in interrupted]


def best_checkpoint(newest: Path) -> Path:
    """The checkpoint of the best evaluation of a run.

    Args:
        newest: of the run's usable checkpoints.

    Raises:
        UserError: there was no evaluation, or its checkpoint cannot be used.
    """
    best = read_state(newest).progress.best
    if best is None:
        raise UserError(f"the run of {newest} has no evaluation, so no best checkpoint")
    found = newest.with_name(checkpoint_name(best.step))
    if problem := checkpoint_problem(found):
        raise UserError(
            f"the best evaluation was at step {best.step:,}, but {found} cannot be used: "
            f"{problem}; checkpoint.keep_best: 1 keeps the best checkpoint"
        )
    return found


def check_local_shards(checkpoint: Path, needed_ranks: Iterable[int]) -> None:
    """Check that `checkpoint` has the files of these ranks on this node.

    Raises:
        UserError: names the ranks whose files are missing.
    """
    part, _ = read_node_checkpoint(checkpoint)
    if missing := set(needed_ranks) - part.ranks:
        raise UserError(
            f"{checkpoint} has the files of {format_ranks(part.ranks)} of "
            f"{part.state.run.world_size} here, but needs those of {format_ranks(missing)}: "
            "resume with the same hosts in the same order, world size and ZeRO stage; or combine "
            "the per-node checkpoints with scripts/gather_checkpoint.py, copy the result to every "
            "node (rsync -a), and set checkpoint.resume to it"
        )
