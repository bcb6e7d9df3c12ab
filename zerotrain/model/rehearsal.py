"""The costliest micro-batch of a run, before its first step: whether it fits into memory, and with
data.micro_batch_tokens auto, how many tokens do.

It runs before a checkpoint is loaded, with a learning rate of 0 and a loss times 0. AdamW's moments
are 0 then, or not yet allocated, so such an update changes neither them nor the weights.
"""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from zerotrain.data.data_plan import DataPlan
from zerotrain.data.loader import MicroBatch, collate
from zerotrain.data.plan import Budget
from zerotrain.model.guard import apply_update
from zerotrain.model.loss import SupervisedLoss
from zerotrain.model.memory import GIB
from zerotrain.model.optimizer import reset_update_count
from zerotrain.model.setup import Setup
from zerotrain.runtime.agreement import gather_json
from zerotrain.runtime.errors import UserError, listed
from zerotrain.runtime.process_group import Ranks
from zerotrain.runtime.seeding import rng_state, set_rng_state

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

AT_ONCE = 1 << 20  # lengths
USED_SHARE = 0.9  # of the memory, with data.micro_batch_tokens auto
WORTHWHILE = 1.1  # growth of the budget for which another one is tried
MOST_GROWTH = 8  # at a time, since a process may reuse memory that counts as in use
OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator")  # of CUDA, of the CPU


class Memory(NamedTuple):
    """Bytes of a rank: on CUDA of its GPU, else of its process."""

    before: int
    """In use before a micro-batch, with the gradients of earlier ones."""
    peak: int
    """In its forward and backward pass; of a process, since it began."""
    available: int
    """In use or free."""


