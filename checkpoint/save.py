"""Save checkpoints and remove old ones. A checkpoint is complete or it does not exist.

    checkpoints/step_00001000/
        deepspeed/            DeepSpeed's shards: weights, optimizer (see shards.py)
        rng/rank_00000.pt     one per rank
        model/                config.json, tokenizer: what export needs besides the weights
        trainer_state.json    what the run is and how far it has progressed
        manifest.json         size and checksum of every file above; versions, world size
        COMPLETE              written last

It is written as step_00001000.ID.tmp and renamed when complete. Every rank collects its state, then
writes its own files and computes their checksums: at once, or with checkpoint.async_save from a
copy while the loop continues.

With checkpoint.node_local each node has such a folder on its own disk, with the shards and RNG
states of its own ranks only. These per-node checkpoints of one save have the same save_id in their
manifests, and are usable only together. Without it there is one node with all ranks
(checkpoint/nodes.py).
"""

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from checkpoint.after_save import ENDING_SECONDS, AfterSave
from checkpoint.copies import TensorCopies, tensor_bytes
from checkpoint.files import write_measured
from checkpoint.find import (
    NodeCheckpoint,
    is_inconsistent,
    joint_problem,
    node_checkpoints,
    survey,
)
from checkpoint.nodes import Nodes
from checkpoint.prefixes import changed_prefixes
from checkpoint.run_folder import (
    COMPLETE,
    MANIFEST,
    RNG,
    SHARDS,
    checkpoint_name,
    checkpoints_folder,
    draft_path,
    hide_checkpoint,
    list_converted,
    list_drafts,
    list_hidden,
    remove,
)
from checkpoint.shards import layout, progress
from checkpoint.state import TrainerState, cost, write_state
from config.schema import CheckpointConfig
from runtime.errors import UserError, describe
from runtime.files import sync_folder
from runtime.seeding import rng_state

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")
WAIT_SECONDS = 0.5  # between two looks at whether checkpoint.after_save has ended
PACKAGES = ("torch", "deepspeed", "transformers")


class SaveError(UserError):
    """A checkpoint could not be written. It is removed, and older ones are unchanged."""


