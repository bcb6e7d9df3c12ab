"""The data loader: collates the micro-batches of one rank, a few steps ahead of training."""

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

PREFETCH_STEPS = 2


class MicroBatch(NamedTuple):
    """One rank's examples of one micro-step: bucketed, padded on the right to a common length, or
    packed, concatenated into one sequence.

    A rank without an example gets a filler of one position that carries no loss, so that it takes
    part in the collectives of the micro-step.
    """

    input_ids: torch.Tensor  # int64 [examples, length]; packed: [1, tokens]
    attention_mask: torch.Tensor | None  # int64 [examples, length], 0 on padding; packed: None
    # packed: int64 [1, tokens], from 0 in each example; a part: as input_ids
    position_ids: torch.Tensor | None
    positions: torch.Tensor  # int64 [targets], flat indices into input_ids that predict a target
    targets: torch.Tensor  # int64 [targets], the token after each of those positions
    # Where packed examples lie, for attention. Parts of a sequence have these of the whole one.
    lengths: tuple[int, ...] = ()  # tokens of each example
    ends: torch.Tensor | None = None  # int32 [1 + examples]: 0, and where each example ends

    @classmethod
    def of(
        cls,
        input_ids: np.ndarray,
        is_target: np.ndarray,
        attention_mask: np.ndarray | None = None,
        position_ids: np.ndarray | None = None,
    ) -> "MicroBatch":
        """From int64 ids, an array that is 1 at targets, and either of the other two, all
        [examples, length]. The first token of an example is never a target.

        Positions are computed here, on the CPU: selecting them by a mask on the device would
        synchronize device and host in every micro-step.
        """
        positions = np.flatnonzero(is_target)
        targets = input_ids.ravel()[positions]
        # Logits at a position predict the token after it. No target is the first of its example, so
        # none is predicted by another example or by padding.
        arrays = (input_ids, attention_mask, position_ids, positions - 1, targets)
        batch = cls(*(None if array is None else torch.from_numpy(array) for array in arrays))
        if position_ids is None:
            return batch
        return batch.of_lengths(np.diff(np.flatnonzero(position_ids == 0), append=input_ids.size))

    def of_lengths(self, lengths: Iterable[int]) -> "MicroBatch":
        """The micro-batch with examples of these lengths, in tokens."""
        lengths = tuple(map(int, lengths))
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return self._replace(lengths=lengths, ends=ends)

    def part(self, index: int, parts: int) -> "MicroBatch":
        """One of `parts` equal parts of each example, or of the packed sequence, for the ranks that
        share it: padded at the end, with positions in place of a mask, since causal attention never
        sees what follows.
        """
        rows, length = self.input_ids.shape
        padding = -length % parts
        width = (length + padding) // parts

        def own(whole: torch.Tensor) -> torch.Tensor:
            return F.pad(whole, (0, padding)).chunk(parts, dim=1)[index]

        position_ids = self.position_ids
        if position_ids is None:
            position_ids = torch.arange(length).expand(rows, -1)
        row, column = torch.unravel_index(self.positions, self.input_ids.shape)
        # A target belongs to the part that predicts it, also if it is the first token of the next.
        is_own = column // width == index
        part = MicroBatch(
            input_ids=own(self.input_ids),
            attention_mask=None,
            position_ids=own(position_ids),
            positions=(row * width + column % width)[is_own],
            targets=self.targets[is_own],
        )
        return part.of_lengths(filter(None, [*(self.lengths or [length]), padding]))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        """The micro-batch with every tensor changed."""
        return MicroBatch(*(change(x) if isinstance(x, torch.Tensor) else x for x in self))

    def to(self, device: torch.device) -> "MicroBatch":
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))


class StepBatch(NamedTuple):
    """One rank's share of one optimizer step; `plan` has the counts over all ranks."""

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
    """Yield this rank's batches of global steps [first, last), made up to PREFETCH_STEPS ahead on a
    thread. To resume, pass the step as `first`: nothing is replayed.

    Args:
        rank: in the plan.
        part: of each micro-batch, and the number of parts: see MicroBatch.part.
    """

    def make(global_step: int) -> StepBatch:
        step = plan.step(global_step)
        batches = []
        for ranks in step.micro_batches:
            batch = collate(plan.data, ranks[rank], plan.budget)
            if part != (0, 1):
                batch = batch.part(*part)
            if torch.cuda.is_available():  # copies from pinned memory to the GPU do not wait
                batch = batch.each(torch.Tensor.pin_memory)
            batches.append(batch)
        return StepBatch(global_step, batches, step)

    # One thread: steps are made in their order, while the GPU computes the ones before.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader") as pool:
        yield from map_ahead(pool, make, range(first, last), PREFETCH_STEPS)


def collate(data: TokenizedRows, examples: np.ndarray, budget: Budget) -> MicroBatch:
    """The examples with these indices, int64 [n] with n >= 0, as one micro-batch."""
    # the filler attends to one position: attention over nothing is NaN
    fetched = data.fetch(examples) or [np.zeros((2, 1), np.int64)]
    lengths = np.array([example.shape[1] for example in fetched])
    ids, masks = np.concatenate(fetched, axis=1)  # [tokens]
    if budget.packed:
        positions = np.concatenate([*map(np.arange, lengths)])
        return MicroBatch.of(ids[None], masks[None], position_ids=positions[None])
    width = budget.padded(lengths.max()) if len(examples) else 1
    is_real = np.arange(width) < lengths[:, None]  # [examples, width], what is no padding
    # A mask selects row by row, so the concatenated tokens fall into the rows of their examples.
    padded, is_target = np.zeros((2, *is_real.shape), np.int64)
    padded[is_real] = ids
    is_target[is_real] = masks
    return MicroBatch.of(padded, is_target, attention_mask=is_real.astype(np.int64))
