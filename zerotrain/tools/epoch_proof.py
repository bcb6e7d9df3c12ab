"""Counts the examples that every rank's loader yields over an epoch, for `prove.py epoch`."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from zerotrain.data.loader import load_steps

if TYPE_CHECKING:
    from zerotrain.data.data_plan import DataPlan
    from zerotrain.data.loader import MicroBatch

MAX_NAMED = 5  # missing or repeated examples that are named by file and line


def prove_epoch(plan: "DataPlan", then: int, cut: float, epoch: int) -> bool:
    """Load an epoch on every rank, uninterrupted, and resumed on `then` ranks after a fraction
    `cut` of it; print what came out.

    Returns:
        Whether each example came once, both times.
    """
    world = plan.budget.world_size
    resumed = replace(plan.budget, world_size=then)
    first = epoch * plan.steps_per_epoch
    last = (epoch + 1) * plan.steps_per_epoch
    middle = first + round(cut * plan.steps_per_epoch)
    print(f"{len(plan.data):,} examples, epoch {epoch}: steps {first:,} to {last - 1:,}")
    stored = Counter()
    places = {}
    for number in range(len(plan.data)):
        ids, masks = plan.data.fetch(np.array([number]))
        key = _key(ids[0], masks[0])
        stored[key] += 1
        places[key] = plan.data.place_of(number)
    split = _loaded(plan, first, middle) + _loaded(replace(plan, budget=resumed), middle, last)
    proved = True
    for name, counts in (
        (f"{world} ranks", _loaded(plan, first, last)),
        (f"{world} ranks for {middle - first:,} steps, then {then}", split),
    ):
        missing = stored - counts
        repeated = counts - stored
        print(
            f"  {name}: {(stored & counts).total():,} examples once, {missing.total():,} missing, "
            f"{repeated.total():,} repeated or not in the data set"
        )
        for problem, keys in (("missing", missing), ("repeated", repeated)):
            for key in list(keys)[:MAX_NAMED]:
                print(f"    {problem}: {places.get(key, 'not in the data set')}")
        proved = proved and counts == stored
    return proved


def _loaded(plan: "DataPlan", first: int, last: int) -> Counter[bytes]:
    """How often the loaders of all ranks yield each example in steps [first, last)."""
    counts = Counter()
    for rank in range(plan.budget.world_size):
        for step in load_steps(plan, rank, first, last):
            for batch in step.micro_batches:
                counts.update(_keys_in(batch))
    return counts


def _keys_in(batch: "MicroBatch") -> Iterator[bytes]:
    """The examples of a micro-batch, without fillers."""
    ids = batch.input_ids.numpy()
    is_target = np.zeros(ids.size, bool)
    is_target[batch.positions.numpy() + 1] = True
    is_target = is_target.reshape(ids.shape)
    if batch.position_ids is None:
        lengths = batch.attention_mask.sum(1).tolist()
        parts = [(ids[i, :n], is_target[i, :n]) for i, n in enumerate(lengths)]
    else:
        starts = batch.ends[1:-1]
        parts = zip(np.split(ids[0], starts), np.split(is_target[0], starts), strict=True)
    return (_key(own, targets) for own, targets in parts if targets.any())


def _key(ids: np.ndarray, mask: np.ndarray) -> bytes:
    """A 128-bit hash of an example's tokens and targets."""
    return xxhash.xxh3_128_digest(
        ids.astype(np.int32).tobytes() + b"|" + mask.astype(bool).tobytes()
    )
