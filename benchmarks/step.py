"""Where the time of a step goes, and what the loop adds to a bare DeepSpeed loop.

    deepspeed --num_gpus 2 --module benchmarks.step --config recipes/demo.yaml [--key value ...]

Two loops take turns on the same engine, a step each, over the plan of the run: train.py's
take_step, with data, loss, guard, records and hang watch, and a bare one, which has the
micro-batches at hand and computes all logits. Both count tokens without padding. Then
torch.profiler measures PROFILED_STEPS steps of train.py: each operator's own time on rank 0, as a
share of the steps.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import train
from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.start import Start
from zerotrain.checkpoint.state import Progress, RunIdentity
from zerotrain.config.ds_config import group_sizes
from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import Config
from zerotrain.data.loader import StepBatch, load_steps
from zerotrain.runtime.agreement import run_on_first_rank
from zerotrain.runtime.errors import UserError, exit_on_error
from zerotrain.runtime.process_group import group_ranks, process_group
from zerotrain.training.optimizer import make_schedule
from zerotrain.training.setup import Setup, load_plans, open_run_on_all_ranks

WARM_UP_STEPS = 2
PROFILED_STEPS = 3
FEWEST_STEPS = 2 * (WARM_UP_STEPS + 1) + PROFILED_STEPS
# what an operator's name contains: the row of the table; the first match counts
KINDS = {
    "attention": "attention",
    "mm": "matrix products",
    "linear": "matrix products",
    "gloo": "communication",
    "nccl": "communication",
    "c10d": "communication",
    "softmax": "loss",
    "nll_loss": "loss",
    "adam": "optimizer",
    "copy": "copies and casts",
    "clone": "copies and casts",
    "cat": "copies and casts",
}


def bare_step(engine: deepspeed.DeepSpeedEngine, batch: StepBatch, world_size: int) -> None:
    """Forward, backward and update, with nothing else around them."""
    scale = world_size / batch.plan.supervised_tokens
    for i, micro_batch in enumerate(batch.micro_batches):
        engine.set_gradient_accumulation_boundary(i == len(batch.micro_batches) - 1)
        inputs = micro_batch.to(engine.device)
        logits = engine(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            use_cache=False,
        ).logits.flatten(0, 1)
        labels = torch.full((len(logits),), -100, device=engine.device)
        labels[inputs.positions] = inputs.targets
        loss = F.cross_entropy(logits.float(), labels, reduction="sum") * scale
        engine.backward(loss, scale_wrt_gas=False)
    engine.step()


@contextmanager
def opened_run(config: Config) -> Iterator[tuple[Setup, train.Training]]:
    """A run as train.py begins it, without held-out sets and W&B."""
    config = replace(config, tracking=replace(config.tracking, wandb="disabled"))
    lock = RunLock(Path(config.output_dir))
    with ExitStack() as stack:
        world = stack.enter_context(process_group(config.distributed.timeout_seconds))
        run_on_first_rank(world, lambda: stack.enter_context(lock))
        setup, tokenizer = open_run_on_all_ranks(config, world)
        ranks = group_ranks(world, *group_sizes(setup.ds_config))
        plan, _ = load_plans(setup, tokenizer, ranks)
        identity = RunIdentity.of(setup, plan)
        schedule = make_schedule(setup.config.train, plan)
        run = train.build_run(setup, tokenizer, identity, Start(plan), schedule, {}, ranks, lock)
        yield setup, run
        run.hang_watch.close()
        run.metrics.close(0)


def main(config: Config) -> None:
    with opened_run(config) as (_, run):
        ranks = run.ranks
        batches = load_steps(
            run.plan, ranks.data_rank, 0, run.total_steps, part=ranks.sequence_part
        )
        if run.total_steps < FEWEST_STEPS:
            raise UserError(f"train.steps: {run.total_steps}; set at least {FEWEST_STEPS}")
        progress = Progress()
        ratios = []
        while progress.step + 2 + PROFILED_STEPS <= run.total_steps:
            began = time.perf_counter()
            before = progress.tokens
            progress = train.take_step(run, batches, progress)
            ours = (progress.tokens - before) / (time.perf_counter() - began)
            batch = next(batches)
            began = time.perf_counter()
            bare_step(run.engine, batch, ranks.world_size)
            bare = batch.plan.tokens / (time.perf_counter() - began)
            progress = replace(progress, step=batch.global_step + 1)
            ratios.append(ours / bare)
        with torch.profiler.profile() as profiler:
            began = time.perf_counter()
            for _ in range(PROFILED_STEPS):
                progress = train.take_step(run, batches, progress)
            seconds = time.perf_counter() - began
        if ranks.is_first:
            ratios = ratios[WARM_UP_STEPS:]
            print(
                f"train.py over the bare loop, tokens/s: {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} pairs of steps)"
            )
            Console(width=100).print(table_of(profiler, seconds))


def table_of(profiler: torch.profiler.profile, seconds: float) -> Table:
    """Each kind of operator's share of the steps, on CPU or, where there is one, on the GPU."""
    on_gpu = torch.cuda.is_available()
    shares: Counter[str] = Counter()
    for event in profiler.key_averages():
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if not on_gpu and not event.key.startswith(("aten::", "c10d::", "gloo:")):
            continue  # the records of autograd's nodes and of Python contain those operators
        kind = next((KINDS[part] for part in KINDS if part in event.key.lower()), "other operators")
        shares[kind] += own / 1e6 / seconds
    shares["no operator: Python, autograd, waiting"] = 1 - sum(shares.values())
    table = Table("kind", "share of a step, %")
    for kind, share in shares.most_common():
        table.add_row(kind, f"{100 * share:.1f}")
    return table


if __name__ == "__main__":
    exit_on_error(lambda: main(parse_command_line(sys.argv[1:]).config))
