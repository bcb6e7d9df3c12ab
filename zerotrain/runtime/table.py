"""Names and texts in two columns, for people and for logs."""

import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping

NAME_WIDTH = 13  # of the longest name in the start-up table; rows that follow later align with it


def show_rows(rows: Mapping[str, str], group_starts: Collection[str] = ()) -> None:
    """Print rows on standard output. On a terminal texts are wrapped to its width between words:
    a path stays whole. Elsewhere each row is one line, however long, because logs are searched.

    Args:
        group_starts: names of rows that have an empty line before them on a terminal.
    """
    width = max(NAME_WIDTH, *map(len, rows))
    for name, text in rows.items():
        line = f"  {name:<{width}}  {text}"
        if sys.stdout.isatty():
            if name in group_starts:
                print()
            line = textwrap.fill(
                line,
                shutil.get_terminal_size().columns,
                subsequent_indent=" " * (width + 4),
                break_long_words=False,
                break_on_hyphens=False,
            )
        print(line, flush=True)
