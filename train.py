"""One training run: what it is -> its data -> where it starts -> model and engine -> train.

    deepspeed --num_gpus 2 train.py --config recipes/demo.yaml [--section.key value ...] [--dry_run]
    deepspeed --hostfile hostfile train.py --config ...
    torchrun --nproc_per_node 2 train.py --config ...

Each step: the plan assigns the step's examples to ranks and micro-steps (data/plan.py). Each rank
runs forward and backward on its micro-batches, with each loss scaled so that the accumulated
gradient is that of the mean over the step's supervised tokens. DeepSpeed averages gradients over
the ranks, under ZeRO 0 and 1 once, in the last micro-batch, and under ZeRO 2 and 3 in every
micro-batch. Then the optimizer updates once. Under ZeRO 1 and 2 the ranks gather the updated
weights; under ZeRO 3 each layer is gathered when it runs.

Exit code: 0 the run is finished; 2 a mistake in the input, reported in one line; 75 preempted by
SIGTERM or SIGUSR1 and saved, the same command resumes; anything else is a failure.
"""

import gc
import sys

from data.check_sources import parse_with_sources
from runtime.errors import EXIT_PREEMPTED, exit_on_error

if __name__ == "__main__":
    # Before the imports below, which take seconds, so that --help and mistakes need not wait.
    COMMAND_LINE = exit_on_error(lambda: parse_with_sources(sys.argv[1:]))
    gc.disable()  # the imports create 780,000 objects that stay; collecting them takes 1 s of 5

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import deepspeed
import torch

from checkpoint.nodes import Nodes, find_nodes
from checkpoint.run_folder import flight_records_folder, take_requests
from checkpoint.save import Saver
from checkpoint.save_interval import SaveInterval, count_hosts
from checkpoint.start import Start, find_start, load_start
from checkpoint.state import Progress, RunIdentity, TrainerState
from config.schema import Config
from data.data_plan import DataPlan, total_steps
from data.loader import StepBatch, load_steps
from model.engine import build_engine, check_engine
from model.guard import Guard
from model.loss import SupervisedLoss
from model.optimizer import Schedule, set_learning_rate
from model.setup import Setup, describe_run, load_plans
from runtime.agreement import any_rank_preempted, count_ranks, run_on_first_rank, sum_over_ranks
from runtime.process_group import Ranks, apply_timeout, process_group
from runtime.world_size import check_world_size
from tracking.console import quieten_libraries
from tracking.evaluation import Evaluation
from tracking.incidents import report_problem
from tracking.metrics import Metrics, open_metrics
from tracking.startup import show_startup, write_resolved_configs
from tracking.steps import StepRecorder


@dataclass(frozen=True)
class Run:
    """What the training loop uses."""

    config: Config
    identity: RunIdentity
    ranks: Ranks
    train_plan: DataPlan
    total_steps: int
    schedule: Schedule
    engine: deepspeed.DeepSpeedEngine
    loss: SupervisedLoss
    guard: Guard
    metrics: Metrics
    recorder: StepRecorder
    evaluation: Evaluation
    saver: Saver
    interval: SaveInterval


def main(config: Config, dry_run: bool) -> None:
    check_world_size(config.launch.world_size)
    with ExitStack() as stack:
        ranks = stack.enter_context(
            process_group(
                config.distributed.timeout_seconds,
                config.distributed.data_timeout_seconds,
                config.launch.preempt_grace_seconds,
                flight_records_folder(config.output_dir),
            )
        )
        quieten_libraries(ranks.is_first)

        # 1. What the run is: tokenizer, architecture, precision, the merged DeepSpeed config.
        setup = describe_run(config, ranks, dry_run)

        # 2. Its data: tokenized by the first rank of each machine, memory-mapped by all ranks.
        train_plan, eval_plans = load_plans(setup, ranks)
        setup = setup.with_mean_batch(train_plan.mean_batch)
        identity = RunIdentity.of(setup, train_plan)
        run_on_first_rank(
            ranks, lambda: show_startup(setup, train_plan, eval_plans, identity, ranks)
        )
        if dry_run:
            return

        # 3. Where it starts: agreed on by all ranks before anything is loaded or written.
        output_dir = Path(config.output_dir)
        nodes = find_nodes(ranks, output_dir, config.checkpoint.node_local)
        nodes.run_on_each_node(lambda: stack.enter_context(nodes.lock))
        start = find_start(setup.config, identity, train_plan, nodes)
        plans = (train_plan, *eval_plans.values())
        run_on_first_rank(ranks, lambda: write_resolved_configs(setup, plans))

        # 4. Model and engine, in the state that the run starts from.
        run = build_run(setup, identity, start, eval_plans, nodes)

        # 5. Train.
        exit_code = train_to_the_end(run, start.progress)
    if exit_code:
        sys.exit(exit_code)


