"""Tokenize the rows of a run, on any machine: without a GPU, DeepSpeed or other ranks.

    python -m scripts.tokenize --config recipes/demo.yaml

Makes a token cache of the training data and of each held-out set in data.cache_dir, and prints what
it has made. train.py opens the caches, and runs this program if they are missing. Any flag of
train.py may follow.

This folder has no __init__.py: a module of this name would hide Python's own `tokenize` from the
scripts beside it.
"""

import sys

from zerotrain.config.parse import parse_command_line
from zerotrain.runtime.errors import exit_on_error


def main() -> None:
    config = parse_command_line(sys.argv[1:], prog="tokenize").config

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from zerotrain.data.cache import open_cache
    from zerotrain.rows.tokenize import make_caches, print_progress
    from zerotrain.tools.data_report import print_counts
    from zerotrain.tracking.console import quieten_libraries

    quieten_libraries(is_first=True)
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenizing", total=None)

        def show(source: str, examples: int) -> None:
            if bar.disable:
                print_progress(source, examples)
            bar.update(task, description=f"tokenizing {source}: {examples:,} examples")

        folders = make_caches(config, show)
    names = ["training data", *(f"held-out set {name}" for name in config.data.eval_sources)]
    for name, folder in zip(names, folders, strict=True):
        print_counts(f"{name}: {folder}", open_cache(folder))


if __name__ == "__main__":
    exit_on_error(main)
