"""Where a run starts: fresh, with the weights of a checkpoint, or resumed from one."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.checkpoint.find import find_checkpoint
from zerotrain.checkpoint.load import load_shards
from zerotrain.checkpoint.nodes import Nodes
from zerotrain.checkpoint.run_folder import checkpoints_folder, list_complete
from zerotrain.checkpoint.shards import Shards
from zerotrain.checkpoint.state import FOLLOWS_PLAN, Progress, RunIdentity, read_state
from zerotrain.config.schema import CheckpointConfig, Config
from zerotrain.data.data_plan import DataPlan, continue_plan
from zerotrain.model.base import Base
from zerotrain.runtime.agreement import run_on_all_ranks
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.process_group import Ranks
from zerotrain.runtime.seeding import rank_seed, seed_everything, set_rng_state

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class _Start:
    plan: DataPlan
    """The training plan from here on."""
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class Fresh(_Start):
    """At step 0, with the weights of the model's files, or random ones."""

    def load(
        self, engine: "DeepSpeedEngine", ranks: Ranks, seed: int, base: Base | None
    ) -> Base | None:
        """Load what the run starts from into the engine; called by all ranks.

        Args:
            base: the files that the engine's weights were read from.

        Returns:
            The files that hold the frozen weights from now on; None: checkpoints have to hold them.
        """
        return base


@dataclass(frozen=True)
class Weights(_Start):
    """At step 0, with the weights of a checkpoint."""

    checkpoint: Path = Path()

    def load(
        self, engine: "DeepSpeedEngine", ranks: Ranks, seed: int, base: Base | None
    ) -> Base | None:
        shards = run_on_all_ranks(ranks, lambda: Shards(self.checkpoint, ranks.rank))
        return load_shards(engine, shards, ranks, base, weights_only=True)


@dataclass(frozen=True)
class Resume(_Start):
    """At the step of a checkpoint, with its weights, optimizer and RNG states."""

    checkpoint: Path = Path()
    world_size: int = 1
    """Of the run that saved it."""

    def load(
        self, engine: "DeepSpeedEngine", ranks: Ranks, seed: int, base: Base | None
    ) -> Base | None:
        shards = run_on_all_ranks(ranks, lambda: Shards(self.checkpoint, ranks.rank))
        base = load_shards(engine, shards, ranks, base, weights_only=False)

        def restore() -> bool:
            if self.world_size != ranks.world_size:
                return False
            try:
                return set_rng_state(shards.first.rng)
            except Exception as error:  # a file of the wrong shape
                raise UserError(
                    f"{self.checkpoint}: the random states of rank {ranks.rank} cannot be used "
                    f"({describe(error)}); use another checkpoint"
                ) from error

        if not run_on_all_ranks(ranks, restore):
            # another seed than at step 0, whose random numbers would be repeated
            seed_everything(rank_seed(seed, ranks.rank, self.progress.step))
        return base


Start = Fresh | Weights | Resume


def find_start(config: Config, identity: RunIdentity, plan: DataPlan, nodes: Nodes) -> Start:
    """Decide where the run starts, for all ranks, before anything is loaded or written.

    Args:
        plan: of this run's config, as if it started at step 0.

    Raises:
        UserError: there are checkpoints and none is usable, or they were written by another run, or
            the rest of the epoch cannot be determined.
    """

    def show(line: str) -> None:
        if nodes.ranks.is_first:
            print(line, flush=True)

    settings = _settings(config, nodes)
    checkpoint, passed_over = find_checkpoint(
        settings, checkpoints_folder(config.output_dir), nodes.run_on_each_node
    )
    for line in passed_over:
        show(line)
    if checkpoint is None:
        return Fresh(plan)
    saved = read_state(checkpoint)
    if settings.weights_only:
        if saved.run.lora and identity.lora and saved.run.lora != identity.lora:
            raise UserError(
                f"checkpoint.weights_only: {checkpoint} has adapters with model.lora "
                f"{saved.run.lora}; keep it, or export the checkpoint and train the export"
            )
        show(f"starting with the weights of {checkpoint}: step {saved.progress.step:,}")
        return Weights(plan, checkpoint=checkpoint)
    check_resumable(checkpoint, saved.run, identity, settings.allow_plan_change)
    show(f"resuming from {checkpoint}: step {saved.progress.step:,}")
    was = (saved.run.world_size, saved.run.zero_stage)
    if was != (identity.world_size, identity.zero_stage):
        show("it was saved by {:,} ranks at ZeRO stage {}".format(*was))
    plan = continue_plan(plan, saved.run.plan, saved.progress.plan_start, saved.progress.step)
    progress = replace(saved.progress, plan_start=plan.start)
    return Resume(plan, progress, checkpoint, saved.run.world_size)


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


def _settings(config: Config, nodes: Nodes) -> CheckpointConfig:
    """config.checkpoint. A run with weights_only that has written checkpoints of its own resumes
    from those.
    """
    settings, folder = config.checkpoint, checkpoints_folder(config.output_dir)
    if not settings.weights_only:
        return settings
    if Path(settings.resume).resolve().parent == folder.resolve():
        raise UserError(
            f"checkpoint.weights_only: {settings.resume} is in this output_dir, which would "
            "have two runs; choose another output_dir"
        )
    if any(nodes.run_on_each_node(lambda: bool(list_complete(folder))).values()):
        return replace(settings, resume="auto", weights_only=False)
    return settings
