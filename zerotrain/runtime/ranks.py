"""The ranks of a run: this process among them, and what they agree on: errors, flags, sums."""

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


# Eight ranks. Those in a cell share a micro-batch: the number in it is data_rank.
#
#   rank            0     1     2     3     4     5     6     7
#                |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |  each rank: a replica
#   tensor = 2   |     0     |     1     |     2     |     3     |  each cell: a replica, in parts
#   sequence = 2 |     0     |     1     |     2     |     3     |  each rank: a replica, and
#                                                                   part rank % 2 of sequences
# Across the replicas DeepSpeed averages gradients, and with ZeRO shares optimizer state (stage 1
# and above), gradients (2) and weights (3).


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks of a run."""

    rank: int
    local_rank: int
    world_size: int
    local_ranks: int
    """Ranks of this node."""
    device: torch.device
    control: dist.ProcessGroup
    """A gloo group for messages and long waits: it takes no GPU memory and does not have the short
    timeout of the collectives.
    """
    stop: PreemptionHandler
    tensor: int = 1
    """The number of ranks that hold parts of each weight matrix and get the same tokens (AutoTP).
    """
    sequence: int = 1
    """The number of ranks that get parts of each sequence (Ulysses)."""
    sequence_group: dist.ProcessGroup | None = None
    """The ranks that get the parts of this rank's sequences; None if `sequence` is 1."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The number of the micro-batch, of those that all ranks together run at a time, that this
        rank runs or runs a part of.
        """
        return self.rank // (self.tensor * self.sequence)

    @property
    def sequence_part(self) -> tuple[int, int]:
        """The part of each sequence that this rank gets, and the number of parts."""
        return self.rank % self.sequence, self.sequence

    @property
    def replicas(self) -> int:
        """The number of replicas of the model, over which DeepSpeed averages gradients."""
        return self.world_size // self.tensor

    @property
    def replica(self) -> int:
        """The number of the replica that this rank belongs to."""
        return self.rank // self.tensor

    def in_groups(self, tensor: int, sequence: int) -> "Ranks":
        """The ranks in groups of consecutive ones; called by all of them."""
        own = dist.new_subgroups(sequence)[0] if sequence > 1 else None
        return replace(self, tensor=tensor, sequence=sequence, sequence_group=own)

    # Every rank calls each of the following methods.

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, on all ranks. JSON, because torch's object collectives unpickle, and
        so execute, what any process in the group sends.

        Args:
            value: of the types of JSON; floats may be infinite or NaN.
        """
        text = json.dumps(value).encode()
        # all_gather needs messages of one length: agree on the longest, then pad
        longest = torch.tensor(len(text))
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.control)
        padded = bytearray(text.ljust(int(longest)))  # JSON may end with spaces
        received = torch.empty(self.world_size, len(padded), dtype=torch.uint8)
        dist.all_gather(
            list(received), torch.frombuffer(padded, dtype=torch.uint8), group=self.control
        )
        return [json.loads(message.numpy().tobytes()) for message in received]

    def run_on_all(self, work: Callable[[], T], first_on_node: bool = False) -> T:
        """Run `work` on every rank. A UserError on any rank is raised on all of them, with its
        rank's prefix if that is not rank 0.

        Otherwise the rank with the error would exit, and the others would wait for it until the
        timeout.

        Args:
            first_on_node: the first rank of each node finishes before its other ranks start.
        """
        result: T | None = None
        turns = (self.local_rank == 0, self.local_rank > 0) if first_on_node else (True,)
        for is_turn in turns:
            error = None
            if is_turn:
                try:
                    result = work()
                except UserError as mistake:
                    # an agreed error has its rank's prefix already
                    is_named = self.is_first or isinstance(mistake, AgreedError)
                    prefix = "" if is_named else rank_prefix()
                    error = (f"{prefix}{mistake}", mistake.exit_code)
            # the first rank's with one, on all ranks: every rank raises the same line
            for message, exit_code in filter(None, self.gather_json(error)):
                agreed = AgreedError(message)
                agreed.exit_code = exit_code
                raise agreed
        return result  # type: ignore[return-value]

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result, of the types of JSON, or raise its UserError,
        on every rank.
        """
        return self.gather_json(self.run_on_all(lambda: work() if self.is_first else None))[0]

    def require_same(self, name: str, text: str) -> None:
        """Raise UserError on all ranks if `text` is not the same on all of them; it shows the first
        line that differs.
        """
        of_first = self.gather_json(text)[0]

        def compare() -> None:
            pairs = zip_longest(of_first.splitlines(), text.splitlines(), fillvalue="nothing")
            for expected, line in pairs:
                if line != expected:
                    raise UserError(
                        f"{name}: {line.strip()!r} on this rank, but {expected.strip()!r} on rank "
                        "0: do all nodes have the same files, tokenizer, library versions and "
                        "kind of GPU?"
                    )

        self.run_on_all(compare)

    def count(self, *flags: bool) -> list[float]:
        """The number of ranks on which each flag is set; the same on all ranks."""
        # on the device, in the step: one small collective for all flags
        return self.sum(torch.tensor(flags, device=self.device)).tolist()

    def any_preempted(self) -> bool:
        """Whether any rank was preempted; the same on all ranks."""
        return self.count(self.stop.signal is not None)[0] > 0

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of `value`, of any shape, over all ranks, in float64: exact for counts, and
        within 1e-15 for losses.
        """
        total = value.detach().to(torch.float64)
        dist.all_reduce(total)
        return total
