"""Reports steps in which the guard found a problem, with their rows."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.run_folder import checkpoints_folder, list_complete
from zerotrain.checkpoint.state import read_state
from zerotrain.data.loader import StepBatch
from zerotrain.data.tokenize import TokenizedRows
from zerotrain.model.guard import Guard, Problem
from zerotrain.runtime.errors import describe
from zerotrain.runtime.files import replace_text
from zerotrain.tracking.metrics import Metrics


def report_problem(
    guard: Guard, batch: StepBatch, data: TokenizedRows, metrics: Metrics, file: Path | None
) -> str:
    """Report what the guard found in the last step.

    Args:
        data: the training examples.
        file: for the rows of skipped steps, on rank 0; None: not to be written.

    Returns:
        What is wrong, in one line.
    """
    step, problem = batch.global_step + 1, guard.problem
    text = problem.reason
    if problem.is_skipped:
        text += f"; the update is skipped ({guard.state.skipped:,} so far)"
        if file is not None:
            _append(file, {"step": step, "reason": text, "rows": _rows(problem, batch, data)})
            text += f", rows in {file}"
    name = "loss_spike" if problem.is_spike else "skipped_step"
    metrics.log("event", {"step": step, "name": name, "text": text})
    return text


def _rows(problem: Problem, batch: StepBatch, data: TokenizedRows) -> list[dict[str, Any]]:
    """The step's rows; those of micro-batches whose own loss was not finite are suspects."""
    rows = []
    for micro_step, of_ranks in enumerate(batch.plan.micro_batches):
        for rank, examples in enumerate(of_ranks):
            is_suspect = micro_step in problem.micro_batches[rank]
            for example in examples.tolist():
                place = {"example": example, "row": data.place_of(example), "rank": rank}
                rows.append({**place, "micro_step": micro_step, "suspect": is_suspect})
    return rows


def _append(file: Path, record: dict[str, Any]) -> None:
    """Append a record, in place of those that a run resumed from an earlier step is repeating."""
    kept = []
    with suppress(FileNotFoundError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                if json.loads(line)["step"] < record["step"]:
                    kept.append(line)
    try:
        replace_text(file, "\n".join([*kept, json.dumps(record), ""]))
    except OSError as error:
        print(f"WARNING: cannot write {file}: {describe(error)}", flush=True)


def last_good_checkpoint(output_dir: str) -> str:
    """The newest checkpoint that was not saved in a row of skipped steps."""
    for checkpoint in reversed(list_complete(checkpoints_folder(output_dir))):
        with suppress(OSError, ValueError):
            if read_state(checkpoint).progress.guard.skipped_in_a_row == 0:
                return str(checkpoint)
    return "none"
