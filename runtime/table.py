"""Names and texts in two columns, for people and for logs."""

import sys
from collections.abc import Collection, Mapping

NAME_WIDTH = 13  # of the longest name in the start-up table; rows that follow later align with it


def show_rows(rows: Mapping[str, str], group_starts: Collection[str] = ()) -> None:
    """Print rows on standard output. On a terminal texts are wrapped to its width; elsewhere each
    row is one line, however long, because logs are searched.

    Args:
        group_starts: names of rows that have an empty line before them on a terminal.
    """
    if not sys.stdout.isatty():
        width = max(NAME_WIDTH, *map(len, rows))
        lines = (f"  {name:<{width}}  {text}" for name, text in rows.items())
        print("\n".join(lines), flush=True)
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=NAME_WIDTH, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, text in rows.items():
        if name in group_starts:
            table.add_row()
        table.add_row(name, Text(text))  # brackets in a str would be read as rich's markup
    Console().print(Padding.indent(table, 2))
