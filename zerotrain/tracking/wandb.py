"""Weights & Biases: one run per job, which shows every step when it happens.

A resumed run repeats the steps after its checkpoint. W&B's server takes them back where it can
(resume_from, a feature in preview). Where it cannot, and offline, the steps are logged again: the
axis of all charts is the run's own `step`, so that they are drawn where they belong.
"""

import html
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.state import Progress
from zerotrain.config.schema import Config
from zerotrain.runtime.errors import EXIT_PREEMPTED, UserError, describe
from zerotrain.runtime.preemption import STOP_SIGNALS
from zerotrain.tracking.names import numbers_of

INIT_SECONDS = 15  # the default waits 91 s for an unreachable server
FINISH_SECONDS = 10  # the default waits forever; DeepSpeed's launcher kills after 30 s


class WandbSink:
    """The run of rank 0. If its server cannot be reached within seconds, tracking is offline."""

    def __init__(
        self, config: Config, folder: Path, start: Progress, about: dict[str, Any]
    ) -> None:
        """
        Args:
            start: the finished steps, and the W&B run that is continued, after a resume.
            about: shown with the config.

        Raises:
            UserError: W&B rejects the settings.
        """
        # Reports of W&B's own errors: a server that does not answer delays the exit by 17 s.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # takes a second, and tracking may be disabled

        settings = {
            "init_timeout": INIT_SECONDS,
            "login_timeout": INIT_SECONDS,  # on a terminal it asks for a key
            "finish_timeout": FINISH_SECONDS,
            # seconds; a killed run loses what was not flushed, by default up to 15 s
            "x_transaction_log_flush_interval": 2,
        }
        mode, run_id = config.tracking.wandb, start.wandb_id
        attempts = [{"mode": mode, "id": run_id, "resume": "allow"}]
        if mode == "online":
            attempts.append({**attempts[0], "mode": "offline"})
            if run_id is not None and start.step:
                rewound = {"mode": mode, "resume_from": f"{run_id}?_step={start.step}"}
                attempts.insert(0, rewound)
        for options in attempts:
            try:
                known = {k: v for k, v in settings.items() if k in wandb.Settings.model_fields}
                with blocked(STOP_SIGNALS):
                    self.run = wandb.init(
                        project=config.tracking.project,
                        name=os.environ.get("WANDB_NAME", folder.name),
                        dir=str(folder),
                        config={**asdict(config), **about},
                        settings=wandb.Settings(**known),
                        **options,
                    )
                break
            except (wandb.errors.Error, ValueError) as error:
                if options is attempts[-1]:
                    problem = describe(error)
                    raise UserError(f"tracking: W&B rejects the settings: {problem}") from error
                what = "rewind the run" if "resume_from" in options else "be reached"
                print(f"W&B cannot {what}: {str(error).splitlines()[0]}", flush=True)
                wandb.teardown()  # the failed attempt's service would refuse a second init
        self._make_html = partial(wandb.Html, inject=False)
        # W&B drops rows whose number is lower than the last one's: where it has later steps of
        # this run than the checkpoint, it numbers the rows itself
        self._is_numbered = self.run.starting_step <= start.step + 1
        self.run.define_metric("*", step_metric="step")

    def log(self, kind: str, values: dict[str, Any]) -> None:
        step, row = values["step"], dict[str, Any](numbers_of(kind, values))
        if kind == "generations":
            row[f"eval/generations/{values['set']}"] = self._make_html(html_table(values["rows"]))
        if row:
            number = max(step, self.run.starting_step) if self._is_numbered else None
            self.run.log({**row, "step": step}, step=number)

    def close(self, exit_code: int) -> None:
        if exit_code == EXIT_PREEMPTED:
            self.run.mark_preempting()  # shown as preempted, not as failed
        self.run.finish(exit_code=exit_code)


def html_table(rows: list[dict[str, Any]]) -> str:
    """Answers as a table. W&B's own tables are artifacts, which wait for the server."""
    lines = ["<table><tr>", *(f"<th>{html.escape(key)}</th>" for key in rows[0]), "</tr>"]
    for row in rows:
        cells = "".join(f"<td><pre>{html.escape(str(text))}</pre></td>" for text in row.values())
        lines.append(f"<tr>{cells}</tr>")
    return "".join([*lines, "</table>"])


@contextmanager
def blocked(signals: Iterable[int]) -> Iterator[None]:
    """Processes that are started inside never receive these signals.

    W&B's process is a child of the rank. DeepSpeed's launcher and SLURM send SIGTERM to it as well,
    and once it has exited the rank would fail at its next measurement instead of saving.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
