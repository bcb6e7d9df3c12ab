"""What a person sees while a run trains."""

import logging
import os
import sys
import time
import warnings
from typing import Any

import datasets
import transformers
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zerotrain.runtime.errors import EXIT_PREEMPTED, UserError
from zerotrain.runtime.library_output import LIBRARY_LOGS

LINE_SECONDS = 10.0  # between lines where there is no terminal
DRAW_SECONDS = 1.0  # between drawings of the bar


class ConsoleSink:
    """On a terminal a progress bar with the last values below it; elsewhere a line every few
    seconds. Evaluations, saves and events have a line of their own in either case.
    """

    def __init__(self, first_step: int, total_steps: int) -> None:
        self._first_step, self._total_steps = first_step, total_steps
        self._began = self._shown_at = time.monotonic()
        self._shown_step, self._step = first_step, first_step
        self._facts: dict[str, str] = {}
        self._height = 0  # lines of the bar and the facts
        # soft_wrap: what is printed above the bar is not cut into lines, e.g. within a path
        console = Console(soft_wrap=True)
        self._live = None
        if console.is_interactive:
            self._live = Live(
                console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty()
            )

    def log(self, kind: str, values: dict[str, Any]) -> None:
        line = line_of(kind, values)
        if line is not None:
            print(f"step {values['step']:,}/{self._total_steps:,}  {line}", flush=True)
        if kind == "eval":
            self._facts["eval loss"] = f"{values['eval_loss']:.4f}"
        if kind != "train":
            return
        self._step = values["step"]
        self._facts |= facts_of(values)
        seconds = LINE_SECONDS if self._live is None else DRAW_SECONDS
        is_first = self._shown_step == self._first_step
        is_last = self._step == self._total_steps
        if is_first or is_last or time.monotonic() - self._shown_at > seconds:
            self._show()

    def close(self, exit_code: int) -> None:
        is_failure = exit_code not in (0, EXIT_PREEMPTED)
        if self._step != self._shown_step and not is_failure:
            self._show()
        if self._live is not None and self._live.is_started:
            if is_failure:
                # other ranks may have printed errors below the bar: do not draw over them
                self._live.console.file.write("\n" * self._height)
                self._live.update(Text())
            self._live.stop()

    def _show(self) -> None:
        self._shown_at, self._shown_step = time.monotonic(), self._step
        facts = "  ".join(f"{name} {text}" for name, text in self._facts.items())
        place = f"step {self._step:,}/{self._total_steps:,}"
        if self._live is None:
            print(f"{place}  {facts}  left {self._left()}", flush=True)
            return
        if not self._live.is_started:
            self._live.start()
            self._live.console.show_cursor()  # a process that is killed would leave it hidden
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        progress = ProgressBar(total=self._total_steps, completed=self._step)
        bar.add_row(place, progress, f"{self._left()} left")
        lines = Text(facts, "dim").wrap(self._live.console, self._live.console.width)
        self._height = 1 + len(lines)
        self._live.update(Group(bar, *lines), refresh=True)

    def _left(self) -> str:
        """Time to the last step, with the evaluations and saves on the way."""
        done = self._step - self._first_step
        seconds = (time.monotonic() - self._began) / done * (self._total_steps - self._step)
        minutes, seconds = divmod(round(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


FACTS = {
    "epoch": ("epoch", "{:.2f}", 1.0),
    "loss": ("loss", "{:.4f}", 1.0),
    "lr": ("lr", "{:.2e}", 1.0),
    "grad_norm": ("grad norm", "{:.2f}", 1.0),
    "tokens_per_s": ("tokens/s", "{:,.0f}", 1.0),
    "mfu": ("MFU", "{:.1%}", 1.0),
    "memory_peak_bytes": ("memory", "{:,.1f} GiB", 2**-30),
}
"""What is shown of a step: key -> name, format and factor."""


def facts_of(values: dict[str, Any]) -> dict[str, str]:
    return {
        name: form.format(values[key] * factor)
        for key, (name, form, factor) in FACTS.items()
        if key in values
    }


def line_of(kind: str, values: dict[str, Any]) -> str | None:
    """A record that is printed when it comes, in one line; None for the others."""
    if kind == "event":
        return values["text"]
    if kind == "save":
        return f"saved in {values['save_seconds']:.1f} s"
    if kind == "eval":
        numbers = {k: v for k, v in values.items() if isinstance(v, float) and k != "eval_seconds"}
        return "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
    return None


# --------------------------------------------------------------------------------------------------
# The libraries' own output


def quieten_libraries(is_first: bool) -> None:
    """Show the libraries' warnings once, on rank 0, and no progress bars where there is no
    terminal. Other ranks print errors only. With LIBRARY_LOGS=INFO every rank prints everything.

    Raises:
        UserError: LIBRARY_LOGS is not a level.
    """
    if not (is_first and Console(stderr=True).is_terminal):
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    level = os.environ.get(LIBRARY_LOGS, "").upper()
    if level:
        if level not in logging.getLevelNamesMapping():
            raise UserError(f"{LIBRARY_LOGS}: {level!r} is not a level; use INFO or DEBUG")
        for name in ("DeepSpeed", "transformers", "datasets", "peft", "torch"):
            logger = logging.getLogger(name)
            for target in (logger, *logger.handlers):
                target.setLevel(level)
        return
    # peft imports it for adapters; on CPU it names a package for inference that it lacks
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # "all_gather_into_tensor is deprecated": DeepSpeed's calls, on every rank, in every run
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    show_warnings_once()
    if not is_first:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)


def show_warnings_once() -> None:
    """Python's own record of what has been shown is emptied by every `catch_warnings`, which
    libraries enter in each step.
    """
    show = warnings.showwarning
    shown: set[tuple[str, type[Warning]]] = set()

    def show_once(message: Warning, category: type[Warning], *place: Any, **options: Any) -> None:
        key = str(message), category
        if key not in shown:
            shown.add(key)
            show(message, category, *place, **options)

    warnings.showwarning = show_once
