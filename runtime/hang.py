"""Names the ranks that training waits for, while it waits."""

import json
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from runtime.errors import UserError
from runtime.process_group import Ranks

REPO = Path(__file__).resolve().parent.parent
POLLS = 20
"""Times per distributed.warn_seconds that a rank looks whether it has moved on."""
LONGEST_POLL_SECONDS = 5.0
ANSWER_POLLS = 3  # how long rank 0 waits for the others
SHOWN = 8  # ranks, and places in the code, that a warning names


@dataclass(frozen=True)
class Answer:
    """What a rank says when it is asked where it is."""

    collectives: dict[str, int]
    """How many it has begun, by process group."""
    idle_seconds: float
    """For how long it has not moved on."""
    position: str


class HangWatch:
    """A thread of each rank that sees whether training moves on. When rank 0 has not moved on for
    `warn_seconds`, it asks all ranks where they are, and reports which have not come.

    A rank moves on when it finishes a step or begins a collective, as evaluations and saves do all
    the time; until the first step is finished, also when it is at another place of the code, since
    compiling takes minutes. A rank has not come if it has begun fewer collectives than another one,
    or does not answer: its process is stopped, or its host is lost.

    The main thread may be inside of a collective, which releases Python's lock. Ranks talk through
    the rendezvous store, because the process groups are what hangs.
    """

    def __init__(
        self,
        ranks: Ranks,
        warn_seconds: float,
        names: Sequence[str],
        report: Callable[[str, list[int]], None],
    ) -> None:
        """Start the thread.

        Args:
            names: how each rank is called in a report.
            report: called on rank 0, in the thread, with one line and the ranks that it names.
        """
        self._ranks, self._warn_seconds, self._names = ranks, warn_seconds, names
        self._report = report
        self._steps, self._asked, self._idle_since = 0, 0, time.monotonic()
        self._poll_seconds = min(LONGEST_POLL_SECONDS, warn_seconds / POLLS)
        # a connection of its own: a thread of NCCL may wait on the other one
        self._store = ranks.store.clone() if ranks.world_size > 1 else ranks.store
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._thread.start()

    def step_finished(self) -> None:
        self._steps += 1

    def close(self) -> None:
        self._ended.set()
        self._thread.join(1)  # not longer: it may wait for a store that is gone

    def _watch(self) -> None:
        state, warned, next_warning = self._state(), False, self._warn_seconds
        try:
            while not self._ended.wait(self._poll_seconds):
                self._answer()
                now, before, state = time.monotonic(), state, self._state()
                idle = now - self._idle_since
                if state != before:
                    self._idle_since, next_warning = now, self._warn_seconds
                    if warned:
                        self._report(f"training continues after {idle:.0f} s", [])
                        warned = False
                elif self._ranks.is_first and idle > next_warning:
                    if (found := self._find()) is not None:
                        self._report(*found)
                        warned = True
                    next_warning = 2 * idle
        except (dist.DistError, UserError):  # the store is gone, and with it the job
            return

    def _state(self) -> tuple[Any, ...]:
        place = _position() if self._steps == 0 else ""
        return self._steps, begun_collectives(), place

    def _answer(self) -> None:
        """If rank 0 asks, say where this rank is."""
        while not self._ranks.is_first and self._store.check([_key(self._asked)]):
            self._store.set(_key(self._asked, self._ranks.rank), json.dumps(self._own_answer()))
            self._asked += 1

    def _own_answer(self) -> list[Any]:
        return [begun_collectives(), time.monotonic() - self._idle_since, _position()]

    def _find(self) -> tuple[str, list[int]] | None:
        """Ask all ranks: a warning, and the ranks that have not come; None if one moves on."""
        others = range(1, self._ranks.world_size)
        answers = {0: Answer(*self._own_answer())}
        self._store.set(_key(self._asked), b"?")
        deadline = time.monotonic() + ANSWER_POLLS * self._poll_seconds
        while time.monotonic() < deadline and len(answers) <= len(others):
            time.sleep(self._poll_seconds / 2)
            for rank in others:
                key = _key(self._asked, rank)
                if rank not in answers and self._store.check([key]):
                    with suppress(ValueError, TypeError):  # of another program
                        answers[rank] = Answer(*json.loads(self._store.get(key)))
        self._asked += 1
        missing = ranks_behind(answers, self._ranks.world_size)
        moving = self._warn_seconds / 2
        if any(rank in answers and answers[rank].idle_seconds < moving for rank in missing):
            return None
        return self._describe(answers, missing), missing

    def _describe(self, answers: dict[int, Answer], missing: list[int]) -> str:
        named = [
            f"{self._names[rank]}: "
            + (f"at {answers[rank].position}" if rank in answers else "does not answer")
            for rank in missing
        ]
        waiting = Counter(a.position for rank, a in answers.items() if rank not in missing)
        places = "; ".join(f"{n} at {place}" for place, n in waiting.most_common(SHOWN))
        seconds = answers[0].idle_seconds
        if not missing:
            return (
                f"nothing has moved for {seconds:.0f} s, and all ranks have begun the same "
                f"collectives: a GPU or the network hangs; {places}"
            )
        more = f"; and {len(named) - SHOWN} more" if named[SHOWN:] else ""
        return (
            f"nothing has moved for {seconds:.0f} s; not come: {'; '.join(named[:SHOWN])}{more}"
            + (f"; waiting for them: {places}" if places else "")
        )


def ranks_behind(answers: dict[int, Answer], world_size: int) -> list[int]:
    """The ranks that have not answered, or have begun fewer collectives of a process group than
    another rank of it.
    """
    most: dict[str, int] = {}
    for answer in answers.values():
        for group, number in answer.collectives.items():
            most[group] = max(number, most.get(group, 0))
    return [
        rank
        for rank in range(world_size)
        if rank not in answers
        or any(number < most[group] for group, number in answers[rank].collectives.items())
    ]


def begun_collectives() -> dict[str, int]:
    """How many collectives this process has begun, by the name of the process group."""
    names = list(c10d._world.pg_names.items())
    return {name: group._get_sequence_number_for_group() for group, name in names}


def _position() -> str:
    """Where the main thread is: file, line and function, of this repository and of the library that
    it has called.
    """
    frame = sys._current_frames().get(threading.main_thread().ident)
    if frame is None:
        return "its end"
    places = [
        (Path(at.f_code.co_filename), line, at.f_code.co_name)
        for at, line in traceback.walk_stack(frame)
    ]
    ours = next((place for place in places if _is_ours(place[0])), None)
    inner = _shown(places[0])
    if ours is None or ours == places[0]:
        return inner
    return f"{_shown(ours)}, in {inner}"


def _is_ours(file: Path) -> bool:
    return file.is_relative_to(REPO) and "site-packages" not in file.parts


def _shown(place: tuple[Path, int, str]) -> str:
    file, line, function = place
    if _is_ours(file):
        file = file.relative_to(REPO)
    elif "site-packages" in file.parts:
        file = Path(*file.parts[file.parts.index("site-packages") + 1 :])
    else:
        file = Path(*file.parts[-2:])
    return f"{file}:{line} {function}"


def _key(asked: int, rank: int | None = None) -> str:
    return f"hang/{asked}" if rank is None else f"hang/{asked}/{rank}"
