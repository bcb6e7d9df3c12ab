"""The destinations of a run's records: the console, metrics.jsonl, W&B and other trackers.

To add a destination, write a class with the methods log and close, and add it in open_metrics.
"""

import os
import socket
from collections import Counter

import psutil

from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.state import Progress
from zerotrain.config.schema import Config, TrackingConfig
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.machine import device_name
from zerotrain.runtime.ranks import Ranks
from zerotrain.tracking.console import ConsoleSink
from zerotrain.tracking.metrics import JsonlSink, Metrics
from zerotrain.tracking.trackers import TrackerSink

FALSE = ("", "0", "f", "false", "n", "no", "off")
"""Values of WANDB_DISABLED that leave W&B on."""


def is_wandb_off(tracking: TrackingConfig) -> bool:
    """Return whether tracking.wandb or a variable turns W&B off, and print that a variable does.

    Trainer reads WANDB_DISABLED. W&B itself no longer does.
    """
    variables = {name: os.environ.get(name, "") for name in ("WANDB_MODE", "WANDB_DISABLED")}
    mode, switch = (value.lower() for value in variables.values())
    by_variable = mode == "disabled" or switch not in FALSE
    if by_variable and tracking.wandb != "disabled":
        print(f"W&B is disabled by its variables, {variables}; tracking.wandb: {tracking.wandb}")
    return by_variable or tracking.wandb == "disabled"


def open_metrics(
    config: Config,
    start: Progress,
    total_steps: int,
    held_out: dict[str, str] | None,
    ranks: Ranks,
    lock: RunLock,
) -> Metrics:
    """Open the destinations on rank 0, and report the hosts of the run. All ranks call it.

    Args:
        start: the progress that the run starts from, with the id of its W&B run.
        held_out: a hash of the examples of each held-out set.

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
        if not is_wandb_off(config.tracking):
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
        cluster["held_out"] = held_out
        cluster["started"] = psutil.Process().create_time()
        metrics.log("start", cluster)

    ranks.run_on_first(open_sinks)
    return metrics
