"""What is printed while long work runs, and tables."""

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping

from zerotrain.runtime.errors import printable
from zerotrain.runtime.rank_env import rank_variables

LINE_SECONDS = 10.0  # between lines where there is no terminal


def print_line(text: str) -> None:
    """Print a line on standard error if this is rank 0."""
    if rank_variables().get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def report_progress(what: str, unit: str) -> Callable[[int], None]:
    """A function that takes the number of units that have been finished since its last call, and
    prints a line on standard error every 10 s, so that short work prints nothing.

    Args:
        what: e.g. "tokenizing".
        unit: in the plural, e.g. "rows".
    """
    finished = 0
    shown_at = time.monotonic()

    def report(count: int) -> None:
        nonlocal finished, shown_at
        finished += count
        if time.monotonic() - shown_at > LINE_SECONDS:
            shown_at = time.monotonic()
            print_line(f"{what}: {finished:,} {unit}")

    return report


def show_rows(rows: Mapping[str, str]) -> None:
    """Print names and texts in two columns, each row in one line, on a terminal in several."""
    width = max(map(len, rows))
    # elsewhere a row stays one line, which can be searched for
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for name, text in rows.items():
        start = f"  {name:<{width}}  "
        indent = " " * len(start)
        text = textwrap.fill(
            printable(text), columns, initial_indent=start, subsequent_indent=indent,
            break_on_hyphens=False,
        )  # fmt: skip
        print(text, flush=True)
