"""What a run is, and how far it has progressed."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from checkpoint.run_folder import TRAINER_STATE
from config.ds_config import zero_stage
from config.parse import dump_config
from data.data_plan import DataPlan
from data.plan_change import PlanRecord
from model.hub import commits
from model.optimizer import optimization_of
from model.setup import Setup

FORMAT = 2
"""Of a checkpoint. Format 1 had the fields of both types below in one object."""
# The part of RunIdentity.optimization that may change together with the plan
FOLLOWS_PLAN = ("train.learning_rate (scaled)", "train.lr_schedule", "train.lr_schedule_args")


@dataclass(frozen=True)
class RunIdentity:
    """What a run is: constant from start to end, and compared when the run is resumed."""

    plan_hash: str
    plan: dict[str, Any]
    """What the plan depends on, a data.plan_change.PlanRecord."""
    config_hash: str
    """xxh3 of the run config, in hexadecimal."""
    world_size: int
    zero_stage: int
    precision: str
    optimization: dict[str, Any]
    """Settings that a resumed run has to share, by run config key."""
    schedule: dict[str, Any] | None = None
    """model.optimizer.Schedule; known once the run knows where it starts."""
    commits: dict[str, str] = field(default_factory=dict)
    """What comes from the hub, see model.hub.commits; not compared."""

    @classmethod
    def of(cls, setup: Setup, plan: DataPlan) -> "RunIdentity":
        """The identity of a run whose training plan is `plan`."""
        config = setup.config
        return cls(
            plan_hash=plan.content_hash(),
            plan=asdict(PlanRecord.of(plan, config.data.eval_fraction)),
            config_hash=xxhash.xxh3_64_hexdigest(dump_config(config).encode()),
            world_size=plan.budget.world_size,
            zero_stage=zero_stage(setup.ds_config),
            precision=setup.precision,
            optimization=optimization_of(config.train, plan.mean_batch),
            commits=commits(config),
        )


@dataclass(frozen=True)
class Progress:
    """How far a run has progressed. `step` is its position in the data: epochs follow from it."""

    step: int = 0
    """Finished optimizer steps."""
    examples: int = 0
    tokens: int = 0
    eval_loss: float | None = None
    """Of the evaluation after this step, if there was one."""
    wandb_id: str | None = None
    save_seconds: float | None = None
    """How long the previous save blocked the loop."""
    plan_changes: list[dict[str, Any]] = field(default_factory=list)
    """data.plan_change.PlanChange, oldest first."""


@dataclass(frozen=True)
class TrainerState:
    """The content of trainer_state.json."""

    run: RunIdentity
    progress: Progress


def write_state(checkpoint: Path, state: TrainerState) -> None:
    text = json.dumps({"format": FORMAT, **asdict(state)}, indent=2)
    (checkpoint / TRAINER_STATE).write_text(text)


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer state of a checkpoint.

    Raises:
        OSError, ValueError, KeyError, TypeError: it cannot be read, or has another format.
    """
    state = json.loads((checkpoint / TRAINER_STATE).read_text())
    if (found := state.get("format", 1)) != FORMAT:
        raise ValueError(
            f"the checkpoint has format {found}, and this version of the code reads format "
            f"{FORMAT}; resume it with the version that wrote it"
        )
    return TrainerState(RunIdentity(**state["run"]), Progress(**state["progress"]))
