"""Weights & Biases: one run per job, which a resumed job continues, with every step once.

W&B cannot take back a step: a step that it has already is dropped or gets another number, and
rewinding a run is a preview of some of its servers, unknown to files written offline. So W&B gets
the records of metrics.jsonl only when no resumed run can repeat them: at once until the run's first
save, later up to the last complete checkpoint. A resumed run starts with what W&B lacks of the
steps before its checkpoint, such as records that a kill has kept it from writing.

The cost: curves end at the last complete checkpoint. Until the next one the current values are in
the run's summary, as latest/..., and all of them in metrics.jsonl. With tracking.wandb_live curves
are current, and a resumed run that repeats steps becomes another W&B run. Either way a run that
goes back behind steps that W&B has, to an older checkpoint for example, becomes another W&B run,
with all steps before from metrics.jsonl, because these steps and the new ones are of two models.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoint.run_folder import (
    COMPLETE,
    METRICS,
    RESOLVED_DS_CONFIG,
    WANDB,
    checkpoint_name,
    checkpoints_folder,
)
from checkpoint.state import Progress
from config.schema import Config
from runtime.errors import EXIT_PREEMPTED, UserError, describe
from runtime.preemption import STOP_SIGNALS
from tracking.names import AXES, GROUPS, grouped

INIT_SECONDS = 15  # the default waits 91 s for an unreachable server
FINISH_SECONDS = 10  # the default waits forever; DeepSpeed's launcher kills after 30 s
SUMMARY_SECONDS = 10.0  # between two updates of the current values


class WandbSink:
    """The run of rank 0. If its server cannot be reached within seconds, tracking is offline.

    A thread does the rest: with tables and artifacts W&B waits for its server.
    """

    def __init__(
        self, config: Config, folder: Path, start: Progress, cluster: dict[str, Any]
    ) -> None:
        self._folder, self._tracking = folder, config.tracking
        self._records = (folder / METRICS).open("rb")  # JsonlSink writes each one before this sink
        self._axes: dict[str, Any] = {}
        self._latest: dict[str, Any] = {}
        self._shown = time.monotonic()
        self._saved: int | None = None  # the step of a save that may not be complete yet
        self._limit = start.step  # the last step to send
        self._holds = start.step > 0 and not config.tracking.wandb_live
        self._is_finished = False
        self._error: Exception | None = None  # of the thread

        about = {
            **asdict(config),
            "resolved_ds_config": json.loads((folder / RESOLVED_DS_CONFIG).read_text()),
            "cluster": cluster,
            **git_state(),
        }
        self._open(config, start.wandb_id, about)
        sent = self._sent_step()
        if sent > start.step:
            about["forked_from"] = {"id": self.run.id, "step": start.step}
            print(
                f"W&B run {self.run.id} has steps up to {sent:,}, which are about to be repeated: "
                "continuing as another W&B run",
                flush=True,
            )
            self.run.finish()
            self._open(config, None, about)
            sent = -1
        self._first = sent + 1  # W&B's own step never goes back
        for axis in AXES:
            self.run.define_metric(axis)
        for group in {"train", "eval", "event", *GROUPS.values()}:
            self.run.define_metric(f"{group}/*", step_metric="step")
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tasks.put(lambda: self._send(after=sent))
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def _open(self, config: Config, run_id: str | None, about: dict[str, Any]) -> None:
        """Set self.run.

        Raises:
            UserError: W&B rejects the settings.
        """
        import wandb

        mode, settings = config.tracking.wandb, {}
        if config.tracking.wandb_shared:
            mode, settings = "shared", {"x_label": socket.gethostname()}
        options = {"id": run_id, "resume": "allow", "config": about}
        try:
            self.run = init(config, self._folder, mode, settings, **options)
        except wandb.errors.Error as error:
            print(
                f"W&B cannot be reached ({str(error).splitlines()[0]}); "
                f"tracking offline in {self._folder}/wandb",
                flush=True,
            )
            wandb.teardown()  # the failed attempt's service would refuse a second init
            try:
                self.run = init(config, self._folder, "offline", {}, **options)
            except wandb.errors.Error as refused:  # e.g. a project name with a slash
                raise UserError(f"tracking: W&B rejects the settings: {refused}") from refused

    @property
    def is_shared(self) -> bool:
        """Whether other nodes can write to the run."""
        return self.run.settings.mode == "shared"

    def _sent_step(self) -> int:
        """The last step that W&B has of this run, -1 if none: as its server says, otherwise as the
        files in the run folder say.
        """
        if self.run.settings.mode == "online":
            return self.run.starting_step - 1
        return last_step_on_disk(self.run)

    def log(self, kind: str, values: dict[str, Any]) -> None:
        """Raises what W&B has raised since the last call."""
        if self._error is not None:
            raise self._error
        self._tasks.put(lambda: self._follow(kind, values))

    def close(self, exit_code: int) -> None:
        if self._error is None:
            self._tasks.put(lambda: self._finish(exit_code))
            self._thread.join(FINISH_SECONDS + 1)
        if self._thread.is_alive():
            print(f"W&B has not answered in time; {self._folder / WANDB} has the run", flush=True)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        import wandb

        try:
            while not self._is_finished:
                self._tasks.get()()
        except Exception as error:  # e.g. W&B's process was killed
            self._error = error
            with suppress(Exception):  # otherwise a traceback when this process ends
                wandb.teardown()

    def _follow(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "save":
            self._saved = values["step"]
        if not self._holds:  # so far no resumed run can repeat a step, unless wandb_live accepts it
            self._limit = values["step"]
            self._holds = kind == "save" and not self._tracking.wandb_live
        self._send_what_is_saved()
        if kind == "train" and self._holds:
            numbers = {**grouped(kind, values), "step": values["step"]}
            self._latest = {f"latest/{name}": value for name, value in numbers.items()}
            if time.monotonic() - self._shown > SUMMARY_SECONDS:
                self._show_latest()

    def _finish(self, exit_code: int) -> None:
        self._send_what_is_saved()
        self._show_latest()
        if exit_code == EXIT_PREEMPTED:
            self.run.mark_preempting()  # shown as preempted, not as failed
        self.run.finish(exit_code=exit_code)
        self._is_finished = True

    def _send_what_is_saved(self) -> None:
        if self._saved is not None:
            checkpoint = checkpoints_folder(self._folder) / checkpoint_name(self._saved)
            if (checkpoint / COMPLETE).is_file():  # of an asynchronous save some steps later
                if self._tracking.wandb_artifacts:
                    about = {"step": self._saved}
                    self._attempt(lambda: log_folder(self.run, "checkpoint", checkpoint, about))
                self._limit = max(self._limit, self._saved)
                self._saved = None
        self._send()

    def _send(self, after: int = -1) -> None:
        """Log the next records of metrics.jsonl, of steps > `after`, up to the limit."""
        while line := self._records.readline():
            is_whole = line.endswith(b"\n")  # a full disk may have taken only the first bytes
            record = json.loads(line) if is_whole else {}
            if not is_whole or record["step"] > self._limit:
                self._records.seek(-len(line), os.SEEK_CUR)
                return
            if record["step"] > after:
                self._log_record(record)

    def _log_record(self, record: dict[str, Any]) -> None:
        kind, step = record.get("kind"), record["step"]
        self._axes |= {axis: record[axis] for axis in AXES if axis in record}
        time_of = {"_timestamp": record["time"]} if "time" in record else {}

        def log(row: dict[str, Any]) -> None:
            # in shared mode W&B numbers the rows itself
            step_of_row = None if self.is_shared else max(step, self._first)
            self.run.log({**row, **self._axes, **time_of}, step=step_of_row)

        if kind == "generations":
            self._attempt(lambda: log({f"eval/generations/{record['set']}": table(record["rows"])}))
        elif row := grouped(kind, record):
            log(row)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do what may fail because of the server, and is not worth losing the curves."""
        try:
            work()
        except Exception as error:
            print(f"W&B: {describe(error)}", flush=True)

    def _show_latest(self) -> None:
        if self._latest:
            self.run.summary.update(self._latest)
        self._shown = time.monotonic()


