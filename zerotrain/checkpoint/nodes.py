"""Which ranks write into the output folder: the first one; with checkpoint.node_local, where each
node has a disk of its own, the first one of each node.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.run_folder import LOCK
from zerotrain.runtime.agreement import gather_json, run_on_all_ranks
from zerotrain.runtime.errors import EXIT_FAILURE, AgreedError, UserError, describe
from zerotrain.runtime.process_group import Ranks

T = TypeVar("T")

LAG_SECONDS = 10.0  # a shared disk may be slow to show one host's new file to another


@dataclass(frozen=True)
class Nodes:
    """Groups of ranks that share an output folder, which the first rank of each writes to."""

    ranks: Ranks
    members: dict[str, range]
    """The ranks of each node by its name, ordered by the first rank."""
    here: str
    """The name of this rank's node."""
    lock: RunLock
    """Of this node's output folder; its first rank acquires it."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.ranks.rank == self.members[self.here][0]

    def label(self, name: str) -> str:
        """The prefix of a line about a node; empty if there is only one."""
        return f"{name}: " if len(self.members) > 1 else ""

    def run_on_each_node(self, work: Callable[[], T]) -> dict[str, T]:
        """Run `work`, whose result is of the types of JSON, on the first rank of each node.

        Returns:
            The results by node, the same on all ranks.

        Raises:
            UserError: `work` raised one, or an OSError, on some node, which is named; on every
                rank.
        """
        outcome: list[Any] = [None, None, 0]
        if self.is_first:
            try:
                outcome = [work(), None, 0]
            except UserError as error:
                outcome = [None, str(error), error.exit_code]
            except OSError as error:
                outcome = [None, describe(error), EXIT_FAILURE]
        outcomes = gather_json(self.ranks, outcome)
        by_node = {name: outcomes[ranks[0]] for name, ranks in self.members.items()}
        for name, (_, error, code) in by_node.items():
            if error is not None:
                raise AgreedError(f"{self.label(name)}{error}", code)
        return {name: result for name, (result, *_) in by_node.items()}


@contextmanager
def own_folder(ranks: Ranks, folder: Path, node_local: bool, dry_run: bool) -> Iterator[Nodes]:
    """The nodes of this run, which holds the lock of `folder` within `with`, unless it is a dry
    run, which writes nothing.

    Raises:
        UserError: another run uses the folder, it cannot be written to, or the machines do not
            share it although they should.
    """
    placed = gather_json(ranks, [socket.gethostname(), ranks.local_rank])
    firsts = [rank for rank, (_, local_rank) in enumerate(placed) if local_rank == 0]
    if not node_local:
        firsts = [0]
    members: dict[str, range] = {}
    for first, end in zip(firsts, [*firsts[1:], ranks.world_size], strict=True):
        # two nodes may have the same name, e.g. SLURM daemons or containers on one machine
        host = placed[first][0]
        members[host if host not in members else f"{host}, rank {first}"] = range(first, end)
        if node_local and [at[1] for at in placed[first:end]] != list(range(end - first)):
            raise AgreedError(
                "checkpoint.node_local: the ranks of a node have to be consecutive: start the run "
                "with launch.sh, torchrun, deepspeed or srun --distribution=block"
            )
    here = next(name for name, its in members.items() if ranks.rank in its)
    nodes = Nodes(ranks, members, here, RunLock(folder))
    if dry_run:
        yield nodes
        return
    with ExitStack() as stack:
        tokens = nodes.run_on_each_node(lambda: stack.enter_context(nodes.lock))
        if not node_local:
            run_on_all_ranks(ranks, lambda: _check_shared(folder, tokens[here], here))
        yield nodes


def _check_shared(folder: Path, token: str, writer: str) -> None:
    """Raise UserError if this machine does not see the lock that the first rank has written."""
    deadline = time.monotonic() + LAG_SECONDS
    while True:
        try:
            if token in (folder / LOCK).read_text(errors="replace"):
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise UserError(
                f"output_dir: {socket.gethostname()} does not see what {writer} writes to "
                f"{folder}; choose a folder on a disk that all hosts share, or set "
                "checkpoint.node_local true, so that each node keeps its own ranks' shards of "
                "every checkpoint on its own disk"
            )
        time.sleep(0.2)