def build_run(
    setup: Setup, identity: RunIdentity, start: Start, eval_plans: dict[str, DataPlan], nodes: Nodes
) -> Run:
    """The engine, ready for the first step after `start`, with metrics and checkpoint saver.

    Raises:
        UserError: the weights cannot be loaded, or the model cannot be trained with this config.
    """
    config, ranks = setup.config, nodes.ranks
    engine, loss = build_engine(setup, start.plan, ranks)
    apply_timeout(config.distributed.timeout_seconds, ranks)
    load_start(engine, start, config, nodes)
    check_engine(engine, loss, setup, start.plan, ranks)
    steps = total_steps(config.train, start.plan)
    interval = SaveInterval(config.checkpoint, count_hosts(ranks), start.progress.save_seconds)
    metrics = open_metrics(config, start.progress, steps, nodes)
    if ranks.is_first and start.saved is not None and config.checkpoint.every:
        print(f"saving {interval.text()}", flush=True)
    return Run(
        config=config,
        identity=replace(identity, schedule=start.schedule),
        ranks=ranks,
        train_plan=start.plan,
        total_steps=steps,
        schedule=start.schedule,
        engine=engine,
        loss=loss,
        guard=Guard(config.guard, start.progress.guard, ranks),
        metrics=metrics,
        recorder=StepRecorder(setup, start.plan, engine, metrics, ranks),
        evaluation=Evaluation(
            config, eval_plans, setup.tokenizer, engine, loss, ranks, metrics, steps
        ),
        saver=Saver(engine, setup.tokenizer, nodes, config.checkpoint, start.checkpoint),
        interval=interval,
    )


def train_to_the_end(run: Run, progress: Progress) -> int:
    """Train, report how training ended, and return the exit code."""
    exit_code = 1
    try:
        with run.ranks.stop.deferred(), run.recorder:
            progress = replace(progress, wandb_id=run.metrics.wandb_id or progress.wandb_id)
            progress, ending = train(run, progress)
        exit_code = EXIT_PREEMPTED if ending == "preempted" else 0
    finally:
        run.saver.stop()
        run.metrics.close(exit_code)
    if run.ranks.is_first:
        saved = "saved" if progress.step else "nothing to save yet"
        done = f"{progress.examples:,} examples, {progress.tokens:,} tokens"
        how = ending if ending == "finished" else f"{ending}, {saved}"
        lines = run.evaluation.ending(progress) if ending == "finished" else []
        print("\n".join([f"{how}: step {progress.step:,}, {done}", *lines]), flush=True)
    return exit_code


def train(run: Run, progress: Progress) -> tuple[Progress, str]:
    """Optimizer steps from `progress` to the last one, with evaluations and saves in between.

    Returns:
        The progress after the last step taken, which is saved, and how the run has ended: finished,
        preempted, or stopped by its user.
    """
    evaluation = run.evaluation
    if evaluation.is_due(progress):  # at the start, or not done by a preempted run
        progress, preempted = evaluation.run(progress)
        if preempted:
            return progress, "preempted"
        if evaluation.asks_for_a_save(progress):
            save_checkpoint(run, progress, step_seconds=0.0)
    if evaluation.stop_reason(progress):  # of a run that is started again
        run.saver.close()
        return progress, "finished"
    ranks, pin_memory, stopped = run.ranks, run.ranks.device.type == "cuda", False
    batches = load_steps(run.train_plan, ranks.rank, progress.step, run.total_steps, pin_memory)
    for batch in run.recorder.waiting(batches, progress.step):
        lr = run.schedule.rate(batch.global_step)
        set_learning_rate(run.engine.basic_optimizer, lr)
        values = {"lr": lr, **train_step(run.engine, run.loss, batch, ranks, run.guard)}
        progress = replace(
            progress,
            step=batch.global_step + 1,
            examples=progress.examples + batch.plan.examples,
            tokens=progress.tokens + batch.plan.tokens,
            eval_loss=None,
            eval_values={},
        )
        step_seconds = run.recorder.finished(batch, values, progress)
        report_problem(run.guard, batch, run.train_plan.data, run.metrics, run.saver)

        stopped, preempted, save, is_written = agree_on_requests(run, progress.step)
        if evaluation.is_due(progress) and not (stopped or preempted):
            progress, preempted = evaluation.run(progress)
        is_last = evaluation.is_last(progress)
        save = save or evaluation.asks_for_a_save(progress)
        if is_written:  # the files of an asynchronous save
            run.saver.finish()
        if is_last or stopped or preempted or save:
            save_checkpoint(run, progress, step_seconds)
            preempted = preempted or any_rank_preempted(ranks)  # during the save
        if is_last or stopped or preempted:
            break
    run.saver.close()
    if evaluation.is_last(progress) and not evaluation.is_due(progress):
        return progress, "finished"
    return progress, "stopped" if stopped else "preempted"


