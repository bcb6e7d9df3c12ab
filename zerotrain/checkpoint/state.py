"""The identity of a run, and its progress."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from zerotrain.checkpoint.manifest import read_json
from zerotrain.checkpoint.run_folder import TRAINER_STATE
from zerotrain.config.ds_config import adam_rule, zero_stage
from zerotrain.config.parse import plain_config
from zerotrain.config.schema import NonNegativeInt
from zerotrain.data.data_plan import DataPlan, PlanRecord, PlanStart
from zerotrain.model.architecture import describe_config
from zerotrain.training.optimizer import is_decayed, scaled_learning_rate
from zerotrain.training.setup import Setup

# Keys of the run config that a resumed run must share with the saved one.
COMPARED = (
    "data.eval_fraction", "train.seed", "train.global_batch_size", "train.global_batch_tokens",
    "train.weight_decay", "train.adam_betas", "train.lr_schedule", "train.lr_schedule_args",
    "train.precision", "model.lora", "model.trainable", "model.quantization",
)  # fmt: skip
# Keys of RunIdentity.settings that may change with checkpoint.allow_plan_change.
FOLLOWS_PLAN = (
    "train.global_batch_size", "train.global_batch_tokens",
    "train.learning_rate (scaled)", "train.lr_schedule", "train.lr_schedule_args",
)  # fmt: skip

Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class RunIdentity:
    """The facts that stay constant during a run, and are compared when it is resumed."""

    plan: PlanRecord
    world_size: int
    zero_stage: int
    precision: Literal["fp32", "bf16", "fp16"]
    settings: dict[str, Any]
    """The values that a resumed run must share with the saved one, by run config key."""
    model: str = ""
    """model.name_or_path with its commit, which may move."""
    model_config: dict[str, Any] = field(default_factory=dict)
    """What the model's config.json says of the architecture, as describe_config returns it."""
    held_out: dict[str, str] | None = None
    """A hash of the examples of each held-out set, in the order of the config; None: not known,
    from an earlier version of this code.
    """
    spared: int | None = None
    """Number of trained matrices that their names spare weight decay; None: an earlier version of
    this code decayed them.
    """

    @classmethod
    def of(cls, setup: Setup, plan: DataPlan, eval_plans: Mapping[str, DataPlan]) -> "RunIdentity":
        """Return the identity of a run with these plans of training data and held-out sets."""
        train = setup.config.train
        plain = plain_config(setup.config)
        skeleton = setup.architecture.skeleton
        return cls(
            plan=PlanRecord.of(plan),
            world_size=plan.budget.world_size,
            zero_stage=zero_stage(setup.ds_config),
            precision=train.precision,
            settings={key: reduce(dict.get, key.split("."), plain) for key in COMPARED}
            | {f"ds_config: {key}": value for key, value in adam_rule(setup.ds_config).items()}
            # last, because it is computed from others, and an error names the first difference
            | {"train.learning_rate (scaled)": scaled_learning_rate(train, plan.mean_batch)},
            model=setup.config.model.name_or_path,
            model_config=describe_config(skeleton.config),
            held_out={name: each.data.meta.content for name, each in eval_plans.items()},
            spared=sum(
                p.requires_grad and p.dim() > 1 and not is_decayed(name, p)
                for name, p in skeleton.named_parameters()
            ),
        )


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest eval_loss so far."""

    value: float
    step: int


@dataclass(frozen=True)
class Progress:
    """How far a run has progressed. `step` determines the position in the data."""

    step: NonNegativeInt = 0
    """Finished optimizer steps."""
    examples: Count = 0
    tokens: Count = 0
    eval_loss: float | None = None
    """Loss of the first held-out set after this step; None without an evaluation."""
    best: Best | None = None
    skipped_in_a_row: int = 0
    """Number of consecutive steps, up to this one, whose update was skipped."""
    norms: tuple[float, ...] = ()
    """The gradient norms of the last steps, for train.skip_spikes."""
    expert_counts: tuple[Count, ...] = ()
    """How often each expert was chosen in the last step whose update was applied, over all layers
    and ranks. Empty before that step, and without a router loss.
    """
    wandb_id: str = ""
    plan_start: PlanStart = field(default_factory=PlanStart)
    """The position in the data at which the steps of the run's plan begin."""

    @property
    def is_best(self) -> bool:
        """Whether the evaluation after this step is the best so far."""
        return self.best is not None and self.best.step == self.step

    def evaluated(self, eval_loss: float) -> "Progress":
        """Return the progress after an evaluation. NaN is worse than any loss."""
        best = self.best
        if best is None or not (best.value <= eval_loss or math.isnan(eval_loss)):
            best = Best(eval_loss, self.step)
        return replace(self, eval_loss=eval_loss, best=best)


@dataclass(frozen=True)
class TrainerState:
    """The content of trainer_state.json."""

    run: RunIdentity
    progress: Progress


def read_state(checkpoint: Path) -> TrainerState:
    """Return the trainer state of a checkpoint.

    Raises:
        UserError: it cannot be read, or is not a trainer state.
    """
    return read_json(checkpoint, TRAINER_STATE, TrainerState)
