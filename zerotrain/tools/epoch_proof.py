"""Count the examples that all ranks' loaders yield over some epochs, for `prove.py epoch`."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice

import numpy as np
import xxhash

from zerotrain.data.data_plan import DataPlan
from zerotrain.data.loader import MicroBatch, load_steps

MAX_NAMED = 5  # As many missing or repeated examples are named by file and line.


def prove_epochs(plan: DataPlan, then: int, cut: float, epochs: int) -> bool:
    """Load the first epochs on every rank twice: uninterrupted, and resumed on `then` ranks after a
    fraction `cut` of the steps. Print the counts.

    Returns:
        Whether each example came the right number of times. If a source has n examples, of
        which an epoch takes m, each must come k*m/n times in k epochs, rounded down or up.
    """
    world = plan.budget.world_size
    resumed = replace(plan, budget=replace(plan.budget, world_size=then))
    last = epochs * plan.steps_per_epoch
    middle = round(cut * last)
    print(f"{len(plan.data):,} examples, {epochs:,} epochs: {last:,} steps")
    meta = plan.data.meta
    mix = plan.order.mix or [(n, n) for n in meta.source_examples]
    numbers = count()
    least, most = Counter(), Counter()
    places = {}
    for source, (n, m) in zip(meta.sources, mix, strict=True):
        print(f"  {source}: {n:,} examples, {m:,} per epoch")
        for number in islice(numbers, n):
            key = _key(*plan.data.fetch(np.array([number])))
            least[key] += epochs * m // n
            most[key] += -(-epochs * m // n)
            places[key] = plan.data.place_of(number)
    loaded = {
        f"{world} ranks": _loaded(plan, 0, last),
        f"{world} ranks for {middle:,} steps, then {then}": _loaded(plan, 0, middle)
        + _loaded(resumed, middle, last),
    }
    for name, counts in loaded.items():
        missing = least - counts
        repeated = counts - most
        print(
            f"  {name}: {counts.total():,} examples, {missing.total():,} missing, "
            f"{repeated.total():,} too often or not in the data set"
        )
        for problem, keys in (("missing", missing), ("too often", repeated)):
            for key in list(keys)[:MAX_NAMED]:
                print(f"    {problem}: {places.get(key, 'not in the data set')}")
    return all(least <= counts <= most for counts in loaded.values())


def _loaded(plan: DataPlan, first: int, last: int) -> Counter[bytes]:
    """Count the examples that the loaders of all ranks yield in steps [first, last)."""
    return Counter(
        key
        for rank in range(plan.budget.world_size)
        for step in load_steps(plan, rank, first, last)
        for batch in step.micro_batches
        for key in _keys_in(batch)
    )


def _keys_in(batch: MicroBatch) -> Iterator[bytes]:
    """Yield a key for each example of a micro-batch, without fillers."""
    ids = batch.input_ids.numpy()
    is_target = np.zeros_like(ids)
    is_target.ravel()[batch.positions + 1] = 1
    is_real = np.ones_like(ids) if batch.position_ids is not None else batch.attention_mask.numpy()
    lengths = batch.lengths or is_real.sum(1)
    tokens = np.stack([ids, is_target])[:, is_real > 0]
    for example in np.split(tokens, np.cumsum(lengths)[:-1], axis=1):
        if example[1].any():
            yield _key(example)


def _key(example: np.ndarray) -> bytes:
    """Return a 128-bit hash of an example's token ids and targets, int64 [2, tokens]."""
    return xxhash.xxh3_128_digest(example.tobytes())
