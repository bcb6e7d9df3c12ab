"""The destinations of a run's records: the console, metrics.jsonl, W&B and other trackers.

To add a destination, write a class with the methods log and close, and add it in open_metrics.
"""

import os
import socket
from collections import Counter

import psutil

from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.state import Progress
from zerotrain.config.schema import Config
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.machine import device_name
from zerotrain.runtime.ranks import Ranks
from zerotrain.tracking.console import ConsoleSink
from zerotrain.tracking.metrics import JsonlSink, Metrics
from zerotrain.tracking.trackers import TrackerSink


def open_metrics(
    config: Config, start: Progress, total_steps: int, ranks: Ranks, lock: RunLock
) -> Metrics:
    """Open the destinations on rank 0, and report the hosts of the run. All ranks call it.

    Args:
        start: the progress that the run starts from, with the id of its W&B run.

    Returns:
        This rank's metrics; ranks other than 0 have no sinks.

    Raises:
        UserError: W&B rejects its settings, or a tracker is not installed. All ranks raise it.
    """
    metrics = Metrics([])
    hosts = ranks.gather_json(f"{socket.gethostname()}: {device_name(ranks.device)}")

    def open_sinks() -> None:
        metrics.sinks += [
            ConsoleSink(start.step, total_steps),
            JsonlSink(start.step, lock, metrics.useful_time.add),
        ]
        environment = f"{os.environ.get('WANDB_MODE')} {os.environ.get('WANDB_DISABLED')}"
        switches = f"{config.tracking.wandb} {environment}".lower().split()
        if not {"disabled", "true", "1"} & {*switches}:
            # Imported here, because the import takes a second.
            from zerotrain.tracking.wandb import WandbSink

            metrics.sinks.append(WandbSink(config, start.wandb_id))
        for name in config.tracking.also:
            try:
                metrics.sinks.append(TrackerSink(name, config, start.wandb_id, start.step))
            except ImportError as error:
                raise UserError(f"tracking.also: {error}; pip install {name}") from error
            except Exception as error:  # each tracker has its own errors
                print(f"WARNING: {name} failed, training continues: {describe(error)}")
        cluster = {"step": start.step, "world_size": len(hosts), "ranks": Counter(hosts)}
        cluster["started"] = psutil.Process().create_time()
        metrics.log("start", cluster)

    ranks.run_on_first(open_sinks)
    return metrics
