"""Which examples each optimizer step has: a pure function of seed, epoch, step, the examples'
lengths and the global batch, and of nothing else.

It does not depend on ranks, nodes or memory. So the loss curve does not depend on the cluster,
resuming takes one integer and no replay, and ranks need not communicate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

PLAN_VERSION = 4  # increase it when a step of the same config is to have other examples than before
FEISTEL_ROUNDS = 6  # even, so that both halves end up where they started
CHUNK_EXAMPLES = 1 << 20  # lengths read at a time where the global batch is in tokens
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads out consecutive integers


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
    bits = max(2, (size - 1).bit_length())
    widths = [np.uint64(bits - bits // 2), np.uint64(bits // 2)]  # of the left and the right half
    masks = [(np.uint64(1) << width) - np.uint64(1) for width in widths]
    round_keys = _mix(np.uint64(key) + np.arange(1, FEISTEL_ROUNDS + 1, dtype=np.uint64) * _GOLDEN)
    out = index.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        value = out[walking]
        left, right = value >> widths[1], value & masks[1]
        for i, round_key in enumerate(round_keys):
            left, right = right, left ^ (_mix(right + round_key) & masks[i % 2])
        value = (left << widths[1]) | right
        out[walking] = value
        walking = walking[value >= np.uint64(size)]
    return out.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014), uint64 -> uint64: every bit of the
    input affects every bit of the output.
    """
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def derive_key(seed: int, *numbers: int) -> int:
    """64-bit key of a permutation, from the seed and numbers that identify it, such as the epoch.

    The numbers (each >= 0) are hashed one after the other, so neighboring ones give unrelated keys.
    """
    key = _mix(np.array([seed], dtype=np.int64).astype(np.uint64))
    with np.errstate(over="ignore"):
        for number in numbers:
            key = _mix(key + np.uint64(number + 1) * _GOLDEN)
    return int(key[0])


@dataclass(frozen=True)
class Share:
    """One source of a mix: the examples from `first` on, and how many of them an epoch has."""

    first: int
    examples: int
    per_epoch: int


def shares_of(examples: Sequence[int], weights: Sequence[float]) -> tuple[Share, ...]:
    """The mix of sources with these numbers of examples, in proportion to their weights.

    The epoch is as long as it can be without using a source more than once: the source with the
    fewest examples for its weight is used completely, the others in part, and continued in later
    epochs.
    """
    scale = min(n / weight for n, weight in zip(examples, weights, strict=True))
    first, shares = 0, []
    for n, weight in zip(examples, weights, strict=True):
        shares.append(Share(first, n, min(n, max(1, round(scale * weight)))))
        first += n
    return tuple(shares)


