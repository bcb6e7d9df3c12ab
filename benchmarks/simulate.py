"""Simulate how evenly up to thousands of GPUs share the work of a step.

    python -m benchmarks.simulate [LENGTHS.npy] [--ranks 8 64 512 4096]

The step plan and the samplers of transformers' Trainer divide the same global batches. A batch
fills --micro_steps micro-batches of each rank to nine tenths. Efficiency is the compute of the real
tokens / the compute of all ranks, who wait for the slowest rank in each micro-step. Communication
is left out: scripts/plan.py forecasts it.
"""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from zerotrain.data.epoch_order import EpochOrder
from zerotrain.data.plan import Budget, plan_step
from zerotrain.launch.hostfile import between
from zerotrain.tools.data_report import efficiency

OPTIONS = {
    "micro_batch_tokens": (8192, "tokens of a micro-batch; longer examples are cut (8192)"),
    "micro_steps": (4, "micro-steps of a global batch (4)"),
    "steps": (20, "steps to measure (20)"),
}
POSITIVE = between(1, 1 << 20)
ORDERS = ("packed", "bucketed", "batch_rebalance", "group_by_length", "random")
MAX_REBALANCED = 60_000  # examples per step, for which BatchRebalanceSampler takes a minute
Steps = Iterator[list[list[np.ndarray]]]
"""Lengths of the examples at [micro-step][rank] of each step."""


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "lengths", nargs="?", type=Path, help="integer .npy file (log-normal lengths)"
    )
    parser.add_argument(
        "--ranks",
        type=POSITIVE,
        nargs="+",
        default=[8, 64, 512, 4096],
        help="numbers of ranks (8 64 512 4096)",
    )
    for name, (default, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=POSITIVE, default=default, help=text)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    try:
        lengths = np.load(args.lengths) if args.lengths else rng.lognormal(4.97, 1.12, 50_000)
        lengths = np.clip(rng.permutation(lengths), 1, args.micro_batch_tokens).astype(np.int64)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print("  ranks  order            efficiency")
    for ranks, order in product(args.ranks, ORDERS):
        budget = Budget(ranks, args.micro_batch_tokens, packed=order == "packed")
        steps = islice(steps_of(order, lengths, budget, args), args.steps)
        micro_steps = [of_ranks for step in steps for of_ranks in step]
        found = efficiency(micro_steps, budget) if micro_steps else np.nan
        print(f"{ranks:>7,}  {order:15}  {found:>10.3f}", flush=True)


def steps_of(order: str, lengths: np.ndarray, budget: Budget, args: Namespace) -> Steps:
    micro_batches = args.micro_steps * budget.world_size
    examples = round(0.9 * args.micro_batch_tokens * micro_batches / lengths.mean())
    if len(lengths) < args.steps * examples:
        lengths = np.random.default_rng(0).choice(lengths, args.steps * examples)
    if order in ("packed", "bucketed"):
        epoch = EpochOrder(lengths, 0, examples)
        for k in range(epoch.steps_per_epoch):
            plan = plan_step(epoch.examples(0, k), lengths, lengths, budget)
            yield [[lengths[batch] for batch in row] for row in plan.micro_batches]
        return
    rows = max(1, round(examples / micro_batches))
    if order == "batch_rebalance":
        lengths = lengths[:MAX_REBALANCED]
        sampler = BatchRebalanceSampler(lengths.tolist(), rows * micro_batches, 1, micro_batches)
    else:
        grouped = LengthGroupedSampler(rows * args.micro_steps, lengths=lengths.tolist())
        one_by_one = RandomSampler(lengths) if order == "random" else grouped
        sampler = BatchSampler(one_by_one, rows, drop_last=True)
    batches = iter(sampler)
    for _ in range(len(lengths) // (rows * micro_batches)):
        step = [lengths[next(batches)] for _ in range(micro_batches)]
        yield [step[i : i + budget.world_size] for i in range(0, len(step), budget.world_size)]


if __name__ == "__main__":
    main()
