"""Where a run starts: fresh, with the weights of a checkpoint, or resumed from one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.checkpoint.manifest import inspect
from zerotrain.checkpoint.run_folder import (
    COMPLETE,
    checkpoints_folder,
    list_checkpoints,
)
from zerotrain.checkpoint.shards import Shards, load_shards
from zerotrain.checkpoint.state import FOLLOWS_PLAN, Progress, RunIdentity, read_state
from zerotrain.config.schema import CheckpointConfig, Config
from zerotrain.data.data_plan import DataPlan, continue_plan
from zerotrain.model.hub import Base
from zerotrain.runtime.agreement import gather_json, run_on_all_ranks
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.process_group import Ranks
from zerotrain.runtime.seeding import rank_seed, seed_everything, set_rng_state

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class Start:
    """Where a run starts."""

    plan: DataPlan
    """The training plan from here on."""
    checkpoint: Path | None = None
    """None: with the weights of the model's files, or random ones."""
    weights_only: bool = False
    """At step 0, with the weights of the checkpoint; else with its optimizer and RNG states too."""
    progress: Progress = field(default_factory=Progress)

    def load(
        self, engine: "DeepSpeedEngine", ranks: Ranks, seed: int, base: Base | None
    ) -> Base | None:
        """Load what the run starts from into the engine; called by all ranks.

        Args:
            base: the files that the engine's weights were read from.

        Returns:
            The files that hold the frozen weights from now on; None: checkpoints have to hold them.
        """
        if self.checkpoint is None:
            return base
        shards = run_on_all_ranks(ranks, lambda: Shards(self.checkpoint, ranks.rank))
        base = load_shards(engine, shards, ranks, base, self.weights_only)
        is_same = shards.has_own and shards.world_size == ranks.world_size
        if not (self.weights_only or (is_same and set_rng_state(shards.first.rng))):
            # another seed than at step 0, whose random numbers would be repeated
            seed_everything(rank_seed(seed, ranks.replica, self.progress.step))
        return base


def find_start(config: Config, identity: RunIdentity, plan: DataPlan, ranks: Ranks) -> Start:
    """Decide where the run starts, for all ranks, before anything is loaded or written.

    Args:
        plan: of this run's config, as if it started at step 0.

    Raises:
        UserError: there are checkpoints and none is usable, or they were written by another run, or
            the rest of the epoch cannot be determined.
    """

    settings = config.checkpoint
    folder = checkpoints_folder(config.output_dir)
    views = gather_json(ranks, see(settings, folder) if ranks.local_rank == 0 else None)
    nodes = [view for view in views if view is not None]

    def decide() -> tuple[Start, list[str]]:
        checkpoint, lines = find_checkpoint(settings, folder, nodes)
        if checkpoint is None:
            return Start(plan), lines
        saved = read_state(checkpoint)
        step = saved.progress.step
        if settings.weights_only and checkpoint == Path(settings.resume):
            check_same_adapters(checkpoint, saved.run, identity)
            lines.append(f"starting with the weights of {checkpoint}: step {step:,}")
            return Start(plan, checkpoint, weights_only=True), lines
        check_resumable(checkpoint, saved.run, identity, settings.allow_plan_change)
        lines.append(f"resuming from {checkpoint}: step {step:,}")
        rest = continue_plan(plan, saved.run.plan, saved.progress.plan_start, step)
        progress = replace(saved.progress, plan_start=rest.start)
        return Start(rest, checkpoint, progress=progress), lines

    start, lines = run_on_all_ranks(ranks, decide)
    wandb_id = gather_json(ranks, start.progress.wandb_id)[0]  # each node's checkpoints have it
    start = replace(start, progress=replace(start.progress, wandb_id=wandb_id))
    if ranks.is_first:
        for line in lines:
            print(line, flush=True)
    return start


