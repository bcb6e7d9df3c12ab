"""Print lines and tables."""

import shutil
import sys
import textwrap
from collections.abc import Mapping

from zerotrain.runtime.errors import printable
from zerotrain.runtime.rank_env import rank_variables

LINE_SECONDS = 10.0
"""Seconds between progress lines without a terminal."""


def print_line(text: str) -> None:
    """Print a line on standard error if this is rank 0."""
    if rank_variables()["RANK"] == "0":
        print(printable(text), file=sys.stderr)


def show_rows(rows: Mapping[str, str]) -> None:
    """Print names and texts in two columns; long texts are wrapped on a terminal only."""
    rows = {printable(name): printable(text) for name, text in rows.items()}
    width = max(map(len, rows))
    # in a file, a row stays one line, which can be searched for
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for name, text in rows.items():
        start = f"  {name:<{width}}  "
        print(textwrap.fill(
            text, columns, initial_indent=start, break_on_hyphens=False,
            subsequent_indent=" " * len(start),
        ))  # fmt: skip
