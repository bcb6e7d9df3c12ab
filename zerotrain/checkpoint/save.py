"""Save checkpoints and remove old ones. A checkpoint is complete or it does not exist.

    checkpoints/step_00001000/
        shards/rank_00000.pt  one per rank: its weights, optimizer and RNG states (see shards.py)
        model/                config.json, tokenizer: what export needs besides the weights
        trainer_state.json    what the run is and how far it has progressed
        manifest.json         size and checksum of every file above; versions, world size
        COMPLETE              written last

It is written as step_00001000.ID.tmp and renamed when complete. Every rank writes its own file and
computes its checksum: at once, or with checkpoint.async_save from a copy while the loop continues.

With checkpoint.node_local each node has such a folder on its own disk, with the shards of its own
ranks only. These parts of one save have the same save_id in their manifests, and are usable only
together.
"""

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerotrain.checkpoint.after_save import ENDING_SECONDS, AfterSave
from zerotrain.checkpoint.find import inspect_part
from zerotrain.checkpoint.manifest import measure
from zerotrain.checkpoint.nodes import Nodes
from zerotrain.checkpoint.run_folder import (
    COMPLETE,
    MANIFEST,
    SHARDS,
    checkpoint_name,
    checkpoints_folder,
    draft_path,
    hide_checkpoint,
    list_complete,
    list_drafts,
    list_hidden,
    remove,
)
from zerotrain.checkpoint.shards import Shard, collect, shard_name
from zerotrain.checkpoint.start import Resume, Start
from zerotrain.checkpoint.state import TrainerState, lowest_first, read_state, write_state
from zerotrain.config.schema import CheckpointConfig
from zerotrain.model.load import LoadedModel
from zerotrain.runtime.agreement import gather_json
from zerotrain.runtime.errors import RunFailed, UserError, describe
from zerotrain.runtime.files import sync_folder, sync_tree

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from transformers import PreTrainedTokenizerBase

WAIT_SECONDS = 0.5  # between two looks at whether checkpoint.after_save has ended
PACKAGES = ("torch", "deepspeed", "transformers")


class SaveError(RunFailed):
    """A checkpoint could not be written. It is removed, and older ones are unchanged."""