def see(settings: CheckpointConfig, folder: Path) -> dict[str, Any]:
    """What this node has of each checkpoint that a run may start from; see manifest.inspect."""
    given = [] if settings.resume == "auto" else [Path(settings.resume)]
    return {str(path): inspect(path) for path in (*list_checkpoints(folder), *given)}


def find_checkpoint(
    settings: CheckpointConfig, folder: Path, views: Sequence[dict[str, Any]]
) -> tuple[Path | None, list[str]]:
    """The newest usable checkpoint in `folder`, otherwise that of checkpoint.resume, and a line for
    each one that is skipped.

    Args:
        views: what see() returned on each node.

    Raises:
        UserError: the given path is not a usable checkpoint, or is in `folder`, which has a later
            one; or there are checkpoints, and none is usable.
    """
    paths = {path for view in views for path in view if Path(path).parent == folder}
    skipped = []
    newest = None
    for path in sorted(paths, reverse=True):
        problem = _problem(path, views)
        if problem is None:
            newest = Path(path)
            break
        skipped.append(f"skipping {path}: {problem}")
    given = Path(settings.resume)
    if settings.resume == "auto":
        if paths and newest is None:
            fix = "restore one, or remove them to start at step 0"
            raise UserError(f"no usable checkpoint in {folder}: {'; '.join(skipped)}; {fix}")
    elif newest is None:
        if problem := _problem(settings.resume, views):
            raise UserError(f"checkpoint.resume: {given} is not a usable checkpoint: {problem}")
        newest = given
    elif given.resolve().parent == folder.resolve() and (
        settings.weights_only or given.name != newest.name
    ):
        raise UserError(
            f"checkpoint.resume: {given} is in output_dir, which has the later {newest.name}; "
            "choose another output_dir, or remove the later ones"
        )
    return newest, skipped


def _problem(path: str, views: Sequence[dict[str, Any]]) -> str | None:
    """Why a checkpoint cannot be used; None if it can. Nodes without a shared disk have the files
    of their own ranks only, so each file has to be right on one node.
    """
    found = [view.get(path, (None, {COMPLETE: "is missing"})) for view in views]
    everywhere = set.intersection(*(set(problems) for _, problems in found))
    if everywhere:
        name = min(everywhere)
        return f"{name} {found[0][1][name]}"
    if len({save_id for save_id, _ in found}) > 1:
        return "not all nodes have the same save of it"
    return None


def check_same_adapters(checkpoint: Path, saved: RunIdentity, now: RunIdentity) -> None:
    """Raise UserError if a checkpoint has other adapters than this run."""
    if saved.lora and now.lora and saved.lora != now.lora:
        raise UserError(
            f"checkpoint.weights_only: {checkpoint} has adapters with model.lora {saved.lora}; "
            "keep it, or export the checkpoint and train the export"
        )


def check_resumable(
    checkpoint: Path, saved: RunIdentity, now: RunIdentity, allow_plan_change: bool
) -> None:
    """Refuse a checkpoint from which the same run cannot be continued.

    Args:
        allow_plan_change: whether the global batch and the learning rate's schedule may differ.

    Raises:
        UserError: names what differs.
    """
    weights = (
        "start a new run in another output_dir (from its weights: --checkpoint.weights_only true "
        f"--checkpoint.resume {checkpoint})"
    )
    if (saved.plan.version, saved.plan.content) != (now.plan.version, now.plan.content):
        raise UserError(f"{checkpoint}: the training data has changed since; {weights}")
    is_now = now.compared()
    for key, was in saved.compared().items():
        if was == is_now.get(key) or (allow_plan_change and key in FOLLOWS_PLAN):
            continue
        fix = weights
        if key in FOLLOWS_PLAN:
            fix = "set --checkpoint.allow_plan_change true for the new one"
        raise UserError(
            f"{checkpoint}: {key} was {was}, this run's is {is_now.get(key)}; resume with the old "
            f"one, or {fix}"
        )
