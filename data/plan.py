"""Who trains on what, when: pure functions of lengths, seed, epoch, batch, budget and world size.

Step k of an epoch is a set of rows fixed by (seed, epoch, k) and the number of rows and the global
batch alone: ranks and micro-steps only decide how that set is dealt out. So the curve does not
depend on the cluster, a resumed run needs one integer and no replay, and no rank asks another
anything.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

FEISTEL_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads consecutive integers


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where `index` goes under the pseudo-random permutation of range(size) that `key` names.

    A balanced Feistel network over the next power of four, with cycle-walking for values past
    `size` (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"): O(1) per element, no
    table, for any size.

    Args:
        index: int64 [n], in [0, size).

    Returns:
        int64 [n], distinct for distinct indices.
    """
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    round_keys = _mix(np.uint64(key) + np.arange(1, FEISTEL_ROUNDS + 1, dtype=np.uint64) * _GOLDEN)
    out = index.astype(np.uint64)
    walking = np.ones(len(out), dtype=bool)
    while walking.any():
        left, right = out[walking] >> shift, out[walking] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        out[walking] = (left << shift) | right
        walking = out >= np.uint64(size)
    return out.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea and Flood 2014), uint64 -> uint64: every bit of the input
    reaches every bit of the output.
    """
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def epoch_key(seed: int, epoch: int) -> int:
    """64-bit key of an epoch's permutation."""
    with np.errstate(over="ignore"):
        return int(
            _mix(
                _mix(np.array([seed], dtype=np.int64).astype(np.uint64))
                + np.uint64(epoch + 1) * _GOLDEN
            )[0]
        )


def steps_per_epoch(rows: int, global_batch_size: int) -> int:
    """Steps of one epoch; none is larger than the global batch, and they differ by at most one
    row.
    """
    return -(-rows // global_batch_size)


def step_rows(rows: int, global_batch_size: int, seed: int, epoch: int, step: int) -> np.ndarray:
    """Row numbers, int64, of step `step` of epoch `epoch`: slice [k*n//S, (k+1)*n//S) of the
    epoch's order.
    """
    steps = steps_per_epoch(rows, global_batch_size)
    index = np.arange(step * rows // steps, (step + 1) * rows // steps, dtype=np.int64)
    return permute(index, rows, epoch_key(seed, epoch))


@dataclass(frozen=True)
class Budget:
    """What bounds and balances micro-batches."""

    world_size: int
    micro_batch_tokens: int
    """The most padded tokens in one micro-batch."""
    pad_to_multiple_of: int = 1
    linear_cost: int = 24_576
    """K of a row's cost K*L + L*L: how many tokens of attention one token's dense layers cost."""


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step, dealt out. `micro_batches[a][r]` are the rows of rank r in micro-step
    a, maybe none.
    """

    micro_batches: list[list[np.ndarray]]
    examples: int
    supervised_tokens: int
    tokens: int
    padded_tokens: int
    """Summed over all ranks and micro-steps, without the filler of a rank that has no row."""


def deal_step(
    rows: np.ndarray, lengths: np.ndarray, supervised: np.ndarray, budget: Budget
) -> StepPlan:
    """Cut one step's rows into world_size x A micro-batches of near-equal cost; A is the smallest
    that fits.

    Rows sorted by length are cut into contiguous groups whose largest cost is the smallest
    possible. Groups in order of cost, world_size consecutive ones form a micro-step, so ranks that
    wait for each other do equal work; the largest come first, so a budget that does not fit in
    memory shows in the first micro-step.

    Args:
        rows: int64 [n], row numbers, in any order: the result does not depend on it.
        lengths, supervised: int32 [all rows], tokens of each row, and those that carry loss.

    Raises:
        ValueError: a row longer than the budget.
    """
    rows = np.sort(rows)
    rows = rows[np.argsort(-lengths[rows].astype(np.int64), kind="stable")]
    exact = lengths[rows].astype(np.int64)
    multiple = budget.pad_to_multiple_of
    padded = -(-exact // multiple) * multiple
    if len(rows) and padded[0] > budget.micro_batch_tokens:
        raise ValueError(
            f"row {rows[0]} has {padded[0]} padded tokens, over the budget of "
            f"{budget.micro_batch_tokens}"
        )

    bounds = np.array(_cut(padded, budget))
    starts, sizes = bounds[:-1], np.diff(bounds)
    groups = [rows[a:b] for a, b in pairwise(bounds)]
    order = np.argsort(-sizes * _row_cost(padded[starts], budget), kind="stable")
    dealt = [groups[i] for i in order]
    dealt += [rows[:0]] * (-len(dealt) % budget.world_size)
    return StepPlan(
        micro_batches=[
            dealt[i : i + budget.world_size] for i in range(0, len(dealt), budget.world_size)
        ],
        examples=len(rows),
        supervised_tokens=int(supervised[rows].sum()),
        tokens=int(exact.sum()),
        padded_tokens=int((sizes * padded[starts]).sum()),
    )


def _row_cost(length: np.ndarray, budget: Budget) -> np.ndarray:
    return length * (budget.linear_cost + length)


def _cut(padded: np.ndarray, budget: Budget) -> list[int]:
    """Bounds of contiguous groups of `padded` (int64, descending): a multiple of world_size of them
    where rows suffice.

    Both searches are exact. Taking as many rows as fit, longest first, uses the fewest groups for
    any limit that grows with the group; so the smallest limit that still needs no more than M
    groups, found by bisection over the integers, is the smallest possible largest cost.
    """
    n = len(padded)
    if n == 0:
        return [0]
    cap_rows = budget.micro_batch_tokens // padded
    cost = _row_cost(padded, budget)
    fewest = len(_greedy(cap_rows, n)) - 1
    target = min(n, -(-fewest // budget.world_size) * budget.world_size)
    low, high = int(cost[0]), int((cap_rows * cost).max())
    low = max(low, -(-int(cost.sum()) // target))
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(np.minimum(cap_rows, middle // cost), n, stop=target)) - 1 <= target:
            high = middle
        else:
            low = middle + 1
    bounds = _greedy(np.minimum(cap_rows, high // cost), n)
    while (
        len(bounds) - 1 < target
    ):  # fewer groups than ranks to feed: halve the costliest that can be halved
        sizes = np.diff(bounds)
        heaviest = int(np.argmax(np.where(sizes > 1, sizes * cost[bounds[:-1]], -1)))
        bounds.insert(heaviest + 1, bounds[heaviest] + int(sizes[heaviest] + 1) // 2)
    return bounds


def _greedy(rows_that_fit: np.ndarray, n: int, stop: int | None = None) -> list[int]:
    """Bounds when each group, longest row first, takes all that fit; gives up after more than
    `stop` groups.
    """
    bounds = [0]
    fit = rows_that_fit.tolist()
    while bounds[-1] < n and (stop is None or len(bounds) <= stop + 1):
        bounds.append(min(n, bounds[-1] + fit[bounds[-1]]))
    return bounds
