"""The step plan: which rank computes which examples of an optimizer step.

The examples of a step are divided into world_size x A micro-batches of nearly equal cost, each
within a token budget; A is the number of micro-steps. The examples of a micro-batch are either
padded to a common length (bucketed) or concatenated (packed).

The plan is a pure function of the step's examples (zerotrain/data/epoch_order.py), their lengths
and the budget. Every rank computes all of it, so ranks do not communicate about it.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from zerotrain.config.schema import MAX_INT

# Bucketed examples are padded to a multiple of this length, which suits tensor cores.
PAD_MULTIPLE = 8


Windows = tuple[tuple[int, float], ...]
"""Sizes of attention windows, in tokens with the query's own, and the share of attention of each.
"""


def squares(lengths: np.ndarray, windows: Windows) -> np.ndarray:
    """Return twice the pairs of a query and a key in examples, minus their lengths, as the mean
    over windows: L*L for an example of L tokens that fits the window, and less for longer ones.
    """
    mean = 0
    for window, share in windows:
        beyond = np.maximum(lengths - window, 0)
        mean = mean + share * (lengths**2 - beyond * (beyond + 1))
    return mean


@dataclass(frozen=True)
class Budget:
    """The token budget of a micro-batch, and the other settings that the plan depends on."""

    world_size: int
    micro_batch_tokens: int
    """Maximum tokens per micro-batch: with padding when bucketed, without when packed."""
    linear_cost: int = 24_576
    """K in the cost K*L + L*L of an example of L tokens. The dense layers of one token cost as much
    as its attention to K tokens, in all layers that have attention."""
    packed: bool = False
    """Concatenate the examples of a micro-batch instead of padding them."""
    windows: Windows = ((MAX_INT, 1.0),)
    """With windows the cost has `squares` in place of L*L."""

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Return the lengths that count against the budget: padded ones when bucketed."""
        multiple = 1 if self.packed else PAD_MULTIPLE
        return -(-lengths // multiple) * multiple

    def cost(self, lengths: np.ndarray) -> np.ndarray:
        """Return the costs of examples of these lengths, int64."""
        return (lengths * self.linear_cost + squares(lengths, self.windows)).astype(np.int64)


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step, assigned to ranks.

    `micro_batches[a][r]` has the indices of the examples of rank r in micro-step a, possibly none.
    The counts are over all ranks and micro-steps.
    """

    micro_batches: list[list[np.ndarray]]
    examples: int
    supervised_tokens: int
    tokens: int
    padded_tokens: int
    """Tokens with padding. The filler of a rank without examples is not counted."""
    weights: np.ndarray | None = None
    """Sum of the weights of each source's supervised tokens, float64 [sources]; from DataPlan."""


def plan_step(
    examples: np.ndarray, lengths: np.ndarray, supervised: np.ndarray, budget: Budget
) -> StepPlan:
    """Assign the examples of one step to ranks and micro-steps.

    Micro-batches are sorted by cost, and each micro-step takes the next world_size of them. So
    ranks that wait for each other do equal work. The most expensive micro-batches come first: if
    the budget is too large for the memory, the first micro-step fails.

    Bucketed plans have the fewest micro-steps that the budget allows; for packed plans see `_pack`.

    Args:
        examples: int64 [n] with n > 0, the indices of the examples; their order does not matter.
            Each example must fit the budget.
        lengths: int32 [all examples], in tokens.
        supervised: int32 [all examples], the number of tokens that carry loss.
    """
    # The longest examples first; of equally long ones, the smallest index first.
    examples = examples[np.lexsort((examples, -lengths[examples]))]
    exact = lengths[examples].astype(np.int64)
    padded = budget.padded(exact)
    groups, costs = (_pack if budget.packed else _bucket)(padded, budget)
    padded_tokens = exact.sum() if budget.packed else sum(len(g) * padded[g[0]] for g in groups)
    order = np.argsort(-costs, kind="stable")
    world = budget.world_size
    assigned = [examples[groups[i]] for i in order]
    # The collectives of the last micro-step need every rank, also one without examples.
    assigned += [examples[:0]] * (-len(assigned) % world)
    return StepPlan(
        micro_batches=[assigned[i : i + world] for i in range(0, len(assigned), world)],
        examples=len(examples),
        supervised_tokens=int(supervised[examples].sum()),
        tokens=int(exact.sum()),
        padded_tokens=int(padded_tokens),
    )


# --------------------------------------------------------------------------------------------------
# Bucketed: examples of similar length, padded to a rectangle


def _bucket(padded: np.ndarray, budget: Budget) -> tuple[list[np.ndarray], np.ndarray]:
    """Divide examples, longest first, into groups of consecutive ones.

    The number of groups is the smallest that fits the budget, rounded up to whole micro-steps. The
    most expensive group is as cheap as possible for that number.

    For a given limit on a group's cost, the fewest groups result from filling each with as many
    examples as fit. So bisection finds the smallest limit with which the number suffices.

    Args:
        padded: int64 [n], padded lengths, descending.

    Returns:
        The positions in `padded` of each group, and the groups' costs, int64.
    """
    cost = budget.cost(padded)
    max_examples = budget.micro_batch_tokens // padded

    def cut(limit: int) -> list[int]:
        """Return the bounds of groups that each cost at most `limit`."""
        # The size of a group that starts at each position. Its first example is its longest.
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
    # Fewer groups than `count` would leave ranks idle: halve the most expensive group.
    while len(bounds) - 1 < count:
        sizes = np.diff(bounds)
        heaviest = np.argmax((sizes > 1) * sizes * cost[bounds[:-1]])
        bounds.insert(heaviest + 1, bounds[heaviest] + (sizes[heaviest] + 1) // 2)
    groups = np.split(np.arange(len(padded)), bounds[1:-1])
    return groups, np.diff(bounds) * cost[bounds[:-1]]


# --------------------------------------------------------------------------------------------------
# Packed: examples concatenated


def _pack(lengths: np.ndarray, budget: Budget) -> tuple[list[np.ndarray], np.ndarray]:
    """Divide examples, longest first, into bins of at most micro_batch_tokens.

    Each example goes into the least loaded bin with enough room (LPT: Graham 1969, "Bounds on
    Multiprocessing Timing Anomalies"). If an example fits nowhere, packing starts over with more
    bins. The contents of the bins depend on their number, but not on the ranks that share them.

    Args:
        lengths: int64 [n], descending.

    Returns:
        The positions in `lengths` of each bin, and the bins' costs, int64.
    """
    bins = (int(lengths.sum()) - 1) // budget.micro_batch_tokens
    owner = None
    while owner is None:  # Ends at the latest with one example per bin.
        bins += 1
        # First a multiple of 8, the usual number of ranks per node, so that every world size that
        # divides the number of bins gets the same bins. Where 8 would add too many bins, the
        # multiple is 4, 2 or 1 (below 32, 16 or 8 bins). Then a multiple of the world size, so that
        # every rank has a bin in each micro-step.
        for multiple in (min(8, 1 << max(0, bins.bit_length() - 3)), budget.world_size):
            bins = -(-bins // multiple) * multiple
        owner = _fill_bins(lengths, bins, budget)
    # bincount sums in float64, which is exact below 2**53: 8,000 examples of a million tokens.
    cost = np.bincount(owner, budget.cost(lengths), bins).astype(np.int64)
    ends = np.cumsum(np.bincount(owner, minlength=bins))
    return np.split(np.argsort(owner, kind="stable"), ends[:-1]), cost


def _fill_bins(lengths: np.ndarray, bins: int, budget: Budget) -> np.ndarray | None:
    """Return the bin of each example, int64 [n], or None if the examples do not fit."""
    owner = np.empty(len(lengths), np.int64)
    room = np.full(bins, budget.micro_batch_tokens)
    cost = budget.cost(lengths)
    # A quarter of the bins get their next example together, which numpy does in one operation.
    together = max(1, bins // 4)
    load = _head_start(cost, bins, together)
    start = 0
    while start < len(lengths):
        # These bins also have room for any later example, which is at most as long.
        with_room = np.flatnonzero(room >= lengths[start])
        n = min(together, len(with_room), len(lengths) - start)
        if not n:
            return None
        # A stable sort takes the first of equal loads, so every machine makes the same choice.
        least = with_room[np.argsort(load[with_room], kind="stable")[:n]]
        owner[start : start + n] = least
        room[least] -= lengths[start : start + n]
        load[least] += cost[start : start + n]
        start += n
    return owner


def _head_start(cost: np.ndarray, bins: int, together: int) -> np.ndarray:
    """Return the load that each bin starts with, int64 [bins]; with less, a bin takes more.

    Bins that are filled together end up equally loaded. An example that costs more than the mean
    bin makes the other ranks of its micro-step wait. So the bins that are filled together with it
    go up to its cost, and all later bins take less.
    """
    level = np.empty(bins, np.int64)
    left = cost.sum()
    for start in range(0, bins, together):
        longest = cost[start] if start < len(cost) else 0
        neighbors = level[start : start + together]
        neighbors[:] = max(longest, left // (bins - start))
        left -= neighbors.sum()
    return level[0] - level
