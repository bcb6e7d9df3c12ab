"""What a run is, and how far it has progressed."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import Field, TypeAdapter

from checkpoint.files import read_json
from checkpoint.run_folder import TRAINER_STATE
from config.ds_config import zero_stage
from config.parse import dump_config
from data.data_plan import DataPlan
from data.plan_change import PlanChange, PlanRecord
from model.guard import GuardState
from model.hub import commits
from model.optimizer import Schedule, optimization_of
from model.setup import Setup

FORMAT = 2
"""Of a checkpoint. Format 1 had the fields of both types below in one object."""
MAX_WORLD_SIZE = 1 << 20  # in a state that is read: far above any job's, small enough for a set
# The part of RunIdentity.optimization that may change together with the plan
FOLLOWS_PLAN = ("train.learning_rate (scaled)", "train.lr_schedule", "train.lr_schedule_args")


@dataclass(frozen=True)
class RunIdentity:
    """What a run is: constant from start to end, and compared when the run is resumed."""

    plan_hash: str
    plan: PlanRecord
    config_hash: str
    """xxh3 of the run config, in hexadecimal."""
    world_size: Annotated[int, Field(ge=1, le=MAX_WORLD_SIZE)]
    zero_stage: int
    precision: Literal["fp32", "bf16", "fp16"]
    optimization: dict[str, Any]
    """Settings that a resumed run has to share, by run config key."""
    schedule: Schedule | None = None
    """Known once the run knows where it starts."""
    commits: dict[str, str] = field(default_factory=dict)
    """What comes from the hub, see model.hub.commits; not compared."""

    @property
    def lora(self) -> dict[str, Any] | None:
        """model.lora of the run config."""
        return self.optimization.get("model.lora")

    @classmethod
    def of(cls, setup: Setup, plan: DataPlan) -> "RunIdentity":
        """The identity of a run whose training plan is `plan`."""
        config = setup.config
        return cls(
            plan_hash=plan.content_hash(),
            plan=PlanRecord.of(plan, config.data.eval_fraction),
            config_hash=xxhash.xxh3_64_hexdigest(dump_config(config).encode()),
            world_size=plan.budget.world_size,
            zero_stage=zero_stage(setup.ds_config),
            precision=setup.precision,
            optimization=optimization_of(config, plan.mean_batch),
            commits=commits(config),
        )


@dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    metric: str
    """eval.metric, by which it is the best."""
    value: float
    step: int
    evaluations_since: int = 0


@dataclass(frozen=True)
class Progress:
    """How far a run has progressed. `step` is its position in the data: epochs follow from it."""

    step: Annotated[int, Field(ge=0)] = 0
    """Finished optimizer steps."""
    examples: int = 0
    tokens: int = 0
    eval_loss: float | None = None
    """Of the evaluation after this step, if there was one: that of the first held-out set."""
    eval_values: dict[str, float] = field(default_factory=dict)
    """What else it measured, by the names of the record `eval`."""
    best: Best | None = None
    guard: GuardState = field(default_factory=GuardState)
    wandb_id: str | None = None
    save_seconds: float | None = None
    """How long the previous save blocked the loop."""
    plan_changes: list[PlanChange] = field(default_factory=list)
    """Oldest first."""

    def measured(self, metric: str) -> float | None:
        """A value of the evaluation after this step; None if there was none."""
        return self.eval_loss if metric == "eval_loss" else self.eval_values.get(metric)

    def evaluated(self, eval_loss: float, values: dict[str, float], metric: str) -> "Progress":
        """After an evaluation.

        Args:
            metric: eval.metric; another one than before starts the comparison anew.
        """
        now = replace(self, eval_loss=eval_loss, eval_values=values)
        value, best = now.measured(metric), self.best
        if best is None or best.metric != metric or cost(metric, value) < cost(metric, best.value):
            return replace(now, best=Best(metric, value, self.step))
        return replace(now, best=replace(best, evaluations_since=best.evaluations_since + 1))


def cost(metric: str, value: float) -> float:
    """The value of a metric as one that is better the lower it is: losses and perplexities as they
    are, scores negated, NaN as infinity.
    """
    sign = 1 if metric.partition("/")[0] in ("eval_loss", "loss", "perplexity") else -1
    return math.inf if math.isnan(value) else sign * value


@dataclass(frozen=True)
class TrainerState:
    """The content of trainer_state.json, besides its format."""

    run: RunIdentity
    progress: Progress

    @classmethod
    def of(cls, values: dict[str, Any]) -> "TrainerState":
        """The state of which `values` is the asdict."""
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True)
class _Format:
    format: int = 1


def write_state(checkpoint: Path, state: TrainerState) -> None:
    text = json.dumps({"format": FORMAT, **asdict(state)}, indent=2)
    (checkpoint / TRAINER_STATE).write_text(text)


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer state of a checkpoint.

    Raises:
        OSError, ValueError: it cannot be read, or has another format or shape.
    """
    path = checkpoint / TRAINER_STATE
    if (found := read_json(path, _Format).format) != FORMAT:
        raise ValueError(
            f"the checkpoint has format {found}, and this version of the code reads format "
            f"{FORMAT}; resume it with the version that wrote it"
        )
    return read_json(path, TrainerState)
