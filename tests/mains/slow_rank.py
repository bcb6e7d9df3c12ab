"""train.py, of which rank 1 waits before its fourth step for a file, and is then stopped for 30 ms
of every 60; while the engine is built, there is a lock of a compiler. For test_steps.py.
"""

import subprocess
import time
from pathlib import Path

import deepspeed

import train
from zerotrain.runtime.hang import HangWatch
from zerotrain.tracking import steps
from zerotrain.training import engine

STOPS = "while kill -STOP $PPID; do sleep .03; kill -CONT $PPID; sleep .03; done"


def main(config, mode):
    """As train.main, with a hang reported after 2 s, locks after .5 s, and windows of 25 steps."""
    load_steps = train.load_steps

    def load_late(plan, rank, *options, **named):
        for batch in load_steps(plan, rank, *options, **named):
            if rank == 1 and batch.global_step == 3:
                while not (Path(config.output_dir) / "go_on").exists():
                    time.sleep(0.01)
                subprocess.Popen(["sh", "-c", STOPS])
            yield batch

    initialize = deepspeed.initialize

    def initialize_late(**options):
        Path(config.output_dir, "lock").touch()
        time.sleep(1)
        return initialize(**options)

    deepspeed.initialize = initialize_late
    train.load_steps = load_late
    train.HangWatch = lambda timeout_seconds: HangWatch(2)
    steps.WINDOW_STEPS = 25
    engine.LOCK_SECONDS = 0.5
    train.main(config, mode)
