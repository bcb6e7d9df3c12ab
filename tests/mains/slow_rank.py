"""train.py with a slow rank, for test_steps.py. Rank 1 waits for the file go_on before its fourth
step, and takes 0.1 s longer for each forward pass. A compiler's lock lies beside the run while its
engine is built.
"""

import os
import time
from pathlib import Path

import deepspeed

import train
from zerotrain.runtime.hang import HangWatch
from zerotrain.tracking import steps
from zerotrain.training import engine


def main(config, dry_run):
    """Train. Hangs are reported after 2 s, locks after 0.5 s, and windows have 10 steps."""
    load_steps = train.load_steps

    def load_late(plan, rank, *options, **named):
        for batch in load_steps(plan, rank, *options, **named):
            if rank == 1 and batch.global_step == 3:
                while not (Path(config.output_dir) / "go_on").exists():
                    time.sleep(0.01)
            yield batch

    initialize = deepspeed.initialize

    def initialize_late(**options):
        Path(config.output_dir, "lock").touch()
        time.sleep(float(os.environ.get("COMPILES_SECONDS", 1)))
        started = initialize(**options)
        if os.environ["RANK"] == "1":
            started[0].module.register_forward_hook(lambda *_: time.sleep(0.1))
        return started

    deepspeed.initialize = initialize_late
    train.load_steps = load_late
    train.HangWatch = lambda _, run_folder: HangWatch(2, run_folder)
    steps.WINDOW_STEPS = 10
    engine.LOCK_SECONDS = 0.5 if "COMPILES_SECONDS" not in os.environ else 0.05
    train.main(config, dry_run)
