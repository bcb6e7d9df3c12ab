"""Simulate training on up to thousands of GPUs: balance, communication, a slow node.

    python -m benchmarks.simulate [LENGTHS.npy] [--ranks 8 64 512 4096]

The step plan and the samplers of transformers' Trainer divide the same global batches, which fill
--micro_steps micro-batches of each rank to nine tenths. Efficiency is the time of the real tokens
over that of the step, in which all ranks wait for the slowest one in each micro-step. Compute takes
6 FLOPs per parameter and token, and attention in proportion. Communication is a ring over all ranks
and overlaps with nothing. ZeRO 1 reduces fp32 gradients once per step, ZeRO 2 and 3 in every
micro-step; 16-bit weights are gathered once per step, under ZeRO 3 twice per micro-step.
"""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.data import BatchSampler, RandomSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from zerotrain.data.epoch_order import EpochOrder
from zerotrain.data.plan import Budget, plan_step
from zerotrain.tools.data_report import costs_of

OPTIONS = {  # name: default, help
    "micro_batch_tokens": (8192, "longer examples are cut to it"),
    "micro_steps": (4, "in the global batch, see above"),
    "steps": (20, "to measure"),
    "parameters": (8e9, "of the model"),
    "tflops": (400.0, "of one GPU, as achieved"),
    "gpus_per_node": (8, "a job of fewer GPUs has one node"),
    "link_gb_per_s": (400.0, "of the ring's slowest link: all NICs of a node together"),
    "hop_microseconds": (2.0, "mean latency from one GPU of the ring to the next"),
    "slowdown": (1.25, "of the compute of the first node, which has the largest micro-batches"),
}
ORDERS = ("packed", "bucketed", "batch_rebalance", "group_by_length", "random")
CASES = ("compute", "ZeRO 1", "ZeRO 2", "ZeRO 3", "slow node")
BUCKET = 2e8  # parameters of one collective: reduce_bucket_size in ds_configs/
MAX_REBALANCED = 60_000  # examples: BatchRebalanceSampler takes a minute for a step of as many
Steps = Iterator[list[list[np.ndarray]]]  # lengths at [micro-step][rank], step by step


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="?", type=Path, help="int .npy; default: log-normal")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    for name, (default, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    try:
        lengths = np.load(args.lengths) if args.lengths else rng.lognormal(4.97, 1.12, 50_000)
        lengths = np.clip(rng.permutation(lengths), 1, args.micro_batch_tokens).astype(np.int64)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if min(*args.ranks, *(getattr(args, name) for name in OPTIONS)) <= 0:
        parser.error("every number has to be positive")
    runs = track(list(product(args.ranks, ORDERS)), console=Console(stderr=True))
    table = Table("ranks", "order", "s per step", *CASES)
    for ranks, order in runs:
        numbers = measure(order, ranks, lengths, args)
        table.add_row(f"{ranks:,}", order, *(f"{number:,.3f}" for number in numbers))
    console = Console(width=100)
    console.print(", ".join(f"{name} {getattr(args, name):g}" for name in OPTIONS))
    console.print(table)


def measure(order: str, ranks: int, lengths: np.ndarray, args: Namespace) -> list[float]:
    """Seconds of compute per step, and the efficiency in each of CASES; NaN: takes too long."""
    budget = Budget(ranks, args.micro_batch_tokens, packed=order == "packed")
    seconds_per_cost = 6 * args.parameters / budget.linear_cost / (args.tflops * 1e12)
    latency = np.ceil(args.parameters / BUCKET) * (ranks - 1) * args.hop_microseconds / 1e6
    sent_bytes = np.array([4, 2]) * args.parameters * (ranks - 1) / ranks  # gradients, weights
    ring_seconds = latency + sent_bytes / (args.link_gb_per_s * 1e9)
    times = []
    for step in islice(steps_of(order, lengths, budget, args), args.steps):
        costs = [[costs_of(batch, budget) for batch in row] for row in step]
        real, padded = np.moveaxis(seconds_per_cost * np.array(costs), -1, 0)
        compute = padded.max(axis=1).sum()
        padded[:, : args.gpus_per_node] *= args.slowdown
        n = len(step)
        zero = compute + np.array([[1, 1], [n, 1], [n, 2 * n]]) @ ring_seconds
        times.append([real.sum() / ranks, compute, *zero, padded.max(axis=1).sum()])
    ideal, *spent = np.mean(times or [[np.nan] * (1 + len(CASES))], axis=0)
    return [spent[0], *ideal / spent]


def steps_of(order: str, lengths: np.ndarray, budget: Budget, args: Namespace) -> Steps:
    micro_batches = args.micro_steps * budget.world_size
    examples = round(0.9 * args.micro_batch_tokens * micro_batches / lengths.mean())
    if len(lengths) < args.steps * examples:  # an epoch would be too short
        lengths = np.random.default_rng(0).choice(lengths, args.steps * examples)
    if order in ("packed", "bucketed"):
        epoch = EpochOrder(lengths, 0, examples)
        for k in range(epoch.steps_per_epoch):
            plan = plan_step(epoch.examples(0, k), lengths, lengths, budget)
            yield [[lengths[batch] for batch in row] for row in plan.micro_batches]
        return
    rows = max(1, round(examples / micro_batches))  # of a micro-batch
    if order == "batch_rebalance":  # its groups are the same for any number of ranks
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
