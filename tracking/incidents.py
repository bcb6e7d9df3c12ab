"""Reports steps in which the guard found a problem, with their rows, and stops runs that cannot
continue.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint.run_folder import SKIPPED_STEPS, list_complete
from checkpoint.save import Saver
from checkpoint.state import read_state
from data.loader import StepBatch
from data.tokenize import TokenizedRows
from model.guard import Guard, Problem
from runtime.agreement import run_on_first_rank
from runtime.errors import RunFailed, describe
from runtime.files import replace_text
from tracking.metrics import Metrics


def report_problem(
    guard: Guard, batch: StepBatch, data: TokenizedRows, metrics: Metrics, saver: Saver
) -> None:
    """Report what the guard found in the last step, if anything; called by all ranks.

    Args:
        data: the training examples.
        saver: of the run, for its folder and its last good checkpoint.

    Raises:
        RunFailed: the run has to stop.
    """
    if (problem := guard.problem) is None:
        return
    step, text = batch.global_step + 1, problem.reason
    if problem.is_skipped:
        file = saver.nodes.lock.folder / SKIPPED_STEPS
        if saver.ranks.is_first and not saver.nodes.lock.is_lost():
            _write(file, step, _record(problem, batch, data))
        text += f"; the update is skipped ({guard.state.skipped:,} so far), rows in {file}"
    name = "loss_spike" if problem.is_spike else "skipped_step"
    metrics.log("event", {"step": step, "name": name, "text": text})
    if reason := guard.stop_reason():
        saver.close()
        good = run_on_first_rank(saver.ranks, lambda: _last_good(saver.folder))
        raise RunFailed(
            f"step {step:,}: {text}; {reason}. The last good checkpoint is {good}. Check the rows, "
            "lower train.learning_rate, or remove the rows from the data"
        )


def _record(problem: Problem, batch: StepBatch, data: TokenizedRows) -> dict[str, Any]:
    """The step's rows; if the loss of some micro-batches was not finite, those are the suspects."""
    rows = []
    for micro_step, of_ranks in enumerate(batch.plan.micro_batches):
        for rank, examples in enumerate(of_ranks):
            is_suspect = micro_step in problem.micro_batches[rank]
            for example in examples.tolist():
                place = {"example": example, "row": data.place_of(example), "rank": rank}
                rows.append({**place, "micro_step": micro_step, "suspect": is_suspect})
    return {"step": batch.global_step + 1, "reason": problem.reason, "rows": rows}


def _write(file: Path, step: int, record: dict[str, Any]) -> None:
    """Append the record, in place of those that a run resumed from an earlier step is repeating."""
    kept = []
    with suppress(FileNotFoundError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                if json.loads(line)["step"] < step:
                    kept.append(line)
    try:
        replace_text(file, "\n".join([*kept, json.dumps(record), ""]))
    except OSError as error:
        print(f"WARNING: cannot write {file}: {describe(error)}", flush=True)


def _last_good(folder: Path) -> str:
    """The newest checkpoint that was not saved in a row of skipped steps."""
    for checkpoint in reversed(list_complete(folder)):
        with suppress(OSError, ValueError):
            if read_state(checkpoint).progress.guard.skipped_in_a_row == 0:
                return str(checkpoint)
    return "none"