@lru_cache(maxsize=4)
def segment_bounds(mix: tuple[Share, ...], epoch: int) -> tuple[tuple[int, ...], ...]:
    """The bounds of an epoch's segments: its start, each point where a source has run through all
    its examples and starts over, and its end. Each bound is the number of examples that every
    source has contributed up to there.

    A source is used at most once per epoch, so at most one of its passes ends within an epoch.
    """
    ends = {Fraction(-epoch * share.per_epoch % share.examples, share.per_epoch) for share in mix}
    return tuple(
        tuple(share.per_epoch * part.numerator // part.denominator for share in mix)
        for part in sorted({Fraction(0), Fraction(1)} | {end for end in ends if end < 1})
    )


@dataclass(frozen=True)
class Remainder:
    """What is left of an epoch of `order` from position `start` on."""

    order: "EpochOrder"
    epoch: int
    start: int


@dataclass(frozen=True)
class EpochOrder:
    """The order of the examples in each epoch, and how steps divide it. Without `mix`, every
    example is in exactly one step per epoch.

    Steps are consecutive slices of the order. With a batch size in examples, step k of S is the
    slice [k*n//S, (k+1)*n//S): sizes differ by at most one, and any step is found in O(1). With a
    batch size in tokens, the slices end where the cumulative token count passes k/S of the epoch's;
    the bounds come from one streamed pass per epoch, kept as a table of S + 1 integers.

    `mix`, for sources mixed by weight, gives each source its share of every epoch. Each source has
    passes of its own that continue across epochs, every pass in a new order: an example is repeated
    only after all others of its source. To that end an epoch is divided into segments where a pass
    ends, and each segment is shuffled separately. So after every step, the usage counts of a
    source's examples differ by at most one; only a step that spans a bound of segments may have an
    example twice.
    """

    lengths: np.ndarray  # int32 [examples], in tokens; may be memory-mapped
    seed: int
    global_batch_size: int | None = None
    """Maximum examples per step. Set either this or global_batch_tokens."""
    global_batch_tokens: int | None = None
    """Approximate maximum of tokens per step: the last example of a step may exceed it."""
    mix: tuple[Share, ...] = ()
    """Empty: every example once per epoch."""
    shuffle: bool = True
    """False keeps the examples in their original order, for evaluation."""
    remainder: Remainder | None = None
    """If given, the only epoch is what another global batch or seed has left of one."""
    _token_bounds: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def examples_per_epoch(self) -> int:
        if self.remainder is not None:
            return self.remainder.order.examples_per_epoch - self.remainder.start
        return sum(share.per_epoch for share in self.mix) or len(self.lengths)

    @cached_property
    def tokens_per_epoch(self) -> int:
        """With a mix, the mean over epochs."""
        if self.remainder is not None:
            return self._count_tokens(0)
        if self.mix:
            return sum(map(self.tokens_of, self.mix))
        return int(np.sum(self.lengths, dtype=np.int64))

    def tokens_of(self, share: Share) -> int:
        """The tokens that one source contributes to the mean epoch."""
        lengths = self.lengths[share.first : share.first + share.examples]
        return int(np.sum(lengths, dtype=np.int64)) * share.per_epoch // share.examples

    @cached_property
    def steps_per_epoch(self) -> int:
        if self.global_batch_tokens is None:
            return -(-self.examples_per_epoch // self.global_batch_size)
        return min(self.examples_per_epoch, -(-self.tokens_per_epoch // self.global_batch_tokens))

    def examples(self, epoch: int, step: int) -> np.ndarray:
        """Indices of the examples of a step, int64."""
        return self.slice(epoch, self.first_of(epoch, step), self.first_of(epoch, step + 1))

    def first_of(self, epoch: int, step: int) -> int:
        """The position in the epoch's order at which a step begins."""
        steps = self.steps_per_epoch
        if self.global_batch_tokens is None:
            return step * self.examples_per_epoch // steps
        if epoch not in self._token_bounds:
            if len(self._token_bounds) > 1:  # a loader reads from two epochs at most
                self._token_bounds.clear()
            self._token_bounds[epoch] = self._bounds_by_tokens(epoch, steps)
        return int(self._token_bounds[epoch][step])

    def slice(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The examples at positions [start, stop) of the epoch's order, int64."""
        if self.remainder is not None:
            rest = self.remainder
            return rest.order.slice(rest.epoch, rest.start + start, rest.start + stop)
        index = np.arange(start, stop, dtype=np.int64)
        if not self.shuffle:
            return index
        if self.mix:
            return self._mixed(epoch, index)
        return permute(index, self.examples_per_epoch, derive_key(self.seed, epoch))

    def _mixed(self, epoch: int, index: np.ndarray) -> np.ndarray:
        """The examples at these positions of the epoch, segment by segment."""
        examples = np.empty_like(index)
        for segment, (used, used_after) in enumerate(pairwise(segment_bounds(self.mix, epoch))):
            start, stop = sum(used), sum(used_after)
            here = (index >= start) & (index < stop)
            if here.any():
                key = derive_key(self.seed, 0, epoch, segment)
                position = permute(index[here] - start, stop - start, key)
                examples[here] = self._of_segment(epoch, position, used, used_after)
        return examples

    def _of_segment(
        self, epoch: int, position: np.ndarray, used: Sequence[int], used_after: Sequence[int]
    ) -> np.ndarray:
        """The examples at these positions of a segment before shuffling, int64, where each source
        has one contiguous range.

        Args:
            used, used_after: examples of each source used in the epoch before and after the
                segment; those in between belong to one pass over the source.
        """
        examples, first = np.empty_like(position), 0
        for number, share in enumerate(self.mix):
            count = used_after[number] - used[number]
            here = (position >= first) & (position < first + count)
            if here.any():
                used_in_run = epoch * share.per_epoch + used[number]
                key = derive_key(self.seed, 1 + number, used_in_run // share.examples, 0)
                index = position[here] - first + used_in_run % share.examples
                examples[here] = share.first + permute(index, share.examples, key)
            first += count
        return examples

    def _chunks_of_lengths(self, epoch: int) -> Iterator[np.ndarray]:
        for start in range(0, self.examples_per_epoch, CHUNK_EXAMPLES):
            stop = min(start + CHUNK_EXAMPLES, self.examples_per_epoch)
            yield self.lengths[self.slice(epoch, start, stop)]

    def _count_tokens(self, epoch: int) -> int:
        return sum(int(chunk.sum(dtype=np.int64)) for chunk in self._chunks_of_lengths(epoch))

    def _bounds_by_tokens(self, epoch: int, steps: int) -> np.ndarray:
        """Slice bounds of an epoch with steps sized in tokens, int64 [steps + 1]; none is empty."""
        total = self._count_tokens(epoch) if self.mix else self.tokens_per_epoch
        k = np.arange(1, steps, dtype=np.int64)
        goals = k * (total // steps) + k * (total % steps) // steps  # k * total might overflow
        bounds, tokens, examples = [np.zeros(1, np.int64)], 0, 0
        for lengths in self._chunks_of_lengths(epoch):
            running = tokens + np.cumsum(lengths, dtype=np.int64)
            here = goals[(goals > tokens) & (goals <= running[-1])]
            bounds.append(examples + 1 + np.searchsorted(running, here))
            tokens = int(running[-1])
            examples += len(lengths)
        k = np.arange(steps + 1)
        table = np.append(np.concatenate(bounds), examples)
        table = np.maximum.accumulate(table - k) + k  # at least one, even next to a huge example
        return np.minimum(table, examples - steps + k)
