"""Nodes: the ranks that share an output folder. The first rank of each node writes, finds and
removes its checkpoints.
"""

import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from checkpoint.lock import RunLock
from runtime.agreement import gather_json, run_on_all_ranks
from runtime.errors import AgreedError, UserError, describe
from runtime.process_group import Ranks

T = TypeVar("T")

LAG_SECONDS = 10.0  # a shared disk may be slow to show one host's new file to another
EXPECTED: tuple[type[Exception], ...] = (UserError, OSError)


@dataclass(frozen=True)
class Nodes:
    """Groups of ranks, each with its own output folder: with checkpoint.node_local the ranks of
    each machine, otherwise one group of all ranks.
    """

    ranks: Ranks
    members: dict[str, list[int]]
    """The ranks of each node by its name, ordered by the first rank."""
    here: str
    """The name of this rank's node."""
    lock: RunLock
    """Of this node's output folder; its first rank acquires it."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.ranks.rank == self.members[self.here][0]

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of this rank's node."""
        return self.members[self.here]

    def label(self, name: str) -> str:
        """The prefix of a line about a node; empty if there is only one."""
        return f"{name}: " if len(self.members) > 1 else ""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, of the types of JSON, on all ranks."""
        return gather_json(self.ranks, value)

    def run_on_each_node(
        self, work: Callable[[], T], catch: tuple[type[Exception], ...] = EXPECTED
    ) -> dict[str, T]:
        """Run `work`, whose result is of the types of JSON, on the first rank of each node.

        Returns:
            The results by node, the same on all ranks.

        Raises:
            UserError: `work` raised one of `catch` on some node, which is named; on every rank.
        """
        outcome: tuple[T | None, str | None] = (None, None)
        if self.is_first:
            try:
                outcome = (work(), None)
            except catch as error:
                outcome = (None, describe(error))
        outcomes = self.gather(outcome)
        by_node = {name: outcomes[ranks[0]] for name, ranks in self.members.items()}
        for name, (_, error) in by_node.items():
            if error is not None:
                raise AgreedError(f"{self.label(name)}{error}")
        return {name: result for name, (result, _) in by_node.items()}  # type: ignore[misc]


def find_nodes(ranks: Ranks, folder: Path, node_local: bool) -> Nodes:
    """Find the nodes of this run by trial: the first rank of each machine writes a file into
    `folder`, and every rank checks which of the files it sees.

    Args:
        folder: the run's output_dir, created if it does not exist.
        node_local: checkpoint.node_local: whether each machine must have a folder of its own, or
            all must share one.

    Raises:
        UserError: the disks do not match `node_local`, or `folder` cannot be written to.
    """
    mine = [socket.gethostname(), ranks.local_rank == 0, uuid.uuid4().hex]
    all_ranks = gather_json(ranks, mine)
    hosts, token = [host for host, _, _ in all_ranks], all_ranks[0][2]
    firsts = [rank for rank, (_, is_first, _) in enumerate(all_ranks) if is_first]
    lock, shared = RunLock(folder), {hosts[0]: list(range(ranks.world_size))}
    if len(firsts) == 1:
        return Nodes(ranks, shared, hosts[0], lock)

    files = {rank: folder / f".node-{token}-{rank}" for rank in firsts}

    def write() -> None:
        if ranks.rank in files:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                files[ranks.rank].touch()
            except OSError as error:
                where = f"{folder} on {mine[0]}"
                raise UserError(f"output_dir: cannot write {where}: {error.strerror}") from error

    try:
        run_on_all_ranks(ranks, write)
        deadline = time.monotonic() + LAG_SECONDS
        while not (node_local or files[firsts[0]].exists()) and time.monotonic() < deadline:
            time.sleep(0.2)
        visible = [rank for rank, file in files.items() if file.exists()]
        seen = gather_json(ranks, visible)
    finally:
        if ranks.rank in files:
            files[ranks.rank].unlink(missing_ok=True)

    if not node_local:
        if blind := [rank for rank in range(ranks.world_size) if firsts[0] not in seen[rank]]:
            raise AgreedError(
                f"output_dir: {hosts[blind[0]]} does not see what {hosts[firsts[0]]} writes to "
                f"{folder}; choose a folder on a disk that all hosts share, or set "
                "checkpoint.node_local true, so that each node keeps its own ranks' shards of "
                "every checkpoint on its own disk"
            )
        return Nodes(ranks, shared, hosts[0], lock)
    for rank, which in enumerate(seen):
        if len(which) != 1:
            writers = " and ".join(hosts[first] for first in which) or "no host"
            raise AgreedError(
                f"checkpoint.node_local: {hosts[rank]} sees in output_dir {folder} what {writers} "
                "wrote there; each node needs a disk of its own: choose another folder, or set "
                "checkpoint.node_local false"
            )
    members: dict[str, list[int]] = {}
    for first in firsts:
        # two nodes may have the same name, e.g. SLURM daemons or containers on one machine
        name = hosts[first] if hosts[first] not in members else f"{hosts[first]}, rank {first}"
        members[name] = [rank for rank, which in enumerate(seen) if which == [first]]
    here = next(name for name, its in members.items() if ranks.rank in its)
    return Nodes(ranks, members, here, lock)
