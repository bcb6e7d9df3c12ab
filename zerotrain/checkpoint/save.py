"""Save checkpoints and remove old ones. A checkpoint is complete or it does not exist.

    checkpoints/step_00001000/
        shards/rank_00000.pt  one per rank: its weights, optimizer and RNG states (see shards.py)
        model/                config.json, tokenizer: what export needs besides the weights
        trainer_state.json    what the run is and how far it has progressed
        manifest.json         size and checksum of every file above
        COMPLETE              written last

It is written as .step_00001000.ID.tmp and renamed when complete. Every rank writes its own file and
computes its checksum: at once, or with checkpoint.async_save from a copy while the loop continues.

Nodes without a shared disk need no setting. On each disk, the rank that has made the folder owns
it: it writes everything but the other ranks' files, whose entries are in every manifest. So each
node has the files of its own ranks, and together they are the checkpoint.
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
from zerotrain.runtime.ranks import Ranks

T = TypeVar("T")


def write_shard(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write a rank's file and return its FileEntry, as JSON."""
    # 4 x as slow as writing; the manifest has a faster checksum of the whole file
    torch.serialization.set_crc32_options(False)
    with path.open("wb") as file:  # whose errors, unlike torch's, say what is wrong with the disk
        torch.save(content, file)
    sync_folder(path)  # other hosts cannot sync what this one has not written yet
    return measure(path)


