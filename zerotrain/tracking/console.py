"""What a person sees while a run trains."""

import logging
import os
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import transformers
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from zerotrain.runtime.progress import LINE_SECONDS

DRAW_SECONDS = 1.0  # between drawings of the bar
SPEED_SECONDS = 3600.0  # from which the remaining time is estimated, evaluations and saves included
FACTS = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval loss {:.4f}",
    "lr": "lr {:.2e}",
    "grad_norm": "grad norm {:.2f}",
    "tokens_per_s": "tokens/s {:,.0f}",
    "mfu": "MFU {:.1%}",
    "memory_peak_gib": "memory {:.1f} GiB",
}
"""What is shown of a step and of the last evaluation."""


class ConsoleSink:
    """On a terminal a progress bar with the last values below it; elsewhere a line every few
    seconds. Evaluations, saves and events have a line of their own in either case.
    """

    def __init__(self, first_step: int, total_steps: int) -> None:
        self._total_steps = total_steps
        self._values = {}  # the last ones, by name
        self._shown_at = 0.0
        self._progress = Progress(
            TextColumn("step {task.completed:,}/{task.total:,}"),
            BarColumn(bar_width=None),
            TimeRemainingColumn(),
            speed_estimate_period=SPEED_SECONDS,
            expand=True,
        )
        self._progress.add_task("", total=total_steps, completed=first_step)
        # soft_wrap: what is printed above the bar is not cut into lines, e.g. within a path
        console = Console(soft_wrap=True)
        self._on_terminal = console.is_interactive
        self._live = Live(console=console, auto_refresh=False)

    def log(self, kind: str, values: dict[str, Any]) -> None:
        step = values["step"]
        self._values |= values
        if kind == "train":
            self._progress.update(0, completed=step)  # its only task
            seconds = DRAW_SECONDS if self._on_terminal else LINE_SECONDS
            if step == self._total_steps or time.monotonic() - self._shown_at > seconds:
                self._show(step)
        elif kind == "event":
            self._print(step, values["text"])
        elif kind == "save":
            self._print(step, f"saved in {values['save_seconds']:.1f} s")
        elif kind == "eval":
            facts = (f"{name} {value:.4f}" for name, value in values.items() if name != "step")
            self._print(step, "  ".join(facts))
            if self._on_terminal:
                self._show(step)

    def _print(self, step: int, text: str) -> None:
        print(f"step {step:,}/{self._total_steps:,}  {text}")

    def _show(self, step: int) -> None:
        self._shown_at = time.monotonic()
        facts = "  ".join(
            form.format(self._values[key]) for key, form in FACTS.items() if key in self._values
        )
        if self._on_terminal:
            self._live.start()
            self._live.console.show_cursor()  # a process that is killed would leave it hidden
            self._live.update(Group(self._progress, Text(facts, "dim")), refresh=True)
        else:
            seconds = self._progress.tasks[0].time_remaining
            left = f"  left {timedelta(seconds=seconds)}" if seconds else ""
            self._print(step, facts + left)

    def close(self, exit_code: int) -> None:
        if self._live.is_started:
            if exit_code:
                # other ranks may have printed errors below the bar: do not draw over them
                self._live.console.file.write("\n" * 4)
            self._live.stop()


# --------------------------------------------------------------------------------------------------
# The libraries' own output


def quieten_libraries(is_first: bool) -> None:
    """Show the libraries' warnings once, on rank 0, and no progress bars where there is no
    terminal. Other ranks print errors only.
    """
    if not (is_first and sys.stderr.isatty()):
        # read when datasets is imported, which takes a second, for sources of the hub
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
        transformers.utils.logging.disable_progress_bar()
    # peft imports it for adapters; on CPU it names a package for inference that it lacks
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # "all_gather_into_tensor is deprecated": DeepSpeed's calls, on every rank, in every run
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # Python's own record of what has been shown is emptied by every `catch_warnings`, which
    # libraries enter in each step
    logging.captureWarnings(True)
    logger = logging.getLogger("py.warnings")
    logger.addHandler(logging.lastResort)  # standard error
    shown = {}
    logger.addFilter(lambda record: shown.setdefault(record.getMessage(), record) is record)
    if not is_first:
        logging.disable(logging.WARNING)
