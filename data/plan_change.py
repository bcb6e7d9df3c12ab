"""Resuming with a changed step plan: another global batch, window or seed, or other data.

The rest of the epoch comes first, in steps of the new plan, then whole epochs of the new plan, so
every example is still trained on once per epoch. The rest are the examples of the old plan's
remaining steps, in its order. If the data changed, they are identified by their tokens, for which
the old tokenized data must still be in data.cache_dir.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data.data_plan import DataPlan, EpochRemainder
from data.plan import Contents, Share
from data.tokenize import TokenizedRows, hold_out, open_cache
from runtime.errors import UserError

HASHED_ROWS = 10_000  # examples hashed at a time


@dataclass(frozen=True)
class PlanRecord:
    """What a plan is made from: enough to recreate it from its tokenized data."""

    version: int
    cache: str
    """Folder of the tokenized data in data.cache_dir."""
    content: str
    eval_fraction: float
    seed: int
    global_batch_size: int | None
    global_batch_tokens: int | None
    window: int
    mix: list[list[int]]

    @classmethod
    def of(cls, plan: DataPlan, eval_fraction: float) -> "PlanRecord":
        c = plan.contents
        return cls(
            c.version,
            plan.data.folder.name,
            plan.data.meta["content"],
            eval_fraction,
            c.seed,
            c.global_batch_size,
            c.global_batch_tokens,
            c.window,
            [list(asdict(share).values()) for share in c.mix],
        )

    def open(self, cache_dir: Path, like: DataPlan) -> DataPlan:
        """Recreate the plan, without the rest of an epoch that earlier changes may have left.

        Args:
            like: the current plan, whose data is used if it is the same.

        Raises:
            UserError: the tokenized data is no longer in the cache.
        """
        folder, data = cache_dir / self.cache, like.data
        if self.content != data.meta["content"]:
            if not folder.exists():
                raise UserError(
                    f"checkpoint.allow_plan_change: {folder} is missing: without the previous "
                    "tokenized data the rest of the epoch is unknown; a --dry_run with the "
                    "previous data recreates it"
                )
            data = open_cache(folder)
            if self.eval_fraction:
                data, _ = hold_out(data, self.eval_fraction, self.seed)
        mix = tuple(Share(*share) for share in self.mix)
        batch = self.global_batch_size, self.global_batch_tokens
        contents = Contents(data.lengths, self.seed, *batch, self.window, mix)
        return DataPlan(data, contents, like.budget)


@dataclass(frozen=True)
class PlanChange:
    """One change of a run's plan, as stored in checkpoints."""

    before: PlanRecord
    at_step: int
    """The first global step of the next plan."""
    epoch: int
    """The epoch in progress; the rest of it comes first."""
    remaining_steps: int


NAMES = {
    "version": "version of data/plan.py",
    "content": "rows or their tokens",
    "seed": "train.seed",
    "global_batch_size": "train.global_batch_size",
    "global_batch_tokens": "train.global_batch_tokens",
    "window": "data.window",
    "mix": "weights of the sources",
}


def describe_change(before: PlanRecord, now: PlanRecord) -> str:
    """The differences between two records, by config key."""

    def of(record: PlanRecord, name: str) -> Any:
        return getattr(record, name)

    differing = [name for name in NAMES if of(before, name) != of(now, name)]
    if "mix" in differing:  # PLAN_VERSION and MIX_VERSION are independent
        differing = [name for name in differing if name != "version"]
    return ", ".join(
        f"{NAMES[name]} was {of(before, name)}, is {of(now, name)}" for name in differing
    )


def continue_plan(
    plan: DataPlan,
    now: PlanRecord,
    before: PlanRecord,
    changes: Sequence[PlanChange],
    global_step: int,
    cache_dir: Path,
) -> tuple[DataPlan, list[PlanChange]]:
    """Continue with `plan` a run that is at `global_step` of the plan `before`.

    One process per node calls this before the others: slow results are kept in `cache_dir`.

    Args:
        now: the record of `plan`.
        changes: all earlier changes of the run's plan.

    Returns:
        `plan` with the rest of the current epoch, and `changes` with this one, if it is one.

    Raises:
        UserError: the rest of the epoch cannot be determined.
    """
    changes = list(changes)
    if now != replace(before, cache=now.cache):
        _check_change(now, before)
        old = before.open(cache_dir, plan)
        old = _with_rest(old, before, changes, global_step, cache_dir)
        _, epoch, step = old.locate(global_step)
        if step == 0 and (old.rest is None or epoch > old.rest.epoch):  # between two epochs
            changes.append(PlanChange(before, global_step, epoch - 1, 0))
        else:
            draft = PlanChange(before, global_step, epoch, 0)
            rows = _rows_left(plan, now, [*changes, draft], cache_dir)
            steps = plan.contents.of_rest(rows).steps_per_epoch if len(rows) else 0
            changes.append(replace(draft, remaining_steps=steps))
    return _with_rest(plan, now, changes, global_step, cache_dir), changes


