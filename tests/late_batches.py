"""train.py, of which rank 1 waits before its fourth step for a file, and is slow from its sixth on,
for tests/test_steps.py.
"""

import time
from pathlib import Path

import train
from config.schema import Config


def main(config: Config, dry_run: bool) -> None:
    """As train.main."""
    load_steps = train.load_steps

    def load_late(plan, rank, *options):
        for batch in load_steps(plan, rank, *options):
            if rank == 1 and batch.global_step == 3:
                wait_for(Path(config.output_dir) / "go_on")
            if batch.global_step >= 5:
                time.sleep(0.3)
            yield batch

    train.load_steps = load_late
    train.main(config, dry_run)


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)
