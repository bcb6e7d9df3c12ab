"""What measuring costs: the share of a run's step time that is spent on marks, hooks, model FLOPs
and the gathering of the ranks' own times (tracking/steps.py).

    deepspeed --num_gpus 2 benchmarks/step_overhead.py --config recipes/demo.yaml \
        --output_dir OUT --train.steps 300 --ds_config ds_configs/zero3.json

Takes the command line of train.py, trains, and prints a line of JSON: seconds per step by method,
on rank 0, and their share of the step. ZeRO 3 has the most hooks. The clock around each call counts
too, so the share is an upper bound. The cost per call does not depend on the size of the model.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.check_sources import parse_with_sources
from runtime.errors import exit_on_error

METHODS = {
    "StepTimer": ("begin", "end", "_add", "_enter", "_leave"),
    "StepRecorder": ("_speed", "_compare_ranks"),
}


def main() -> None:
    command_line = exit_on_error(lambda: parse_with_sources(sys.argv[1:]))

    import train
    from tracking.metrics import Metrics
    from tracking.step_timer import StepTimer
    from tracking.steps import StepRecorder

    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    steps: list[float] = []

    def timed(owner: type, name: str) -> Callable[..., Any]:
        work = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*args, **options)
            finally:
                seconds[name] += time.perf_counter() - began
                calls[name] += 1

        return call

    for owner in (StepTimer, StepRecorder):
        for name in METHODS[owner.__name__]:
            setattr(owner, name, timed(owner, name))
    log = Metrics.log

    def record(metrics: Metrics, kind: str, values: dict[str, Any]) -> None:
        log(metrics, kind, values)
        if kind == "train":
            steps.append(values["step_seconds"])

    Metrics.log = record
    exit_on_error(lambda: train.main(command_line.config, command_line.dry_run))
    if steps:  # on rank 0
        report = {
            "steps": len(steps),
            "step_seconds": sum(steps) / len(steps),
            "seconds_per_step": {name: total / len(steps) for name, total in seconds.items()},
            "calls_per_step": {name: count / len(steps) for name, count in calls.items()},
            "share": sum(seconds.values()) / sum(steps),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
