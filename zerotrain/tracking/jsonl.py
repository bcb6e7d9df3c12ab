"""metrics.jsonl in the run folder."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.lock import RunLock
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.files import replace_text


class JsonlSink:
    """One JSON object per line, with `kind` and `time`, in Unix seconds. A resumed run removes the
    steps after its checkpoint, which it is about to repeat. Every start and resume is a record of
    the kind `start`, with the cluster that the run is on from there on.

    A full disk does not end training: lines that cannot be written are kept in memory and written
    with the next ones. Once `lock` is lost, nothing is written.

    Raises:
        UserError: `path` cannot be written at the start.
    """

    def __init__(
        self, path: Path, first_step: int, lock: RunLock, cluster: Mapping[str, Any]
    ) -> None:
        self._lock, self._is_failing, self._unwritten = lock, False, b""
        kept = []
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            try:
                if 0 < first_step >= json.loads(line)["step"]:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError, RecursionError):
                pass  # an incomplete line of a run that was killed
        try:
            replace_text(path, "".join(kept))
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"output_dir: cannot write {path}: {describe(error)}") from error
        self.log("start", {"step": first_step, **cluster})

    def log(self, kind: str, values: dict[str, Any]) -> None:
        record = {"kind": kind, "time": time.time(), **values}
        self._unwritten += json.dumps(record).encode() + b"\n"
        if self._lock.is_lost():
            return
        try:
            while self._unwritten:  # a write to an almost full disk takes only the first bytes
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                print(
                    f"WARNING: cannot write {self._file.name}: {describe(error)}; training "
                    "continues, and the lines follow when there is room",
                    flush=True,
                )
            self._is_failing = True

    def close(self, exit_code: int) -> None:
        self._file.close()