def train_step(
    engine: deepspeed.DeepSpeedEngine,
    loss_sum: SupervisedLoss,
    batch: StepBatch,
    ranks: Ranks,
    guard: Guard,
) -> dict[str, float]:
    """One optimizer step.

    DeepSpeed averages gradients over W ranks. With N the supervised tokens of the step over all
    ranks, known from the plan, backward on sum_CE * W / N in every micro-batch gives exactly the
    gradient of the mean over tokens, for any W and number of micro-steps. The router loss, one
    value per micro-batch, is averaged in the same way, weighted by tokens without padding.
    Nothing here waits for the device before the update, except packed examples, once per
    micro-batch, for their bounds.

    Returns:
        loss, nats per supervised token of the global batch; grad_norm, before clipping; for
        mixtures of experts also their load and router_loss, without its coefficient.
    """
    scale = ranks.world_size / batch.plan.supervised_tokens
    router_scale = loss_sum.router_coefficient * ranks.world_size / batch.plan.tokens
    # cross entropy and router loss of each micro-step
    losses = torch.zeros(2, len(batch.micro_batches), dtype=torch.float64, device=ranks.device)
    router = None
    for i, micro_batch in enumerate(batch.micro_batches):
        # Set explicitly, because the number of micro-steps differs between steps.
        engine.set_gradient_accumulation_boundary(i == len(batch.micro_batches) - 1)
        cross_entropy, router = loss_sum(engine, micro_batch.to(ranks.device))
        loss = cross_entropy * scale
        losses[0, i] = cross_entropy.detach()
        if router is not None:
            loss = loss + router * router_scale
            losses[1, i] = router.detach()
        engine.backward(loss, scale_wrt_gas=False)
    loss, router_loss = sum_over_ranks(losses.sum(1)).tolist()
    loss /= batch.plan.supervised_tokens
    grad_norm = guard.update(engine, loss, losses)  # clips, updates, zeroes the gradients
    values = {"loss": loss, "grad_norm": grad_norm, **loss_sum.expert_load.metrics()}
    return values if router is None else {**values, "router_loss": router_loss / batch.plan.tokens}


def agree_on_requests(run: Run, step: int) -> tuple[bool, bool, bool, bool]:
    """(stop, preempted, save, whether a pending save is written), the same on all ranks.

    Stop: OUTPUT_DIR/stop was created. Preempted: any rank was. Save: OUTPUT_DIR/save_now was
    created, or a save is due. Raises UserError if another run has taken over the output folder.
    """
    ranks, is_lost = run.ranks, run.saver.nodes.lock.is_lost()
    stop = save = profile = False
    if ranks.is_first and not is_lost:
        stop, save, profile = take_requests(run.config.output_dir)
        save = save or run.interval.is_due(step)
    preempted = ranks.stop.signal is not None
    stop, preempted, save, profile, written, lost = count_ranks(
        ranks, stop, preempted, save, profile, run.saver.is_written, is_lost
    )
    if profile:
        run.recorder.profiler.request()
    if lost:
        run.saver.nodes.run_on_each_node(run.saver.nodes.lock.check)
    return stop > 0, preempted > 0, save > 0, written == ranks.world_size


def save_checkpoint(run: Run, progress: Progress, step_seconds: float) -> None:
    """Save, and report for how long training was blocked."""
    began = time.perf_counter()
    progress = replace(progress, save_seconds=run.interval.save_seconds, guard=run.guard.state)
    run.saver.save(TrainerState(run.identity, progress))
    save_seconds = time.perf_counter() - began
    run.metrics.log("save", {"step": progress.step, "save_seconds": save_seconds})
    if run.ranks.is_first:
        for line in run.interval.saved(save_seconds, step_seconds, run.ranks.stop.grace_seconds):
            print(line, flush=True)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    exit_on_error(lambda: main(COMMAND_LINE.config, COMMAND_LINE.dry_run))
