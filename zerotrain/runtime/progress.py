"""How far long work is: a bar on a terminal, elsewhere a line every few seconds; on rank 0 only."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from zerotrain.runtime.rank_env import rank_variables

LINE_SECONDS = 10.0


def print_line(text: str) -> None:
    """Print a line on standard error if this is rank 0."""
    if _is_first():
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Show how much of some work is done, on standard error: on a terminal a bar, which is erased
    at the end; elsewhere a line every 10 s, so that short work prints nothing.

    Args:
        what: e.g. "converting".
        total: in `unit`; None if it is unknown.
        unit: in the plural, e.g. "rows".

    Yields:
        A function to be called, often, with the amount that is done so far.
    """
    is_terminal = sys.stderr.isatty()
    line_due = time.monotonic() + LINE_SECONDS
    bar = tqdm(
        desc=what,
        total=total,
        unit=f" {unit}",
        leave=False,
        disable=not (is_terminal and _is_first()),
    )

    def report(done: int) -> None:
        nonlocal line_due
        bar.update(done - bar.n)
        if not is_terminal and time.monotonic() >= line_due:
            line_due += LINE_SECONDS
            of_total = "" if total is None else f" of {total:,}"
            print_line(f"{what}: {done:,}{of_total} {unit}")

    with bar:
        yield report


def _is_first() -> bool:
    return rank_variables(os.environ).get("RANK", "0") == "0"
