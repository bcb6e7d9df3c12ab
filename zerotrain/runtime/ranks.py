"""The ranks of a run, and the calls by which they agree on errors, flags and sums."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerotrain.runtime.errors import AgreedError, UserError, rank_prefix
from zerotrain.runtime.preemption import PreemptionHandler

T = TypeVar("T")


# Eight ranks. The ranks in one cell share a micro-batch; the number in the cell is data_rank.
#
#   rank            0     1     2     3     4     5     6     7
#                |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |  each rank: a replica
#   tensor = 2   |     0     |     1     |     2     |     3     |  each cell: a replica, in pieces
#   sequence = 2 |     0     |     1     |     2     |     3     |  each rank: a replica, and slice
#                                                                   rank % 2 of each sequence
# DeepSpeed averages gradients over the replicas. ZeRO partitions over them: optimizer state (stage
# 1 and above), gradients (2 and above) and weights (3).


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks of a run, and its collectives."""

    rank: int
    local_rank: int
    world_size: int
    local_ranks: int
    """Number of ranks on this node."""
    device: torch.device
    control: dist.ProcessGroup
    """Gloo group for messages and long waits. It uses no GPU memory, and the collectives' short
    timeout does not apply to it.
    """
    stop: PreemptionHandler
    tensor: int = 1
    """Size of a tensor-parallel group (AutoTP). Its ranks hold pieces of each weight matrix and get
    the same tokens.
    """
    sequence: int = 1
    """Size of a sequence-parallel group (Ulysses). Its ranks get slices of each sequence."""
    sequence_group: dist.ProcessGroup | None = None
    """The group that shares this rank's sequences; None if `sequence` is 1."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Index of this rank's micro-batch among all that run at the same time. The ranks of a
        tensor- or sequence-parallel group share one.
        """
        return self.rank // (self.tensor * self.sequence)

    @property
    def sequence_part(self) -> tuple[int, int]:
        """Index of the slice that this rank gets of each sequence, and the number of slices."""
        return self.rank % self.sequence, self.sequence

    @property
    def replicas(self) -> int:
        """Number of model replicas, over which DeepSpeed averages gradients."""
        return self.world_size // self.tensor

    @property
    def replica(self) -> int:
        """Index of this rank's replica."""
        return self.rank // self.tensor

    def in_groups(self, tensor: int, sequence: int) -> "Ranks":
        """Return a copy that knows its tensor- and sequence-parallel groups, whose ranks are
        consecutive. All ranks call it.
        """
        own = dist.new_subgroups(sequence)[0] if sequence > 1 else None
        return replace(self, tensor=tensor, sequence=sequence, sequence_group=own)

    # All ranks must call each of the following methods.

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value, on all ranks. It is sent as JSON, because torch's object
        collectives unpickle, and so execute, what any process of the group sends.

        Args:
            value: JSON types; floats may be infinite or NaN.
        """
        text = json.dumps(value).encode()
        # all_gather needs messages of equal length: agree on the longest, then pad.
        longest = torch.tensor(len(text))
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.control)
        padded = bytearray(text.ljust(int(longest)))  # JSON allows trailing spaces
        received = torch.empty(self.world_size, len(padded), dtype=torch.uint8)
        dist.all_gather(
            list(received), torch.frombuffer(padded, dtype=torch.uint8), group=self.control
        )
        return [json.loads(message.numpy().tobytes()) for message in received]

    def run_on_all(self, work: Callable[[], T], first_on_node: bool = False) -> T:
        """Run `work` on every rank and return its result.

        If a rank raises UserError, all ranks raise it; the message names the rank, unless it is
        rank 0. Without this, the failing rank would exit and the others would wait for it until
        the timeout.

        Args:
            first_on_node: run the first rank of each node to its end before its other ranks start.
        """
        result: T | None = None
        turns = (self.local_rank == 0, self.local_rank > 0) if first_on_node else (True,)
        for is_turn in turns:
            error = None
            if is_turn:
                try:
                    result = work()
                except UserError as mistake:
                    # An AgreedError already names its rank.
                    is_named = self.is_first or isinstance(mistake, AgreedError)
                    line = str(mistake) if is_named else f"{rank_prefix()}{mistake}"
                    error = line, mistake.exit_code
            # All ranks raise the same line: the error of the lowest failing rank.
            if failed := next(filter(None, self.gather_json(error)), None):
                agreed = AgreedError(failed[0])
                agreed.exit_code = failed[1]
                raise agreed
        return result  # type: ignore[return-value]

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0. All ranks return its result (JSON types) or raise its UserError."""
        return self.gather_json(self.run_on_all(lambda: work() if self.is_first else None))[0]

    def require_same(self, name: str, text: str) -> None:
        """Raise UserError on all ranks unless they have the same `text`. The message shows the
        first line that differs.
        """
        expected = self.gather_json(text)[0]

        def compare() -> None:
            pairs = zip_longest(text.splitlines(), expected.splitlines(), fillvalue="nothing")
            for line, first in pairs:
                if line != first:
                    raise UserError(
                        f"{name}: {line.strip()!r} on this rank, but {first.strip()!r} on rank 0; "
                        "use the same files, tokenizer, library versions and kind of GPU on all "
                        "nodes"
                    )

        self.run_on_all(compare)

    def count(self, *flags: bool) -> list[float]:
        """Count the ranks on which each flag is set; the result is the same on all ranks."""
        # One small collective for all flags, on the device, within the step.
        return self.sum(torch.tensor(flags, device=self.device)).tolist()

    def any_preempted(self) -> bool:
        """Return whether any rank was preempted; the result is the same on all ranks."""
        return self.count(self.stop.signal is not None)[0] > 0

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor of any shape over all ranks, in float64: exact for counts, within 1e-15 for
        losses.
        """
        total = value.detach().to(torch.float64)
        dist.all_reduce(total)
        return total
