"""Counts the examples that every rank's loader yields over an epoch, for `prove.py epoch`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from zerotrain.data.loader import load_steps
from zerotrain.runtime.progress import progress

if TYPE_CHECKING:
    from zerotrain.data.data_plan import DataPlan
    from zerotrain.data.loader import MicroBatch

MAX_NAMED = 5  # missing or repeated examples that are named by file and line


def prove_epoch(plan: "DataPlan", then: int, cut: float, epoch: int) -> bool:
    """Load an epoch on every rank, uninterrupted, and resumed on `then` ranks after a fraction
    `cut` of it; print what came out.
    """
    resumed = replace(plan, budget=replace(plan.budget, world_size=then))
    first, world = epoch * plan.steps_per_epoch, plan.budget.world_size
    middle, last = first + round(cut * plan.steps_per_epoch), first + plan.steps_per_epoch
    print(f"{len(plan.data):,} examples, epoch {epoch}: steps {first:,} to {last - 1:,}")
    keys = [_key(ids, mask) for ids, mask in _stored_examples(plan)]
    whole = _count(keys, [(plan, first, last)])
    split = _count(keys, [(plan, first, middle), (resumed, middle, last)])
    proved = _report(plan, f"{world} ranks", whole)
    proved &= _report(plan, f"{world} ranks for {middle - first:,} steps, then {then}", split)
    same = sum(_examples_of(plan, k) == _examples_of(resumed, k) for k in range(first, last))
    print(f"  the same examples in {same:,} of {last - first:,} steps on {world} and {then} ranks")
    return proved and bool((whole == split).all()) and same == last - first


def _count(keys: list[bytes], parts: "list[tuple[DataPlan, int, int]]") -> np.ndarray:
    """How often the ranks' loaders yield each example in these (plan, first step, last step + 1),
    int64 [examples + 1]; the last entry counts those that are not in the data set.
    """
    number_of = {key: number for number, key in reversed(list(enumerate(keys)))}
    counts = np.zeros(len(keys) + 1, np.int64)
    loaders = []
    for plan, first, last in parts:
        loaders += [(plan, rank, first, last) for rank in range(plan.budget.world_size)]
    with progress("loading", len(loaders), "ranks") as report:
        for done, (plan, rank, first, last) in enumerate(loaders):
            report(done)
            for step in load_steps(plan, rank, first, last):
                assigned = (ranks[rank] for ranks in step.plan.micro_batches)
                for rows, batch in zip(assigned, step.micro_batches, strict=True):
                    numbers = rows.tolist()
                    found = [_key(ids, mask) for ids, mask in _examples_in(batch)]
                    if found != [keys[number] for number in numbers]:
                        numbers = [number_of.get(key, -1) for key in found]
                    np.add.at(counts, numbers, 1)
    return counts


def _report(plan: "DataPlan", name: str, counts: np.ndarray) -> bool:
    """Print the counts; True if each example came once."""
    unknown, counts = int(counts[-1]), counts[:-1]
    missing, repeated = (counts == 0).nonzero()[0], (counts > 1).nonzero()[0]
    print(
        f"  {name}: {(counts == 1).sum():,} examples once, {len(missing):,} missing, "
        f"{len(repeated):,} repeated, {unknown:,} that are not in the data set"
    )
    for word, rows in (("missing", missing), ("repeated", repeated)):
        for row in rows[:MAX_NAMED].tolist():
            print(f"    {word}: {plan.data.place_of(row)}")
    return not (len(missing) or len(repeated) or unknown)


def _examples_of(plan: "DataPlan", step: int) -> list[int]:
    """Numbers of the examples in a step, sorted."""
    micro_batches = plan.step(step).micro_batches
    return sorted(row for ranks in micro_batches for rows in ranks for row in rows.tolist())


def _examples_in(batch: "MicroBatch") -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids and targets of each example in a micro-batch, without fillers."""
    ids = batch.input_ids.numpy()
    is_target = np.zeros(ids.size, bool)
    is_target[batch.positions.numpy() + 1] = True
    is_target = is_target.reshape(ids.shape)
    if batch.position_ids is None:
        lengths = batch.attention_mask.sum(1).tolist()
        parts = [(ids[i, :n], is_target[i, :n]) for i, n in enumerate(lengths)]
    else:
        starts = np.flatnonzero(batch.position_ids.numpy()[0] == 0)[1:]
        parts = zip(np.split(ids[0], starts), np.split(is_target[0], starts), strict=True)
    return ((own, targets) for own, targets in parts if targets.any())


def _stored_examples(plan: "DataPlan") -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, len(plan.data), 1000):
        rows = np.arange(start, min(start + 1000, len(plan.data)))
        yield from zip(*plan.data.fetch(rows), strict=True)


def _key(ids: np.ndarray, mask: np.ndarray) -> bytes:
    """A 128-bit hash of an example's tokens and targets."""
    return xxhash.xxh3_128_digest(
        ids.astype(np.int32).tobytes() + b"|" + mask.astype(bool).tobytes()
    )
