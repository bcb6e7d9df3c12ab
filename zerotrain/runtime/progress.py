"""What is printed while long work runs, and tables."""

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping

from tqdm import tqdm

from zerotrain.runtime.errors import printable
from zerotrain.runtime.rank_env import rank_variables


def print_line(text: str) -> None:
    """Print a line on standard error if this is rank 0."""
    if _is_first():
        print(text, file=sys.stderr, flush=True)


def progress_bar(what: str, total: int | None, unit: str) -> tqdm:
    """A bar on standard error, which is erased at the end; in a log it is written every 10 s, so
    that short work writes nothing.

    Args:
        what: e.g. "converting".
        total: in `unit`; None if it is unknown.
        unit: in the plural, e.g. "rows".
    """
    seconds = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        desc=what,
        total=total,
        unit=f" {unit}",
        leave=False,
        mininterval=seconds,
        delay=seconds,
        disable=not _is_first(),
    )


def show_rows(rows: Mapping[str, str]) -> None:
    """Print names and texts in two columns, each row in one line, on a terminal in several."""
    width = max(map(len, rows))
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for name, text in rows.items():
        start = f"  {name:<{width}}  "
        lines = textwrap.wrap(
            printable(text), max(20, columns - len(start)), break_on_hyphens=False
        )
        print(start + ("\n" + " " * len(start)).join(lines), flush=True)


def _is_first() -> bool:
    return rank_variables(os.environ).get("RANK", "0") == "0"
