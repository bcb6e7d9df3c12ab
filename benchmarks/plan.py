"""Measure the step plan on given example lengths, beside the samplers of transformers' Trainer.

    python benchmarks/plan.py [LENGTHS.npy] [--worlds 8,64,512] [--micro_batch_tokens 8192]

Efficiency is the cost of the examples (K L + L^2 for L tokens) over what all ranks spend, with
padding and with the wait for the slowest rank in each micro-step. The design effect (deff) is the
variance over steps of the mean log length, divided by that of random steps: 1 is as random as
shuffling. Every order has about as many examples per step as ours has in four micro-steps of
bucketed batches; the peers have no token budget. Lengths are drawn again, with replacement, where
an epoch would have fewer than 20 steps. Needs no GPU.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from zerotrain.data.epoch_order import EpochOrder
from zerotrain.data.plan import Budget, plan_step

MICRO_STEPS = 4
MIN_STEPS = 20
MAX_STEPS = 60  # measured of an epoch
PEER_SECONDS = 20.0  # a peer that takes longer is stopped, and measured so far
MAX_PEER_EXAMPLES = 20_000  # of a step: with more, batch_rebalance takes a minute or more per step
Step = list[list[np.ndarray]]  # the examples of each rank in each micro-step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lengths", nargs="?", type=Path, help="int .npy; default: log-normal")
    parser.add_argument("--worlds", default="8,64,512", help="numbers of ranks")
    parser.add_argument("--micro_batch_tokens", type=int, default=8192)
    parser.add_argument("--linear_cost", type=int, default=24_576, help="K of the cost")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    given = np.load(args.lengths) if args.lengths else rng.lognormal(4.97, 1.12, 50_000)
    given = np.clip(rng.permutation(given), 1, args.micro_batch_tokens).astype(np.int32)
    table = Table("ranks", "order", "efficiency", "deff", "largest micro-batch", "ms per step")
    for world_size in map(int, args.worlds.split(",")):
        budget = Budget(world_size, args.micro_batch_tokens, args.linear_cost)
        examples_per_step = calibrate(given, budget)
        lengths = given
        if len(given) < MIN_STEPS * examples_per_step:
            lengths = rng.choice(given, MIN_STEPS * examples_per_step)
        for name, measure in ORDERS.items():
            table.add_row(str(world_size), name, *measure(lengths, budget, examples_per_step))
    Console(width=100).print(table)


def calibrate(lengths: np.ndarray, budget: Budget) -> int:
    """Examples per step that take MICRO_STEPS micro-steps of bucketed batches."""
    filled = 0.9 * budget.micro_batch_tokens * budget.world_size * MICRO_STEPS
    return round(filled / lengths.mean())


def ours(packed: bool) -> Callable[[np.ndarray, Budget, int], list[str]]:
    def measure(lengths: np.ndarray, budget: Budget, examples_per_step: int) -> list[str]:
        order = EpochOrder(lengths, 0, examples_per_step)
        with_mode = Budget(budget.world_size, budget.micro_batch_tokens, budget.linear_cost, packed)

        def steps() -> Iterator[Step]:
            for k in range(min(MAX_STEPS, order.steps_per_epoch)):
                yield plan_step(order.examples(0, k), lengths, lengths, with_mode).micro_batches

        return figures(steps(), lengths, with_mode, packed)

    return measure


def peer(sampler_of: Callable[[list[int], Budget, int], Iterator[int]]) -> Callable:
    """A sampler that yields examples one by one, of which every `rows` form a micro-batch."""

    def measure(lengths: np.ndarray, budget: Budget, examples_per_step: int) -> list[str]:
        world_size = budget.world_size
        rows = max(1, round(examples_per_step / world_size / MICRO_STEPS))

        def steps() -> Iterator[Step]:
            stream = iter(sampler_of(lengths.tolist(), budget, rows))
            for _ in range(min(MAX_STEPS, len(lengths) // (rows * world_size * MICRO_STEPS))):
                yield [
                    [np.array([next(stream) for _ in range(rows)]) for _ in range(world_size)]
                    for _ in range(MICRO_STEPS)
                ]

        return figures(steps(), lengths, budget, packed=False)

    return measure


def shuffled(lengths: list[int], _: Budget, __: int) -> Iterator[int]:
    from torch.utils.data import RandomSampler

    return iter(RandomSampler(lengths))


def group_by_length(lengths: list[int], _: Budget, rows: int) -> Iterator[int]:
    """Trainer passes the number of examples of one rank's whole step."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    return iter(LengthGroupedSampler(rows * MICRO_STEPS, lengths=lengths))


def batch_rebalance(lengths: np.ndarray, budget: Budget, examples_per_step: int) -> list[str]:
    """transformers' BatchRebalanceSampler: its groups are the same, and in the same order, for any
    number of ranks.
    """
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    world_size = budget.world_size
    size = round(examples_per_step / world_size / MICRO_STEPS) * world_size * MICRO_STEPS
    if size > MAX_PEER_EXAMPLES:
        return ["", "", "", "a minute or more"]
    began = time.perf_counter()

    def steps() -> Iterator[Step]:
        for first in range(0, len(lengths) - size + 1, size):
            if time.perf_counter() - began > PEER_SECONDS or first >= MAX_STEPS * size:
                return
            here = lengths[first : first + size].tolist()
            sampler = BatchRebalanceSampler(here, size, 1, world_size * MICRO_STEPS)
            groups = [first + np.array(group) for group in sampler]
            yield [groups[i : i + world_size] for i in range(0, len(groups), world_size)]

    return figures(steps(), lengths, budget, packed=False)


def figures(steps: Iterator[Step], lengths: np.ndarray, budget: Budget, packed: bool) -> list[str]:
    """A row of the table."""
    logs = np.log(lengths.astype(float))
    useful = 0
    spent = 0
    largest = 0
    means = []
    sizes = []
    began = time.perf_counter()
    seconds = 0.0
    for step in steps:
        seconds += time.perf_counter() - began
        examples = np.concatenate([batch for ranks in step for batch in ranks])
        means.append(logs[examples].mean())
        sizes.append(len(examples))
        useful += int(budget.cost(lengths[examples].astype(np.int64)).sum())
        for ranks in step:
            costs = []
            for batch in ranks:
                held = lengths[batch].astype(np.int64)
                if len(held) and not packed:
                    held = np.full(len(held), budget.padded(held.max()))
                costs.append(int(budget.cost(held).sum()))
                largest = max(largest, int(held.sum()))
            spent += budget.world_size * max(costs)
        began = time.perf_counter()
    deff = np.var(means) / (logs.var() / np.mean(sizes)) if len(means) > 1 else float("nan")
    milliseconds = 1000 * seconds / len(means)
    return [f"{useful / spent:.3f}", f"{deff:.2f}", f"{largest:,}", f"{milliseconds:.1f}"]


ORDERS: dict[str, Callable[[np.ndarray, Budget, int], list[str]]] = {
    "packed": ours(packed=True),
    "bucketed": ours(packed=False),
    "batch_rebalance": batch_rebalance,
    "group_by_length": peer(group_by_length),
    "random, padded": peer(shuffled),
}


if __name__ == "__main__":
    main()
