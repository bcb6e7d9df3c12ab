"""The data loader: makes the micro-batches of one rank, a few steps ahead of training."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from zerotrain.data.cache import TokenizedRows
from zerotrain.data.data_plan import DataPlan
from zerotrain.data.plan import Budget, StepPlan
from zerotrain.runtime.ahead import map_ahead
from zerotrain.runtime.errors import UserError

PREFETCH_STEPS = 2


class MicroBatch(NamedTuple):
    """One rank's examples of one micro-step.

    Bucketed examples are padded on the right to a common length. Packed examples are concatenated
    into one sequence. A rank without examples gets a filler: two tokens without loss, so that the
    rank takes part in the collectives of the micro-step.

    Under sequence parallelism a rank has a slice of each sequence; see `part`.
    """

    input_ids: torch.Tensor  # int64 [examples, length]; packed: [1, tokens]
    attention_mask: torch.Tensor | None  # int64 [examples, length], 0 at padding; None if packed
    # int64 [1, tokens], from 0 in each example; None if bucketed. A slice always has them.
    position_ids: torch.Tensor | None
    positions: torch.Tensor  # int64 [targets], flat indices into input_ids that predict a target
    targets: torch.Tensor  # int64 [targets], the token after each of these positions
    # float32 [1 or 2, targets], the number of each target's source, and its weight if not all are 1
    of_targets: torch.Tensor
    is_real: torch.Tensor  # bool [examples, length], False at padding and in a filler
    # For attention within packed examples. A slice has the values of the whole sequence.
    lengths: tuple[int, ...] = ()  # tokens of each example
    ends: torch.Tensor | None = None  # int32 [1 + examples], 0 and the end of each example

    @classmethod
    def of(
        cls,
        input_ids: np.ndarray,
        is_target: np.ndarray,
        attention_mask: np.ndarray | None = None,
        position_ids: np.ndarray | None = None,
    ) -> "MicroBatch":
        """Make a micro-batch from int64 arrays, [examples, length] or packed [1, tokens].

        The positions of targets are computed here, on the CPU. Selecting them by a mask on the
        device would synchronize device and host in every micro-step.

        Args:
            is_target: 1 at targets. The first token of an example is never a target.
            attention_mask: for bucketed examples.
            position_ids: for packed examples.
        """
        positions = np.flatnonzero(is_target)
        targets = input_ids.ravel()[positions]
        # The logits at a position predict the next token. No target is the first token of its
        # example, so padding or another example never predicts it.
        of_targets = np.zeros((1, targets.size), np.float32)  # load_steps knows them
        is_real = np.ones_like(input_ids) if attention_mask is None else attention_mask
        is_real = (is_real > 0) & is_target.any()  # Every example has a target, a filler has none.
        arrays = (
            input_ids, attention_mask, position_ids, positions - 1, targets, of_targets, is_real,
        )  # fmt: skip
        batch = cls(*(None if array is None else torch.from_numpy(array) for array in arrays))
        if position_ids is None:
            return batch
        return batch.of_lengths(np.diff(np.flatnonzero(position_ids == 0), append=input_ids.size))

    def about_targets(self, of_targets: np.ndarray | torch.Tensor) -> "MicroBatch":
        """Return a copy with these sources, and perhaps weights, of the targets."""
        return self._replace(of_targets=torch.as_tensor(of_targets))

    def of_lengths(self, lengths: Iterable[int]) -> "MicroBatch":
        """Return a copy whose packed examples have these lengths, in tokens."""
        lengths = tuple(map(int, lengths))
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return self._replace(lengths=lengths, ends=ends)

    def part(self, index: int, parts: int) -> "MicroBatch":
        """Return slice `index` of `parts` equal slices of each sequence.

        The sequences are padded at the end. Positions replace the attention mask, because causal
        attention never sees the padding that follows.
        """
        rows, length = self.input_ids.shape
        width = max(2, -(-length // parts))  # also of a filler
        padding = width * parts - length

        def own(whole: torch.Tensor) -> torch.Tensor:
            return F.pad(whole, (0, padding)).chunk(parts, dim=1)[index]

        position_ids = self.position_ids
        if position_ids is None:
            position_ids = torch.arange(length).expand(rows, -1)
        row, column = torch.unravel_index(self.positions, self.input_ids.shape)
        # The slice with the position that predicts a target has the target, even if the target
        # itself is the first token of the next slice.
        is_own = column // width == index
        part = MicroBatch(
            input_ids=own(self.input_ids),
            attention_mask=None,
            position_ids=own(position_ids),
            positions=(row * width + column % width)[is_own],
            targets=self.targets[is_own],
            of_targets=self.of_targets[:, is_own],
            is_real=own(self.is_real),
        )
        return part.of_lengths(filter(None, [*(self.lengths or [length]), padding]))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        """Return a copy with every tensor changed."""
        return MicroBatch(*(change(x) if isinstance(x, torch.Tensor) else x for x in self))

    def to(self, device: torch.device) -> "MicroBatch":
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))


class StepBatch(NamedTuple):
    """One rank's share of one optimizer step. The counts in `plan` are over all ranks."""

    global_step: int
    micro_batches: list[MicroBatch]
    plan: StepPlan


