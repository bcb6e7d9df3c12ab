"""Names the ranks that training waits for, while it waits."""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from zerotrain.runtime.process_group import Ranks

REPO = Path(__file__).resolve().parents[2]
WARN_SECONDS = 300.0
MAX_NAMED = 8  # ranks in a warning


class HangWatch:
    """A thread of each rank that sees whether its process moves on: begins a collective, or comes
    to another line of the code. A rank that has not moved on for `warn_seconds` writes where it is
    to the rendezvous store, since the process groups are what hangs. Rank 0 then reads what all
    ranks wrote and reports those that have begun fewer collectives than others, or wrote nothing:
    such a process is stopped, its host is lost, or it is busy with something else.

    The main thread may be inside of a collective, which releases Python's lock.
    """

    def __init__(
        self,
        ranks: Ranks,
        names: Sequence[str],
        report: Callable[[str, list[int]], None],
        warn_seconds: float = WARN_SECONDS,
    ) -> None:
        """Start the thread.

        Args:
            names: how each rank is called in a report, with its host.
            report: called on rank 0, in the thread, with one line and the ranks that it names.
        """
        self._ranks, self._names, self._report = ranks, names, report
        self._warn_seconds = warn_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        if ranks.world_size > 1:
            self._thread.start()

    def close(self) -> None:
        """End the thread. One that is still there when Python exits may collect process groups then,
        which aborts the process.
        """
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _watch(self) -> None:
        poll_seconds = self._warn_seconds / 20
        own_key = f"hang/{self._ranks.rank}"
        try:
            # a connection of its own: a thread of NCCL may wait on another one
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
            state, since, written, reported = None, time.monotonic(), False, False
            while not self._ended.wait(poll_seconds):
                before, state = state, (begun_collectives(), position())
                idle = time.monotonic() - since
                if state != before:
                    if reported:
                        self._report(f"training continues after {idle:.0f} s", [])
                    if written:
                        store.delete_key(own_key)
                    since, written, reported = time.monotonic(), False, False
                elif idle > self._warn_seconds and not written:
                    store.set(own_key, json.dumps(state))
                    written = True
                # by then the others have written too
                elif self._ranks.is_first and idle > self._warn_seconds + 3 * poll_seconds:
                    if not reported:
                        self._report(*self._describe(store, idle))
                    reported = True
        except dist.DistError:  # the store is gone, and with it the job
            return

    def _describe(self, store: dist.Store, idle: float) -> tuple[str, list[int]]:
        """A line, and the ranks that it names."""
        keys = {rank: f"hang/{rank}" for rank in range(self._ranks.world_size)}
        states = {r: json.loads(store.get(k)) for r, k in keys.items() if store.check([k])}
        missing = ranks_behind({r: begun for r, (begun, _) in states.items()}, len(keys))
        if not missing:
            where = states[self._ranks.rank][1]
            text = "all ranks have begun the same collectives: a GPU or the network hangs, at "
            return f"nothing has moved for {idle:.0f} s; {text}{where}", []
        places = [
            f"{self._names[r]} ({'at ' + states[r][1] if r in states else 'stopped or busy'})"
            for r in missing[:MAX_NAMED]
        ]
        more = f" and {len(missing) - MAX_NAMED} more" if missing[MAX_NAMED:] else ""
        return f"nothing has moved for {idle:.0f} s; waiting for {', '.join(places)}{more}", missing


def ranks_behind(begun: dict[int, dict[str, int]], world_size: int) -> list[int]:
    """The ranks that are not in `begun`, or have begun fewer collectives of a process group than
    another rank of it.
    """
    most: dict[str, int] = {}
    for numbers in begun.values():
        for group, number in numbers.items():
            most[group] = max(number, most.get(group, 0))
    return [
        rank
        for rank in range(world_size)
        if rank not in begun or any(n < most[group] for group, n in begun[rank].items())
    ]


def begun_collectives() -> dict[str, int]:
    """How many collectives this process has begun, by the name of the process group."""
    names: list[tuple[Any, str]] = list(c10d._world.pg_names.items())
    return {name: group._get_sequence_number_for_group() for group, name in names}


def position() -> str:
    """Where the main thread is: file, line and function of this repository, else of a library."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    stack = traceback.extract_stack(frame)[::-1]
    is_own = [at.filename.startswith((f"{REPO}/zerotrain", f"{REPO}/train.py")) for at in stack]
    at = stack[is_own.index(True)] if any(is_own) else stack[0]
    return f"{at.filename.removeprefix(f'{REPO}/')}:{at.lineno} {at.name}"