def _check_change(now: PlanRecord, before: PlanRecord) -> None:
    """Raise UserError if an epoch started with `before` cannot be completed with `now`."""
    other_rows = now.content != before.content
    if (now.mix or before.mix) and (now.mix != before.mix or other_rows or now.seed != before.seed):
        problem = (
            "sources mixed by weight continue across epochs: only the global batch and data.window "
            "of such a plan may change"
        )
    elif now.version != before.version:
        problem = "the saved plan is from another version of data/plan.py"
    elif now.eval_fraction != before.eval_fraction or (
        now.eval_fraction and (other_rows or now.seed != before.seed)
    ):
        problem = (
            "with data.eval_fraction, other data or another seed holds out other rows, some of "
            "them already trained on; set data.eval_sources"
        )
    else:
        return
    raise UserError(f"checkpoint.allow_plan_change: cannot resume with the changed plan: {problem}")


def _with_rest(
    plan: DataPlan,
    record: PlanRecord,
    changes: Sequence[PlanChange],
    global_step: int,
    cache_dir: Path,
) -> DataPlan:
    """`plan` with the rest of the epoch that its last change left."""
    if not changes:
        return plan
    last, contents = changes[-1], None
    if global_step < last.at_step + last.remaining_steps:
        rows = _rows_left(plan, record, changes, cache_dir)
        contents = plan.contents.of_rest(rows)
    return replace(
        plan, rest=EpochRemainder(last.at_step, last.remaining_steps, last.epoch, contents)
    )


def _rows_left(
    plan: DataPlan, record: PlanRecord, changes: Sequence[PlanChange], cache_dir: Path
) -> np.ndarray:
    """Examples of `plan` that the last change left of its epoch, int64, memory-mapped from a file
    in `cache_dir`.
    """
    *earlier, last = changes
    steps = [(asdict(c.before), c.at_step) for c in changes]
    key = xxhash.xxh3_64_hexdigest(json.dumps([steps, asdict(record)]).encode())
    path = cache_dir / f"rest_{key}.npy"
    if not path.exists():
        old = last.before.open(cache_dir, plan)
        old = _with_rest(old, last.before, earlier, last.at_step, cache_dir)
        contents, epoch, step = old.locate(last.at_step)
        rows = contents.rest(epoch, step)
        if record.content != last.before.content:
            rows = _found_again(old.data, rows, plan.data, plan.contents.rest(epoch, 0))
        draft = path.with_suffix(f".{os.getpid()}")
        with draft.open("wb") as file:
            np.save(file, rows)
        os.replace(draft, path)
    return np.load(path, mmap_mode="r")


def _found_again(
    old: TokenizedRows, left: np.ndarray, new: TokenizedRows, order: np.ndarray
) -> np.ndarray:
    """The new examples of `order`, int64, that were not trained on.

    Identical examples are counted: of each kind, as many are left out as there are among the old
    examples that are not in `left`, int64.
    """
    trained = np.setdiff1d(np.arange(len(old)), left)
    kinds, counts = np.unique(row_hashes(old)[trained], return_counts=True)
    hashes = row_hashes(new)[order]
    by_kind = np.argsort(hashes, kind="stable")
    ranked = hashes[by_kind]
    first = np.flatnonzero(np.diff(ranked, prepend=ranked[:1] + np.uint64(1)))
    nth = np.arange(len(ranked)) - np.repeat(first, np.diff(first, append=len(ranked)))
    if not len(kinds):
        return order
    at = np.minimum(np.searchsorted(kinds, ranked), len(kinds) - 1)
    was_trained = nth < np.where(kinds[at] == ranked, counts[at], 0)
    return order[np.sort(by_kind[~was_trained])]


def row_hashes(data: TokenizedRows) -> np.ndarray:
    """xxh3 of each example's tokens and loss mask, uint64 [examples]."""
    hashes = np.empty(len(data), np.uint64)
    for start in range(0, len(data), HASHED_ROWS):
        examples = np.arange(start, min(start + HASHED_ROWS, len(data)))
        for example, ids, mask in zip(examples, *data.fetch(examples), strict=True):
            hashes[example] = xxhash.xxh3_64_intdigest(ids.tobytes() + mask.tobytes())
    return hashes