@dataclass
class Saver:
    """Writes checkpoints of one run into its output folder, and removes old ones.

    Every method but is_due() is called by all ranks together. Nothing is written or removed once
    the folder's lock is lost.
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
    """Called with "save" and its values when a checkpoint is complete."""
    _last_began: float = field(default_factory=time.monotonic)
    _blocked_seconds: float = 0.0
    _threads: ThreadPoolExecutor = field(default_factory=ThreadPoolExecutor)
    _pending: Future[dict[str, Any]] | None = None
    """The FileEntry of this rank's file, of a save that has begun; the fields below are its own."""
    _progress: Progress = field(init=False)
    _target: Path = field(init=False)
    """The checkpoint, once it is complete."""
    _draft: Path = field(init=False)
    """The folder that becomes it."""
    _owns_disk: bool = False
    """Whether this rank has created that folder on its disk."""

    def __post_init__(self) -> None:
        if self.ranks.local_rank == 0:  # one rank of each disk
            for path in list_temporary(self.folder):
                remove(path)

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return checkpoints_folder(self.lock.folder)

    def is_due(self, step: int) -> bool:
        """Whether to save after `step` finished steps. It may depend on the clock of this rank, so
        only the answer of rank 0 is used.
        """
        settings = self.settings
        is_time = 0 < settings.every_minutes <= (time.monotonic() - self._last_began) / 60
        return is_time or (settings.every_steps > 0 and step % settings.every_steps == 0)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, or with async_save start writing it, after finishing the previous
        save.

        Raises:
            RunFailed: it cannot be written; its files are removed, and older ones are unchanged.
        """
        self.finish()
        self._last_began = time.monotonic()
        self._progress = progress
        self._target = self.folder / checkpoint_name(progress.step)
        # rank 0's name for all: the nodes of a shared disk write into one folder
        self._draft = Path(self.ranks.gather_json(str(temporary_name(self._target)))[0])
        self._owns_disk = False
        is_first = self.ranks.is_first
        # rank 0 creates the folder, then one rank of every other node that does not see it
        for is_turn in (is_first, not is_first):
            self._run(lambda turn=is_turn: turn and self._create())
        # In use, or with async_save copies: the next step changes the weights in place.
        content = vars(collect(self.engine, self._owns_disk, self.base))
        if self.settings.async_save:
            content = tree_map_only(torch.Tensor, lambda t: t.to("cpu", copy=True), content)
        path = self._draft / shard_name(self.ranks.rank)
        self._pending = self._threads.submit(write_shard, path, content)
        self._blocked_seconds = time.monotonic() - self._last_began
        if not self.settings.async_save:
            self.finish()

    @property
    def is_written(self) -> bool:
        """Whether this rank's file of a pending save is on disk, so that finish() would not wait
        for it.
        """
        return self._pending is not None and self._pending.done()

    def finish(self) -> None:
        """Wait for the pending save, if any, and make it complete.

        Raises:
            RunFailed: as save().
        """
        if self._pending is None:
            return
        began = time.monotonic()
        entry = self._pending
        self._pending = None
        wait([entry])  # also if the lock is lost: then the draft is removed
        # gathered only if all ranks have written: _run raises on every rank otherwise
        entries = self.ranks.gather_json(self._run(entry.result))
        self._run(lambda: self._owns_disk and self._seal(entries))
        # the owners of all disks have sealed theirs; it is usable once all have renamed it
        self._run(lambda: self._owns_disk and self._publish())
        seconds = self._blocked_seconds + time.monotonic() - began
        self.log("save", {"step": self._progress.step, "save_seconds": seconds})

    # The steps of a save

    def _run(self, work: Callable[[], T]) -> T:
        """Run `work` on all ranks and return its result; if it fails on one of them, remove the
        draft and raise RunFailed on all.
        """

        def with_lock() -> T:
            try:
                self.lock.check()  # right before each step: the lock may be lost during any
                return work()
            except UserError:
                raise
            except Exception as error:
                # torch raises errors of its own where the file's write() has failed
                cause = error.__context__ if isinstance(error.__context__, OSError) else error
                raise UserError(describe(cause)) from error

        try:
            return self.ranks.run_on_all(with_lock)
        except UserError as error:
            if self._owns_disk:
                remove(self._draft)
            raise RunFailed(
                f"{self._target.name} could not be saved in {self.folder}: {error}; older "
                "checkpoints are unchanged"
            ) from error

    def _create(self) -> None:
        draft = self._draft
        if self.ranks.is_first:  # the other ranks create it on a disk of their own
            # without its parents: an output_dir that is still away is not made a second time
            self.folder.mkdir(exist_ok=True)
        try:
            (draft / SHARDS).mkdir(parents=True)  # atomic: one rank of a disk succeeds
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
        (draft / TRAINER_STATE).write_text(json.dumps(state, indent=2))

    def _seal(self, entries: list[dict[str, Any]]) -> None:
        """Write the manifest and COMPLETE into the draft."""
        draft = self._draft
        # also of ranks whose files are on other nodes: so a reader knows which are missing
        files = {shard_name(rank): entry for rank, entry in enumerate(entries)}
        for path in filter(Path.is_file, (draft / TRAINER_STATE, *draft.glob("model/**/*"))):
            files[str(path.relative_to(draft))] = measure(path)
        (draft / MANIFEST).write_text(json.dumps({"save_id": draft.name, "files": files}, indent=1))
        (draft / COMPLETE).write_text("complete\n")
        sync_tree(draft)  # before the rename, which alone makes it a checkpoint

    def _publish(self) -> None:
        """Rename the draft to a checkpoint, and remove those that are no longer kept."""
        # one of the same step was written before the run was resumed from an earlier step
        self._hide(self._target)
        os.replace(self._draft, self._target)
        sync_folder(self.folder)  # the new one is on disk before an old one goes
        settings = self.settings
        best = self._progress.best
        complete = list_complete(self.folder)
        kept = {*complete[-settings.keep_last :], self.started_from, self._target}
        if settings.keep_best and best is not None:
            kept.add(self.folder / checkpoint_name(best.step))
        for path in sorted({*complete} - kept):
            try:
                self._hide(path)
            except OSError as error:  # the new one is complete
                print(f"WARNING: {path} cannot be removed: {describe(error)}")
        # listed now, while the lock is held; removed in threads, since 5 GB take a second
        self._threads.map(remove, list_temporary(self.folder))

    def _hide(self, checkpoint: Path) -> None:
        """Rename a checkpoint before it is removed, so that an interrupted removal does not leave
        one with COMPLETE and missing files. It may not be there, or no longer: a run that is dead
        by now may have renamed it.

        Raises:
            EnvironmentFailure: the lock of the folder is lost.
            OSError: it cannot be renamed.
        """
        self.lock.check()
        with suppress(FileNotFoundError):
            checkpoint.rename(temporary_name(checkpoint))
