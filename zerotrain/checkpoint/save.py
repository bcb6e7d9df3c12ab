"""Save checkpoints and remove old ones. A checkpoint is complete or it does not exist.

    checkpoints/step_00001000/
        shards/rank_00000.pt  one per rank: its weights, optimizer and RNG states (see shards.py)
        model/                config.json and tokenizer, which export needs besides the weights
        trainer_state.json    the identity of the run, and its progress
        manifest.json         size and checksum of every file above
        COMPLETE              written last

A save writes into .step_00001000.ID.tmp, the draft, and renames it when it is complete. Every rank
writes its own file and computes its checksum. With checkpoint.async_save it does so from a copy,
while the loop continues.

Nodes without a shared disk need no setting. On each disk, the rank that has created the draft owns
it, and writes everything but the other ranks' files. Every manifest lists the files of all ranks.
So each node has the files of its own ranks, and together they are the checkpoint.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed import DeepSpeedEngine
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedTokenizerBase

from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.manifest import measure
from zerotrain.checkpoint.run_folder import (
    COMPLETE,
    MANIFEST,
    SHARDS,
    TRAINER_STATE,
    checkpoint_name,
    checkpoints_folder,
    list_complete,
    list_temporary,
    remove,
    shard_name,
)
from zerotrain.checkpoint.shards import collect
from zerotrain.checkpoint.state import Progress, RunIdentity, TrainerState
from zerotrain.config.schema import CheckpointConfig
from zerotrain.model.hub import Base
from zerotrain.runtime.errors import RunFailed, UserError, describe
from zerotrain.runtime.files import sync_folder, sync_tree, temporary_name
from zerotrain.runtime.progress import print_line
from zerotrain.runtime.ranks import Ranks

T = TypeVar("T")


class DraftRemoved(RunFailed):
    """Somebody has removed the draft of a save, as with the whole output folder."""


def write_shard(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write a rank's file and return its FileEntry, as JSON."""
    # torch's checksum takes 4 times as long as writing. The manifest has a faster one.
    torch.serialization.set_crc32_options(False)
    # A Python file's error says what is wrong with the disk; torch's own error does not.
    with path.open("wb") as file:
        torch.save(content, file)
    sync_folder(path)  # no other host can do it for this one
    return measure(path)