def rehearse(
    engine: "DeepSpeedEngine", loss: SupervisedLoss, setup: Setup, plan: DataPlan, search: bool
) -> Budget:
    """Run forward, backward and update on the costliest micro-batch of a run, on all ranks, and
    leave weights, optimizer and RNG as they were.

    Args:
        engine: as it was built, before a checkpoint is loaded.
        search: for the largest budget that fits, instead of the plan's.

    Returns:
        The budget that was rehearsed last.

    Raises:
        UserError: a rank is out of memory; on that rank alone, since others may be in a collective.
            Or SuperOffload updates.
    """
    if engine.super_offload():
        raise UserError(
            "train.rehearse: with SuperOffload the count of updates cannot be put back; set it to "
            "false, and data.micro_batch_tokens to a number"
        )
    ranks = setup.ranks
    rng = rng_state()
    scaler = vars(engine.optimizer.loss_scaler) if engine.fp16_enabled() else {}
    scale = dict(scaler)
    largest = setup.strategy.largest_budget()

    def attempt(budget: Budget) -> list[Memory]:
        memory = run_costliest(engine, loss, replace(plan, budget=budget), ranks, largest)
        return [Memory(*rank) for rank in gather_json(ranks, memory)]

    smallest = plan.with_budget(1).budget
    longest = smallest.micro_batch_tokens
    memory = attempt(smallest)  # allocates the optimizer's state
    if search:
        examples = plan.order.global_batch_size or -(-plan.order.global_batch_tokens // longest)
        most = -(-examples // smallest.world_size)  # with which a step is one micro-step
        budget, memory = largest_budget(attempt, smallest, most)
    else:
        budget = plan.budget
        largest = max(longest, int(longest * growth(memory)))
        memory = attempt(budget)
    scaler.update(scale)
    reset_update_count(engine.basic_optimizer)
    set_rng_state(rng)
    get_accelerator().reset_peak_memory_stats()
    if ranks.is_first:
        print(
            f"rehearsed {budget.micro_batch_tokens:,} tokens: "
            f"{memory[0].peak / GIB:.2f} of {memory[0].available / GIB:.2f} GiB on rank 0; "
            f"{setup.with_budget(budget).memory}",
            flush=True,
        )
    return budget


def largest_budget(
    attempt: Callable[[Budget], list[Memory]], smallest: Budget, most: int
) -> tuple[Budget, list[Memory]]:
    """The largest budget that leaves a tenth of the memory free on each rank, and the memory used.

    What a micro-batch needs grows at most in proportion to the budget, if that is a multiple of the
    longest example. So no attempt runs out of memory, which would leave other ranks in a collective
    that never ends.

    Args:
        attempt: runs the costliest micro-batch of a budget, and returns the memory of all ranks.
        smallest: of the longest example alone.
        most: what the largest budget may be, as a multiple of the smallest.
    """
    multiple = larger = 1
    while True:
        multiple = larger
        tokens = multiple * smallest.micro_batch_tokens
        budget = replace(smallest, micro_batch_tokens=tokens)
        memory = attempt(budget)
        larger = min(most, int(multiple * min(MOST_GROWTH, growth(memory))))
        if larger < WORTHWHILE * multiple:
            return budget, memory


def growth(memory: list[Memory]) -> float:
    """How many times as many tokens as were measured fit on all ranks."""
    return min(
        (USED_SHARE * rank.available - rank.before) / max(1, rank.peak - rank.before)
        for rank in memory
    )


def run_costliest(
    engine: "DeepSpeedEngine", loss: SupervisedLoss, plan: DataPlan, ranks: Ranks, largest: int
) -> Memory:
    """Forward and backward on the costliest micro-batches of a plan, and an update by 0.

    Args:
        largest: see describe_micro_batch.
    """
    accelerator = get_accelerator()
    accelerator.reset_peak_memory_stats()
    chosen = costliest(plan)
    chosen.append(chosen[0])  # beside the gradients of the others
    with explain_out_of_memory(describe_micro_batch, plan, np.concatenate(chosen), largest):
        for i, examples in enumerate(chosen):
            batch = collate_full(plan, examples)
            if ranks.sequence > 1:
                batch = batch.part(*ranks.sequence_part)
            before = accelerator.memory_allocated()
            engine.set_gradient_accumulation_boundary(i == len(chosen) - 1)
            cross_entropy, router = loss(engine, batch.to(ranks.device))
            total = cross_entropy if router is None else cross_entropy + router
            engine.backward(0.0 * total, scale_wrt_gas=False)
        if ranks.device.type == "cuda":
            peak = accelerator.max_memory_allocated()
            free, _ = torch.cuda.mem_get_info()
        else:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            free = accelerator.available_memory() // int(os.environ["LOCAL_WORLD_SIZE"])
        apply_update(engine)
    return Memory(before, peak, accelerator.memory_reserved() + free)


def costliest(plan: DataPlan) -> list[np.ndarray]:
    """Micro-batches, int64 [examples] each, that no planned one exceeds: neither the most tokens of
    them, on which most of the memory depends, nor the largest sum of squared lengths, on which it
    depends where attention keeps its scores. Examples stand for others of the same length.

    bucketed: for each length as many examples as the budget allows; the two lengths with the most
    tokens and the largest sum of squares, often the same.
    packed: the longest examples, the last of which collate_full() cuts where the budget ends. They
    have both maxima: the j longest examples of another micro-batch have at most as many tokens as
    the j longest here, for every j (Karamata's inequality).
    """
    budget = plan.budget
    all_lengths = plan.data.lengths
    size = int(all_lengths.max()) + 1
    counts = np.zeros(size, np.int64)
    example_of = np.zeros(size, np.int64)  # one of each length
    for start in range(0, len(all_lengths), AT_ONCE):
        some = all_lengths[start : start + AT_ONCE]
        counts += np.bincount(some, minlength=size)
        example_of[some] = np.arange(start, start + len(some))
    lengths = np.flatnonzero(counts)[::-1]
    padded = budget.padded(lengths)
    most = plan.order.global_batch_size or len(all_lengths)
    rows = np.minimum(budget.micro_batch_tokens // padded, most)
    if not budget.packed:
        tokens = rows * padded
        largest = np.unique([np.argmax(tokens), np.argmax(tokens * padded)])
        return [np.repeat(example_of[lengths[i]], rows[i]) for i in largest]
    longest = np.repeat(lengths, np.minimum(counts[lengths], rows + 1))[:most]
    count = 1 + np.searchsorted(np.cumsum(longest), budget.micro_batch_tokens)
    return [example_of[longest[:count]]]


def collate_full(plan: DataPlan, examples: np.ndarray) -> MicroBatch:
    """A micro-batch cut to the budget, with a loss at every token, and with padding, for which
    attention needs a mask.
    """
    batch = collate(plan.data, examples, plan.budget)
    tokens = plan.budget.micro_batch_tokens
    ids = batch.input_ids[:, :tokens]
    mask = batch.attention_mask
    position_ids = batch.position_ids
    if mask is not None:
        mask[:, -1] = 0
    if position_ids is not None:
        position_ids = position_ids[:, :tokens]
    return MicroBatch(ids, mask, position_ids, torch.arange(ids.numel()), ids.flatten())


@contextmanager
def explain_out_of_memory(describe: Callable[..., str], *args: Any) -> Iterator[None]:
    """Raise UserError where the GPU, or the CPU's memory, does not hold something.

    Args:
        describe: what it is and what to do, from `args`.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in OUT_OF_MEMORY):
            raise
        raise UserError(f"out of memory in {describe(*args)}") from error


def describe_micro_batch(plan: DataPlan, examples: np.ndarray, largest: int) -> str:
    """Its rows, and the budget that fits.

    Args:
        examples: of the micro-batch, the longest first.
        largest: tokens that fit, by measurement or estimate. If that is 0, or not less than the
            budget, half the budget is named, but no less than the plan's longest row has.
    """
    rows = [
        f"{plan.data.place_of(example)} ({plan.data.lengths[example]:,} tokens)"
        for example in dict.fromkeys(examples.tolist())
    ]
    tokens = plan.budget.micro_batch_tokens
    fitting = largest if 0 < largest < tokens else tokens // 2
    fitting = plan.with_budget(fitting).budget.micro_batch_tokens
    cure = "set model.activation_checkpointing true, or lower data.max_length"
    if fitting < tokens:
        cure = (
            f"data.micro_batch_tokens is {tokens:,}, and {fitting:,} fit: set it to that, which "
            f"changes neither steps nor losses; if that is not enough, {cure}"
        )
    return f"a micro-batch of {listed(rows)}; {cure}"
