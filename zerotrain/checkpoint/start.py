"""Where a run starts: fresh, with the weights of a checkpoint, or resumed from one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepspeed import DeepSpeedEngine

from zerotrain.checkpoint.manifest import find_problems, inspect, read_manifest
from zerotrain.checkpoint.run_folder import (
    COMPLETE,
    TRAINER_STATE,
    checkpoints_folder,
    list_checkpoints,
)
from zerotrain.checkpoint.shards import Shards, is_shard, load_shards
from zerotrain.checkpoint.state import FOLLOWS_PLAN, Progress, RunIdentity, read_state
from zerotrain.config.schema import CheckpointConfig, Config
from zerotrain.data.data_plan import DataPlan, continue_plan
from zerotrain.model.hub import Base
from zerotrain.runtime.errors import UserError, describe, printable
from zerotrain.runtime.ranks import Ranks
from zerotrain.runtime.seeding import rank_seed, seed_everything, set_rng_state


@dataclass(frozen=True)
class Start:
    """Where a run starts."""

    plan: DataPlan
    """The training plan from here on."""
    checkpoint: Path | None = None
    """Where weights come from; None: from the model's files, or they are random."""
    weights_only: bool = False
    """Whether the run starts at step 0 with nothing but the weights of the checkpoint."""
    progress: Progress = field(default_factory=Progress)

    def load(
        self, engine: DeepSpeedEngine, ranks: Ranks, seed: int, base: Base | None
    ) -> Base | None:
        """Load what the run starts from into the engine; called by all ranks.

        Args:
            base: the files that the engine's weights were read from.

        Returns:
            The files that hold the frozen weights from now on; None: checkpoints have to hold them.
        """
        if self.checkpoint is None:
            return base
        shards = ranks.run_on_all(lambda: Shards(self.checkpoint, ranks.rank))
        base = load_shards(engine, shards, ranks, base, self.weights_only)
        is_same = shards.has_own and shards.world_size == ranks.world_size
        if not (self.weights_only or (is_same and set_rng_state(shards.first.rng))):
            # another seed than at step 0, whose random numbers would be repeated
            seed_everything(rank_seed(seed, ranks.replica, self.progress.step))
        return base


NodeView = dict[str, tuple[str | None, dict[str, str]]]
"""What a node has of each checkpoint, by path: what manifest.inspect returns."""


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
    view = inspect_on_this_node(settings, folder) if ranks.local_rank == 0 else None
    nodes = [view for view in ranks.gather_json(view) if view is not None]
    damage: dict[str, str] | None = None
    while damage != {}:
        checkpoint, lines = ranks.run_on_all(lambda: find_checkpoint(settings, folder, nodes))
        damage = find_damage_on_all_ranks(checkpoint, nodes, ranks) if checkpoint else {}
        for view in nodes if damage else ():
            view[str(checkpoint)][1].update(damage)
    start = Start(plan)
    if checkpoint is not None:
        start = ranks.run_on_all(lambda: start_from(checkpoint, settings, identity, plan))
        line = f"resuming from {checkpoint}: step {start.progress.step:,}"
        lines.append(f"starting with the weights of {checkpoint}" if start.weights_only else line)
    wandb_id = ranks.gather_json(start.progress.wandb_id)[0]  # each node's checkpoints have it
    for line in lines if ranks.is_first else ():
        print(printable(line), flush=True)
    return replace(start, progress=replace(start.progress, wandb_id=wandb_id))