def load_steps(
    plan: DataPlan,
    rank: int,
    first: int,
    last: int,
    part: tuple[int, int] = (0, 1),
) -> Iterator[StepBatch]:
    """Yield this rank's batches of global steps [first, last).

    A thread makes them up to PREFETCH_STEPS ahead. To resume, pass the next step as `first`;
    nothing is replayed.

    Args:
        rank: the rank's number in the plan.
        part: index and number of the slices of each sequence; see MicroBatch.part.

    Raises:
        UserError: the cache of tokenized rows is damaged.
    """

    def make(global_step: int) -> StepBatch:
        step = plan.step(global_step)
        batches = []
        for ranks in step.micro_batches:
            batch = collate(plan.data, ranks[rank], plan.budget)
            batch = batch.about_targets(plan.data.of_targets(ranks[rank]))
            if part != (0, 1):
                batch = batch.part(*part)
            if torch.cuda.is_available():  # Only copies from pinned memory do not wait.
                batch = batch.each(torch.Tensor.pin_memory)
            batches.append(batch)
        return StepBatch(global_step, batches, step)

    # One thread makes the steps in order, while the GPU computes earlier ones.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader") as pool:
        yield from map_ahead(pool, make, range(first, last), PREFETCH_STEPS)


def collate(data: TokenizedRows, examples: np.ndarray, budget: Budget) -> MicroBatch:
    """Return the micro-batch of the examples with these indices, int64 [n] with n >= 0.

    Raises:
        UserError: the cache of tokenized rows is damaged.
    """
    fetched = data.fetch(examples)
    # The plan divides the loss by these counts: a wrong one would train wrongly, without an error.
    if [mask.sum() for _, mask in fetched] != data.supervised[examples].tolist():
        raise UserError(
            f"data.cache_dir: {data.folder} is damaged: a loss mask differs from its count of "
            "supervised tokens; delete it, and the rows are tokenized again (write it again if it "
            "is a source itself)"
        )
    # The filler attends to its own positions: attention over nothing is NaN. torch.compile would
    # make new graphs for a size of 1, and for rows without padding.
    filler = (2,) if budget.packed else (2, 1)
    fetched = fetched or [np.zeros((2, length), np.int64) for length in filler]
    tokens = np.concatenate(fetched, axis=1)  # [2, tokens]: ids, and 1 at targets
    lengths = np.array([example.shape[1] for example in fetched])
    if budget.packed:
        positions = np.concatenate([*map(np.arange, lengths)])
        return MicroBatch.of(*tokens[:, None], position_ids=positions[None])
    width = budget.padded(lengths.max()) if len(examples) else 2
    is_real = np.arange(width) < lengths[:, None]  # [examples, width], False at padding
    # A mask selects row by row, so the concatenated tokens fall into the rows of their examples.
    padded = np.zeros((2, *is_real.shape), np.int64)
    padded[:, is_real] = tokens
    return MicroBatch.of(*padded, attention_mask=is_real.astype(np.int64))