class Saver:
    """Writes checkpoints of one run into its output folder on every node, and removes old ones.

    Every method but stop() is called by all ranks together. Nothing is written or removed once the
    folder's lock is lost.
    """

    def __init__(
        self,
        engine: "DeepSpeedEngine",
        tokenizer: "PreTrainedTokenizerBase",
        nodes: Nodes,
        config: CheckpointConfig,
        resumed_from: Path | None,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.nodes, self.ranks = nodes, nodes.ranks
        self.folder = checkpoints_folder(nodes.lock.folder)
        self.config, self.resumed_from = config, resumed_from
        self._after_save = AfterSave(config, nodes)
        self._copies = TensorCopies()
        engine.basic_optimizer.register_step_pre_hook(lambda *_: self._wait_for_copies())
        self.waited_seconds = 0.0
        """Total time that updates have waited for the copies of asynchronous saves."""
        self._pending: tuple[TrainerState, Path, str] | None = None  # with its draft and save_id
        self._writer: threading.Thread | None = None
        self._removal: threading.Thread | None = None
        self._written: dict[str, Any] = {}
        self._error: str | None = None

    def save(self, state: TrainerState) -> None:
        """Write `folder`/step_XXXXXXXX, or with async_save start writing it, after finishing the
        previous save.

        Raises:
            SaveError: it cannot be written and checkpoint.on_failed_save is stop.
        """
        self.finish()
        files = self._collect()
        mine = [sum(map(tensor_bytes, files.values())), asdict(state), uuid.uuid4().hex]
        of_ranks = self.nodes.gather(mine)
        _, values, save_id = of_ranks[0]  # those of rank 0, to be the same on all nodes
        state = TrainerState.of(values)
        needed_bytes = sum(of_ranks[rank][0] for rank in self.nodes.local_ranks)
        draft = draft_path(self.folder, state.progress.step, save_id)
        self._pending = state, draft, save_id
        try:
            self._on_each_node(lambda: self._prepare(draft, state, needed_bytes))
        except UserError as error:
            self._error = str(error)
        if self._error is None:
            if self.config.async_save:
                files = self._copies.plan(files)
            self._writer = threading.Thread(
                target=self._write, args=(draft, files), name="checkpoint-writer"
            )
            self._writer.start()
        if self._error is not None or not self.config.async_save:
            self.finish()

    @property
    def is_written(self) -> bool:
        """Whether this rank's files of a pending save are on disk, so that finish() would not wait
        for them.
        """
        return self._pending is not None and not (self._writer and self._writer.is_alive())

    def finish(self) -> None:
        """Wait for the pending save, if any, and make it complete.

        Raises:
            SaveError: as save().
        """
        if self._pending is None:
            return
        (state, draft, save_id), self._pending = self._pending, None
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        of_ranks = self.nodes.gather([self._written, self._error])
        self._written, self._error = {}, None
        try:
            if errors := [error for _, error in of_ranks if error is not None]:
                raise UserError(errors[0])
            files = {}
            for rank in self.nodes.local_ranks:
                files |= of_ranks[rank][0]
            self._on_each_node(lambda: self._seal(draft, state, save_id, files))
            # all nodes have written theirs; the checkpoint is usable once all have renamed it
            self._on_each_node(lambda: self._publish(draft, state))
            in_use = self._start_command(state)
            found = survey(self.folder, self._on_each_node)
            self._on_each_node(lambda: self._rotate(state, found, in_use))
        except UserError as error:
            self._give_up(draft, state, str(error))

    def close(self) -> None:
        """finish(), and wait until old checkpoints are removed and checkpoint.after_save has ended.

        Raises:
            SaveError: as save().
        """
        self.finish()
        self._wait_for_removal()
        if self.config.after_save is not None:
            self._wait_for_command()

    def stop(self) -> None:
        """Stop the command of checkpoint.after_save on this rank."""
        self._after_save.stop()

    # The steps of a save

    def _on_each_node(self, work: Callable[[], T]) -> dict[str, T]:
        """Nodes.run_on_each_node, unless the lock is lost."""

        def with_lock() -> T:
            self.nodes.lock.check()
            return work()

        return self.nodes.run_on_each_node(with_lock, (Exception,))

    def _wait_for_copies(self) -> None:
        began = time.perf_counter()
        self._copies.made.wait()
        self.waited_seconds += time.perf_counter() - began

    def _collect(self) -> dict[str, Any]:
        """What this rank has to write, by file name; tensors are those in use, not copies."""
        collector, module = StateCollector(), self.engine.module
        parameters = dict(module.named_parameters(remove_duplicate=False))
        trained = {name for name, p in parameters.items() if p.requires_grad}
        # frozen weights that are in the model's files are not saved
        leaves_out = module.read_from is not None and len(trained) < len(parameters)
        usual, self.engine.checkpoint_engine = self.engine.checkpoint_engine, collector
        # rank 0 would write a recovery script next to the shards; export.py replaces it
        self.engine._copy_recovery_script = lambda folder: None
        try:
            self.engine.save_checkpoint(
                "/", tag=SHARDS, save_latest=False, exclude_frozen_parameters=leaves_out
            )
        finally:
            self.engine.checkpoint_engine = usual
        about = {
            "layout": layout(self.engine),
            "progress": progress(self.engine),
            "read_from": module.read_from,
            "prefixes": changed_prefixes(module),
        }
        files = {f"{SHARDS}/{path.name}": s | about for path, s in collector.files.items()}
        for state in files.values():
            if leaves_out and "module" in state:
                # DeepSpeed has left in second names of tied weights, and scales of quantized ones
                kept = trained.union(state["buffer_names"])
                state["module"] = {n: w for n, w in state["module"].items() if n in kept}
        files[f"{RNG}/rank_{self.ranks.rank:05d}.pt"] = rng_state()
        return files

    def _prepare(self, draft: Path, state: TrainerState, needed_bytes: int) -> None:
        """Create the draft with its small files, after checking that the disk has room."""
        self._wait_for_removal()
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in (*list_drafts(self.folder), *list_hidden(self.folder)):
            remove(left_over)
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < needed_bytes:
            raise OSError(f"it needs {needed_bytes:,} bytes, the disk has {free_bytes:,} free")
        for name in (SHARDS, RNG):
            (draft / name).mkdir(parents=True)
        model = self.engine.module
        model.config.save_pretrained(draft / "model")
        if model.can_generate():
            model.generation_config.save_pretrained(draft / "model")
        self.tokenizer.save_pretrained(draft / "model")
        for name, text in model.processor_files.items():
            (draft / "model" / name).write_text(text, encoding="utf-8")
        write_state(draft, state)

    def _write(self, draft: Path, files: dict[str, Any]) -> None:
        """Write this rank's files. Runs in a thread; sets self._written or self._error."""
        try:
            self._copies.make()
            self._written = {
                name: write_measured(draft / name, lambda file, c=content: torch.save(c, file))
                for name, content in files.items()
            }
        except Exception as error:  # reported to the other ranks, whatever it is
            here = self.nodes.label(self.nodes.here)
            self._error = f"{here}{describe(error)} (rank {self.ranks.rank})"

    def _seal(self, draft: Path, state: TrainerState, save_id: str, files: dict[str, Any]) -> None:
        """Write the manifest and COMPLETE into the draft."""
        for path in sorted(draft.rglob("*")):
            name = str(path.relative_to(draft))
            if path.is_file() and name not in files:  # small files of _prepare
                content = path.read_bytes()
                files[name] = write_measured(path, lambda file, c=content: file.write(c))
        optimizer = self.engine.basic_optimizer
        made_by = {
            "save_id": save_id,
            "world_size": state.run.world_size,
            "zero_stage": state.run.zero_stage,
            "optimizer": type(optimizer).__name__,
            "plan_hash": state.run.plan_hash,
            "config_hash": state.run.config_hash,
            "commits": state.run.commits,
            "versions": {name: version(name) for name in PACKAGES},
        }
        manifest = {"made_by": made_by, "files": dict(sorted(files.items()))}
        text = json.dumps(manifest, indent=1)
        write_measured(draft / MANIFEST, lambda file: file.write(text.encode()))
        write_measured(draft / COMPLETE, lambda file: file.write(b"complete\n"))

    def _publish(self, draft: Path, state: TrainerState) -> None:
        """Rename the draft to a checkpoint."""
        target = self.folder / checkpoint_name(state.progress.step)
        if os.path.lexists(target):  # written before the run was resumed from an earlier step
            remove(hide_checkpoint(target))
        os.replace(draft, target)
        sync_folder(self.folder)

    def _start_command(self, state: TrainerState) -> set[str]:
        """Run checkpoint.after_save, if there is one, on each node.

        Returns:
            The names of the checkpoints that it uses now on any node.
        """
        if self.config.after_save is None:
            return set()
        checkpoint = self.folder / checkpoint_name(state.progress.step)
        return set().union(*self._on_each_node(lambda: self._after_save.start(checkpoint)).values())

    def _wait_for_command(self) -> None:
        """Wait until checkpoint.after_save has ended on all nodes; in a preempted run only as long
        as there is time. All ranks wait, since launchers expect them to end together.
        """
        said = False
        while True:
            self._after_save.start_again()
            mine = [self._after_save.is_running, self.ranks.stop.seconds_left]
            of_ranks = self.nodes.gather(mine)
            if not any(is_running for is_running, _ in of_ranks):
                return
            if min(seconds_left for _, seconds_left in of_ranks) < ENDING_SECONDS:
                self.stop()
                return
            if self.ranks.is_first and not said:
                print("waiting for checkpoint.after_save", flush=True)
                said = True
            time.sleep(WAIT_SECONDS)

    def _rotate(
        self,
        state: TrainerState,
        found: Mapping[str, Mapping[str, "NodeCheckpoint"]],
        in_use: set[str],
    ) -> None:
        """Remove the checkpoints that checkpoint.keep_last, keep_every_steps and keep_best do not
        keep, and older ones that a crash has left on some nodes only.

        Args:
            found: the survey of every node, so that all nodes decide the same.
            in_use: names of checkpoints that are kept for now.
        """
        config, names = self.config, sorted(found[self.nodes.here])
        usable = [name for name in names if joint_problem(node_checkpoints(found, name)) is None]
        states = {name: found[self.nodes.here][name].state.progress for name in usable}
        metric = state.progress.best.metric if state.progress.best else "eval_loss"
        values = {name: states[name].measured(metric) for name in usable}
        scored = [name for name in usable if values[name] is not None]
        best = sorted(scored, key=lambda name: cost(metric, values[name]))[: config.keep_best]
        newest = usable[-config.keep_last :]
        kept = {checkpoint_name(state.progress.step), *newest, *best, *in_use}
        if config.keep_every_steps:
            kept |= {n for n in usable if states[n].step % config.keep_every_steps == 0}
        scattered = [name for name in names if is_inconsistent(node_checkpoints(found, name))]
        paths = [self.folder / name for name in sorted({*usable, *scattered} - kept)]
        doomed = [hide_checkpoint(path) for path in paths if path != self.resumed_from]
        self._removal = threading.Thread(target=self._remove, args=(doomed,))  # 5 GB take a second
        self._removal.start()

    def _wait_for_removal(self) -> None:
        if self._removal is not None:
            self._removal.join()

    def _remove(self, doomed: Iterable[Path]) -> None:
        for path in (*doomed, *list_converted(self.folder)):  # converted ones are used once
            with suppress(OSError):  # the next save removes what is left
                remove(path)

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


class StateCollector(CheckpointEngine):
    """Replaces DeepSpeed's writer: collects what would be written, by path. An error of writing
    then occurs in our code, which handles it, and not between two barriers of DeepSpeed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[Path, Any] = {}

    def create(self, info: Any) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path)] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        raise NotImplementedError

    def commit(self, info: Any) -> bool:
        return True
