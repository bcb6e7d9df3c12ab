"""What a person sees while a run trains."""

import logging
import os
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from zerotrain.runtime.progress import LINE_SECONDS

# The remaining time follows from the speed of the last hour, evaluations and saves included.
SPEED_SECONDS = 3600.0
FACTS = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval loss {:.4f}",
    "lr": "lr {:.2e}",
    "grad_norm": "grad norm {:.2f}",
    "tokens_per_s": "tokens/s {:,.0f}",
    "mfu": "MFU {:.1%}",
    "memory_peak_gib": "memory {:.1f} GiB",
}
"""The values shown of a step and of the last evaluation, with their formats."""


class ConsoleSink:
    """A progress bar with the latest values on a terminal; elsewhere a line every LINE_SECONDS.

    Either way, evaluations, saves and events get a line of their own.
    """

    def __init__(self, first_step: int, total_steps: int) -> None:
        self._total_steps = total_steps
        self._values = {}  # The latest value of each name.
        self._shown_at = 0.0
        # soft_wrap keeps long lines whole that are printed above the bar, e.g. with paths.
        console = Console(soft_wrap=True)
        self._bar = Progress(
            TextColumn("step {task.completed:,}/{task.total:,}"),
            # With 16 colors, rich's own green of a finished bar is the gray of an empty one.
            BarColumn(bar_width=12, finished_style="green"),
            TimeRemainingColumn(),
            # A column with a ratio takes the rest of the width, and wraps its text.
            TextColumn("{task.description}", "dim", table_column=Column(ratio=1)),
            console=console,
            refresh_per_second=1,
            speed_estimate_period=SPEED_SECONDS,
            expand=True,
            disable=not console.is_interactive,
        )
        self._task = self._bar.add_task("", total=total_steps, completed=first_step)

    def log(self, kind: str, values: dict[str, Any]) -> None:
        step = values["step"]
        self._values |= values
        facts = "  ".join(
            form.format(self._values[key]) for key, form in FACTS.items() if key in self._values
        )
        self._bar.update(self._task, completed=step, description=facts)
        if kind == "train":
            self._show(step, facts)
        elif kind == "event":
            self._print(step, values["text"])
        elif kind == "save":
            self._print(step, f"saved in {values['save_seconds']:.1f} s")
        elif kind == "eval":
            # eval_loss repeats the loss of the first held-out set.
            skipped = ("step", "time", "eval_loss")
            facts = (f"{k} {v:.4f}" for k, v in values.items() if k not in skipped)
            self._print(step, "  ".join(facts))

    def _show(self, step: int, facts: str) -> None:
        if not self._bar.disable:
            self._bar.start()
            # The bar hides the cursor. A killed process would leave it hidden.
            self._bar.console.show_cursor()
        elif step == self._total_steps or time.monotonic() - self._shown_at > LINE_SECONDS:
            self._shown_at = time.monotonic()
            seconds = self._bar.tasks[0].time_remaining
            left = f"  left {timedelta(seconds=seconds)}" if seconds else ""
            self._print(step, facts + left)

    def _print(self, step: int, text: str) -> None:
        print(f"step {step:,}/{self._total_steps:,}  {text}")

    def close(self, exit_code: int) -> None:
        if self._bar.live.is_started:
            if exit_code:
                # Other ranks may have printed errors below the bar. Do not draw over them.
                self._bar.console.file.write("\n" * 4)
            self._bar.stop()


# --------------------------------------------------------------------------------------------------
# The libraries' own output


def quieten_libraries(is_first: bool) -> None:
    """Show each warning of the libraries once, on rank 0. Other ranks show only errors.

    Progress bars of the libraries are shown only on a terminal.
    """
    if not (is_first and sys.stderr.isatty()):
        # A variable, because importing datasets takes a second. Only sources of the hub need it.
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
        transformers.utils.logging.disable_progress_bar()
    # peft imports bitsandbytes, which warns on CPU that a package for inference is missing.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # DeepSpeed calls deprecated functions such as all_gather_into_tensor on every rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # Python forgets which warnings it has shown at every `catch_warnings`, which libraries enter in
    # each step. Shown as log records, the warnings can be filtered.
    logging.captureWarnings(True)
    logger = logging.getLogger("py.warnings")
    logger.addHandler(logging.lastResort)  # Prints to standard error.
    shown = {}
    logger.addFilter(lambda record: shown.setdefault(record.getMessage(), record) is record)
    if not is_first:
        logging.disable(logging.WARNING)