@dataclass
class Saver:
    """Writes the checkpoints of one run into its output folder, and removes old ones.

    All ranks call each method together, except is_due(). Once the folder's lock is lost, nothing is
    written or removed.
    """

    engine: DeepSpeedEngine
    base: Base | None
    """The files that have the frozen weights; None: the checkpoints have them."""
    tokenizer: PreTrainedTokenizerBase
    identity: RunIdentity
    settings: CheckpointConfig
    ranks: Ranks
    lock: RunLock
    """The lock of the output folder, which rank 0 holds."""
    started_from: Path | None
    """The checkpoint that the run starts from, which is never removed."""
    log: Callable[[str, dict[str, Any]], None]
    """Called with "save" and its metrics when a checkpoint is complete."""
    _last_began: float = field(default_factory=time.monotonic)
    _blocked_seconds: float = 0.0
    _threads: ThreadPoolExecutor = field(default_factory=ThreadPoolExecutor)
    _pending: Future[dict[str, Any]] | None = None
    """The FileEntry of this rank's file, while a save is unfinished. The fields below belong to the
    last save.
    """
    _progress: Progress = field(init=False)
    _target: Path = field(init=False)
    """The checkpoint, once it is complete."""
    _draft: Path = field(init=False)
    _owns_disk: bool = False
    """Whether this rank has created the draft on its disk."""

    def __post_init__(self) -> None:
        if self.ranks.local_rank == 0:  # one rank of each disk
            for path in list_temporary(self.folder):
                remove(path)

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return checkpoints_folder(self.lock.folder)

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step` finished steps. It may depend on this rank's clock,
        so only rank 0's answer counts.
        """
        settings = self.settings
        is_time = 0 < settings.every_minutes <= (time.monotonic() - self._last_began) / 60
        return is_time or (settings.every_steps > 0 and step % settings.every_steps == 0)

    def save(self, progress: Progress) -> None:
        """Finish the previous save, then write a checkpoint, or with async_save start to write it.

        Raises:
            RunFailed: it cannot be written; its files are removed, and older ones are unchanged.
        """
        self.finish()
        self._last_began = time.monotonic()
        self._progress = progress
        self._target = self.folder / checkpoint_name(progress.step)
        # one name for all ranks, because the nodes of a shared disk write into one folder
        self._draft = Path(self.ranks.gather_json(str(temporary_name(self._target)))[0])
        self._owns_disk = False
        is_first = self.ranks.is_first
        # Rank 0 creates the draft. Then one rank of each node that does not see it creates one.
        for is_turn in (is_first, not is_first):
            self._run(lambda turn=is_turn: turn and self._create())
        # An asynchronous save needs copies: the next step changes the tensors in place.
        content = vars(collect(self.engine, self._owns_disk, self.base))
        if self.settings.async_save:
            content = tree_map_only(torch.Tensor, lambda t: t.to("cpu", copy=True), content)
        path = self._draft / shard_name(self.ranks.rank)
        self._pending = self._threads.submit(write_shard, path, content)
        self._blocked_seconds = time.monotonic() - self._last_began
        if not self.settings.async_save and self.finish():
            self.save(progress)

    @property
    def is_written(self) -> bool:
        """Whether this rank's file of an unfinished save is on disk; finish() will not wait."""
        return self._pending is not None and self._pending.done()

    def finish(self) -> bool:
        """Wait for the unfinished save, if any, and complete it. Return whether its draft was
        removed meanwhile, so that the run has to save again.

        Raises:
            RunFailed: as in save().
        """
        if self._pending is None:
            return False
        began = time.monotonic()
        entry = self._pending
        self._pending = None
        wait([entry])  # also if the lock is lost, because _run then removes the draft
        try:
            entries = self.ranks.gather_json(self._run(entry.result))
            self._run(lambda: self._owns_disk and self._seal(entries))
            # The checkpoint is usable once the owners of all disks have renamed their drafts.
            self._run(lambda: self._owns_disk and self._publish())
        except DraftRemoved as error:
            print_line(f"WARNING: {error}; the run saves again")
            return True
        seconds = self._blocked_seconds + time.monotonic() - began
        self.log("save", {"step": self._progress.step, "save_seconds": seconds})
        return False

    def _run(self, work: Callable[[], T]) -> T:
        """Run a phase of a save on all ranks and return its result. If it fails on one rank, remove
        the draft and raise RunFailed on all.
        """

        def with_lock() -> T:
            try:
                self.lock.check()
                return work()
            except UserError:
                raise
            except Exception as error:
                # Where the file's write() has failed, torch raises an error of its own.
                cause = error.__context__ if isinstance(error.__context__, OSError) else error
                raise UserError(describe(cause)) from error

        try:
            return self.ranks.run_on_all(with_lock)
        except UserError as error:
            is_removed = self._owns_disk and not any(map(Path.exists, (self._draft, self._target)))
            kind = DraftRemoved if any(self.ranks.gather_json(is_removed)) else RunFailed
            if self._owns_disk:
                remove(self._draft)
            older = "; older checkpoints are unchanged" if self.folder.is_dir() else ""
            raise kind(f"{self._target}: could not be saved: {error}{older}") from error

    def _create(self) -> None:
        draft = self._draft
        if self.ranks.is_first:
            # without parents, so that an output_dir that is out of reach is not created again
            self.folder.mkdir(exist_ok=True)
        try:
            (draft / SHARDS).mkdir(parents=True)  # atomic: one rank per disk succeeds
        except FileExistsError:
            return
        self._owns_disk = True
        if not (self.ranks.is_first or list_complete(self.folder)):
            print(
                f"WARNING: {socket.gethostname()} does not share {self.folder} with rank 0: it "
                "keeps the files of its own ranks, and other nodes need them to resume elsewhere"
            )
        model = self.engine.module
        model.config.save_pretrained(draft / "model")
        if model.can_generate():
            model.generation_config.save_pretrained(draft / "model")
        self.tokenizer.save_pretrained(draft / "model")
        state = asdict(TrainerState(self.identity, self._progress))
        # What is off leaves nothing behind.
        state["progress"] = {k: v for k, v in state["progress"].items() if v != ()}
        (draft / TRAINER_STATE).write_text(json.dumps(state, indent=2))

    def _seal(self, entries: list[dict[str, Any]]) -> None:
        """Write the manifest and COMPLETE into the draft."""
        draft = self._draft
        # Files on other nodes are listed too, so that a reader knows which are missing.
        files = {shard_name(rank): entry for rank, entry in enumerate(entries)}
        for path in filter(Path.is_file, (draft / TRAINER_STATE, *draft.glob("model/**/*"))):
            files[str(path.relative_to(draft))] = measure(path)
        (draft / MANIFEST).write_text(json.dumps({"save_id": draft.name, "files": files}, indent=1))
        (draft / COMPLETE).write_text("complete\n")
        sync_tree(draft)  # before the rename, which makes it a checkpoint

    def _publish(self) -> None:
        """Rename the draft to a checkpoint, and remove checkpoints that are no longer kept."""
        # The run may have reached this step before, and resumed from an earlier step.
        self._hide(self._target)
        os.replace(self._draft, self._target)
        sync_folder(self.folder)  # before an old checkpoint goes
        settings = self.settings
        best = self._progress.best
        complete = list_complete(self.folder)
        kept = {*complete[-settings.keep_last :], self.started_from, self._target}
        if settings.keep_best and best is not None:
            kept.add(self.folder / checkpoint_name(best.step))
        for path in sorted({*complete} - kept):
            try:
                self._hide(path)
            except OSError as error:  # not fatal, because the new checkpoint is complete
                print(f"WARNING: {path} cannot be removed: {describe(error)}")
        # Listed now, while the lock is held. Removed in threads, because 5 GB take a second.
        self._threads.map(remove, list_temporary(self.folder))

    def _hide(self, checkpoint: Path) -> None:
        """Rename a checkpoint before its removal: an interrupted removal would leave COMPLETE, and
        missing files. A missing checkpoint is fine: a dead run may have renamed it.

        Raises:
            EnvironmentFailure: the lock of the folder is lost.
            OSError: it cannot be renamed.
        """
        self.lock.check()
        with suppress(FileNotFoundError):
            checkpoint.rename(temporary_name(checkpoint))
