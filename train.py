"""One training run: what it is -> its data -> where it starts -> model and engine -> train.

    deepspeed --num_gpus 2 train.py --config recipes/demo.yaml [--section.key value ...]
        [--dry_run]
    deepspeed --hostfile hostfile train.py --config ...
    torchrun --nproc_per_node 2 train.py --config ...

What happens in a step:

1. The plan assigns the step's examples to ranks and micro-steps (zerotrain/data/plan.py).
2. Each rank runs forward and backward on its micro-batches. Each loss is scaled so that the
   accumulated gradient is the gradient of the mean over the step's supervised tokens, weighted
   if the rows have weights.
3. DeepSpeed averages gradients over the ranks: under ZeRO 0 and 1 in the last micro-batch, under
   ZeRO 2 and 3 in each.
4. The optimizer updates once. Under ZeRO 1 and 2 the ranks then gather the updated weights; under
   ZeRO 3 each layer gathers its weights when it runs.

The exit codes are in zerotrain/runtime/errors.py.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from zerotrain.config.parse import check_start, parse_command_line
from zerotrain.runtime.errors import EXIT_FAILURE, EXIT_PREEMPTED, RunFailed, exit_on_error
from zerotrain.runtime.preemption import follow_launcher

if __name__ == "__main__":  # --help, and a mistake, need not wait for the imports below
    follow_launcher()
    COMMAND_LINE = exit_on_error(lambda: parse_command_line(sys.argv[1:]))
    gc.disable()  # collections would take a sixth of the imports' time
    # DeepSpeed imports MLflow if it is installed, which then reports to its makers.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import deepspeed
import torch

from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.masters import spread_masters
from zerotrain.checkpoint.run_folder import (
    METRICS,
    SAVE_NOW,
    STOP,
    checkpoint_name,
    list_complete,
    take_request,
)
from zerotrain.checkpoint.save import Saver
from zerotrain.checkpoint.shards import load_start
from zerotrain.checkpoint.start import find_start
from zerotrain.checkpoint.state import Progress, RunIdentity
from zerotrain.config.schema import Config
from zerotrain.data.data_plan import DataPlan
from zerotrain.data.loader import StepBatch, load_steps
from zerotrain.runtime.hang import HangWatch
from zerotrain.runtime.process_group import process_group
from zerotrain.runtime.progress import show_rows
from zerotrain.runtime.ranks import Ranks
from zerotrain.tracking.console import quieten_libraries
from zerotrain.tracking.destinations import open_metrics
from zerotrain.tracking.metrics import Metrics
from zerotrain.tracking.startup import startup_table, write_resolved_configs
from zerotrain.tracking.steps import PhaseTimer, StepReporter
from zerotrain.training.engine import build_engine, check_engine
from zerotrain.training.evaluate import HeldOutSets, Preempted
from zerotrain.training.guard import (
    MAX_SKIPPED_IN_A_ROW,
    SPIKE_WINDOW,
    apply_update,
    cure,
    is_bad_step,
    spike_limit,
)
from zerotrain.training.loss import SupervisedLoss
from zerotrain.training.optimizer import Schedule, make_schedule
from zerotrain.training.out_of_memory import describe_micro_batch, explain_out_of_memory
from zerotrain.training.replay import micro_steps
from zerotrain.training.setup import open_data, open_run_on_all_ranks

FINISHED = "finished"
PREEMPTED = "preempted"


@dataclass(frozen=True)
class Training:
    """What the training loop uses."""

    # fixed
    config: Config
    ranks: Ranks
    plan: DataPlan
    schedule: Schedule
    # what acts
    engine: deepspeed.DeepSpeedEngine
    loss: SupervisedLoss
    held_out: HeldOutSets
    saver: Saver
    metrics: Metrics
    reporter: StepReporter
    timer: PhaseTimer
    hang_watch: HangWatch


def main(config: Config, dry_run: bool = False) -> None:
    """Train; or, with dry_run, print the start-up table, stop, and write nothing."""
    job = config.distributed
    with ExitStack() as stack:
        world = stack.enter_context(
            process_group(job.timeout_seconds, job.preempt_grace_seconds, job.world_size)
        )
        quieten_libraries(world.is_first)

        # 1. What the run is: tokenizer, architecture, precision, the merged DeepSpeed config.
        world.run_on_all(lambda: check_start(config))
        setup, tokenizer, ranks = open_run_on_all_ranks(config, world)

        # 2. Its data: token caches, which all ranks map into memory.
        setup, data = open_data(setup, tokenizer, ranks)
        config = setup.config  # from here on as resolved
        # Exports serve the template with which the rows were rendered.
        tokenizer.chat_template = data.plan.data.meta.chat_template

        # 3. Where it starts: agreed on by all ranks before anything is loaded or written.
        identity = RunIdentity.of(setup, data.plan, data.eval_plans)
        lock = RunLock(Path(config.output_dir))
        if not dry_run:
            ranks.run_on_first(lambda: stack.enter_context(lock))
        start = find_start(config, identity, data.plan, ranks)
        schedule = make_schedule(config.train, start.plan)
        if ranks.is_first:
            show_rows(startup_table(setup, start, data.eval_plans, schedule))
        if dry_run:
            return

        # 4. Model and engine, in the state that the run starts from.
        engine, loss, model_base = build_engine(setup, tokenizer, start.plan, ranks)
        ranks.run_on_first(lambda: write_resolved_configs(setup))
        # Checkpoints need not hold the frozen weights that are in the files of `base`.
        base = load_start(engine, start, ranks, model_base, config.train.seed)
        if config.train.masters == "spread" and start.checkpoint is None:
            ranks.run_on_all(lambda: spread_masters(engine, config, ranks))
        # Counts of another model are refused here, and not in the first step.
        ranks.run_on_all(lambda: loss.router_loss.begin(start.progress.expert_counts))
        check_engine(engine, loss, setup, tokenizer, start.plan, ranks)

        # 5. Train.
        metrics = open_metrics(
            config, start.progress, schedule.total_steps, identity.held_out, ranks, lock
        )
        held_out = HeldOutSets(
            plans=data.eval_plans,
            questions=data.questions,
            max_new_tokens=config.eval.max_new_tokens,
            tokenizer=tokenizer,
            engine=engine,
            loss=loss,
            ranks=ranks,
        )
        saver = Saver(
            engine=engine,
            base=base,
            tokenizer=tokenizer,
            identity=identity,
            settings=config.checkpoint,
            ranks=ranks,
            lock=lock,
            started_from=start.checkpoint,
            log=metrics.log,
        )
        run = Training(
            config=config,
            ranks=ranks,
            plan=start.plan,
            schedule=schedule,
            engine=engine,
            loss=loss,
            held_out=held_out,
            saver=saver,
            metrics=metrics,
            reporter=StepReporter(setup, start.plan, metrics, ranks),
            timer=PhaseTimer(ranks.device),
            hang_watch=HangWatch(job.timeout_seconds, config.output_dir),
        )
        exit_code = run_to_its_end(run, start.progress)
    if exit_code:
        sys.exit(exit_code)


def run_to_its_end(run: Training, progress: Progress) -> int:
    """Train, print how training ended, and return the exit code."""
    exit_code = EXIT_FAILURE
    line = "interrupted"
    try:
        with run.ranks.stop.deferred():
            progress, ending = train(run, progress)
        exit_code = EXIT_PREEMPTED if ending == PREEMPTED else 0
        line = f"{ending}: step {progress.step:,}, {progress.examples:,} examples"
    finally:
        run.hang_watch.close()
        run.metrics.close(exit_code)
        if run.ranks.is_first:
            with suppress(OSError):  # the folder is out of reach
                last = max(list_complete(run.saver.folder), default="none")
                print(f"{line}; last checkpoint: {last}")
                if exit_code == 0:
                    print_best(progress, run.saver.folder)
    return exit_code


def print_best(progress: Progress, folder: Path) -> None:
    """Print which step has the lowest held-out loss, and how to export its checkpoint in `folder`.
    Print nothing if it is the last step.
    """
    best = progress.best
    if best is not None and best.step < progress.step:
        checkpoint = folder / checkpoint_name(best.step)
        then = f"to export it: python -m scripts.export {checkpoint} {folder.with_name('best')}"
        if not checkpoint.exists():
            then = "it has no checkpoint: checkpoint.keep_best keeps the best one after step 0"
        print(f"lowest eval_loss: {best.value:.4f}, after step {best.step:,}; {then}")


def train(run: Training, progress: Progress) -> tuple[Progress, str]:
    """Take optimizer steps from `progress` to the last one, with evaluations and saves in between.

    Returns:
        The progress after the last step taken, and how training ended: FINISHED, PREEMPTED, or
        "stopped by" its user.
    """
    ranks = run.ranks
    steps = run.schedule.total_steps
    batches = load_steps(run.plan, ranks.data_rank, progress.step, steps, ranks.sequence_part)
    saved = progress
    ending = ""  # why training ends before its last step
    save = False  # whether a save is due
    while True:
        # Before step 1 and after a step; and first of all if a preempted run has left it undone.
        if is_evaluation_due(run, progress) and not ending:
            progress, ending = evaluate(run, progress)
            save = save or (run.config.checkpoint.keep_best and progress.is_best)
        is_last = progress.step >= steps
        if (save or is_last or ending) and progress.step > 0 and progress != saved:
            run.hang_watch.restart()
            run.saver.save(progress)
            saved = progress
            if not ending and ranks.any_preempted():  # during the save
                ending = PREEMPTED
        if is_last or ending:
            break
        progress = take_step(run, batches, progress)
        ending, save = agree_on_requests(run, progress.step)
    # An asynchronous save: a run ends when its checkpoint is complete.
    while run.saver.finish():
        run.saver.save(progress)
    if is_last and not is_evaluation_due(run, progress):
        ending = FINISHED
    return progress, ending


def take_step(run: Training, batches: Iterator[StepBatch], progress: Progress) -> Progress:
    """Take one optimizer step, measure and report it, and return the progress after it.

    Raises:
        RunFailed: the loss has been bad for too long.
    """
    run.hang_watch.restart()
    run.timer.mark("step")
    batch = next(batches)
    run.timer.mark("data")
    lr = run.schedule.rate(batch.global_step)
    for group in run.engine.basic_optimizer.param_groups:
        group["lr"] = lr
    examples = batch.plan.micro_batches[0][run.ranks.data_rank]
    with explain_out_of_memory(describe_micro_batch, run.plan, examples):
        limit = spike_limit(progress.norms, run.config.train.skip_spikes)
        try:
            values, losses, counts = train_step(run, batch, limit, progress.expert_counts)
        except RunFailed:
            run.saver.finish()
            raise
    phases = run.timer.take()  # Waits for the device. Rank 0 reports its own.
    values |= {"lr": lr, "step_seconds": sum(phases.values()), **phases}
    is_bad = is_bad_step(values, run.engine)
    in_a_row = progress.skipped_in_a_row + is_bad if values["update_skipped"] else 0
    progress = replace(
        progress,
        step=batch.global_step + 1,
        examples=progress.examples + batch.plan.examples,
        tokens=progress.tokens + batch.plan.tokens,
        eval_loss=None,
        skipped_in_a_row=in_a_row,
        norms=(*progress.norms, values["grad_norm"])[-SPIKE_WINDOW:],
        expert_counts=progress.expert_counts if values["update_skipped"] else counts,
    )
    run.reporter.report(batch, values, progress)
    if is_bad:
        reason = f"loss {values['loss']:.4f}, gradient norm {values['grad_norm']}"
        run.reporter.report_skipped(batch, losses, reason)
        if in_a_row >= MAX_SKIPPED_IN_A_ROW:
            run.saver.finish()
            raise RunFailed(
                f"step {progress.step:,}: {reason}; {in_a_row} steps in a row were "
                f"skipped. Check the rows listed in {METRICS}. Start in another output_dir with "
                f"{cure(values, run.engine)}. To begin there at an earlier checkpoint, name it in "
                "checkpoint.resume, and set checkpoint.allow_plan_change to true"
            )
    return progress


def train_step(
    run: Training, batch: StepBatch, limit: float, expert_counts: tuple[int, ...]
) -> tuple[dict[str, float], torch.Tensor, tuple[int, ...]]:
    """Run forward, backward and update on this rank's share of the step.

    DeepSpeed averages gradients over W ranks; under tensor parallelism, over W groups of ranks that
    share a micro-batch. The plan knows N, the step's supervised tokens over all ranks, or the sum
    of their weights. Backward on
    sum_CE * W / N in every micro-batch then gives exactly the gradient of the mean over tokens, for
    any W and any number of micro-steps. The router loss is summed in the same way, with the number
    of real tokens in place of N: see zerotrain/training/router_loss.py.

    Args:
        limit: the gradient norm above which the update is skipped.
        expert_counts: choices of each expert in the last step whose update was applied.

    Returns:
        The step's values: loss, in nats per supervised token of the global batch; source_loss/NAME,
        the same of each source, if there are several; grad_norm, before clipping; update_skipped,
        which is also true while fp16 looks for its loss scale; and router_loss of mixtures of
        experts, without its coefficient. The losses of this rank's micro-steps, float64
        [2, micro-steps]. And how often each expert was chosen in this step.
    """
    engine = run.engine
    loss_sum = run.loss
    router_loss = loss_sum.router_loss
    ranks = run.ranks
    timer = run.timer
    weight = float(batch.plan.weights.sum())
    scale = ranks.replicas / weight
    router_scale = router_loss.coefficient * ranks.replicas / batch.plan.tokens
    # Cross entropy and router loss of each micro-step, on the device: no micro-step waits for them.
    losses = torch.zeros(2, len(batch.micro_batches), dtype=torch.float64, device=ranks.device)
    names = run.plan.source_names
    every = run.config.train.replay_every
    for i, is_last, watch in micro_steps(batch, every, engine.module, ranks):
        if i == 0:  # also after a replay
            loss_sum.by_source = losses.new_zeros(len(names))
            router_loss.begin(expert_counts)
        micro_batch = batch.micro_batches[i]
        # DeepSpeed cannot count: the number of micro-steps differs between steps.
        engine.set_gradient_accumulation_boundary(is_last)
        cross_entropy, router = loss_sum(engine, micro_batch, at_head=lambda: timer.mark("forward"))
        loss = cross_entropy * scale + router * router_scale
        losses[:, i] = torch.stack([cross_entropy, router]).detach()
        timer.mark("head")
        with watch:
            engine.backward(loss, scale_wrt_gas=False)
        timer.mark("backward")
    # Calls engine.step(), which clips, updates and zeroes the gradients.
    grad_norm, is_applied = apply_update(engine, run.config.train.gradient_clipping, limit)
    # The ranks of a tensor-parallel group have the same losses.
    sums = losses.sum(1), loss_sum.by_source, router_loss.tally[0].to(ranks.device)
    loss_sum.by_source = None  # evaluations add nothing
    totals = (ranks.sum(torch.cat(sums)) / ranks.tensor).split([*map(len, sums)])
    (cross_entropy, router), by_source, counts = (total.tolist() for total in totals)
    timer.mark("optimizer")
    values = {"loss": cross_entropy / weight, "grad_norm": grad_norm}
    values["update_skipped"] = not is_applied
    if router_loss.coefficient:
        values["router_loss"] = router / batch.plan.tokens
    for name, total, its_weight in zip(names, by_source, batch.plan.weights, strict=True):
        if its_weight > 0 and len(names) > 1:  # a step may have no row of a source
            values[f"source_loss/{name}"] = total / its_weight
    return values, losses, tuple(map(int, counts))


def agree_on_requests(run: Training, step: int) -> tuple[str, bool]:
    """Agree on what users and schedulers have asked for since the last step, and finish an
    asynchronous save that all ranks have written.

    Returns:
        "stopped by OUTPUT_DIR/stop" if that file was created, PREEMPTED if a rank was, or ""; and
        whether a save is due or OUTPUT_DIR/save_now was created. The same on all ranks.

    Raises:
        UserError: another run has taken over the output folder.
    """
    ranks = run.ranks
    saver = run.saver
    lock = saver.lock
    is_lost = lock.is_lost()
    stop = save = False
    if ranks.is_first and not is_lost:
        stop = take_request(lock.folder, STOP)
        # Rank 0 decides for all, because a save may be due by its clock.
        save = take_request(lock.folder, SAVE_NOW) or saver.is_due(step)
    preempted = ranks.stop.signal is not None
    # One collective for all: stopping and saving take every rank, at the same step.
    stop, preempted, save, written, lost = ranks.count(
        stop, preempted, save, saver.is_written, is_lost
    )
    if lost:
        ranks.run_on_first(lock.check)
    if written == ranks.world_size:
        save += saver.finish()
    if stop:
        return f"stopped by {lock.folder / STOP}", save > 0
    return PREEMPTED if preempted else "", save > 0


# --------------------------------------------------------------------------------------------------
# Evaluation


def is_evaluation_due(run: Training, progress: Progress) -> bool:
    """Whether the config asks for an evaluation at this step that has not been done yet."""
    if not run.held_out.plans or progress.eval_loss is not None:
        return False
    every = run.config.eval.every_steps
    return progress.step == run.schedule.total_steps or (every > 0 and progress.step % every == 0)


def evaluate(run: Training, progress: Progress) -> tuple[Progress, str]:
    """Evaluate and report.

    Returns:
        The progress with what was measured, and "". If a rank was preempted meanwhile, nothing was
        measured: the same progress, and PREEMPTED. A resumed run starts with the evaluation.
    """
    run.hang_watch.restart()
    began = time.perf_counter()
    try:
        values, answers = run.held_out.measure()
    except Preempted:
        return progress, PREEMPTED
    progress = progress.evaluated(next(iter(values.values())))  # The first set decides.
    values = {"step": progress.step, "eval_loss": progress.eval_loss, **values}
    run.metrics.log("eval", values | {"eval_seconds": time.perf_counter() - began})
    for name, rows in answers.items():
        run.metrics.log("generations", {"step": progress.step, "set": name, "rows": rows})
    return progress, ""


if __name__ == "__main__":
    gc.freeze()  # what is imported stays; no later collection looks through it
    gc.enable()
    exit_on_error(lambda: main(COMMAND_LINE.config, COMMAND_LINE.dry_run))
