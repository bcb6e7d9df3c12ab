"""What a run has recorded, as tools read it."""

from pathlib import Path
from typing import Any

from zerotrain.tracking.metrics import metrics_lines, parse_record


def read_metrics(run_folder: str | Path, kind: str = "train") -> list[dict[str, Any]]:
    """The records of one kind in a run's metrics.jsonl, oldest first. Each has `kind` and `step`;
    other values may be NaN or infinite. Lines that are no records are left out.

    Raises:
        UserError: the folder has no metrics.jsonl that can be read.
    """
    records = filter(None, map(parse_record, metrics_lines(run_folder)))
    return [record for record in records if record["kind"] == kind]
