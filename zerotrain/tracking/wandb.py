"""Weights & Biases: one run per job, which shows every step when it happens.

A resumed run repeats the steps after its checkpoint, and logs them again: the axis of all charts is
the run's own `step`, so that they are drawn where they belong.
"""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import wandb

from zerotrain.config.schema import Config
from zerotrain.runtime.errors import EXIT_PREEMPTED, EnvironmentFailure, UserError, describe

INIT_SECONDS = 15  # the default waits 91 s for an unreachable server
FINISH_SECONDS = 10  # the default waits forever; DeepSpeed's launcher kills after 30 s
FLUSH_SECONDS = 2  # a killed run loses what was not flushed, by default up to 15 s
SERVICE = (sys.executable, "-m", "wandb", "beta", "core")


def start_service() -> str:
    """Start W&B's process in a session of its own, and return its address.

    As a child of this rank it would get the SIGTERM with which DeepSpeed's launcher stops a rank
    and its children, and the rank could not report its last steps. If the rank is killed, it exits
    soon after that.
    """
    os.environ.pop("WANDB_SERVICE", None)  # of a failed attempt, whose run's id it would keep
    command = [*SERVICE, "start", "--idle-timeout", "20s"]
    started = subprocess.run(command, capture_output=True, text=True)
    if started.returncode:
        raise EnvironmentFailure(f"tracking: W&B does not start: {started.stderr.strip()[-200:]}")
    return started.stdout.strip()


class WandbSink:
    """The run of rank 0. If its server cannot be reached within seconds, tracking is offline."""

    def __init__(self, config: Config, wandb_id: str) -> None:
        """
        Args:
            wandb_id: of the W&B run, which a resumed run continues.

        Raises:
            UserError: W&B rejects the settings.
        """
        # Reports of W&B's own errors: a server that does not answer delays the exit by 17 s.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        folder = Path(config.output_dir)
        mode = config.tracking.wandb
        for attempt in dict.fromkeys((mode, "offline")):
            os.environ["WANDB_SERVICE"] = start_service()
            try:
                self.run = wandb.init(
                    mode=attempt,
                    id=wandb_id,
                    resume="allow",
                    project=config.tracking.project,
                    name=os.environ.get("WANDB_NAME", folder.name),
                    dir=str(folder),
                    config=asdict(config),
                    settings=wandb.Settings(
                        init_timeout=INIT_SECONDS,
                        login_timeout=INIT_SECONDS,  # on a terminal it asks for a key
                        finish_timeout=FINISH_SECONDS,
                        x_transaction_log_flush_interval=FLUSH_SECONDS,
                    ),
                )
                break
            # RuntimeError: there is no home
            except (wandb.errors.Error, ValueError, OSError, RuntimeError) as error:
                problem = describe(error)
                if attempt == "offline":
                    raise UserError(
                        f"tracking: W&B refuses to start: {problem}; set HOME to a folder if it is "
                        "not set, or --tracking.wandb disabled"
                    ) from error
                print(f"W&B: tracking is offline; `wandb sync` uploads it ({problem})")
                wandb.teardown()
        # W&B numbers the rows itself: it would drop those of steps that it has had already
        self.run.define_metric("*", step_metric="step")

    def log(self, kind: str, values: dict[str, Any]) -> None:
        row = {
            f"{kind}/{key}": float(value)
            for key, value in values.items()
            if isinstance(value, int | float) and key != "step"
        }
        if kind == "event":
            row[f"event/{values['name']}"] = 1
        if kind == "generations":
            import pandas as pd

            # not W&B's own tables: they are artifacts, which wait for the server
            with pd.option_context("display.max_colwidth", None):
                table = pd.DataFrame(values["rows"]).to_html(index=False)
            row[f"eval/generations/{values['set']}"] = wandb.Html(table, inject=False)
        self.run.log({**row, "step": values["step"]})

    def close(self, exit_code: int) -> None:
        if exit_code == EXIT_PREEMPTED:
            self.run.mark_preempting()  # shown as preempted, not as failed
        self.run.finish(exit_code=exit_code)
        subprocess.run([*SERVICE, "stop"], capture_output=True)
