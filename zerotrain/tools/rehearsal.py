"""Run the costliest micro-batch of a run, and find how many tokens fit into memory."""

import ctypes
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch
from deepspeed import DeepSpeedEngine

from zerotrain.config.schema import Config
from zerotrain.data.data_plan import DataPlan
from zerotrain.data.loader import MicroBatch, collate
from zerotrain.runtime.machine import GIB
from zerotrain.runtime.process_group import process_group
from zerotrain.runtime.ranks import Ranks
from zerotrain.tools.memory import USED_SHARE, estimate_memory
from zerotrain.tracking.console import quieten_libraries
from zerotrain.training.engine import build_engine
from zerotrain.training.guard import apply_update
from zerotrain.training.loss import SupervisedLoss
from zerotrain.training.out_of_memory import describe_micro_batch, explain_out_of_memory
from zerotrain.training.setup import open_data, open_run_on_all_ranks

SMALLEST_GROWTH = 1.1  # Stop if the next micro-batch would be less than 1.1 times the last.
LARGEST_GROWTH = 8  # The next micro-batch has at most 8 times the tokens of the last.


class MeasuredMemory(NamedTuple):
    """Bytes of a rank: of the tensors on its GPU, or of its process on a CPU."""

    before: int
    """Bytes in use before a micro-batch, with the gradients of earlier ones."""
    peak: int
    """Bytes at the peak of forward, backward and update."""
    available: int
    """Bytes in use or free."""

    @property
    def share(self) -> float:
        return self.peak / self.available


