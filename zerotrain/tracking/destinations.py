"""Where the records of a run go: the console, metrics.jsonl, Weights & Biases.

Another destination is a class with the methods log and close and a line in open_metrics.
"""

import os
import socket
from collections import Counter

from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.state import Progress
from zerotrain.config.schema import Config
from zerotrain.runtime.machine import device_name
from zerotrain.runtime.ranks import Ranks
from zerotrain.tracking.console import ConsoleSink
from zerotrain.tracking.metrics import JsonlSink, Metrics


def open_metrics(
    config: Config, start: Progress, total_steps: int, ranks: Ranks, lock: RunLock
) -> Metrics:
    """The metrics of this rank, with no sinks on ranks other than 0; all ranks call it.

    Args:
        start: the steps that are finished, and the W&B run, which a resumed run continues.

    Raises:
        UserError: W&B rejects its settings; on every rank.
    """
    metrics = Metrics([])
    places = ranks.gather_json(f"{socket.gethostname()}: {device_name(ranks.device)}")

    def open_sinks() -> None:
        metrics.sinks += [ConsoleSink(start.step, total_steps), JsonlSink(start.step, lock)]
        environment = f"{os.environ.get('WANDB_MODE')} {os.environ.get('WANDB_DISABLED')}"
        said = f"{config.tracking.wandb} {environment}".lower().split()
        if not {"disabled", "true", "1"} & {*said}:
            # imported here, because W&B takes a second and may be disabled
            from zerotrain.tracking.wandb import WandbSink

            metrics.sinks.append(WandbSink(config, start.wandb_id))
        cluster = {"step": start.step, "world_size": len(places), "ranks": Counter(places)}
        metrics.log("start", cluster)

    ranks.run_on_first(open_sinks)  # what rank 0 refuses, all ranks raise
    return metrics
