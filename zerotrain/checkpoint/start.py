"""Where a run starts: fresh, with the weights of a checkpoint, or resumed from one."""

import json
import uuid
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from zerotrain.checkpoint.manifest import find_problems, inspect, read_manifest
from zerotrain.checkpoint.run_folder import (
    TRAINER_STATE,
    checkpoints_folder,
    is_shard,
    list_checkpoints,
)
from zerotrain.checkpoint.state import FOLLOWS_PLAN, Progress, RunIdentity, read_state
from zerotrain.config.schema import Config
from zerotrain.data.data_plan import DataPlan, continue_plan
from zerotrain.runtime.errors import AgreedError, UserError, describe, printable
from zerotrain.runtime.ranks import Ranks


@dataclass(frozen=True)
class Start:
    """Where a run starts."""

    plan: DataPlan
    """The training plan from here on."""
    progress: Progress
    checkpoint: Path | None = None
    """Where weights come from; None: from the model's files, or they are random."""
    weights_only: bool = False
    """Whether the run starts at step 0 with nothing but the weights of the checkpoint."""


def find_start(config: Config, identity: RunIdentity, plan: DataPlan, ranks: Ranks) -> Start:
    """Decide where the run starts, for all ranks, before anything is loaded or written: at the
    newest usable checkpoint of output_dir, otherwise at the one of checkpoint.resume.

    Args:
        plan: of this run's config, as if it started at step 0.

    Raises:
        UserError: there are checkpoints and none is usable, or they were written by another run, or
            the rest of the epoch cannot be determined.
    """
    settings = config.checkpoint
    folder = checkpoints_folder(config.output_dir)
    # of all nodes: one that has joined has none on a disk of its own, and must try the same ones
    of_nodes = ranks.gather_json([path.name for path in list_checkpoints(folder)])
    candidates = [folder / name for name in sorted({*chain(*of_nodes)}, reverse=True)]
    if settings.resume != "auto":
        # last: once output_dir has checkpoints of its own, the same command goes on from them
        candidates.append(Path(settings.resume))
    # rank 0's id for all: every rank keeps the progress that rank 0 saves
    start = Start(plan, Progress(wandb_id=ranks.gather_json(uuid.uuid4().hex[:8])[0]))
    skipped = []
    for checkpoint in candidates:
        problem = find_problem(checkpoint, ranks)
        if problem is None:
            # A usable one of another run is an error: an older one would hide the mistake.
            start = ranks.run_on_all(partial(start_from, checkpoint, config, identity, start))
            break
        skipped.append(f"{checkpoint}: {problem}")
    else:
        if candidates:
            # never from step 0, which would overwrite the curve, and in time the checkpoints
            raise AgreedError(
                f"no usable checkpoint: {'; '.join(skipped)}; restore one, set checkpoint.resume "
                "to another one, or remove them to start at step 0"
            )
    if start.checkpoint and ranks.is_first:
        how = "starting with the weights of" if start.weights_only else "resuming from"
        last = f"{how} {start.checkpoint}: step {start.progress.step:,}"
        for line in (*[f"skipping {line}" for line in skipped], last):
            print(printable(line))
    return start


def find_problem(checkpoint: Path, ranks: Ranks) -> str | None:
    """Why a checkpoint cannot be used; None if it can; called by all ranks. Nodes without a shared
    disk have the files of their own ranks only, so each file has to be right on one node.

    First the sizes of all files are checked, by a rank of each node. Then each rank reads the shard
    that it would resume from, and an equal share of further ones. What each node has on a disk of
    its own, and the small files, are shared among the node's ranks.
    """
    inspected = ranks.gather_json(inspect(checkpoint) if ranks.local_rank == 0 else None)
    save_ids, problems = zip(*filter(None, inspected), strict=True)  # of each node
    # sorted, and of the first node: all ranks have to return the same
    for name in sorted(set(problems[0]).intersection(*problems)):
        return f"{name} {problems[0][name]}"
    # parts of two saves of one step, as when a node was replaced, have other weights
    if len(set(save_ids)) > 1:
        return "not all nodes have the same save of it"
    in_part = set().union(*problems)  # what not all nodes have

    def find() -> dict[str, str]:
        files = read_manifest(checkpoint).files
        own = {}
        for i, name in enumerate(files):  # first the shards, in the order of their ranks
            reader, readers = ranks.local_rank, ranks.local_ranks
            if is_shard(name) and name not in in_part:
                reader, readers = ranks.rank, ranks.world_size
            if i % readers == reader and (checkpoint / name).exists():
                own[name] = files[name]
        return find_problems(checkpoint, own, checksums=True)

    for found in ranks.gather_json(ranks.run_on_all(find)):
        for name, problem in found.items():
            return f"{name} {problem}"
    return None


def start_from(checkpoint: Path, config: Config, identity: RunIdentity, fresh: Start) -> Start:
    """The start of a run at a usable checkpoint.

    Args:
        fresh: the start at step 0.

    Raises:
        UserError: the checkpoint is of another run; or checkpoint.resume is in output_dir, where
            it would be ignored once the run has saved.
    """
    settings = config.checkpoint
    given = Path(settings.resume)
    # the parent of "auto" is the working folder
    if given.resolve().parent == checkpoints_folder(config.output_dir).resolve():
        raise UserError(
            f"checkpoint.resume: {given} is in output_dir, whose run goes on from its newest "
            f"checkpoint, {checkpoint.name}; leave it out, or choose another output_dir"
        )
    saved = read_state(checkpoint)
    if settings.weights_only and checkpoint == given:
        # shapes alone would not show another lora_alpha, which scales the adapters
        was = saved.run.settings.get("model.lora")
        now = identity.settings["model.lora"]
        if was and now and was != now:
            raise UserError(
                f"checkpoint.weights_only: {checkpoint} has model.lora: {json.dumps(was)}; keep "
                "it, or export the checkpoint and train the export"
            )
        return replace(fresh, checkpoint=checkpoint, weights_only=True)
    check_resumable(checkpoint, saved.run, identity, settings.allow_plan_change)
    progress = saved.progress
    try:
        rest = continue_plan(fresh.plan, saved.run.plan, progress.plan_start, progress.step)
    except (ArithmeticError, LookupError, ValueError) as error:  # numbers that no run has written
        raise UserError(
            f"{checkpoint / TRAINER_STATE}: the position in the data is none that the run could "
            f"have ({describe(error)}); use another checkpoint"
        ) from error
    # the steps from here on are numbered by the new plan, which the next checkpoint records
    return Start(rest, replace(progress, plan_start=rest.start), checkpoint)


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
    # a hash of the tokenized examples: the same steps would have others
    has_same_data = (saved.plan.version, saved.plan.content) == (now.plan.version, now.plan.content)
    for key, was in saved.settings.items():
        is_planned = key in FOLLOWS_PLAN
        fix = "set --checkpoint.allow_plan_change true for the new one" if is_planned else weights
        # the mean batch, which scales the rate, follows from the data: then that is the cause
        may_differ = is_planned and (allow_plan_change or not has_same_data)
        if was != now.settings.get(key) and not may_differ:
            raise UserError(
                f"{checkpoint}: {key} was {json.dumps(was)}, this run's is "
                f"{json.dumps(now.settings.get(key))}; resume with the old one, or {fix}"
            )
    if not has_same_data:
        raise UserError(
            f"{checkpoint}: the training data, or how often it is repeated, has changed since; "
            f"{weights}"
        )
