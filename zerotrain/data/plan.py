"""Which rank computes which examples of a step: world_size x A micro-batches of near-equal cost
within a token budget, padded to rectangles (bucketed) or concatenated (packed).

A pure function of the step's examples (zerotrain/data/epoch_order.py), their lengths and the
budget.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

PAD_MULTIPLE = 8  # bucketed examples are padded to such a length, which suits tensor cores


@dataclass(frozen=True)
class Budget:
    """The token budget of a micro-batch, and what else its assignment depends on."""

    world_size: int
    micro_batch_tokens: int
    """Maximum tokens per micro-batch: with padding when bucketed, without when packed."""
    linear_cost: int = 24_576
    """K in the cost K*L + L*L of an example of L tokens: the dense layers of one token cost as much
    as its attention to K tokens."""
    packed: bool = False
    """Concatenate examples without padding, instead of padding those of similar length."""

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """The lengths as they count for the budget."""
        multiple = 1 if self.packed else PAD_MULTIPLE
        return -(-lengths // multiple) * multiple

    def cost(self, lengths: np.ndarray) -> np.ndarray:
        """Cost K*L + L*L of examples of these lengths, in integers."""
        return lengths * (self.linear_cost + lengths)


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step, assigned to ranks: `micro_batches[a][r]` has the examples of rank r in
    micro-step a, possibly none.
    """

    micro_batches: list[list[np.ndarray]]
    examples: int
    supervised_tokens: int
    tokens: int
    padded_tokens: int
    """Summed over all ranks and micro-steps, without the filler of ranks that have no example."""


def plan_step(
    examples: np.ndarray, lengths: np.ndarray, supervised: np.ndarray, budget: Budget
) -> StepPlan:
    """Assign one step's examples to world_size x A micro-batches of near-equal cost within the
    budget, with the smallest possible number of micro-steps A (packed: see _pack).

    Micro-batches are sorted by cost, and world_size consecutive ones form a micro-step, so that
    ranks that wait for each other do equal work. The most expensive come first, so that a budget
    too large for the memory fails in the first micro-step.

    Args:
        examples: int64 [n], n > 0, indices, each within the budget; the result does not depend on
            their order.
        lengths, supervised: int32 [all examples], tokens, and those that carry loss.
    """
    examples = examples[np.lexsort((examples, -lengths[examples]))]  # the longest first
    exact = lengths[examples].astype(np.int64)
    padded = budget.padded(exact)
    groups, costs = (_pack if budget.packed else _bucket)(padded, budget)
    padded_tokens = exact.sum() if budget.packed else sum(len(g) * padded[g[0]] for g in groups)
    order = np.argsort(-costs, kind="stable")
    world = budget.world_size
    assigned = [examples[groups[i]] for i in order]
    # Empty ones make the last micro-step whole: its collectives need every rank.
    assigned += [examples[:0]] * (-len(assigned) % world)
    return StepPlan(
        micro_batches=[assigned[i : i + world] for i in range(0, len(assigned), world)],
        examples=len(examples),
        supervised_tokens=int(supervised[examples].sum()),
        tokens=int(exact.sum()),
        padded_tokens=int(padded_tokens),
    )


# Bucketed: padded rectangles


