"""train.py, of which rank 1 takes 40 ms longer for one matrix, for tests/test_steps.py."""

import time

import train
from config.schema import Config


def main(config: Config, dry_run: bool) -> None:
    """As train.main."""
    build_run = train.build_run

    def build_slow(*options):
        run = build_run(*options)
        matrix = run.engine.module.model.layers[1].mlp.down_proj
        compute = matrix.forward

        def compute_late(hidden):
            time.sleep(0.04 * run.ranks.rank)
            return compute(hidden)

        matrix.forward = compute_late
        return run

    train.build_run = build_slow
    train.main(config, dry_run)
