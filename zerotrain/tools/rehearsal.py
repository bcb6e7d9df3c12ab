"""The costliest micro-batch of a run before its first step, and how many tokens fit into memory."""

import resource
from typing import NamedTuple

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from zerotrain.config.schema import Config
from zerotrain.data.data_plan import DataPlan
from zerotrain.data.loader import MicroBatch, collate
from zerotrain.runtime.process_group import process_group
from zerotrain.runtime.ranks import Ranks
from zerotrain.tracking.console import quieten_libraries
from zerotrain.training.engine import build_engine
from zerotrain.training.guard import apply_update
from zerotrain.training.loss import SupervisedLoss
from zerotrain.training.out_of_memory import describe_micro_batch, explain_out_of_memory
from zerotrain.training.setup import Setup, load_plans, open_run_on_all_ranks
from zerotrain.training.states import GIB

USED_SHARE = 0.9  # of the memory, by the largest micro-batch that is said to fit
SMALLEST_GROWTH = 1.1  # of the micro-batch for which another attempt is worth its time
LARGEST_GROWTH = 8  # in one attempt, since a process may reuse memory that counts as in use


class MeasuredMemory(NamedTuple):
    """Bytes of a rank: on CUDA of its GPU, else of its process."""

    before: int
    """In use before a micro-batch, with the gradients of earlier ones."""
    peak: int
    """In the forward and backward pass; of a process, since it began."""
    available: int
    """In use or free."""


def open_and_rehearse(config: Config) -> None:
    """Build the engine of a run as train.py does, and rehearse; nothing is written."""
    job = config.distributed
    with process_group(job.timeout_seconds, job.preempt_grace_seconds, job.world_size) as world:
        quieten_libraries(world.is_first)
        setup, tokenizer, ranks = open_run_on_all_ranks(config, world)
        plan, _, _ = load_plans(setup, tokenizer, ranks)
        engine, loss, _ = build_engine(setup, tokenizer, plan, ranks)
        rehearse(engine, loss, setup, plan, ranks)


def rehearse(
    engine: DeepSpeedEngine,
    loss: SupervisedLoss,
    setup: Setup,
    plan: DataPlan,
    ranks: Ranks,
) -> None:
    """Run forward, backward and update on the costliest micro-batch of the plan and on larger ones;
    the first rank prints how many tokens fit. Called by all ranks. It changes weights and
    optimizer.

    Raises:
        UserError: a rank is out of memory; on that rank alone, since others may be in a collective.
    """
    longest = plan.with_budget(1).budget.micro_batch_tokens

    def attempt(tokens: int) -> list[MeasuredMemory]:
        measured = run_costliest(engine, loss, plan.with_budget(tokens), ranks)
        return [MeasuredMemory(*rank) for rank in ranks.gather_json(measured)]

    attempt(longest)  # the longest example alone, whose update also allocates AdamW's moments
    planned = plan.budget.micro_batch_tokens
    memory = attempt(planned)
    examples = plan.order.global_batch_size or -(-plan.order.global_batch_tokens // longest)
    # of the longest example: a step of one micro-step
    most = -(-examples // plan.budget.world_size)
    multiple = planned // longest
    while True:
        larger = min(most, int(multiple * min(LARGEST_GROWTH, growth(memory))))
        if larger < SMALLEST_GROWTH * multiple:
            break
        multiple = larger
        memory = attempt(multiple * longest)
    largest = max(planned, multiple * longest)
    if ranks.is_first:
        print(
            f"data.micro_batch_tokens {planned:,} fits: {memory[0].peak / GIB:.2f} of "
            f"{memory[0].available / GIB:.2f} GiB at the peak of rank 0; {setup.states}\n"
            f"{largest:,} is the most that is of use or leaves a tenth of every rank's memory free",
        )


def growth(memory: list[MeasuredMemory]) -> float:
    """How many times the measured micro-batch leaves a tenth of the memory free on every rank.

    What a multiple of the longest example needs grows at most in proportion to it. So no attempt
    runs out of memory, which would leave other ranks in a collective that never ends.
    """
    return min(
        (USED_SHARE * rank.available - rank.before) / max(1, rank.peak - rank.before)
        for rank in memory
    )


def run_costliest(
    engine: DeepSpeedEngine,
    loss: SupervisedLoss,
    plan: DataPlan,
    ranks: Ranks,
) -> MeasuredMemory:
    """Forward and backward on the costliest micro-batches of a plan, and an update."""
    accelerator = get_accelerator()
    accelerator.reset_peak_memory_stats()
    chosen = costliest(plan)
    chosen.append(chosen[0])  # beside the gradients of the others
    rows = np.concatenate(chosen)
    with explain_out_of_memory(describe_micro_batch, plan, rows):
        for i, examples in enumerate(chosen):
            batch = collate_full(plan, examples)
            if ranks.sequence > 1:
                batch = batch.part(*ranks.sequence_part)
            before = accelerator.memory_allocated()
            engine.set_gradient_accumulation_boundary(i == len(chosen) - 1)
            losses = loss(engine, batch)
            engine.backward(sum(losses) / rows.size, scale_wrt_gas=False)
        if ranks.device.type == "cuda":
            peak = accelerator.max_memory_allocated()
            free, _ = torch.cuda.mem_get_info()
        else:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            free = accelerator.available_memory() // ranks.local_ranks
        apply_update(engine, clipping=0.0)
    return MeasuredMemory(before, peak, accelerator.memory_reserved() + free)


def costliest(plan: DataPlan) -> list[np.ndarray]:
    """Micro-batches, int64 [examples] each, that no planned one exceeds: neither the most tokens of
    them, on which most of the memory depends, nor the largest sum of squared lengths, on which it
    depends where attention keeps its scores. Examples stand for others of the same length.

    For each length as many examples as the budget allows: those of the lengths with the most tokens
    and with the largest sum of squares, often the same. Packed, the last example is the one that
    collate_full() cuts where the budget ends.
    """
    budget = plan.budget
    # int64 [lengths], from the longest
    found = np.unique(plan.data.lengths, return_index=True)
    lengths, example_of = (each[::-1].astype(np.int64) for each in found)
    padded = budget.padded(lengths)
    spare = padded - 1 if budget.packed else 0
    most = plan.order.global_batch_size or plan.order.places
    rows = np.minimum((budget.micro_batch_tokens + spare) // padded, most)
    tokens = np.minimum(rows * padded, budget.micro_batch_tokens)
    largest = np.unique([np.argmax(tokens), np.argmax(tokens * padded)])
    return [np.repeat(example_of[i], rows[i]) for i in largest]


def collate_full(plan: DataPlan, examples: np.ndarray) -> MicroBatch:
    """A micro-batch cut to the budget, with a loss at as many tokens as any of its size has, and
    with padding, for which attention needs a mask.
    """
    batch = collate(plan.data, examples, plan.budget)
    tokens = plan.budget.micro_batch_tokens
    ids, mask, position_ids = (None if x is None else x[:, :tokens].numpy() for x in batch[:3])
    if mask is not None:
        mask[:, -1] = 0
    is_target = np.ones_like(ids, bool)
    is_target[:, 0] = False
    return MicroBatch.of(ids, is_target, mask, position_ids)