class Saver:
    """Writes checkpoints of one run into its output folder on every node, and removes old ones.

    Every method but is_due() and stop() is called by all ranks together. Nothing is written or
    removed once the folder's lock is lost.
    """

    def __init__(
        self,
        engine: "DeepSpeedEngine",
        loaded: LoadedModel,
        tokenizer: "PreTrainedTokenizerBase",
        nodes: Nodes,
        config: CheckpointConfig,
        start: Start,
        log: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """
        Args:
            start: of the run; the checkpoint that it resumes from is never removed.
            log: is called with "save" and its values when a checkpoint is complete.
        """
        self.engine, self.loaded, self.tokenizer = engine, loaded, tokenizer
        self.nodes, self.ranks = nodes, nodes.ranks
        self.folder = checkpoints_folder(nodes.lock.folder)
        self.config, self.log = config, log
        self.last_step = start.progress.step
        """The step from which the run would continue if it were started again."""
        self._resumed = {start.checkpoint.name} if isinstance(start, Resume) else set()
        self._eval_losses: dict[str, float | None] | None = None  # of the usable checkpoints
        self._after_save = AfterSave(config.after_save, nodes) if config.after_save else None
        self._buffers: list[torch.Tensor] = []
        self._last_began = time.monotonic()
        self._blocked_seconds = 0.0
        self._pending: tuple[TrainerState, Path, str] | None = None  # with its draft and save_id
        self._writer: threading.Thread | None = None
        self._removal: threading.Thread | None = None
        self._written: dict[str, Any] = {}
        self._error: str | None = None

    def is_due(self, step: int) -> bool:
        """Whether to save after `step` finished steps. It may depend on the clock of this rank, so
        only the answer of rank 0 is used.
        """
        if self.config.every_steps and step % self.config.every_steps == 0:
            return True
        minutes = (time.monotonic() - self._last_began) / 60
        return 0 < self.config.every_minutes <= minutes

    def save(self, state: TrainerState) -> None:
        """Write a checkpoint, or with async_save start writing it, after finishing the previous
        save.

        Raises:
            SaveError: it cannot be written and checkpoint.on_failed_save is stop.
        """
        self.finish()
        self._last_began = time.monotonic()
        shard = collect(self.engine, self.nodes.is_first, self.loaded.base)
        needed = sum(tensor.nbytes for flat in shard.flats for tensor in flat.values())
        gathered = gather_json(self.ranks, [needed, uuid.uuid4().hex])
        save_id = gathered[0][1]
        draft = draft_path(self.folder, state.progress.step, save_id)
        self._pending = state, draft, save_id
        needed_here = sum(gathered[rank][0] for rank in self.nodes.members[self.nodes.here])
        try:
            self._on_each_node(lambda: self._prepare(draft, state, needed_here))
        except UserError as error:
            self._error = str(error)
        else:
            if self.config.async_save:
                shard = self._copy(shard)
            self._writer = threading.Thread(
                target=self._write, args=(draft, shard), name="checkpoint-writer"
            )
            self._writer.start()
        self._blocked_seconds = time.monotonic() - self._last_began
        if self._error is not None or not self.config.async_save:
            self.finish()

    @property
    def is_written(self) -> bool:
        """Whether this rank's file of a pending save is on disk, so that finish() would not wait
        for it.
        """
        return self._pending is not None and not (self._writer and self._writer.is_alive())

    def finish(self) -> None:
        """Wait for the pending save, if any, and make it complete.

        Raises:
            SaveError: as save().
        """
        if self._pending is None:
            return
        began = time.monotonic()
        (state, draft, save_id), self._pending = self._pending, None
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        gathered = gather_json(self.ranks, [self._written, self._error])
        self._written, self._error = {}, None
        try:
            errors = [error for _, error in gathered if error is not None]
            if errors:
                raise UserError(errors[0])
            files = {}
            for rank in self.nodes.members[self.nodes.here]:
                files |= gathered[rank][0]
            self._on_each_node(lambda: self._seal(draft, state, save_id, files))
            # all nodes have written theirs; the checkpoint is usable once all have renamed it
            self._on_each_node(lambda: self._publish(draft, state))
        except UserError as error:
            self._give_up(draft, state, str(error))
            return
        self.last_step = state.progress.step
        seconds = self._blocked_seconds + time.monotonic() - began
        self.log("save", {"step": self.last_step, "save_seconds": seconds})

    def close(self) -> None:
        """finish(), and wait until old checkpoints are removed and checkpoint.after_save has ended;
        in a preempted run only as long as there is time.

        Raises:
            SaveError: as save().
        """
        self.finish()
        if self._removal is not None:
            self._removal.join()
        is_told = False
        while self._after_save is not None:  # all ranks wait: launchers expect them to end together
            mine = [bool(self._after_save.in_use), self.ranks.stop.seconds_left]
            of_ranks = gather_json(self.ranks, mine)
            if not any(is_running for is_running, _ in of_ranks):
                return
            if min(seconds_left for _, seconds_left in of_ranks) < ENDING_SECONDS:
                return self.stop()
            if self.ranks.is_first and not is_told:
                print("waiting for checkpoint.after_save", flush=True)
            is_told = True
            time.sleep(WAIT_SECONDS)

    def stop(self) -> None:
        """Stop the command of checkpoint.after_save on this rank."""
        if self._after_save is not None:
            self._after_save.stop()

    # The steps of a save

    def _on_each_node(self, work: Callable[[], None]) -> None:
        """Nodes.run_on_each_node, unless the lock is lost; every error is one of the save."""

        def with_lock() -> None:
            self.nodes.lock.check()
            try:
                work()
            except UserError:
                raise
            except Exception as error:
                raise UserError(describe(error)) from error

        self.nodes.run_on_each_node(with_lock)

    def _prepare(self, draft: Path, state: TrainerState, needed_bytes: int) -> None:
        """Create the draft with its small files, after checking that the disk has room."""
        if self._removal is not None:
            self._removal.join()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove([*list_drafts(self.folder), *list_hidden(self.folder)])  # of interrupted runs
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < needed_bytes:
            raise OSError(f"it needs {needed_bytes:,} bytes, the disk has {free_bytes:,} free")
        (draft / SHARDS).mkdir(parents=True)
        model = self.engine.module
        model.config.save_pretrained(draft / "model")
        if model.can_generate():
            model.generation_config.save_pretrained(draft / "model")
        self.tokenizer.save_pretrained(draft / "model")
        for name, text in self.loaded.processor_files.items():
            (draft / "model" / name).write_text(text, encoding="utf-8")
        write_state(draft, state)

    def _copy(self, shard: Shard) -> Shard:
        """`shard` with copies of its tensors in CPU memory, which is allocated once, and pinned if
        there is a GPU.
        """
        on_gpu = torch.cuda.is_initialized()  # not is_available: a CPU run leaves GPUs alone
        tensors = [tensor for flat in shard.flats for tensor in flat.values()]
        if not self._buffers:
            self._buffers = [torch.empty_like(t, device="cpu", pin_memory=on_gpu) for t in tensors]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        copies = iter(self._buffers)
        return replace(
            shard,
            flats=[{key: next(copies) for key in flat} for flat in shard.flats],
            buffers={name: buffer.clone() for name, buffer in shard.buffers.items()},
        )

    def _write(self, draft: Path, shard: Shard) -> None:
        """Write this rank's file. Runs in a thread; sets self._written or self._error."""
        name = shard_name(self.ranks.rank)
        content = {**vars(shard), "fragments": [tuple(at) for at in shard.fragments]}
        try:
            torch.serialization.set_crc32_options(False)  # 4 x as slow as writing
            torch.save(content, draft / name)
            sync_folder(draft / name)  # other hosts cannot sync what this one has not written yet
            self._written = {name: measure(draft / name)}
        except Exception as error:  # reported to the other ranks, whatever it is
            here = self.nodes.label(self.nodes.here)
            self._error = f"{here}{describe(error)} (rank {self.ranks.rank})"

    def _seal(self, draft: Path, state: TrainerState, save_id: str, files: dict[str, Any]) -> None:
        """Write the manifest and COMPLETE into the draft."""
        for path in draft.rglob("*"):
            name = str(path.relative_to(draft))
            if path.is_file() and name not in files:  # small files of _prepare
                files[name] = measure(path)
        made_by = {
            "save_id": save_id,
            "world_size": state.run.world_size,
            "zero_stage": state.run.zero_stage,
            "optimizer": type(self.engine.basic_optimizer).__name__,
            "plan_hash": state.run.plan_hash,
            "config_hash": state.run.config_hash,
            "commits": state.run.commits,
            "versions": {name: version(name) for name in PACKAGES},
        }
        manifest = {"made_by": made_by, "files": dict(sorted(files.items()))}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
        sync_tree(draft)
        (draft / COMPLETE).write_text("complete\n")
        sync_tree(draft)

    def _publish(self, draft: Path, state: TrainerState) -> None:
        """Rename the draft to a checkpoint, and remove those that are no longer kept."""
        target = self.folder / checkpoint_name(state.progress.step)
        replaced = []
        if os.path.lexists(target):  # written before the run was resumed from an earlier step
            replaced = [hide_checkpoint(target)]
        os.replace(draft, target)
        sync_folder(self.folder)
        if self._after_save is not None:
            self._after_save.start(target)
        doomed = [*replaced, *self._rotate(state)]
        self._removal = threading.Thread(target=self._remove, args=(doomed,))  # 5 GB take a second
        self._removal.start()

    def _rotate(self, state: TrainerState) -> list[Path]:
        """Hide the checkpoints that checkpoint.keep_last, keep_every_steps and keep_best do not
        keep. Damaged ones do not count, and stay.
        """
        if self._eval_losses is None:
            usable = (path for path in list_complete(self.folder) if inspect_part(path)[0] is None)
            self._eval_losses = {p.name: read_state(p).progress.eval_loss for p in usable}
        losses, config = self._eval_losses, self.config
        losses[checkpoint_name(state.progress.step)] = state.progress.eval_loss
        scored = [name for name, loss in losses.items() if loss is not None]
        best = sorted(scored, key=lambda name: (lowest_first(losses[name]), name))
        kept = {*self._resumed, *sorted(losses)[-config.keep_last :], *best[: config.keep_best]}
        kept.add(checkpoint_name(state.progress.step))
        if config.keep_every_steps:
            kept |= {
                n for n in losses if int(n.removeprefix("step_")) % config.keep_every_steps == 0
            }
        if self._after_save is not None:
            kept |= self._after_save.in_use
        hidden = []
        for name in set(losses) - kept:
            del losses[name]
            try:
                hidden.append(hide_checkpoint(self.folder / name))
            except OSError as error:
                self._warn_left(self.folder / name, error)
        return hidden

    def _remove(self, doomed: Iterable[Path]) -> None:
        for path in doomed:
            try:
                remove(path)
            except OSError as error:  # e.g. a file that another process has open over NFS
                self._warn_left(path, error)

    def _warn_left(self, path: Path, error: OSError) -> None:
        print(f"WARNING: {path} cannot be removed ({describe(error)}); it is left", flush=True)

    def _give_up(self, draft: Path, state: TrainerState, error: str) -> None:
        line = f"checkpoint of step {state.progress.step:,} in {self.folder} failed: {error}"
        if self.nodes.is_first:
            shutil.rmtree(draft, ignore_errors=True)
        dist.barrier(group=self.ranks.control)
        if self.config.on_failed_save == "stop":
            raise SaveError(
                f"{line}; older checkpoints are complete; make room, or set "
                "checkpoint.on_failed_save continue, and start again"
            )
        if self.ranks.is_first:
            print(f"WARNING: {line}; continuing without it", flush=True)
