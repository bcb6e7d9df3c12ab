"""How far long work is: a bar on a terminal, elsewhere a line every few seconds; on rank 0 only."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from runtime.rank_env import rank_variables

LINE_SECONDS = 10.0
DRAW_SECONDS = 0.25

_shown = threading.Lock()  # one bar at a time: work within work shows none


def say(text: str) -> None:
    """Print a line on standard error if this is rank 0."""
    if rank_variables(os.environ).get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Show how much of some work is done, on standard error: on a terminal a bar, which is erased
    at the end; elsewhere a line every 10 s, so that short work prints nothing.

    Starts no thread: a thread's stack counts against limits on memory.

    Args:
        what: e.g. "converting".
        total: in `unit`; None if it is unknown.
        unit: in the plural, e.g. "rows".

    Yields:
        A function to be called, often, with the amount that is done so far.
    """
    is_first = rank_variables(os.environ).get("RANK", "0") == "0"
    if not is_first or not _shown.acquire(blocking=False):
        yield lambda done: None
        return
    is_terminal = sys.stderr.isatty()
    interval = DRAW_SECONDS if is_terminal else LINE_SECONDS
    began = time.monotonic()
    due = began + interval
    try:
        with (_bar if is_terminal else _lines)(what, total) as show:

            def report(done: int) -> None:
                nonlocal due
                if (now := time.monotonic()) >= due:
                    due = now + interval
                    of_total = "" if total is None else f" of {total:,}"
                    rate = done / (now - began)
                    digits = 0 if rate >= 10 else 1
                    show(done, f"{done:,}{of_total} {unit}, {rate:,.{digits}f} {unit}/s")

            yield report
    finally:
        _shown.release()


@contextmanager
def polled_progress(what: str, total: int, unit: str, count: Callable[[], int]) -> Iterator[None]:
    """As `progress`, where this thread is waiting for others: a thread asks `count`."""
    ended = threading.Event()
    with progress(what, total, unit) as report:

        def watch() -> None:
            while not ended.wait(DRAW_SECONDS):
                report(count())

        thread = threading.Thread(target=watch, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


Show = Callable[[int, str], None]


@contextmanager
def _lines(what: str, total: int | None) -> Iterator[Show]:
    yield lambda done, text: print(f"{what}: {text}", file=sys.stderr, flush=True)


def _bar(what: str, total: int | None) -> AbstractContextManager[Show]:
    from rich.console import Console  # takes .1 s, and most runs have no terminal
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    @contextmanager
    def shown() -> Iterator[Show]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        with Progress(
            *columns,
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            expand=True,
            redirect_stdout=sys.stdout.isatty(),
        ) as bar:
            bar.console.show_cursor()  # a process that is killed would leave it hidden
            task = bar.add_task(what, total=total, text="")

            def show(done: int, text: str) -> None:
                bar.update(task, completed=done, text=text, refresh=True)

            yield show

    return shown()
