"""Prove a claim about the data of your own config, without a model.

    python scripts/prove.py epoch --config recipes/demo.yaml [--world 8] [--then 6] [--cut 0.4]
    python scripts/prove.py data --config recipes/demo.yaml

epoch   Run every rank's loader over a whole epoch and count the examples that it yields, identified
        by their tokens; once on one world size, and once interrupted and resumed on another. Each
        example must appear exactly once. With sources mixed by weight, each source must have its
        share, and an example must not repeat before all others of its source have appeared.
data    Read every row of all sources and compare it with its decoded tokens and loss mask. The
        supervised text of each answer must be its content and its end mark, with nothing of another
        turn; every key of a row must be in its text, be metadata, or be ignored; and the examples
        in data.cache_dir must be those that the row gives.

Any flag of train.py may follow. Exit code: 0 proved, 1 refuted, 2 a mistake in the input.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.check_sources import parse_with_sources
from runtime.errors import EXIT_FAILURE, UserError, exit_on_error
from runtime.progress import progress

if TYPE_CHECKING:
    import numpy as np

    from config.schema import Config
    from data.data_plan import DataPlan
    from data.loader import MicroBatch

NAMED = 5  # the most missing or repeated examples that are named by file and line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("claim", choices=["epoch", "data"])
    of_epoch = parser.add_argument_group("epoch")
    of_epoch.add_argument("--world", type=int, default=8, help="world size")
    of_epoch.add_argument("--then", type=int, default=6, help="world size after resuming")
    of_epoch.add_argument(
        "--cut", type=float, default=0.4, help="where to interrupt, as a fraction of the epoch"
    )
    of_epoch.add_argument("--epoch", type=int, default=0, help="which epoch, from 0")
    args, rest = parser.parse_known_args()
    if min(args.world, args.then) < 1 or not 0 <= args.cut <= 1 or args.epoch < 0:
        raise UserError(
            "--world and --then must be at least 1, --cut in [0, 1], --epoch at least 0"
        )
    config = parse_with_sources(rest, prog="prove.py").config

    from tracking.console import quieten_libraries

    quieten_libraries(is_first=True)
    proved = prove_data(config) if args.claim == "data" else prove_epoch(config, args)
    print("proved" if proved else "REFUTED")
    sys.exit(0 if proved else EXIT_FAILURE)


# --------------------------------------------------------------------------------------------------
# Every example once per epoch


def prove_epoch(config: "Config", args: argparse.Namespace) -> bool:
    """Load an epoch on every rank, uninterrupted and resumed, and report what came out."""
    from tracking.startup import open_plans

    _, _, plan, _ = open_plans(config, args.world)
    resumed = replace(plan, budget=replace(plan.budget, world_size=args.then))
    first = args.epoch * plan.steps_per_epoch
    cut, last = first + round(args.cut * plan.steps_per_epoch), first + plan.steps_per_epoch
    print(
        f"{len(plan.data):,} examples, {plan.contents.rows_per_epoch:,} of them in epoch "
        f"{args.epoch}: steps {first:,} to {last - 1:,}"
    )
    ledger = Ledger(plan, args.epoch)
    whole = ledger.count([(plan, first, last)])
    split = ledger.count([(plan, first, cut), (resumed, cut, last)])
    split_name = f"{args.world} ranks for {cut - first:,} steps, then {args.then}"
    proved = ledger.report(f"{args.world} ranks", whole) & ledger.report(split_name, split)
    same = sum(examples_of(plan, k) == examples_of(resumed, k) for k in range(first, last))
    print(
        f"  the same examples in {same:,} of {last - first:,} steps on {args.world} and {args.then}"
    )
    proved &= bool((whole == split).all()) and same == last - first
    if plan.contents.mix:
        proved &= report_order(plan, last)
    return proved


class Ledger:
    """Counts the examples of a data set that loaders yield, identified by tokens and targets."""

    def __init__(self, plan: "DataPlan", epoch: int) -> None:
        self.plan, self.epoch = plan, epoch
        self.keys = [key_of(ids, mask) for ids, mask in stored_examples(plan)]
        self.number_of = {key: number for number, key in reversed(list(enumerate(self.keys)))}

    def count(self, parts: "list[tuple[DataPlan, int, int]]") -> "np.ndarray":
        """How often the ranks' loaders yield each example in these (plan, first step, last step +
        1), int64 [examples + 1]; the last entry counts those that are not in the data set.
        """
        import numpy as np

        from data.loader import load_steps

        counts = np.zeros(len(self.keys) + 1, np.int64)
        loaders = [
            (plan, rank, first, last)
            for plan, first, last in parts
            for rank in range(plan.budget.world_size)
        ]
        with progress("loading", len(loaders), "ranks") as report:
            for done, (plan, rank, first, last) in enumerate(loaders):
                report(done)
                for step in load_steps(plan, rank, first, last):
                    assigned = (ranks[rank] for ranks in step.plan.micro_batches)
                    for rows, batch in zip(assigned, step.micro_batches, strict=True):
                        np.add.at(counts, self._numbers(rows.tolist(), batch), 1)
        return counts

    def _numbers(self, assigned: list[int], batch: "MicroBatch") -> list[int]:
        """Numbers of the examples in a micro-batch; identical ones are resolved by `assigned`."""
        keys = [key_of(ids, mask) for ids, mask in examples_in(batch)]
        if keys == [self.keys[number] for number in assigned]:
            return assigned
        return [self.number_of.get(key, -1) for key in keys]

    def report(self, name: str, counts: "np.ndarray") -> bool:
        """Print the counts; True if they are as they should be."""
        counts, unknown = counts[:-1], int(counts[-1])
        if unknown:
            print(f"  {name}: {unknown:,} examples that are not in the data set")
        if self.plan.contents.mix:
            return self._report_mix(name, counts) and not unknown
        missing, repeated = (counts == 0).nonzero()[0], (counts > 1).nonzero()[0]
        print(
            f"  {name}: {(counts == 1).sum():,} examples once, {len(missing):,} missing, "
            f"{len(repeated):,} repeated"
        )
        for word, rows in (("missing", missing), ("repeated", repeated)):
            for row in rows[:NAMED].tolist():
                print(f"    {word}: {self.plan.data.place_of(row)}")
        return not (len(missing) or len(repeated) or unknown)

    def _report_mix(self, name: str, counts: "np.ndarray") -> bool:
        """The same for a mix; an epoch may end one pass over a source and begin the next."""
        right = True
        for share, source in zip(
            self.plan.contents.mix, self.plan.data.meta["sources"], strict=True
        ):
            came = counts[share.first : share.first + share.rows]
            first = self.epoch * share.per_epoch
            most = (first + share.per_epoch - 1) // share.rows - first // share.rows + 1
            often = int((came > most).sum())
            right &= int(came.sum()) == share.per_epoch and not often
            print(
                f"  {name}: {source}: {came.sum():,} of {share.per_epoch:,} examples due, "
                f"{often:,} more than {most} times"
            )
        return right


def report_order(plan: "DataPlan", steps: int) -> bool:
    """Print for each source of a mix after how many of the run's first `steps` steps the counts of
    its examples differ by more than one; True if after none.
    """
    import numpy as np

    mix = plan.contents.mix
    counts, early = np.zeros(len(plan.data), np.int64), [0] * len(mix)
    for step in range(steps):
        np.add.at(counts, examples_of(plan, step), 1)
        for number, share in enumerate(mix):
            early[number] += int(np.ptp(counts[share.first : share.first + share.rows])) > 1
    for source, n in zip(plan.data.meta["sources"], early, strict=True):
        print(
            f"  {source}: an example repeated before all others appeared in "
            f"{n:,} of {steps:,} steps"
        )
    return not any(early)


def examples_of(plan: "DataPlan", step: int) -> list[int]:
    """Numbers of the examples in a step, sorted."""
    return sorted(
        row for ranks in plan.step(step).micro_batches for rows in ranks for row in rows.tolist()
    )


def examples_in(batch: "MicroBatch") -> Iterator[tuple[bytes, bytes]]:
    """Token ids (int32) and targets (bool) of each example in a micro-batch, without fillers."""
    import numpy as np

    ids = batch.input_ids.numpy().astype(np.int32)
    is_target = np.zeros(ids.size, bool)
    is_target[batch.positions.numpy() + 1] = True
    is_target = is_target.reshape(ids.shape)
    if batch.position_ids is None:
        lengths = batch.attention_mask.sum(1).tolist()
        parts = [(ids[i, :n], is_target[i, :n]) for i, n in enumerate(lengths)]
    else:
        starts = np.flatnonzero(batch.position_ids.numpy()[0] == 0)[1:]
        parts = zip(np.split(ids[0], starts), np.split(is_target[0], starts), strict=True)
    return ((i.tobytes(), t.tobytes()) for i, t in parts if t.any())


def stored_examples(plan: "DataPlan") -> Iterator[tuple[bytes, bytes]]:
    """The same of every example in the data set."""
    import numpy as np

    for start in range(0, len(plan.data), 1000):
        rows = np.arange(start, min(start + 1000, len(plan.data)))
        for ids, mask in zip(*plan.data.fetch(rows), strict=True):
            yield ids.astype(np.int32).tobytes(), mask.astype(bool).tobytes()


def key_of(ids: bytes, mask: bytes) -> bytes:
    """A 128-bit hash of an example's tokens and targets."""
    import xxhash

    return xxhash.xxh3_128_digest(ids + b"|" + mask)


# --------------------------------------------------------------------------------------------------
# What is supervised


def prove_data(config: "Config") -> bool:
    """Check every row of the training and held-out sources."""
    from data.row_proof import RowProof
    from data.tokenize import open_cache, tokenize_sources
    from model.load import load_tokenizer

    tokenizer, proved = load_tokenizer(config), True
    held_out = list(config.data.eval_sets().values())
    for number, given in enumerate([config.data.sources("train_sources"), *held_out]):
        cache = open_cache(tokenize_sources(given, tokenizer, config.data))
        proof = RowProof(config.data, tokenizer, cache)
        with progress("checking", None, "rows") as report:
            for source in given:
                proof.read(source, report)
        key = "eval_sources" if number else "train_sources"
        print(f"data.{key}: {', '.join(cache.meta['sources'])}")
        proved &= proof.report()
    return proved


if __name__ == "__main__":
    exit_on_error(main)
