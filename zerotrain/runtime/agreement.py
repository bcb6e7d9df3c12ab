"""Agreement between ranks: on errors, on flags, on sums."""

import json
import socket
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerotrain.runtime.errors import AgreedError, UserError, rank_prefix
from zerotrain.runtime.process_group import Ranks

T = TypeVar("T")


def gather_json(ranks: Ranks, value: Any) -> list[Any]:
    """Every rank's value, on all ranks. JSON, because torch's object collectives unpickle, and so
    execute, what any process in the group sends.

    Args:
        value: of the types of JSON; floats may be infinite or NaN.
    """
    text = json.dumps(value).encode()
    longest = torch.tensor(len(text))
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=ranks.control)
    padded = bytearray(text.ljust(int(longest)))  # JSON may end with spaces
    received = torch.empty(ranks.world_size, len(padded), dtype=torch.uint8)
    dist.all_gather(
        list(received), torch.frombuffer(padded, dtype=torch.uint8), group=ranks.control
    )
    return [json.loads(message.numpy().tobytes()) for message in received]


def run_on_all_ranks(ranks: Ranks, work: Callable[[], T], first_on_node: bool = False) -> T:
    """Run `work` on every rank. A UserError on any rank is raised on all of them, with its
    rank's prefix if that is not rank 0.

    Otherwise the rank with the error would exit, and the others would wait for it until the
    timeout.

    Args:
        first_on_node: the first rank of each node finishes before its other ranks start.
    """
    result: T | None = None
    turns = (ranks.local_rank == 0, ranks.local_rank > 0) if first_on_node else (True,)
    for is_turn in turns:
        error = None
        if is_turn:
            try:
                result = work()
            except UserError as mistake:
                is_own = not (ranks.is_first or isinstance(mistake, AgreedError))
                error = ((rank_prefix() if is_own else "") + str(mistake), mistake.exit_code)
        for found in gather_json(ranks, error):
            if found is not None:
                raise AgreedError(*found)
    return result  # type: ignore[return-value]


def run_on_first_rank(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result, of the types of JSON, or raise its UserError, on
    every rank.
    """
    result = run_on_all_ranks(ranks, lambda: work() if ranks.is_first else None)
    return gather_json(ranks, result)[0]


def require_same(ranks: Ranks, name: str, text: str) -> None:
    """Raise UserError on all ranks if `text` is not the same on all of them; it shows the first
    line that differs.
    """
    first, *others = gather_json(ranks, [*text.splitlines(), f"host: {socket.gethostname()}"])
    for rank, lines in enumerate(others, start=1):
        for expected, line in zip_longest(first[:-1], lines[:-1], fillvalue="nothing"):
            if line != expected:
                raise AgreedError(
                    f"{name}: {line.strip()!r} on rank {rank} ({lines[-1]}), but "
                    f"{expected.strip()!r} on rank 0 ({first[-1]}): do all nodes have the same "
                    "files, tokenizer, library versions and kind of GPU?"
                )


def count_ranks(ranks: Ranks, *flags: bool) -> list[int]:
    """The number of ranks on which each flag is set; the same on all ranks."""
    counts = torch.tensor(flags, dtype=torch.float32, device=ranks.device)
    dist.all_reduce(counts)
    return [int(count) for count in counts.tolist()]


def any_rank_preempted(ranks: Ranks) -> bool:
    """Whether any rank was preempted; the same on all ranks."""
    return count_ranks(ranks, ranks.stop.signal is not None)[0] > 0


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The sum of `value`, of any shape, over all ranks, in float64: exact for counts, and within
    1e-15 for losses.
    """
    total = value.detach().to(torch.float64)
    dist.all_reduce(total)
    return total
