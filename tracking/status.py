"""What a person wants to know of a running job, from its records."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from math import isfinite, nan
from statistics import median
from typing import Any

TREND_STEPS = 50
RATE_STEPS = 200  # whose time, evaluations and saves included, the remaining time is computed from


class Status:
    """Keeps the latest of every kind of record; values that a run does not report are left out.

    Args:
        first_step: finished steps at the start of this process.
        clock: seconds.
    """

    def __init__(
        self, first_step: int, total_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total_steps, self._clock = total_steps, clock
        self.train: Mapping[str, Any] = {}
        self._ranks: Mapping[str, Any] = {}
        self._eval_loss: float | None = None
        self._saved_at: float | None = None
        self._losses: deque[float] = deque(maxlen=2 * TREND_STEPS)
        self._steps = deque([(clock(), first_step)], maxlen=RATE_STEPS)

    def update(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind == "train":
            self.train = values
            if isfinite(loss := values.get("loss", nan)):  # a skipped step may have none
                self._losses.append(loss)
            self._steps.append((self._clock(), values["step"]))
        elif kind == "eval":
            self._eval_loss = values.get("eval_loss")
        elif kind == "ranks":
            self._ranks = values
        elif kind == "save":
            self._saved_at = self._clock()

    def remaining(self) -> str | None:
        """Time to the last step; None before the first and at the end."""
        (then, first), (now, last) = self._steps[0], self._steps[-1]
        if last in (first, self.total_steps):
            return None
        return duration((self.total_steps - last) * (now - then) / (last - first))

    def slowest(self) -> str | None:
        """The rank with the most time of its own, and how far it is above the median."""
        if len(seconds := self._ranks.get("own_seconds") or ()) < 2:
            return None
        worst = max(range(len(seconds)), key=seconds.__getitem__)
        hosts = self._ranks.get("hosts")
        where = f" @ {hosts[worst]}" if hosts else ""
        usual = median(seconds)
        return f"rank {worst}{where}" + (f", +{seconds[worst] / usual - 1:.0%}" if usual else "")

    def facts(self) -> dict[str, str]:
        """Short texts by their labels of at most 9 characters, in order of interest."""
        now = self.train
        saved = None if self._saved_at is None else self._clock() - self._saved_at
        texts = {
            "epoch": _text(now.get("epoch"), "{:.2f}"),
            "loss": _text(now.get("loss"), "{:.4f}") and f"{now['loss']:.4f}{self._trend()}",
            "eval loss": _text(self._eval_loss, "{:.4f}"),
            "lr": _text(now.get("lr"), "{:.2e}"),
            "grad norm": _text(now.get("grad_norm"), "{:.2f}"),
            "tokens/s": _text(now.get("tokens_per_s"), "{:,.0f}"),
            "MFU": _text(now.get("mfu"), "{:.1%}"),
            "TFLOP/s": _text(now.get("model_flops_per_s"), "{:,.3g}", 1e-12),
            "padding": _text(now.get("padding_efficiency"), "{:.1%}", -1, 1),
            "memory": _text(now.get("memory_peak_bytes"), "{:,.1f} GiB", 2**-30),
            "saved": None if saved is None else f"{duration(saved)} ago",
        }
        return {label: text for label, text in texts.items() if text is not None}

    def line(self) -> str:
        """All of it in one line, for logs."""
        facts = self.facts() | {"left": self.remaining(), "slowest": self.slowest()}
        texts = "  ".join(f"{label} {text}" for label, text in facts.items() if text)
        return f"{self.place(self.train['step'])}  {texts}"

    def place(self, step: int) -> str:
        return f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def _trend(self) -> str:
        """Of the mean loss: the last steps against as many before them."""
        losses, half = list(self._losses), len(self._losses) // 2
        if half < 2 or not (before := sum(losses[-2 * half : -half])):
            return ""
        change = sum(losses[-half:]) / before - 1
        return f" ({change:+.{0 if abs(change) >= 0.0995 else 1}%})"


def describe(kind: str, values: Mapping[str, Any]) -> str | None:
    """A record that is printed when it comes, in one line; None for the others."""
    if kind == "event":
        return str(values.get("text") or values.get("name", "event"))
    if kind == "save":
        return f"saved in {values['save_seconds']:.1f} s"
    if kind == "eval":
        numbers = {k: v for k, v in values.items() if isinstance(v, float) and k != "eval_seconds"}
        sets = {name.partition("/")[2] for name in numbers if "/" in name}
        if len(sets) == 1:  # whose loss is eval_loss
            numbers = {k.partition("/")[0]: v for k, v in numbers.items() if k[:5] != "loss/"}
        return "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
    return None


def duration(seconds: float) -> str:
    """1:02:03, with the days before it if there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02}:{seconds:02}"


def _text(value: float | None, form: str, factor: float = 1, offset: float = 0) -> str | None:
    return None if value is None else form.format(value * factor + offset)