def _bucket(padded: np.ndarray, budget: Budget) -> tuple[list[np.ndarray], np.ndarray]:
    """Divide `padded` (int64, descending) into contiguous groups: positions and costs, int64.

    Filling each group with as many examples as fit, longest first, needs the fewest groups for any
    limit on a group's cost. So the smallest limit for which a number of groups suffices is found by
    bisection; the number is the smallest that fits the budget in whole micro-steps.
    """
    cost = budget.cost(padded)
    max_examples = budget.micro_batch_tokens // padded

    def cut(limit: int) -> list[int]:
        """Bounds of groups that each cost at most `limit`."""
        # how many examples a group holds that begins at each position, where its longest one is
        sizes = np.minimum(max_examples, limit // cost)
        bounds = [0]
        while bounds[-1] < len(padded):
            bounds.append(bounds[-1] + sizes[bounds[-1]])
        bounds[-1] = len(padded)
        return bounds

    highest = (max_examples * cost).max()
    fewest = len(cut(highest)) - 1
    count = min(len(padded), -(-fewest // budget.world_size) * budget.world_size)
    limits = range(highest)
    bounds = cut(bisect_left(limits, True, cost[0], key=lambda limit: len(cut(limit)) - 1 <= count))
    while len(bounds) - 1 < count:  # ranks would be idle: halve the most expensive group
        sizes = np.diff(bounds)
        heaviest = np.argmax((sizes > 1) * sizes * cost[bounds[:-1]])
        bounds.insert(heaviest + 1, bounds[heaviest] + (sizes[heaviest] + 1) // 2)
    groups = np.split(np.arange(len(padded)), bounds[1:-1])
    return groups, np.diff(bounds) * cost[bounds[:-1]]


# Packed: examples concatenated


def _pack(lengths: np.ndarray, budget: Budget) -> tuple[list[np.ndarray], np.ndarray]:
    """Put examples of `lengths` (int64, descending) into bins of at most micro_batch_tokens: the
    positions in each bin and the bins' costs, int64.

    Longest first, each into the least loaded bin with enough room (LPT: Graham 1969, "Bounds on
    Multiprocessing Timing Anomalies"), a quarter of the bins at a time so that it vectorizes; if an
    example fits nowhere, it starts over with more bins. What is in the bins depends on their number
    alone, not on the ranks that share them.
    """
    bins = (int(lengths.sum()) - 1) // budget.micro_batch_tokens
    owner = None
    while owner is None:  # terminates: at the latest with one example per bin
        bins += 1
        # Rounded up to a multiple of 8, the usual number of ranks per node (of 4, 2 or 1 below 32,
        # 16 or 8 bins, where 8 would add too many): each world size that divides it gets the same
        # bins. Then of the world size, so that every rank has one in each micro-step.
        for multiple in (min(8, 1 << max(0, bins.bit_length() - 3)), budget.world_size):
            bins = -(-bins // multiple) * multiple
        owner = _fill_bins(lengths, bins, budget)
    # bincount sums in float64, which is exact below 2**53: 8,000 examples of a million tokens
    cost = np.bincount(owner, budget.cost(lengths), bins).astype(np.int64)
    ends = np.cumsum(np.bincount(owner, minlength=bins))
    return np.split(np.argsort(owner, kind="stable"), ends[:-1]), cost


def _fill_bins(lengths: np.ndarray, bins: int, budget: Budget) -> np.ndarray | None:
    """The bin of each example, int64 [examples], or None if they do not fit."""
    owner = np.empty(len(lengths), np.int64)
    room = np.full(bins, budget.micro_batch_tokens)
    cost = budget.cost(lengths)
    at_once = max(1, bins // 4)
    load = _head_start(cost, bins, at_once)
    start = 0
    while start < len(lengths):
        with_room = np.flatnonzero(room >= lengths[start])  # for every example from here on
        n = min(at_once, len(with_room), len(lengths) - start)
        if not n:
            return None
        # stable: of equal loads the first, so that every machine makes the same choice
        least = with_room[np.argsort(load[with_room], kind="stable")[:n]]
        owner[start : start + n] = least
        room[least] -= lengths[start : start + n]
        load[least] += cost[start : start + n]
        start += n
    return owner


def _head_start(cost: np.ndarray, bins: int, at_once: int) -> np.ndarray:
    """Initial load of each bin, int64 [bins], so that every `at_once` bins end up equally loaded.

    An example that costs more than the mean bin makes the other ranks of its micro-step wait. So
    the bins next to it are filled up to its cost, and the others correspondingly less.
    """
    level = np.empty(bins, np.int64)
    left = cost.sum()
    for start in range(0, bins, at_once):
        together = level[start : start + at_once]
        longest = cost[start] if start < len(cost) else 0
        together[:] = max(longest, left // (bins - start))
        left -= together.sum()
    return level[0] - level
