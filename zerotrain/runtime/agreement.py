"""Agreement between ranks: on errors, on flags, on sums."""

import json
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerotrain.runtime.errors import AgreedError, UserError, rank_prefix
from zerotrain.runtime.process_group import Ranks

T = TypeVar("T")

MESSAGE_BYTES = 64 << 20  # every rank receives one per rank; the largest ones list files


def gather_json(ranks: Ranks, value: Any) -> list[Any]:
    """Every rank's value, on all ranks. JSON, because torch's object collectives unpickle, and so
    execute, what any process in the group sends.

    Args:
        value: of the types of JSON; floats may be infinite or NaN.

    Raises:
        UserError: a rank sent something else.
    """
    content = bytearray(json.dumps(value).encode())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.world_size)]
    dist.all_gather(sizes, torch.tensor([len(content)]), group=ranks.control)
    lengths = [int(size) for size in sizes]
    for rank, length in enumerate(lengths):
        if not 0 < length <= MESSAGE_BYTES:
            raise UserError(_not_ours(rank, f"{length:,} bytes instead of 1 to {MESSAGE_BYTES:,}"))
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=ranks.control)
    values = []
    for rank, (message, length) in enumerate(zip(received, lengths, strict=True)):
        try:
            values.append(json.loads(message[:length].numpy().tobytes()))
        except (ValueError, RecursionError):
            raise UserError(_not_ours(rank, "what is not JSON")) from None
    return values


def _not_ours(rank: int, what: str) -> str:
    return (
        f"rank {rank} sent {what}: another program, or another version of this code, has joined "
        "the job; start it again with another MASTER_PORT"
    )


def run_on_all_ranks(ranks: Ranks, work: Callable[[], T], first_on_machine: bool = False) -> T:
    """Run `work` on every rank. A UserError on any rank is raised on all of them, with its
    rank's prefix if that is not rank 0.

    Otherwise the rank with the error would exit, and the others would wait for it until the
    timeout.

    Args:
        first_on_machine: the first rank of each machine finishes before its other ranks start.
    """
    result: T | None = None
    for turn in (True, False) if first_on_machine else (None,):
        error = None
        if turn is None or turn == (ranks.local_rank == 0):
            try:
                result = work()
            except UserError as mistake:
                is_own = not (ranks.is_first or isinstance(mistake, AgreedError))
                error = ((rank_prefix() if is_own else "") + str(mistake), mistake.exit_code)
        for found in gather_json(ranks, error):
            if found is not None:
                raise AgreedError(*found)
    return result  # type: ignore[return-value]


def require_same(ranks: Ranks, name: str, value: str) -> None:
    """Raise UserError on every rank where `value` is not the same on all of them."""
    values = gather_json(ranks, [value, socket.gethostname()])
    odd = [rank for rank, (its, _) in enumerate(values) if its != values[0][0]]
    if odd:
        there, here = (" on ".join(values[rank]) for rank in (odd[0], 0))
        raise AgreedError(
            f"{name} of rank {odd[0]} ({there}) differs from that of rank 0 ({here}): do all "
            "machines have the same files, tokenizer and library versions?"
        )


def run_on_first_rank(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result, of the types of JSON, or raise its UserError, on
    every rank.
    """
    result, error = None, None
    if ranks.is_first:
        try:
            result = work()
        except UserError as mistake:
            error = (str(mistake), mistake.exit_code)
    result, error = gather_json(ranks, [result, error])[0]
    if error is not None:
        raise AgreedError(*error)
    return result  # type: ignore[return-value]


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