def rehearse(config: Config) -> None:
    """Build the engine of a run as train.py does, and run its costliest micro-batch and larger
    ones. Print the memory of each, and the largest that fits. Nothing is written.

    Raises:
        UserError: a rank is out of memory. Only that rank raises it: the others may be in a
            collective.
    """
    job = config.distributed
    with process_group(job.timeout_seconds, job.preempt_grace_seconds, job.world_size) as world:
        quieten_libraries(world.is_first)
        setup, tokenizer, ranks = open_run_on_all_ranks(config, world)
        setup, data = open_data(setup, tokenizer, ranks)
        plan = data.plan
        engine, loss, _ = build_engine(setup, tokenizer, plan, ranks)
        if ranks.is_first:
            states = estimate_memory(setup).states.items()
            parts = ", ".join(f"{name} {size / GIB:.3g}" for name, size in states)
            print(f"estimated GiB per rank in all steps: {parts}")
        longest = plan.with_budget(1).budget.micro_batch_tokens

        def attempt(tokens: int) -> list[MeasuredMemory]:
            measured = run_costliest(engine, loss, plan.with_budget(tokens), ranks)
            memory = [MeasuredMemory(*rank) for rank in ranks.gather_json(measured)]
            if ranks.is_first:
                fullest = max(memory, key=lambda rank: rank.share)
                print(
                    f"data.micro_batch_tokens {tokens:,}: {fullest.peak / GIB:.2f} of "
                    f"{fullest.available / GIB:.2f} GiB ({fullest.share:.1%}) at the peak of rank "
                    f"{memory.index(fullest)}"
                )
            return memory

        attempt(longest)  # Its update also allocates AdamW's moments, which later attempts need.
        planned = plan.budget.micro_batch_tokens
        order = plan.order
        examples = order.global_batch_size or -(-order.global_batch_tokens // longest)
        most = -(-examples // plan.budget.world_size) * longest
        largest = find_largest(attempt, longest, planned, most)
        if ranks.is_first:
            print(
                f"{largest:,} is the largest measured value that keeps 10% of every rank's memory "
                f"free; a rank's share of a step has at most {most:,} tokens"
                if largest
                else "no value keeps 10% of every rank's memory free: set "
                "model.activation_checkpointing true, lower data.max_length, or take a higher ZeRO "
                "stage"
            )


def find_largest(
    attempt: Callable[[int], list[MeasuredMemory]], longest: int, planned: int, most: int
) -> int | None:
    """Return the tokens of the largest micro-batch that was measured to fit; None if none does.

    The first attempt is the planned one. If it fits, attempts grow until one does not fit; if not,
    they shrink, at most to the longest example. Each attempt assumes that memory is proportional to
    tokens. It usually grows more slowly, so no attempt runs out of memory. That would leave the
    other ranks in a collective forever.

    Args:
        attempt: measures a micro-batch of so many tokens on every rank.
        longest: tokens of the longest example.
        most: tokens per rank of a step with one micro-step.
    """

    tokens = planned
    fitting = None
    while True:
        growth = largest_growth(attempt(tokens))
        following = int(tokens * min(LARGEST_GROWTH, growth)) // longest * longest
        if growth >= 1:
            fitting = tokens
            following = min(most, following)
            if tokens < planned or following < SMALLEST_GROWTH * tokens:
                return fitting
        elif fitting or tokens == longest:
            return fitting
        else:
            following = max(longest, min(following, tokens - longest))
        tokens = following


def largest_growth(memory: list[MeasuredMemory]) -> float:
    """Return the factor by which a measured micro-batch may grow until a rank has 10% of its memory
    free. It is below 1 if less is free now.
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
    """Run forward and backward on the costliest micro-batches of a plan, then an update. It changes
    weights and optimizer. Return the memory of this rank.
    """
    is_cuda = ranks.device.type == "cuda"
    in_use = memory_in_use(is_cuda)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        available = torch.cuda.memory_reserved() + torch.cuda.mem_get_info()[0]
    else:
        # Reset the peak. If the kernel refuses, the peak since the start counts.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        available = in_use + psutil.virtual_memory().available // ranks.local_ranks
    chosen = costliest(plan)
    chosen.append(chosen[0])  # once more, now that gradients exist
    rows = np.concatenate(chosen)
    with explain_out_of_memory(describe_micro_batch, plan, rows):
        for i, examples in enumerate(chosen):
            batch = collate_full(plan, examples)
            if ranks.sequence > 1:
                batch = batch.part(*ranks.sequence_part)
            before = memory_in_use(is_cuda)
            engine.set_gradient_accumulation_boundary(i == len(chosen) - 1)
            losses = loss(engine, batch)
            engine.backward(sum(losses) / rows.size, scale_wrt_gas=False)
        apply_update(engine, clipping=0.0)
    if is_cuda:
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return MeasuredMemory(before, peak, available)


def memory_in_use(is_cuda: bool) -> int:
    """Return the bytes of the tensors on the GPU, or of the process without its freed memory. A
    micro-batch would reuse freed memory and seem to need less.
    """
    if is_cuda:
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def costliest(plan: DataPlan) -> list[np.ndarray]:
    """Return micro-batches, int64 [examples] each, that bound the memory of all planned ones.

    Memory depends mostly on the number of tokens. Where attention keeps its scores, it also depends
    on the sum of squared lengths. No planned micro-batch exceeds the largest of either here.

    For each length, as many examples as the budget allows are considered. One micro-batch has the
    length with the most tokens, one the length with the largest sum of squares; often they are the
    same. Examples stand for others of the same length. If packed, collate_full() cuts the last
    example where the budget ends.
    """
    budget = plan.budget
    # Both are int64 [lengths], from the longest.
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
    """Return a micro-batch cut to the budget, with the largest cost for its size: all tokens but
    the first of a row are targets, and one is padding, for which attention needs a mask.
    """
    batch = collate(plan.data, examples, plan.budget)
    tokens = plan.budget.micro_batch_tokens
    ids, mask, position_ids = (None if x is None else x[:, :tokens].numpy() for x in batch[:3])
    if mask is not None:
        mask[:, -1] = 0
    is_target = np.ones_like(ids, bool)
    is_target[:, 0] = False
    return MicroBatch.of(ids, is_target, mask, position_ids)