class WandbNodeSink:
    """The system metrics of another node than rank 0's, in the same W&B run. Nothing else."""

    def __init__(self, config: Config, folder: Path, run_id: str) -> None:
        """A node that does not reach the server trains without it."""
        import wandb

        host = socket.gethostname()
        node_folder = folder / WANDB / host  # W&B names its folders by the second
        node_folder.mkdir(parents=True, exist_ok=True)
        self.run = None
        try:
            settings = {"x_label": host, "x_primary": False, "x_update_finish_state": False}
            self.run = init(config, node_folder, "shared", settings, id=run_id)
        except wandb.errors.Error as error:
            print(f"{host}: no system metrics in W&B: {describe(error)}", flush=True)

    def log(self, kind: str, values: dict[str, Any]) -> None:
        pass

    def close(self, exit_code: int) -> None:
        if self.run is not None:
            self.run.finish(exit_code=exit_code)


def init(
    config: Config, folder: Path, mode: str, settings: dict[str, Any], /, **options: Any
) -> Any:
    """wandb.init with what all runs of ours have in common, within `folder`.

    Args:
        settings: further fields of wandb.Settings; those that begin with x_ are not public, and are
            left out where another version lacks them.
        options: further arguments.

    Raises:
        wandb.errors.Error: no answer in time, or something is rejected.
    """
    # Reports to W&B about its own errors: a server that does not answer delays the exit by 17 s.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    # tables are put there until they are uploaded; the default is in the home directory
    os.environ.setdefault("WANDB_DATA_DIR", str((folder / WANDB).resolve()))
    import wandb  # takes a second, and tracking may be disabled

    settings = {
        "init_timeout": INIT_SECONDS,
        "login_timeout": INIT_SECONDS,  # on a terminal it asks for a key
        "finish_timeout": FINISH_SECONDS,
        # seconds; a killed run loses what was not flushed, by default up to 15 s
        "x_transaction_log_flush_interval": 2,
        **settings,
    }
    known = {name: v for name, v in settings.items() if name in wandb.Settings.model_fields}
    tracking = config.tracking
    with blocked(STOP_SIGNALS):
        return wandb.init(
            project=tracking.project,
            entity=tracking.entity,
            name=tracking.run_name or Path(config.output_dir).name,
            tags=tracking.tags,
            dir=str(folder),
            mode=mode,
            settings=wandb.Settings(**known),
            **options,
        )


