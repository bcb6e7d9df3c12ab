"""TensorBoard. The shortest sink, and the example of how to add one: see tracking/metrics.py."""

import json
from pathlib import Path
from typing import Any

from zerotrain.tracking.names import numbers_of

FLUSH_SECONDS = 10  # a killed run loses what was not flushed, by default up to 120 s


class TensorBoardSink:
    """Event files, one for each start of the run. TensorBoard hides the steps that a resumed run
    repeats: they follow `purge_step` in an earlier file.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second, and is optional

        purge_step = first_step + 1 if first_step else 0  # at the start also what is of step 0
        self._writer = SummaryWriter(folder, purge_step=purge_step, flush_secs=FLUSH_SECONDS)

    def log(self, kind: str, values: dict[str, Any]) -> None:
        step = values["step"]
        for name, number in numbers_of(kind, values).items():
            self._writer.add_scalar(name, number, step)
        if kind == "event":
            self._writer.add_text("event", f"{values['name']}: {values['text']}", step)
        if kind == "generations":
            text = json.dumps(values["rows"], indent=2, ensure_ascii=False)
            self._writer.add_text(f"eval/generations/{values['set']}", f"```\n{text}\n```", step)

    def close(self, exit_code: int) -> None:
        self._writer.close()