def start_from(
    checkpoint: Path, settings: CheckpointConfig, identity: RunIdentity, plan: DataPlan
) -> Start:
    """The start of a run at a usable checkpoint.

    Raises:
        UserError: the checkpoint is of another run.
    """
    saved = read_state(checkpoint)
    if settings.weights_only and checkpoint == Path(settings.resume):
        was = saved.run.settings.get("model.lora")
        now = identity.settings["model.lora"]
        if was and now and was != now:
            raise UserError(
                f"checkpoint.weights_only: {checkpoint} has adapters with model.lora {was}; keep "
                "it, or export the checkpoint and train the export"
            )
        return Start(plan, checkpoint, weights_only=True)
    check_resumable(checkpoint, saved.run, identity, settings.allow_plan_change)
    progress = saved.progress
    try:
        rest = continue_plan(plan, saved.run.plan, progress.plan_start, progress.step)
    except (ArithmeticError, LookupError, ValueError) as error:
        raise UserError(
            f"{checkpoint / TRAINER_STATE}: the position in the data is none that the run could "
            f"have ({describe(error)}); use another checkpoint"
        ) from error
    return Start(rest, checkpoint, progress=replace(progress, plan_start=rest.start))


def inspect_on_this_node(settings: CheckpointConfig, folder: Path) -> NodeView:
    """What this node has of each checkpoint that the run may start from."""
    given = [] if settings.resume == "auto" else [Path(settings.resume)]
    return {str(path): inspect(path) for path in (*list_checkpoints(folder), *given)}


def find_damage_on_all_ranks(
    checkpoint: Path, nodes: Sequence[NodeView], ranks: Ranks
) -> dict[str, str]:
    """What is wrong with the content of a checkpoint's files, by name; called by all ranks.

    Each rank reads the shard that it would resume from, and an equal share of further ones. What
    each node has on a disk of its own, and the small files, are shared among the node's ranks.
    """
    lacking = set().union(*(view[str(checkpoint)][1] for view in nodes))

    def find() -> dict[str, str]:
        files = read_manifest(checkpoint).files
        own = {}
        # shards first, so that their numbers are those of their ranks
        for i, name in enumerate(sorted(files, key=lambda name: (not is_shard(name), name))):
            reader, readers = ranks.local_rank, ranks.local_ranks
            if is_shard(name) and name not in lacking:
                reader, readers = ranks.rank, ranks.world_size
            if i % readers == reader and (checkpoint / name).exists():
                own[name] = files[name]
        return find_problems(checkpoint, own, checksums=True)

    found = ranks.gather_json(ranks.run_on_all(find))
    return {name: problem for of_rank in found for name, problem in of_rank.items()}


def find_checkpoint(
    settings: CheckpointConfig, folder: Path, nodes: Sequence[NodeView]
) -> tuple[Path | None, list[str]]:
    """The newest usable checkpoint in `folder`, otherwise the one of checkpoint.resume, and a line
    for each one that is skipped.

    Raises:
        UserError: the given path is not a usable checkpoint, or is in `folder`, which has a later
            one; or there are checkpoints, and none is usable.
    """
    paths = {path for view in nodes for path in view if Path(path).parent == folder}
    skipped = []
    newest = None
    for path in sorted(paths, reverse=True):
        problem = unusable_because(path, nodes)
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
        if problem := unusable_because(str(given), nodes):
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


def unusable_because(path: str, nodes: Sequence[NodeView]) -> str | None:
    """Why a checkpoint cannot be used; None if it can. Nodes without a shared disk have the files
    of their own ranks only, so each file has to be right on one node.
    """
    found = [view.get(path, (None, {COMPLETE: "is missing"})) for view in nodes]
    everywhere = set.intersection(*(set(problems) for _, problems in found))
    if everywhere:
        name = min(everywhere)
        return f"{name} {found[0][1][name]}"
    if len({save_id for save_id, _ in found}) > 1:
        return "not all nodes have the same save of it"
    return None


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
    for key, was in saved.settings.items():
        if was == now.settings.get(key) or (allow_plan_change and key in FOLLOWS_PLAN):
            continue
        fix = weights
        if key in FOLLOWS_PLAN:
            fix = "set --checkpoint.allow_plan_change true for the new one"
        raise UserError(
            f"{checkpoint}: {key} was {was}, this run's is {now.settings.get(key)}; resume with "
            f"the old one, or {fix}"
        )
    if (saved.plan.version, saved.plan.content) != (now.plan.version, now.plan.content):
        raise UserError(f"{checkpoint}: the training data has changed since; {weights}")