def table(rows: list[dict[str, Any]]) -> Any:
    """A wandb.Table with a column for each key."""
    import wandb

    columns = list(dict.fromkeys(key for row in rows for key in row))
    return wandb.Table(columns, [[row.get(key) for key in columns] for row in rows])


def log_folder(run: Any, kind: str, folder: Path, metadata: dict[str, Any]) -> None:
    """Record a folder as an artifact that refers to its path: nothing is read or uploaded.

    Args:
        kind: type of the artifact, checkpoint or model.
        metadata: with `step`.
    """
    import wandb

    artifact = wandb.Artifact(f"{kind}-{run.id}", kind, metadata=metadata)
    artifact.add_reference(folder.resolve().as_uri(), name=folder.name, checksum=False)
    run.log_artifact(artifact, aliases=[f"step_{metadata['step']}"])


def log_model(config: Config, folder: Path, model: Path, progress: Progress) -> None:
    """Record an exported model as an artifact, in a W&B run of its own: a run has one writer, and
    the training may continue.

    Args:
        folder: the run folder.
        progress: of the checkpoint that was exported.
    """
    import wandb

    about = {"step": progress.step, "trained_by": progress.wandb_id}
    group = {"group": progress.wandb_id, "job_type": "export"}
    try:
        run = init(config, folder, config.tracking.wandb, {}, **group)
        log_folder(run, "model", model, about)
        run.finish()
    except wandb.errors.Error as error:
        print(f"the model is not recorded in W&B: {describe(error)}", flush=True)


def last_step_on_disk(run: Any) -> int:
    """The last step in the files of earlier starts of this run, in the same folder; -1 if none."""
    here = Path(run.dir).parent
    files = here.parent.glob(f"*run-*-{run.id}*/run-{run.id}.wandb")
    newest_first = sorted(files, key=lambda f: f.parent.name.removeprefix("offline-"), reverse=True)
    for file in newest_first:
        if file.parent == here:
            continue
        inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        found = subprocess.run(inspect, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for line in found.stdout.splitlines() if '"history"' in line]
        # not W&B's own _step, which rows of the mode shared lack
        steps = [row["history"]["item"]["step"] for row in rows if row["type"] == "history"]
        if steps:
            return max(steps)
    return -1


@contextmanager
def blocked(signals: Iterable[int]) -> Iterator[None]:
    """Processes that are started inside never receive these signals.

    W&B's process is a child of the rank. DeepSpeed's launcher and SLURM send SIGTERM to it as well,
    and once it has exited the rank would fail at its next measurement instead of saving.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def git_state() -> dict[str, Any]:
    """Commit of the running code and whether the working tree differs from it; empty outside a git
    checkout.
    """
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {
            "git_commit": git("rev-parse", "HEAD"),
            "git_dirty": bool(git("status", "--porcelain")),
        }
    except (OSError, subprocess.CalledProcessError):
        return {}
