"""Walks the plan for one rank, collating its micro-batches ahead of the loop."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from data.plan import Budget, Contents, StepPlan, deal_step
from data.tokenize import TokenizedRows

PREFETCH_STEPS = 2


@dataclass(frozen=True)
class MicroBatch:
    """One rank's rows of one micro-step, padded on the right to a common length.

    A rank without a row gets one filler row of one position that carries no loss, so that it takes
    part in the collectives of the micro-step.
    """

    input_ids: torch.Tensor  # int64 [rows, length]
    attention_mask: torch.Tensor  # int64 [rows, length], 0 on padding
    positions: torch.Tensor  # int64 [targets], where in rows x length a target is predicted from
    targets: torch.Tensor  # int64 [targets], the token after each of those positions

    @classmethod
    def of(
        cls, input_ids: np.ndarray, attention_mask: np.ndarray, is_target: np.ndarray
    ) -> "MicroBatch":
        """From int64 ids and mask and a bool array, all [rows, length]; column 0 is no target.

        Positions are found here, on the CPU: picking them by a mask on the device would make the
        device tell the host how many there are, a wait in every micro-step.
        """
        positions = np.flatnonzero(is_target[:, 1:].ravel())
        rows, columns = np.divmod(positions, max(1, is_target.shape[1] - 1))
        arrays = (
            input_ids,
            attention_mask,
            rows * is_target.shape[1] + columns,
            input_ids[rows, columns + 1],
        )
        return cls(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays))

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(**{k: v.to(device, non_blocking=True) for k, v in vars(self).items()})

    def pin_memory(self) -> "MicroBatch":
        return MicroBatch(**{k: v.pin_memory() for k, v in vars(self).items()})


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of one optimizer step; `plan` has the counts over all ranks."""

    global_step: int
    epoch: int
    micro_batches: list[MicroBatch]
    plan: StepPlan


@dataclass(frozen=True)
class DataPlan:
    """Every step of a run over one tokenised set. Step numbers run on over the epochs."""

    data: TokenizedRows
    contents: Contents
    budget: Budget

    @property
    def steps_per_epoch(self) -> int:
        return self.contents.steps_per_epoch

    def step(self, global_step: int) -> StepPlan:
        """The step's rows dealt out over all ranks: any step, in any order, in milliseconds."""
        rows = self.contents.rows(*divmod(global_step, self.steps_per_epoch))
        return deal_step(rows, self.data.lengths, self.data.supervised, self.budget)

    def content_hash(self) -> str:
        """Changes when the contents of any step would: 16 hex digits. Ranks and token budget are
        not in it.
        """
        c = self.contents
        key = [self.data.meta["content"], len(self.data), c.seed, c.global_batch_size]
        key += [c.global_batch_tokens, c.window, c.mix]
        return xxhash.xxh3_64_hexdigest(repr(key).encode())


def load_steps(
    plan: DataPlan, rank: int, first: int, last: int, pin_memory: bool = False
) -> Iterator[StepBatch]:
    """Yield this rank's batches of global steps [first, last), made up to PREFETCH_STEPS ahead on a
    thread.

    Where to begin is one integer: nothing is replayed on resume.
    """

    def make(global_step: int) -> StepBatch:
        deal = plan.step(global_step)
        batches = [
            collate(plan.data, ranks[rank], plan.budget.pad_to_multiple_of)
            for ranks in deal.micro_batches
        ]
        batches = [batch.pin_memory() for batch in batches] if pin_memory else batches
        return StepBatch(global_step, global_step // plan.steps_per_epoch, batches, deal)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader") as pool:
        ahead = deque(pool.submit(make, k) for k in range(first, min(first + PREFETCH_STEPS, last)))
        for upcoming in range(first + PREFETCH_STEPS, last + PREFETCH_STEPS):
            batch = ahead.popleft().result()
            if upcoming < last:
                ahead.append(pool.submit(make, upcoming))
            yield batch


def collate(data: TokenizedRows, rows: np.ndarray, pad_to_multiple_of: int) -> MicroBatch:
    """Rows, int64 [n] with n >= 0, as one padded micro-batch."""
    length = max((int(data.lengths[row]) for row in rows), default=1)
    if len(rows):
        length = -(-length // pad_to_multiple_of) * pad_to_multiple_of
    shape = (max(1, len(rows)), length)
    input_ids, attention_mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    is_target = np.zeros(shape, bool)
    attention_mask[:, 0] = 1  # also of the filler row: attention over nothing is NaN
    fetched = data.rows[rows.tolist()] if len(rows) else {"input_ids": [], "loss_mask": []}
    for i, (ids, mask) in enumerate(zip(fetched["input_ids"], fetched["loss_mask"], strict=True)):
        input_ids[i, : len(ids)] = ids
        attention_mask[i, : len(ids)] = 1
        is_target[i, : len(ids)] = mask
    return MicroBatch.of(input_ids, attention_mask, is_target)
