"""Where a run starts: at step 0, with the weights of a checkpoint, or resumed from one."""

import json
import uuid
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from textwrap import shorten

from zerotrain.checkpoint.manifest import find_problems, inspect, read_manifest
from zerotrain.checkpoint.run_folder import (
    TRAINER_STATE,
    checkpoints_folder,
    list_checkpoints,
    refuse_links,
)
from zerotrain.checkpoint.state import FOLLOWS_PLAN, Progress, RunIdentity, read_state
from zerotrain.config.schema import Config
from zerotrain.data.data_plan import DataPlan, continue_plan
from zerotrain.runtime.errors import AgreedError, UserError, describe
from zerotrain.runtime.progress import print_line
from zerotrain.runtime.ranks import Ranks


@dataclass(frozen=True)
class Start:
    """Where a run starts."""

    plan: DataPlan
    """The training plan from here on."""
    progress: Progress
    checkpoint: Path | None = None
    """Where weights come from; None: the model's files, or random initialization."""
    weights_only: bool = False
    """Whether the run takes only the weights of the checkpoint, and starts at step 0."""


def find_start(config: Config, identity: RunIdentity, plan: DataPlan, ranks: Ranks) -> Start:
    """Decide where the run starts, for all ranks, before anything is loaded or written: at the
    newest usable checkpoint of output_dir, or else at checkpoint.resume.

    Args:
        plan: this run's plan, as if it started at step 0.

    Raises:
        UserError: there are checkpoints and none is usable, or they belong to another run, or the
            rest of the epoch cannot be determined.
    """
    folder = checkpoints_folder(config.output_dir)
    ranks.run_on_all(lambda: refuse_links(config.output_dir))
    # A node that has joined may have a disk of its own, and must try the same checkpoints.
    names = ranks.gather_json([path.name for path in list_checkpoints(folder)])
    candidates = [folder / name for name in sorted(set(chain(*names)), reverse=True)]
    if config.checkpoint.resume != "auto":
        # last, so that the same command later continues from output_dir's own checkpoints
        candidates.append(Path(config.checkpoint.resume))
    # one id for all ranks, because every rank keeps the progress that rank 0 saves
    fresh = Start(plan, Progress(wandb_id=ranks.gather_json(uuid.uuid4().hex[:8])[0]))
    skipped = []
    for checkpoint in candidates:
        if problem := find_problem(checkpoint, ranks):
            skipped.append(f"{checkpoint}: {problem}")
            print_line(f"skipping {skipped[-1]}")
            continue
        # A usable one of another run is an error: an older one would hide the mistake.
        start = ranks.run_on_all(partial(start_from, checkpoint, config, identity, fresh))
        how = "starting with the weights of" if start.weights_only else "resuming from"
        print_line(f"{how} {checkpoint}: step {start.progress.step:,}")
        return start
    if candidates:
        # Step 0 would overwrite the curve, and in time the checkpoints.
        raise AgreedError(
            f"no usable checkpoint: {'; '.join(skipped)}; restore one, set checkpoint.resume to "
            "another, or start at step 0: in another output_dir, without checkpoint.resume"
        )
    return fresh


def find_problem(checkpoint: Path, ranks: Ranks) -> str | None:
    """Return why a checkpoint cannot be used; None if it can. All ranks call it.

    First a rank of each node checks the sizes of all files. Then each rank reads the shard that it
    would resume from, and an equal share of the other files. Nodes without a shared disk have only
    the files of their own ranks, so each file has to be right on one node.
    """
    inspected = ranks.gather_json(inspect(checkpoint) if ranks.local_rank == 0 else None)
    save_ids, problems = zip(*filter(None, inspected), strict=True)  # one of each node
    on_no_node = set(problems[0]).intersection(*problems)
    if on_no_node:
        name = min(on_no_node)  # all ranks have to return the same
        return f"{name} {problems[0][name]}"
    # Two saves of one step have different weights. They mix when a node is replaced.
    if len(set(save_ids)) > 1:
        return "not all nodes have the same save of it"
    on_some_nodes = {*chain(*problems)}

    def find() -> dict[str, str]:
        files = read_manifest(checkpoint).files
        own = {}
        for i, name in enumerate(files):  # the shards come first, in the order of their ranks
            reader, readers = ranks.rank, ranks.world_size
            if name in on_some_nodes:
                reader, readers = ranks.local_rank, ranks.local_ranks
            if i % readers == reader and (checkpoint / name).exists():
                own[name] = files[name]
        return find_problems(checkpoint, own, checksums=True)

    found = chain(*(part.items() for part in ranks.gather_json(ranks.run_on_all(find))))
    return next((f"{name} {problem}" for name, problem in found), None)


