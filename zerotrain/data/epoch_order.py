"""Which examples each optimizer step has: a pure function of seed, epoch, step, the examples'
lengths and the global batch, and of nothing else.

It does not depend on ranks, nodes or memory. So the loss curve does not depend on the cluster,
resuming takes one integer and no replay, and ranks need not communicate.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

PLAN_VERSION = 4  # increase it when a step of the same config is to have other examples than before
FEISTEL_ROUNDS = 6  # even, so that both halves end up where they started
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads out consecutive integers


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Image of `index` under the pseudo-random permutation of range(size) selected by `key`.

    A Feistel network over the next power of two (the halves differ by one bit if the exponent is
    odd), with cycle-walking for values past `size` (Black and Rogaway 2002, "Ciphers with Arbitrary
    Finite Domains"): O(1) per element, without a table, for any size.

    Args:
        index: int64 [n], in [0, size).

    Returns:
        int64 [n], distinct for distinct indices.
    """
    bits = max(2, (size - 1).bit_length())  # each half needs one
    widths = [bits - bits // 2, bits // 2]  # of the left and the right half
    masks = [(1 << width) - 1 for width in widths]
    round_keys = _mix(key + np.arange(1, FEISTEL_ROUNDS + 1, dtype=np.uint64) * _GOLDEN)
    out = index.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        value = out[walking]
        left = value >> widths[1]
        right = value & masks[1]
        for i, round_key in enumerate(round_keys):
            left, right = right, left ^ (_mix(right + round_key) & masks[i % 2])
        value = (left << widths[1]) | right
        out[walking] = value
        # An image past the end is mapped again: its cycle leads back to an index in the range.
        walking = walking[value >= size]
    return out.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014), uint64 [n] -> uint64 [n]: every bit
    of the input affects every bit of the output. Products of arrays wrap around.
    """
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def derive_key(seed: int, epoch: int) -> int:
    """64-bit key of an epoch's permutation; neighboring epochs have unrelated ones."""
    key = _mix(np.array([seed % 2**64], np.uint64))
    return int(_mix(key + (epoch + 1) * _GOLDEN % 2**64)[0])


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The order of the examples in each epoch, and how steps divide it: every example is in exactly
    one step per epoch, unless a `mix` has more or fewer of its source.

    A source of n examples that has m places in each epoch is walked round and round, in one random
    order of the n: epoch e has those at e*m, e*m + 1 ... e*m + m-1, modulo n. So any k epochs in a
    row have each of them k*m/n times, rounded down or up.

    Steps are consecutive slices of the order. With a batch size in examples, step k of S is the
    slice [k*n//S, (k+1)*n//S): sizes differ by at most one, and any step is found in O(1). With a
    batch size in tokens, the slices end where the cumulative token count passes k/S of the epoch's;
    the bounds come from one pass over the lengths per epoch, kept as a table of S + 1 integers. All
    epochs have the same S, also where a mix gives them other examples.

    `start` is 0 everywhere below, except in an epoch that is divided anew from some position on,
    because the global batch has changed there.
    """

    lengths: np.ndarray  # int32 [examples], in tokens; may be memory-mapped
    seed: int
    global_batch_size: int | None = None
    """Maximum examples per step. Set either this or global_batch_tokens."""
    global_batch_tokens: int | None = None
    """Approximate maximum of tokens per step: the last example of a step may exceed it."""
    shuffle: bool = True
    """False keeps the examples in their original order, for evaluation."""
    mix: tuple[tuple[int, int], ...] = ()
    """n and m of each source, whose examples follow each other; empty: every example once."""

    @cached_property
    def places(self) -> int:
        """Examples per epoch; one that comes twice counts twice."""
        return sum(m for _, m in self.mix) or len(self.lengths)

    @cached_property
    def tokens_per_epoch(self) -> int:
        """Tokens of an epoch; the mean where a mix gives epochs other examples."""
        total = first = 0
        for n, m in self.mix or [[self.places] * 2]:
            total += int(self.lengths[first : first + n].sum()) * m // (n or 1)
            first += n
        return total

    @cached_property
    def steps_per_epoch(self) -> int:
        return self.steps_from(0, 0)

    def steps_from(self, epoch: int, start: int) -> int:
        """Steps of an epoch from position `start` on."""
        if self.global_batch_size:
            return -(-(self.places - start) // self.global_batch_size)
        return len(self._bounds_by_tokens(epoch, start)) - 1

    def examples(self, epoch: int, step: int, start: int = 0) -> np.ndarray:
        """Indices of the examples of a step, int64."""
        first = self.first_of(epoch, step, start)
        return self.slice(epoch, first, self.first_of(epoch, step + 1, start))

    def first_of(self, epoch: int, step: int, start: int = 0) -> int:
        """The position in the epoch's order at which a step begins."""
        if self.global_batch_size:
            left = self.places - start
            return start + step * left // self.steps_from(epoch, start)
        return int(self._bounds_by_tokens(epoch, start)[step])

    def slice(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The examples at positions [start, stop) of the epoch's order, int64."""
        index = np.arange(start, stop)
        if not self.shuffle:
            return index
        place = permute(index, self.places, derive_key(self.seed, epoch))
        examples = place.copy()
        first = 0  # example of the source, whose places are [0, m)
        for source, (n, m) in enumerate(self.mix):
            is_own = (place >= 0) & (place < m)
            walked = (epoch * m + place[is_own]) % n
            # with a key that no epoch has
            examples[is_own] = first + permute(walked, n, derive_key(self.seed, -1 - source))
            first += n
            place -= m
        return examples

    @lru_cache(maxsize=64)  # noqa: B019 - a run has few orders, and keeps them
    def _bounds_by_tokens(self, epoch: int, start: int) -> np.ndarray:
        """Bounds of the steps sized in tokens, from position `start` of an epoch on, int64
        [steps + 1]; no step is empty.
        """
        tokens = np.cumsum(self.lengths[self.slice(epoch, start, self.places)])
        left = len(tokens)
        total = int(tokens[-1]) if start else self.tokens_per_epoch
        steps = min(left, -(-total // self.global_batch_tokens))
        goals = np.arange(1, steps) * tokens[-1] // steps
        bounds = np.concatenate([[0], 1 + np.searchsorted(tokens, goals), [left]])
        k = np.arange(steps + 1)
        bounds = np.maximum.accumulate(bounds - k) + k  # at least one, even next to a huge example
        # and at least one is left for each step that follows
        return start + np.minimum(bounds, left - steps + k)
