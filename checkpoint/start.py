"""Where a run starts: at step 0, with the weights of a checkpoint, or resumed from one."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint.find import check_local_shards, find_checkpoint
from checkpoint.load import check_resumable, load_checkpoint, load_weights
from checkpoint.nodes import Nodes
from checkpoint.run_folder import checkpoints_folder, list_complete
from checkpoint.state import Progress, RunIdentity, read_state
from checkpoint.weights_proof import prove_weights
from config.schema import CheckpointConfig, Config
from data.data_plan import DataPlan, total_steps
from data.plan_change import continue_plan, describe_change
from model.optimizer import Schedule, describe_move, schedule_of
from runtime.agreement import run_on_all_ranks
from runtime.errors import UserError
from runtime.table import show_rows

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class Start:
    """The state from which this process starts."""

    plan: DataPlan
    """The training plan from here on."""
    schedule: Schedule
    """The learning rate over its steps."""
    progress: Progress = field(default_factory=Progress)
    checkpoint: Path | None = None
    """Loaded before the first step."""
    saved: RunIdentity | None = None
    """Identity of the resumed run; None at step 0, also with the weights of a checkpoint."""


def find_start(config: Config, identity: RunIdentity, plan: DataPlan, nodes: Nodes) -> Start:
    """Decide where the run starts, for all ranks, before anything is loaded or written.

    Args:
        plan: of this run's config, as if it started at step 0.

    Raises:
        UserError: there are checkpoints and none is usable, or they were written by another run, or
            the rest of the epoch cannot be determined.
    """

    def say(line: str) -> None:
        if nodes.ranks.is_first:
            print(line, flush=True)

    settings = _settings(config, nodes)
    checkpoint, passed_over = find_checkpoint(
        settings, checkpoints_folder(config.output_dir), nodes.run_on_each_node
    )
    for line in passed_over:
        say(line)
    if checkpoint is None:
        return Start(plan, schedule_of(config, plan))
    saved = read_state(checkpoint)
    same = (saved.run.world_size, saved.run.zero_stage) == (
        identity.world_size,
        identity.zero_stage,
    )
    is_direct = same and not settings.weights_only  # each rank reads its own shard
    needed = nodes.local_ranks if is_direct else range(saved.run.world_size)
    nodes.run_on_each_node(lambda: check_local_shards(checkpoint, needed))
    if settings.weights_only:
        _check_scale(checkpoint, saved.run, identity)
        say(f"starting with the weights of {checkpoint}: step {saved.progress.step:,}")
        return Start(plan, schedule_of(config, plan), checkpoint=checkpoint)
    check_resumable(checkpoint, saved.run, identity, settings.allow_plan_change)
    say(f"resuming from {checkpoint}: step {saved.progress.step:,}")
    plan, changes = run_on_all_ranks(
        nodes.ranks,
        lambda: continue_plan(
            plan,
            identity.plan,
            saved.run.plan,
            saved.progress.plan_changes,
            saved.progress.step,
            Path(config.data.cache_dir),
        ),
        first_on_machine=True,
    )
    if len(changes) > len(saved.progress.plan_changes):
        left = f"the rest of the epoch takes {plan.rest.steps:,} steps"
        say(f"{describe_change(saved.run.plan, identity.plan)}: {left}")
    progress = replace(saved.progress, plan_changes=changes)
    schedule = schedule_of(config, plan)
    moved = describe_move(saved.run.schedule, schedule, progress.step)
    if moved and progress.step < total_steps(config.train, plan):
        say(moved)
    return Start(plan, schedule, progress, checkpoint, saved.run)


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


def _check_scale(checkpoint: Path, saved: RunIdentity, identity: RunIdentity) -> None:
    """Raise UserError if adapters of a checkpoint would get another scale, alpha / r; another r is
    noticed by their shapes.
    """
    was = saved.lora.get("alpha") if isinstance(saved.lora, dict) else None
    if identity.lora and was not in (None, now := identity.lora["alpha"]):
        raise UserError(
            f"checkpoint.weights_only: the adapters of {checkpoint} were trained with "
            f"model.lora.alpha {was}, and {now} would scale them otherwise; keep it, or export the "
            "checkpoint and set model.name_or_path to the export"
        )


def load_start(engine: "DeepSpeedEngine", start: Start, config: Config, nodes: Nodes) -> None:
    """Load what `start` selects into the engine: nothing, the weights, or everything. Pretrained
    weights that stay are compared with their files.

    Raises:
        UserError: the checkpoint is of another model, or cannot be converted to this run's layout;
            or weights differ from their files.
    """
    is_frozen = any(not p.requires_grad for p in engine.module.parameters())
    if not config.model.from_config and (start.checkpoint is None or is_frozen):
        line = prove_weights(engine, config, nodes.ranks)
        if nodes.ranks.is_first:
            show_rows({"weights": line})
    if start.checkpoint is None:
        return
    if start.saved is None:
        load_weights(engine, start.checkpoint, nodes.ranks)
        return
    folder = checkpoints_folder(config.output_dir)
    load_checkpoint(engine, start.checkpoint, folder, nodes, config.train.seed)
