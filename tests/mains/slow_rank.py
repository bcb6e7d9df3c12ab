"""train.py, of which rank 1 waits before its fourth step for a file, and then for each batch; while
the engine is built, a lock of a compiler appears. For test_steps.py.
"""

import time
from pathlib import Path

import deepspeed

import train
from zerotrain.runtime.hang import HangWatch
from zerotrain.tracking import steps
from zerotrain.training import engine


def main(config, mode):
    """As train.main, with a hang reported after 2 s, locks after .2 s, and windows of 4 steps."""
    load_steps = train.load_steps

    def load_late(plan, rank, *options, **named):
        for batch in load_steps(plan, rank, *options, **named):
            if rank == 1 and batch.global_step == 3:
                while not (Path(config.output_dir) / "go_on").exists():
                    time.sleep(0.01)
            if rank == 1 and batch.global_step > 3:
                time.sleep(0.1)
            yield batch

    initialize = deepspeed.initialize

    def initialize_late(**options):
        time.sleep(0.5)
        Path(config.output_dir, "lock").touch()
        time.sleep(0.5)
        return initialize(**options)

    deepspeed.initialize = initialize_late
    train.load_steps = load_late
    train.HangWatch = lambda timeout_seconds: HangWatch(2)
    steps.WINDOW_STEPS = 4
    engine.LOCK_SECONDS = 0.2
    train.main(config, mode)
