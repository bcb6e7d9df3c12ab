"""Resume: load weights, optimizer, schedule and RNG states from a checkpoint."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from checkpoint import fill
from checkpoint.find import check_local_shards
from checkpoint.nodes import Nodes
from checkpoint.run_folder import RNG, SHARDS
from checkpoint.shards import Shards, layout, load_safely
from checkpoint.state import FOLLOWS_PLAN, RunIdentity, read_state
from data.plan_change import describe_change
from runtime.agreement import count_ranks, run_on_all_ranks
from runtime.errors import UserError
from runtime.process_group import Ranks
from runtime.seeding import rank_seed, seed_everything, set_rng_state

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def check_resumable(
    checkpoint: Path, saved: RunIdentity, now: RunIdentity, allow_plan_change: bool
) -> None:
    """Refuse a checkpoint from which the same run cannot be continued.

    Args:
        allow_plan_change: whether the plan and the learning rate's schedule may differ.

    Raises:
        UserError: names what differs.
    """
    if saved.plan_hash != now.plan_hash and not allow_plan_change:
        raise UserError(
            f"{checkpoint}: its step plan differs: {describe_change(saved.plan, now.plan)}; "
            "resume with the old plan, or set --checkpoint.allow_plan_change true: the rest of the "
            "epoch then has the steps of the new plan"
        )
    for key, was in saved.optimization.items():
        if was != now.optimization[key] and not (allow_plan_change and key in FOLLOWS_PLAN):
            other = "use another output_dir"
            if key in FOLLOWS_PLAN:
                other = "set --checkpoint.allow_plan_change true for the new one"
            raise UserError(
                f"{checkpoint}: {key} was {was}, this run's is {now.optimization[key]}; resume "
                f"with the old one, or {other}"
            )
    if saved.precision != now.precision:
        raise UserError(
            f"{checkpoint}: its precision is {saved.precision}, this run's {now.precision}; resume "
            "with the same, or start a new run in another output_dir (from its weights: "
            f"--checkpoint.weights_only true --checkpoint.resume {checkpoint})"
        )


def load_checkpoint(
    engine: "DeepSpeedEngine", checkpoint: Path, folder: Path, nodes: Nodes, seed: int
) -> None:
    """Load weights, optimizer and RNG states from `checkpoint`. They are converted if the engine
    partitions its state differently from the engine that wrote them.

    Args:
        folder: of this run's checkpoints, for the converted checkpoint.
        seed: train.seed, which seeds the ranks if the world size is another one.

    Raises:
        UserError: the checkpoint is of another model, or cannot be converted.
        RuntimeError: DeepSpeed loaded nothing.
    """
    state, shards, ranks = read_state(checkpoint), Shards(checkpoint), nodes.ranks
    run_on_all_ranks(ranks, lambda: fill.check_base(engine, shards, checkpoint))
    [same] = count_ranks(ranks, shards.layout(ranks.rank) == layout(engine))
    if same == ranks.world_size:
        usual, engine.checkpoint_engine = engine.checkpoint_engine, SafeReader(shards)
        try:
            loaded, _ = engine.load_checkpoint(
                str(checkpoint), tag=SHARDS, load_module_strict=not shards.missing()
            )
        finally:
            engine.checkpoint_engine = usual
        if loaded is None:
            raise RuntimeError(f"DeepSpeed loaded nothing from {checkpoint}")
        engine.module.read_from = shards.read_from
    else:
        nodes.run_on_each_node(lambda: check_local_shards(checkpoint, range(state.run.world_size)))
        _convert_and_load(engine, shards, checkpoint, folder, nodes)
    rng = checkpoint / RNG / f"rank_{ranks.rank:05d}.pt"
    same_ranks = state.run.world_size == ranks.world_size
    if not (same_ranks and set_rng_state(load_safely(rng))):
        # another seed than at step 0, whose random numbers would be repeated
        seed_everything(rank_seed(seed, ranks.rank, state.progress.step))


class SafeReader(CheckpointEngine):
    """Replaces DeepSpeed's reader, which runs whatever code a file contains."""

    def __init__(self, shards: Shards) -> None:
        super().__init__()
        self._shards = shards

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        # not memory-mapped: the optimizer keeps some of the tensors, and the file may be removed
        return self._shards.load(Path(path), map_location)

    def create(self, info: Any) -> None:
        raise NotImplementedError

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise NotImplementedError

    def save(self, state_dict: Any, path: str) -> None:
        raise NotImplementedError

    def commit(self, info: Any) -> bool:
        raise NotImplementedError


def _convert_and_load(
    engine: "DeepSpeedEngine", shards: Shards, checkpoint: Path, folder: Path, nodes: Nodes
) -> None:
    run_on_all_ranks(nodes.ranks, lambda: fill.check_model(engine, shards, checkpoint))
    if find_spec("checkpoint.convert") is None:
        raise UserError(
            f"{checkpoint} is of another world size, ZeRO stage or optimizer, and this copy has no "
            "checkpoint/convert.py: resume with the same world size, ZeRO stage and optimizer"
        )
    from checkpoint import convert  # may have been deleted

    run_on_all_ranks(nodes.ranks, lambda: convert.check_optimizer(engine, shards, checkpoint))
    converted = convert.convert(checkpoint, shards, folder, nodes)
    convert.load(engine, shards, converted)


def load_weights(engine: "DeepSpeedEngine", checkpoint: Path, ranks: Ranks) -> None:
    """Load the weights alone, from a checkpoint of any layout and precision.

    Raises:
        UserError: the checkpoint is of another model.
    """
    shards = Shards(checkpoint)
    run_on_all_ranks(ranks, lambda: fill.check_model(engine, shards, checkpoint))
    fill.load_weights(engine, shards)
