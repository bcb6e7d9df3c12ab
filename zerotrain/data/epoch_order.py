"""The epoch order: which examples each optimizer step has.

It is a pure function of seed, epoch, step, the lengths of the examples and the global batch. Ranks,
nodes and memory do not matter. So the loss curve is the same on every cluster, a resumed run needs
one integer and replays nothing, and ranks do not communicate about examples.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

# Increase it when the same config is to give a step other examples than before, or when the files
# of a checkpoint change: older checkpoints are then refused by both numbers.
PLAN_VERSION = 4
# An even number: each round swaps the halves, so that they end up where they started.
FEISTEL_ROUNDS = 6
# 2^64 / golden ratio; its multiples spread consecutive integers over all 64 bits.
_GOLDEN = 0x9E3779B97F4A7C15


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Map indices by the pseudo-random permutation of range(size) that `key` selects.

    A Feistel network permutes the next power of two. Its halves differ by one bit if the exponent
    is odd. Values past `size` are mapped again (cycle-walking: Black and Rogaway 2002, "Ciphers
    with Arbitrary Finite Domains"). This takes O(1) per element, without a table, for any size.

    Args:
        index: int64 [n], in [0, size).

    Returns:
        int64 [n], distinct for distinct indices.
    """
    bits = max(2, (size - 1).bit_length())  # At least one for each half.
    left_bits, right_bits = bits - bits // 2, bits // 2
    masks = [(1 << left_bits) - 1, (1 << right_bits) - 1]
    round_keys = _mix(key + np.arange(1, FEISTEL_ROUNDS + 1, dtype=np.uint64) * _GOLDEN)
    out = index.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        value = out[walking]
        left = value >> right_bits
        right = value & masks[1]
        for i, round_key in enumerate(round_keys):
            left, right = right, left ^ (_mix(right + round_key) & masks[i % 2])
        value = (left << right_bits) | right
        out[walking] = value
        # Mapping again follows a cycle, which leads back into the range that it started from.
        walking = walking[value >= size]
    return out.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix 64-bit integers, uint64 [n] -> uint64 [n]: every input bit affects every output bit.

    This is the finalizer of splitmix64 (Steele, Lea and Flood 2014). Its products wrap around.
    """
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def derive_key(seed: int, epoch: int) -> int:
    """Return the 64-bit key of an epoch's permutation. Neighboring epochs get unrelated keys."""
    key = _mix(np.array([seed % 2**64], np.uint64))
    return int(_mix(key + (epoch + 1) * _GOLDEN % 2**64)[0])


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The order of the examples in each epoch, and the steps that it is divided into.

    Every example is in exactly one step per epoch, unless a `mix` repeats or thins out its source.

    A mix gives a source of n examples m positions per epoch. The source is read cyclically, in one
    random order: epoch e reads positions e*m to e*m + m-1 of that order, modulo n. So any k
    consecutive epochs contain each of its examples k*m/n times, rounded down or up.

    Steps are consecutive slices of an epoch's order:

    - With a batch size in examples, step k of S is the slice [k*n//S, (k+1)*n//S) of the epoch's n
      positions. Sizes differ by at most one, and any step is found in O(1).
    - With a batch size in tokens, step k ends where the cumulative token count passes (k+1)/S of
      the epoch's. One pass over the lengths finds the bounds of an epoch, a table of S + 1
      integers.

    All epochs have the same number of steps S, also where a mix gives them different examples.

    If the global batch changes within an epoch, the rest of that epoch is split again. `start` is
    the position where the rest begins; it is 0 for every other epoch.
    """

    lengths: np.ndarray  # int32 [examples], in tokens; may be memory-mapped.
    seed: int
    global_batch_size: int | None = None
    """Maximum examples per step. Exactly one of the two global batches is set."""
    global_batch_tokens: int | None = None
    """Approximate maximum of tokens per step: the last example of a step may exceed it."""
    shuffle: bool = True
    """False keeps the original order of the examples, for evaluation."""
    mix: tuple[tuple[int, int], ...] = ()
    """(n, m) of each source, in the order of the examples; empty: every example once per epoch."""

    @cached_property
    def places(self) -> int:
        """Positions per epoch. A repeated example counts each time."""
        return sum(m for _, m in self.mix) or len(self.lengths)

    @cached_property
    def tokens_per_epoch(self) -> int:
        """Tokens per epoch; with a mix, in the mean epoch."""
        total = first = 0
        for n, m in self.mix or [[self.places] * 2]:
            total += int(self.lengths[first : first + n].sum()) * m // (n or 1)
            first += n
        return total

    @cached_property
    def steps_per_epoch(self) -> int:
        return self.steps_from(0, 0)

    def steps_from(self, epoch: int, start: int) -> int:
        """Return the number of steps of an epoch from position `start` on."""
        if self.global_batch_size:
            return -(-(self.places - start) // self.global_batch_size)
        return len(self._bounds_by_tokens(epoch, start)) - 1

    def examples(self, epoch: int, step: int, start: int = 0) -> np.ndarray:
        """Return the indices of a step's examples, int64. `step` counts from position `start`."""
        first = self.first_of(epoch, step, start)
        return self.slice(epoch, first, self.first_of(epoch, step + 1, start))

    def first_of(self, epoch: int, step: int, start: int = 0) -> int:
        """Return the position in the epoch's order at which a step begins."""
        if self.global_batch_size:
            left = self.places - start
            return start + step * left // self.steps_from(epoch, start)
        return int(self._bounds_by_tokens(epoch, start)[step])

    def slice(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the indices of the examples at positions [start, stop) of the epoch's order."""
        index = np.arange(start, stop)
        if not self.shuffle:
            return index
        slots = permute(index, self.places, derive_key(self.seed, epoch))
        examples = slots.copy()
        first = 0
        for source, (n, m) in enumerate(self.mix):
            # The slots of this source are now [0, m), and its examples are [first, first + n).
            is_own = (slots >= 0) & (slots < m)
            walked = (epoch * m + slots[is_own]) % n
            # Epochs are never negative, so no epoch has the key of a source.
            examples[is_own] = first + permute(walked, n, derive_key(self.seed, -1 - source))
            first += n
            slots -= m
        return examples

    @lru_cache(maxsize=64)  # noqa: B019 - a run has few orders, and keeps them
    def _bounds_by_tokens(self, epoch: int, start: int) -> np.ndarray:
        """Return the bounds of the steps sized in tokens, int64 [steps + 1]; no step is empty.

        The first bound is `start`, the last one the end of the epoch.
        """
        tokens = np.cumsum(self.lengths[self.slice(epoch, start, self.places)])
        left = len(tokens)
        total = int(tokens[-1]) if start else self.tokens_per_epoch
        steps = min(left, -(-total // self.global_batch_tokens))
        goals = np.arange(1, steps) * tokens[-1] // steps
        bounds = np.concatenate([[0], 1 + np.searchsorted(tokens, goals), [left]])
        # A huge example may reach several goals. Each step gets at least one example, and leaves
        # at least one for each step that follows.
        k = np.arange(steps + 1)
        bounds = np.maximum.accumulate(bounds - k) + k
        return start + np.minimum(bounds, left - steps + k)
