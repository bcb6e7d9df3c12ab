"""Compare the real tokens/s of one training loop with different data feeds, in a single run.

    deepspeed --num_gpus 2 benchmarks/throughput.py [--lengths LENGTHS.npy] [--steps 20] [--json]

Feeds: `packed` and `bucketed`, this repository's step plans; `random`, fixed-size batches in random
order; `group_by_length`, fixed-size batches in the order of transformers' LengthGroupedSampler,
assigned to ranks as Trainer does. Packed examples get model/packed_attention.py, the others what
transformers chooses. All feeds have the same examples, global batch and number of micro-steps, and
run train.py's train step under ZeRO-2. They alternate step by step, so that other load on the
machine affects all of them alike. The fixed-size feeds may use as much memory as their largest
batch needs.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import deepspeed
import numpy as np
import torch
from plan import LogLengths  # benchmarks/plan.py: the folder of this file is on the path
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.trainer_pt_utils import LengthGroupedSampler

from config.schema import GuardConfig
from data.data_plan import DataPlan
from data.loader import load_steps
from data.plan import Budget, Contents, StepPlan, plan_step
from model.architecture import linear_cost
from model.guard import Guard, GuardState
from model.loss import SupervisedLoss
from model.packed_attention import PACKED_EXAMPLES
from runtime.errors import UserError, exit_on_error
from runtime.process_group import Ranks, process_group
from train import train_step  # the train step that is measured

VOCABULARY = 4096
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class RandomTokens:
    """Replaces TokenizedRows: examples of these lengths, the second half of each is supervised."""

    lengths: np.ndarray

    @property
    def supervised(self) -> np.ndarray:
        return self.lengths // 2

    def fetch(self, rows: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        ids, masks = [], []
        for row in rows.tolist():
            n = int(self.lengths[row])
            ids.append(np.random.default_rng(row).integers(1, VOCABULARY, n, dtype=np.int32))
            masks.append(np.arange(n) >= n - n // 2)
        return ids, masks


@dataclass(frozen=True)
class FixedSize:
    """Batches of a fixed number of examples, in a given order, padded to the longest of each."""

    data: RandomTokens
    budget: Budget
    order: np.ndarray
    rows_per_batch: int
    micro_steps: int

    @property
    def steps_per_epoch(self) -> int:
        return len(self.order) // (self.rows_per_batch * self.budget.world_size * self.micro_steps)

    def step(self, k: int) -> StepPlan:
        world, rows, a = self.budget.world_size, self.rows_per_batch, self.micro_steps
        mine = self.order[k * world * rows * a : (k + 1) * world * rows * a]
        batches = mine.reshape(a, world, rows)
        lengths = self.data.lengths[batches]
        return StepPlan(
            micro_batches=[list(micro_step) for micro_step in batches],
            examples=mine.size,
            supervised_tokens=int(self.data.supervised[mine].sum()),
            tokens=int(lengths.sum()),
            padded_tokens=int((lengths.max(axis=2) * rows).sum()),
            useful_cost=0,
            held_cost=0,
            waited_cost=0,
        )


@dataclass(frozen=True)
class Sampled:
    """A feed's steps in random order, because the grouped orders start with long examples."""

    feed: DataPlan | FixedSize
    order: np.ndarray

    @property
    def data(self) -> RandomTokens:
        return self.feed.data

    @property
    def budget(self) -> Budget:
        return self.feed.budget

    @property
    def steps_per_epoch(self) -> int:
        return len(self.order)

    def locate(self, k: int) -> tuple[None, int, int]:
        """Like DataPlan.locate; all steps are of the first epoch."""
        return None, 0, int(self.order[k])

    def step(self, k: int) -> StepPlan:
        return self.feed.step(int(self.order[k]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=Path, help="int .npy; default: log-normal, mean 270")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per feed")
    parser.add_argument("--global_batch_size", type=int, default=128)
    parser.add_argument("--micro_batch_tokens", type=int, default=2048)
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--feeds", default="packed,bucketed,group_by_length,random")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--attn_implementation", help="of the feeds with padding")
    parser.add_argument(
        "--cpu_seconds",
        action="store_true",
        help="CPU time of one rank, which other load leaves as is",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lengths and not args.lengths.is_file():
        raise UserError(f"--lengths: no such file: {args.lengths}")
    with process_group() as ranks:
        report = measure(args, ranks)
        if ranks.is_first:
            print(json.dumps(report, indent=None if args.json else 2))


def measure(args: argparse.Namespace, ranks: Ranks) -> dict:
    """Tokens/s of each feed, the median over its steps, and the ratio of the first feed to each of
    the others.
    """
    rng = np.random.default_rng(0)
    lengths = np.load(args.lengths) if args.lengths else rng.lognormal(4.97, 1.12, 50_000)
    lengths = np.clip(lengths, 4, args.max_length).astype(np.int32)
    model_config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=args.hidden_size, intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers, num_attention_heads=max(1, args.hidden_size // 64),
        max_position_embeddings=args.max_length,
    )  # fmt: skip
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.precision]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        model_config, dtype=dtype, attn_implementation=args.attn_implementation
    )
    loss = SupervisedLoss(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": args.precision == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        },
    )
    engine.train()
    plans = make_feeds(args, RandomTokens(lengths), ranks.world_size, linear_cost(model_config))
    total = min(WARM_UP_STEPS + args.steps, *(p.steps_per_epoch for p in plans.values()))
    feeds = {
        name: load_steps(
            Sampled(p, rng.permutation(p.steps_per_epoch)[:total]), ranks.rank, 0, total
        )
        for name, p in plans.items()
    }
    guard = Guard(GuardConfig(on_spike="off"), GuardState(), ranks)
    seconds = {name: [] for name in plans}
    clock = time.process_time if args.cpu_seconds else time.perf_counter
    counts = {name: [] for name in plans}
    for k in range(total):
        for name, steps in feeds.items():
            batch = next(steps)
            model.set_attn_implementation(
                PACKED_EXAMPLES if name == "packed" else args.attn_implementation
            )
            torch.distributed.barrier()
            began = clock()
            train_step(engine, loss, batch, ranks, guard)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            torch.distributed.barrier()
            if k >= WARM_UP_STEPS:
                seconds[name].append(clock() - began)
                counts[name].append(batch.plan)
    first, logs = next(iter(plans)), LogLengths(lengths)
    # the median over steps, since other load can hold up single ones
    rate = {
        n: float(np.median([p.tokens for p in counts[n]] / np.array(s))) for n, s in seconds.items()
    }
    return {
        "ranks": ranks.world_size,
        "device": ranks.device.type,
        "global_batch_size": args.global_batch_size,
        "micro_steps": {
            n: float(np.mean([len(p.micro_batches) for p in counts[n]])) for n in plans
        },
        "steps": {n: len(counts[n]) for n in plans},
        "padding_efficiency": {
            n: round(sum(p.tokens for p in counts[n]) / sum(p.padded_tokens for p in counts[n]), 3)
            for n in plans
        },
        "deff": {n: round(deff(plan, logs), 2) for n, plan in plans.items()},
        "tokens_per_s": {n: round(value) for n, value in rate.items()},
        f"{first}_over": {n: round(rate[first] / rate[n], 2) for n in plans if n != first},
    }


