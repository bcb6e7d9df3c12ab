"""What a person sees while a run trains."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from math import ceil
from typing import Any, TextIO

import datasets
import transformers
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runtime.errors import EXIT_PREEMPTED, UserError
from runtime.library_output import LIBRARY_LOGS
from runtime.progress import progress
from tracking.status import Status, describe

LINE_SECONDS = 10.0  # between lines where there is no terminal
DRAW_SECONDS = 1.0  # between drawings of the panel, each of which takes 2 to 3 ms
CELL_COLUMNS = 25  # of the panel, for one label and its text


class ConsoleSink:
    """On a terminal a panel that is redrawn in place; elsewhere a line every few seconds.
    Evaluations, saves and events have a line of their own in either case.
    """

    def __init__(self, first_step: int, total_steps: int) -> None:
        self._status = Status(first_step, total_steps)
        self._shown_at, self._shown_step = 0.0, first_step
        console = Console()
        self._panel = LivePanel(console) if console.is_interactive else None

    def log(self, kind: str, values: dict[str, Any]) -> None:
        self._status.update(kind, values)
        if text := describe(kind, values):
            print(f"{self._status.place(values['step'])}  {text}", flush=True)
        if kind != "train":
            return
        interval = LINE_SECONDS if self._panel is None else DRAW_SECONDS
        is_last = values["step"] == self._status.total_steps
        if is_last or time.monotonic() - self._shown_at > interval:
            self._show()

    def _show(self) -> None:
        self._shown_at, self._shown_step = time.monotonic(), self._status.train["step"]
        if self._panel is None:
            print(self._status.line(), flush=True)
        else:
            self._panel.draw(self._status)

    def close(self, exit_code: int) -> None:
        is_failure = exit_code not in (0, EXIT_PREEMPTED)
        if self._panel is not None:
            if self._status.train and not is_failure:
                self._show()  # an evaluation and a save may have followed the last step
            self._panel.close(is_failure)
        elif self._status.train.get("step", self._shown_step) != self._shown_step:
            self._show()


class LivePanel:
    """Text at the end of a terminal that is redrawn in place. What this process prints meanwhile,
    by `print`, `warnings` or `logging`, appears above it. There is no thread: it is drawn when
    `draw` is called.
    """

    def __init__(self, console: Console) -> None:
        self._live = Live(
            console=console,
            auto_refresh=False,
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )
        self._height = 0

    def draw(self, status: Status) -> None:
        if not self._live.is_started:
            self._start()
        panel, self._height = render(status, self._live.console.width)
        self._live.update(panel, refresh=True)

    def _start(self) -> None:
        streams = sys.stdout, sys.stderr
        self._live.start()
        # A process that is killed leaves the terminal as it is: do not hide the cursor.
        self._live.console.show_cursor()
        for before, now in zip(streams, (sys.stdout, sys.stderr), strict=True):
            move_log_handlers(before, now)

    def close(self, is_failure: bool) -> None:
        """Leave the panel as it was last drawn. After a failure, other ranks may have printed their
        errors below it, which drawing it again would erase: continue below them.
        """
        if not self._live.is_started:
            return
        if is_failure:
            self._live.console.file.write("\n" * self._height)
            self._live.update(Text())
        streams = sys.stdout, sys.stderr
        self._live.stop()
        for before, now in zip(streams, (sys.stdout, sys.stderr), strict=True):
            move_log_handlers(before, now)


def render(status: Status, columns: int) -> tuple[Panel, int]:
    """The panel for a terminal of that width, and how many lines it has."""
    step, total = status.train["step"], status.total_steps
    head = Table.grid(expand=True, padding=(0, 1, 0, 0))
    for ratio in (None, 1, None):
        head.add_column(ratio=ratio, no_wrap=True)
    remaining = status.remaining()
    head.add_row(
        Text(f"step {step:,} of {total:,}", "bold"),
        ProgressBar(total=total, completed=step),
        f"{step / total:.0%}" + (f"  {remaining} left" if remaining else ""),
    )
    facts = list(status.facts().items())
    per_line = max(1, min(len(facts), (columns - 4) // CELL_COLUMNS))
    cells = Table.grid(expand=True, padding=(0, 1, 0, 0))
    for _ in range(per_line):
        cells.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    texts = [Text.assemble((f"{label:<9} ", "dim"), text) for label, text in facts]
    for start in range(0, len(texts), per_line):
        cells.add_row(*texts[start : start + per_line])
    parts: list[Any] = [head, cells]
    if slowest := status.slowest():
        line = Text.assemble(("slowest   ", "dim"), slowest, no_wrap=True, overflow="ellipsis")
        parts.append(line)
    height = 3 + ceil(len(texts) / per_line) + (slowest is not None)
    return Panel(Group(*parts), border_style="dim"), height


def move_log_handlers(before: TextIO, now: TextIO) -> None:
    """Have all log handlers that write to `before` write to `now`: they keep the stream that was
    sys.stderr when they were made.
    """
    if before is now:
        return
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(now)


# --------------------------------------------------------------------------------------------------
# The libraries' own output


def quieten_libraries(is_first: bool) -> None:
    """Show the libraries' warnings once, on rank 0, and their bars as those of runtime/progress.py.
    Other ranks print errors only. With LIBRARY_LOGS=INFO every rank prints everything.

    Raises:
        UserError: LIBRARY_LOGS is not a level.
    """
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_tqdm_hook(_tracked)
    if level := os.environ.get(LIBRARY_LOGS):
        if level.upper() not in logging.getLevelNamesMapping():
            raise UserError(f"{LIBRARY_LOGS}: {level!r} is not a level; use INFO or DEBUG")
        for name in ("DeepSpeed", "transformers", "datasets", "peft", "torch"):
            logger = logging.getLogger(name)
            for target in (logger, *logger.handlers):
                target.setLevel(level.upper())
        return
    # peft imports it for adapters; on CPU it names a package for inference that it lacks
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # "all_gather_into_tensor is deprecated": DeepSpeed's calls, on every rank, in every run
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    _show_warnings_once()
    if not is_first:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)


def _show_warnings_once() -> None:
    """Python's own record of what has been shown is emptied by every `catch_warnings`, which
    libraries enter in each step.
    """
    show, shown = warnings.showwarning, set[tuple[str, type[Warning]]]()

    def show_once(message: Warning, category: type[Warning], *place: Any, **options: Any) -> None:
        if (key := (str(message), category)) not in shown:
            shown.add(key)
            show(message, category, *place, **options)

    warnings.showwarning = show_once


def _tracked(
    make_bar: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """In place of transformers' bars: of weights that it loads."""
    if not args or not isinstance(args[0], Sized):
        return make_bar(*args, **options)

    def items() -> Iterator[Any]:
        what = options.get("desc", "loading").lower()
        with progress(what, len(args[0]), "tensors") as report:
            for done, item in enumerate(args[0]):
                report(done)
                yield item

    return items()
