"""What a person sees while a run trains."""

import logging
import sys
import time
import warnings
from typing import Any

import datasets
import transformers
from tqdm import tqdm

LINE_EVERY_SECONDS = 10.0  # between lines where there is no terminal for a progress bar


class ConsoleSink:
    """A progress bar on a terminal. Elsewhere a plain line every few seconds, because a bar fills
    logs with carriage returns.
    """

    def __init__(self, first_step: int, total_steps: int) -> None:
        self.total_steps = total_steps
        self.last_line = 0.0
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True)

    def log(self, kind: str, values: dict[str, Any]) -> None:
        step = values["step"]
        if kind == "eval":
            self._line(f"step {step:>6}/{self.total_steps}  eval_loss {values['eval_loss']:.4f}")
        if kind == "event":
            self._line(values["text"])
        if kind != "train":
            return
        text = (
            f"loss {values['loss']:.4f}  lr {values['lr']:.2e}  "
            f"grad_norm {values['grad_norm']:.2f}  "
            f"{values['tokens_per_s']:,.0f} tokens/s"
        )
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
        elif (
            step in (1, self.total_steps) or time.monotonic() - self.last_line > LINE_EVERY_SECONDS
        ):
            self._line(f"step {step:>6}/{self.total_steps}  {text}")
            self.last_line = time.monotonic()

    def _line(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def close(self, exit_code: int) -> None:
        if self.bar is not None:
            self.bar.close()


def quieten_libraries(is_first: bool) -> None:
    """Show the libraries' progress bars only on rank 0 and only on a terminal."""
    if not is_first or not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    # peft imports it for adapters; on CPU it names a package for inference that it lacks
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # "all_gather_into_tensor is deprecated": DeepSpeed's calls, on every rank, in every run
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