def start_from(checkpoint: Path, config: Config, identity: RunIdentity, fresh: Start) -> Start:
    """Return the start of a run at a usable checkpoint.

    Args:
        fresh: the start at step 0.

    Raises:
        UserError: the checkpoint belongs to another run; or checkpoint.resume is in output_dir,
            where it would be ignored once the run has saved.
    """
    settings = config.checkpoint
    given = Path(settings.resume)
    # the parent of "auto" is the working folder
    if given.resolve().parent == checkpoints_folder(config.output_dir).resolve():
        raise UserError(
            f"checkpoint.resume: {given} is in output_dir, whose run continues from its newest "
            f"checkpoint, {checkpoint.name}; leave it out, or choose another output_dir"
        )
    saved = read_state(checkpoint)
    if settings.weights_only and checkpoint == given:
        # Shapes alone would not show a different lora_alpha, which scales the adapters.
        was = saved.run.settings.get("model.lora")
        now = identity.settings["model.lora"]
        if was and now and was != now:
            raise UserError(
                f"checkpoint.weights_only: {checkpoint} has model.lora: {json.dumps(was)}; keep "
                "it, or set model.name_or_path to an export of it, without checkpoint.resume"
            )
        return replace(fresh, checkpoint=checkpoint, weights_only=True)
    check_resumable(checkpoint, saved.run, identity, settings.allow_plan_change)
    progress = saved.progress
    try:
        rest = continue_plan(fresh.plan, saved.run.plan, progress.plan_start, progress.step)
    except (ArithmeticError, LookupError, ValueError) as error:  # numbers that no run has written
        raise UserError(
            f"{checkpoint / TRAINER_STATE}: progress: impossible position in the data "
            f"({describe(error)}); use another checkpoint"
        ) from error
    # The new plan numbers the steps from here on, and the next checkpoint records it.
    progress = keep_evaluations(saved.run, identity, progress)
    return Start(rest, replace(progress, plan_start=rest.start), checkpoint)


def keep_evaluations(saved: RunIdentity, now: RunIdentity, progress: Progress) -> Progress:
    """Return the progress; without its evaluations, which a line then says, if the first held-out
    set has other examples than before.
    """
    if saved.held_out is None:
        return progress
    for name, content in now.held_out.items():
        if saved.held_out.get(name, content) != content:
            print_line(f"held-out set {name}: its examples have changed, reports begin again")
    was, first = (next(iter(run.held_out.values()), None) for run in (saved, now))
    if was == first:
        return progress
    if best := progress.best:
        print_line(
            "the first held-out set has changed: the search for the lowest eval_loss begins again; "
            f"the checkpoint of the last one ({best.value:.4f}, step {best.step:,}) is no longer "
            "kept for it: copy it, or restore data.eval_sources"
        )
    return replace(progress, eval_loss=None, best=None)


def check_resumable(
    checkpoint: Path, saved: RunIdentity, now: RunIdentity, allow_plan_change: bool
) -> None:
    """Check that a checkpoint continues the same run.

    Args:
        allow_plan_change: allow another global batch and learning-rate schedule.

    Raises:
        UserError: names what differs.
    """
    weights = (
        "start a new run in another output_dir (from its weights: --checkpoint.weights_only true "
        f"--checkpoint.resume {checkpoint}; if model.lora differs, from its export)"
    )
    if saved.plan.version != now.plan.version:
        raise UserError(
            f"{checkpoint}: has version {saved.plan.version} of plans and checkpoints, this code "
            f"has {now.plan.version}; resume with code of that version, or {weights}"
        )
    check_model(checkpoint, saved, now, weights)
    # `content` is a hash of the tokenized examples.
    has_other_data = saved.plan.content != now.plan.content
    for key, was in saved.settings.items():
        is_planned = key in FOLLOWS_PLAN
        fix = "set --checkpoint.allow_plan_change true for the new one" if is_planned else weights
        # The data determine the mean batch, which scales the rate: then they are the cause.
        may_differ = is_planned and (allow_plan_change or has_other_data)
        if was != now.settings.get(key) and not may_differ:
            raise UserError(
                f"{checkpoint}: {key}: is {json.dumps(now.settings.get(key))}, but the checkpoint "
                f"has {json.dumps(was)}; restore that, or {fix}"
            )
    if has_other_data:
        raise UserError(
            f"{checkpoint}: data.train_sources: the rows or their repeats have changed; {weights}"
        )
    if saved.spared is None and now.spared and now.settings["train.weight_decay"]:
        print_line(
            f"train.weight_decay: no longer applies to {now.spared} tensors (biases of experts, "
            f"A_log ...), which the version that saved {checkpoint} decayed"
        )


def check_model(checkpoint: Path, saved: RunIdentity, now: RunIdentity, weights: str) -> None:
    """Check that a checkpoint has this run's architecture, whose numbers may differ although all
    shapes are the same.

    Args:
        weights: the fix if the model cannot be restored.

    Raises:
        UserError: names the first key of config.json that differs.
    """
    has_moved = "@" in saved.model and saved.model != now.model
    restore = f"set model.name_or_path to {saved.model}" if has_moved else "restore it"
    # Keys that only one of the two has come from another version of transformers.
    for key in [key for key in saved.model_config if key in now.model_config]:
        was, found = (shorten(json.dumps(run.model_config[key]), 200) for run in (saved, now))
        if saved.model_config[key] != now.model_config[key]:
            raise UserError(
                f"{checkpoint}: model.name_or_path: {key} is {found} in config.json, but the "
                f"checkpoint has {was}; {restore}, or {weights}"
            )
    if has_moved:
        print_line(
            f"model.name_or_path: is {now.model}, but the run began with {saved.model}; both have "
            "the same architecture, and the run keeps the weights of the checkpoint"
        )
