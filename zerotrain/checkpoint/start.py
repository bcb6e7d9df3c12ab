"""Where a run starts: fresh, with the weights of a checkpoint, or resumed from one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.checkpoint.manifest import find_damage, inspect, read_manifest
from zerotrain.checkpoint.run_folder import (
    COMPLETE,
    SHARDS,
    TRAINER_STATE,
    checkpoints_folder,
    list_checkpoints,
)
from zerotrain.checkpoint.shards import Shards, load_shards
from zerotrain.checkpoint.state import FOLLOWS_PLAN, Progress, RunIdentity, read_state
from zerotrain.config.schema import CheckpointConfig, Config
from zerotrain.data.data_plan import DataPlan, continue_plan
from zerotrain.model.hub import Base
from zerotrain.runtime.agreement import gather_json, run_on_all_ranks
from zerotrain.runtime.errors import UserError, describe, printable
from zerotrain.runtime.machine import this_machine
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
    while True:
        checkpoint, lines = run_on_all_ranks(
            ranks, lambda: find_checkpoint(settings, folder, nodes)
        )
        damage = find_damage_on_all_ranks(checkpoint, nodes, ranks)
        if not damage:
            break
        for view in nodes:
            view[str(checkpoint)][1].update(damage)

    def decide() -> tuple[Start, list[str]]:
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
        try:
            rest = continue_plan(plan, saved.run.plan, saved.progress.plan_start, step)
        except (ArithmeticError, LookupError, ValueError) as error:
            raise UserError(
                f"{checkpoint / TRAINER_STATE}: the position in the data is none that the run "
                f"could have ({describe(error)}); use another checkpoint"
            ) from error
        progress = replace(saved.progress, plan_start=rest.start)
        return Start(rest, checkpoint, progress=progress), lines

    start, lines = run_on_all_ranks(ranks, decide)
    wandb_id = gather_json(ranks, start.progress.wandb_id)[0]  # each node's checkpoints have it
    start = replace(start, progress=replace(start.progress, wandb_id=wandb_id))
    if ranks.is_first:
        for line in lines:
            print(printable(line), flush=True)
    return start


def see(settings: CheckpointConfig, folder: Path) -> dict[str, Any]:
    """What this node has of each checkpoint that a run may start from; see manifest.inspect."""
    given = [] if settings.resume == "auto" else [Path(settings.resume)]
    return {str(path): inspect(path) for path in (*list_checkpoints(folder), *given)}


def find_damage_on_all_ranks(
    checkpoint: Path | None, views: Sequence[dict[str, Any]], ranks: Ranks
) -> dict[str, str]:
    """What is wrong with the content of a checkpoint's files, by name; called by all ranks.

    Each rank reads the file that it would resume from, and an equal share of those of further
    ranks; the first rank of a node reads the small files. Where nodes have disks of their own, the
    ranks of each node read all that it has.

    Args:
        views: what see() returned on each node.
    """
    if checkpoint is None:
        return {}
    local_ranks = this_machine(ranks).local_ranks
    lacking = set().union(*(view[str(checkpoint)][1] for view in views))

    def is_own(number: int, name: str) -> bool:
        if not name.startswith(f"{SHARDS}/"):
            return ranks.local_rank == 0
        is_share = number % ranks.world_size == ranks.rank
        return is_share or (name in lacking and number % local_ranks == ranks.local_rank)

    def find() -> dict[str, str]:
        files = sorted(read_manifest(checkpoint).files.items())
        shards = [name for name, _ in files if name.startswith(f"{SHARDS}/")]
        number = {name: i for i, name in enumerate(shards)}
        own = [
            (name, entry)
            for name, entry in files
            if is_own(number.get(name, 0), name) and (checkpoint / name).exists()
        ]
        return find_damage(checkpoint, own)

    found = gather_json(ranks, run_on_all_ranks(ranks, find))
    return {name: problem for of_rank in found for name, problem in of_rank.items()}


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
        if problem := _problem(str(given), views):
            raise UserError(f"checkpoint.resume: {given} is not a usable checkpoint: {problem}")
        newest = given
    elif given.resolve().parent == folder.resolve():
        if settings.weights_only:
            raise UserError(
                f"checkpoint.weights_only: {given} is a checkpoint of output_dir, whose run would "
                "be resumed; choose another output_dir"
            )
        if given.name != newest.name:
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
    if (saved.plan.version, saved.plan.content) != (now.plan.version, now.plan.content):
        raise UserError(f"{checkpoint}: the training data has changed since; {weights}")
