"""Weights & Biases: one W&B run per training run, with a row for every step when it happens.

A resumed run repeats the steps after its checkpoint and logs them again. The x-axis of all charts
is the run's own `step`, so repeated steps are drawn at the same position.
"""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import wandb
from pydantic import ValidationError

from zerotrain.config.schema import Config
from zerotrain.runtime.errors import EXIT_PREEMPTED, UserError, describe
from zerotrain.tracking.metrics import numbers

# W&B's default waits 91 s for an unreachable server.
INIT_SECONDS = 15
# W&B's default waits forever. DeepSpeed's launcher kills a rank 30 s after its SIGTERM.
FINISH_SECONDS = 10
# W&B's default of 15 s loses that much, if a killed node or container takes W&B's process along.
FLUSH_SECONDS = 2
# W&B's modes; the later ones send less.
MODES = ("run", "online", "shared", "dryrun", "offline", "disabled")
SAME_MODES = {"run": "online", "dryrun": "offline"}
DECIDED_HERE = {
    "WANDB_MODE": "mode", "WANDB_PROJECT": "project", "WANDB_RUN_ID": "run_id",
    "WANDB_RESUME": "resume", "WANDB_DIR": "root_dir", "WANDB_ROOT_DIR": "root_dir",
    "WANDB_INIT_TIMEOUT": "init_timeout", "WANDB_LOGIN_TIMEOUT": "login_timeout",
    "WANDB_FINISH_TIMEOUT": "finish_timeout",
    "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL": "x_transaction_log_flush_interval",
}  # fmt: skip
"""W&B's variables that WandbSink overrides, as far as W&B lets it, with the settings' names."""


def cannot_start(error: Exception) -> UserError:
    return UserError(
        f"tracking: W&B cannot start: {describe(error)}; if HOME is not set, set HOME to a folder, "
        "or set --tracking.wandb disabled"
    )


def own_settings() -> wandb.Settings:
    """Return W&B's settings from its variables, and from commands such as `wandb offline`.

    Raises:
        UserError: W&B rejects a variable, or one asks for the steps of a different W&B run.
    """
    try:
        settings = wandb.setup().settings.model_copy()
        wandb.teardown()  # Ends W&B's process, a child of this rank: see start_service.
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(("WANDB", *map(str, first["loc"]))).upper()
        raise UserError(
            f"{name}: {first['msg']}, got {first['input']!r}; correct the variable, or unset it"
        ) from error
    except Exception as error:
        raise cannot_start(error) from error
    for name in ("fork_from", "resume_from"):
        if getattr(settings, name):
            raise UserError(
                f"WANDB_{name.upper()}: a run logs to a W&B run of its own; unset the variable"
            )
    return settings


def stricter_mode(mode: str, given: str) -> str:
    """Return the stricter of two modes of W&B: online, offline or disabled. Print it if it differs
    from `mode`, which tracking.wandb gives.
    """
    chosen = max(mode, given, key=MODES.index)
    chosen = "online" if chosen == "shared" else SAME_MODES.get(chosen, chosen)
    if chosen != mode:
        print(f"W&B is {chosen}: WANDB_MODE, or W&B's own settings, are stricter than {mode}")
    return chosen


def name_ignored(given: wandb.Settings, used: dict[str, Any]) -> None:
    """Print which variables have no effect, as their settings are `used`."""
    given.mode = SAME_MODES.get(given.mode, given.mode)
    names = [
        name
        for name, key in DECIDED_HERE.items()
        if name in os.environ and str(getattr(given, key)) != str(used[key])
    ]
    if names:
        print(
            f"W&B: {', '.join(names)} ignored: tracking.wandb, tracking.project, output_dir, the "
            "checkpoint's id and the times in zerotrain/tracking/wandb.py take their place"
        )


def start_service() -> None:
    """Start W&B's process, which the next `wandb.init` uses.

    `wandb.init` would start it as a child of this rank. DeepSpeed's launcher stops a rank together
    with its children, and W&B's process ends at SIGTERM even if started with the signal blocked.
    The rank could then not log its last steps, nor that it was preempted
    (test_ctrl_c_under_deepspeed_closes_the_run_of_wandb). This command leaves a process without a
    parent. It writes all that it has received, also if the rank is killed, and then exits.
    """
    # The service of a failed attempt would reject the run's id as taken.
    os.environ.pop("WANDB_SERVICE", None)
    command = [sys.executable, "-m", "wandb", "beta", "core", "start", "--idle-timeout", "20s"]
    address = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True)
    os.environ["WANDB_SERVICE"] = address.strip()


class WandbSink:
    """The W&B run of rank 0. It is offline if the server does not answer within INIT_SECONDS."""

    def __init__(self, config: Config, wandb_id: str) -> None:
        """
        Args:
            wandb_id: id of the W&B run; a resumed run continues it.

        Raises:
            UserError: W&B rejects the settings or cannot start.
        """
        # W&B reports its own errors to its makers. Without a network that delays the exit by 17 s.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        folder = Path(config.output_dir)
        given = own_settings()
        mode = stricter_mode(config.tracking.wandb, given.mode)
        for attempt in dict.fromkeys((mode, "offline")):
            try:
                start_service()
                self.run = wandb.init(
                    mode=attempt,
                    id=wandb_id,
                    resume="allow",
                    project=config.tracking.project,
                    name=given.run_name or folder.name,
                    dir=str(folder),
                    config=asdict(config),
                    settings=wandb.Settings(
                        init_timeout=INIT_SECONDS,
                        # On a terminal W&B asks for a key, and waits as long for the answer.
                        login_timeout=INIT_SECONDS,
                        finish_timeout=FINISH_SECONDS,
                        x_transaction_log_flush_interval=FLUSH_SECONDS,
                    ),
                )
                break
            except Exception as error:  # W&B raises its own errors and several of Python's.
                wandb.teardown()
                if attempt == "offline":
                    raise cannot_start(error) from error
                print(f"W&B: tracking is offline; `wandb sync` uploads it ({describe(error)})")
        name_ignored(given, {**vars(self.run.settings), "mode": mode})
        # W&B numbers the rows itself. Given our numbers, it would drop the rows of repeated steps.
        self.run.define_metric("*", step_metric="step")

    def log(self, kind: str, values: dict[str, Any]) -> None:
        row = numbers(kind, values)
        if kind == "event":
            row[f"event/{values['name']}"] = 1
        if kind == "generations":
            import pandas as pd

            # HTML, because W&B's own tables are artifacts, which wait for the server.
            with pd.option_context("display.max_colwidth", None):
                table = pd.DataFrame(values["rows"]).to_html(index=False)
            row[f"eval/generations/{values['set']}"] = wandb.Html(table, inject=False)
        self.run.log({**row, "step": values["step"]})

    def close(self, exit_code: int) -> None:
        if exit_code == EXIT_PREEMPTED:
            self.run.mark_preempting()  # W&B shows the run as preempted instead of failed.
        self.run.finish(exit_code=exit_code)
