"""Print the rows of a file as JSONL, as training reads them.

    python -m scripts.to_jsonl rows.parquet > rows.jsonl

Chats that are JSON in strings become lists of objects. Messages about bad rows name this command
before jq, which reads neither tables nor such strings.
"""

import argparse
import ast
import json
from contextlib import suppress
from typing import Any

from zerotrain.config.schema import Source
from zerotrain.rows.fixes import decoded
from zerotrain.rows.sources import BadRow, parse_row, read_rows
from zerotrain.runtime.errors import UserError, exit_on_error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="JSONL, JSON, CSV, TSV, Parquet or Arrow")
    parser.add_argument(
        "--python", action="store_true", help="read strings with Python's text of a list, too"
    )
    args = parser.parse_args()
    for raw in read_rows(Source(path=args.file)):
        try:
            row = parse_row(raw, {})
            if args.python:
                row = {key: evaluated(value) for key, value in row.items()}
            row = decoded(row)
        except BadRow as error:
            raise UserError(f"{raw.file}:{raw.place}: {error}") from error
        print(json.dumps(row, ensure_ascii=False))


def evaluated(value: Any) -> Any:
    """Return the value of a string with Python's text of a list; return anything else unchanged."""
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError, SyntaxError):
            return ast.literal_eval(value)
    return value


if __name__ == "__main__":
    exit_on_error(main)