def deff(plan: DataPlan | FixedSize, logs: LogLengths) -> float:
    """The design effect, as defined in benchmarks/plan.py, over one epoch."""
    if isinstance(plan, DataPlan):
        steps = [plan.contents.rows(0, k) for k in range(plan.steps_per_epoch)]
    else:
        size = plan.rows_per_batch * plan.budget.world_size * plan.micro_steps
        steps = [plan.order[k * size : (k + 1) * size] for k in range(plan.steps_per_epoch)]
    examples_per_step = float(np.mean([len(rows) for rows in steps]))
    return logs.deff([[logs.mean_of(rows) for rows in steps]], examples_per_step)["deff"]


def make_feeds(
    args: argparse.Namespace, data: RandomTokens, world_size: int, k: int
) -> dict[str, DataPlan | FixedSize]:
    """The feeds named in --feeds, all with about as many micro-steps as bucketed."""
    contents = Contents(data.lengths, 0, args.global_batch_size)
    budget = Budget(world_size, args.micro_batch_tokens, 1, k)
    plans = [
        plan_step(contents.rows(0, s), data.lengths, data.supervised, budget)
        for s in range(min(50, contents.steps_per_epoch))
    ]
    micro_steps = max(1, round(float(np.mean([len(p.micro_batches) for p in plans]))))
    rows = max(1, args.global_batch_size // (world_size * micro_steps))
    feeds: dict[str, DataPlan | FixedSize] = {}
    for name in args.feeds.split(","):
        if name in ("bucketed", "bucketed_window_4", "packed"):
            plan_budget = Budget(world_size, args.micro_batch_tokens, 1, k, name == "packed")
            window = 4 if name == "bucketed_window_4" else 1
            feeds[name] = DataPlan(data, replace(contents, window=window), plan_budget)
            continue
        if name == "random":
            order = np.random.default_rng(1).permutation(len(data.lengths))
        elif name == "group_by_length":
            # Trainer passes the number of examples of one rank's whole step
            sampler = LengthGroupedSampler(
                rows * micro_steps,
                lengths=data.lengths.tolist(),
                generator=torch.Generator().manual_seed(1),
            )
            order = np.array(list(sampler))
        else:
            raise UserError(f"--feeds: unknown feed {name}")
        feeds[name] = FixedSize(data, budget, order, rows, micro_steps)
    return feeds


if __name__ == "__main__":
    exit_on_error(main)
