"""Save, verify, find, resume, rotate. A checkpoint is complete or it does not exist.

    checkpoints/step_00001000/
        deepspeed/            DeepSpeed's shards: weights, optimizer, schedule
        rng/rank_00000.pt     one per rank
        model/                config.json, tokenizer: what export needs besides the weights
        trainer_state.json    position, plan hash, layout
        manifest.json         size and checksum of every file above; what made them
        COMPLETE              written last

It is written as step_00001000.tmp and renamed when whole. Every rank hands over its part of the
state, then writes and measures its own files: at once, or (checkpoint.async_save) from a copy while
the loop goes on.
"""

import copy
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from finetune import universal
from finetune.config import CheckpointConfig
from finetune.distributed import Ranks
from finetune.errors import UserError
from finetune.seeding import rng_state, seed_everything, set_rng_state
from finetune.universal import remove_converted

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from transformers import PreTrainedTokenizerBase

SHARDS = "deepspeed"  # DeepSpeed's tag inside the checkpoint's folder
CHUNK_BYTES = 1 << 18  # is in the core's cache for the write after the checksum: 1.6 x faster
PACKAGES = ("torch", "deepspeed", "transformers")


@dataclass(frozen=True)
class TrainerState:
    """Where a run is. `global_step` alone places it in the data: the plan knows the epoch."""

    plan_hash: str
    world_size: int
    zero_stage: int
    precision: str
    optimization: dict[str, Any]
    """What the optimizer's saved state would silently override, by its key in the run config."""
    global_step: int = 0
    examples: int = 0
    tokens: int = 0
    eval_loss: float | None = None
    """Of the evaluation after this very step, if there was one."""
    wandb_id: str | None = None


class SaveError(UserError):
    """A checkpoint could not be written. Nothing of it is left, the older ones are as they were."""


# --------------------------------------------------------------------------------------------------
# Save


class Saver:
    """Writes checkpoints of one run into `folder`, which all ranks share, and keeps the right ones.

    Every method is called by all ranks together.
    """

    def __init__(
        self,
        engine: "DeepSpeedEngine",
        tokenizer: "PreTrainedTokenizerBase",
        ranks: Ranks,
        folder: Path,
        config: CheckpointConfig,
        resumed_from: Path | None,
    ) -> None:
        self.engine, self.tokenizer, self.ranks = engine, tokenizer, ranks
        self.folder, self.config, self.resumed_from = folder, config, resumed_from
        self._copies = TensorCopies()
        engine.basic_optimizer.register_step_pre_hook(lambda *_: self._wait_for_copies())
        self.waited_seconds = 0.0
        """That updates have waited for the copies of an asynchronous save, over all of them."""
        self._pending: TrainerState | None = None
        self._writer: threading.Thread | None = None
        self._remover = threading.Thread()
        self._written: dict[str, Any] = {}
        self._error: str | None = None

    def save(self, state: TrainerState) -> None:
        """Write `folder`/step_XXXXXXXX, or with async_save start to; an earlier one is finished
        first.

        Raises:
            SaveError: it cannot be written and checkpoint.on_failed_save is stop.
        """
        self.finish()
        files = self._collect()
        needed_bytes = sum(self._gather(sum(map(tensor_bytes, files.values()))))
        draft = self._draft(state)
        self._error = self._on_first(lambda: self._prepare(draft, state, needed_bytes))
        self._pending = state
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
        """Whether this rank's part of a pending save is on disk, so that finish() would not wait
        for it.
        """
        return self._pending is not None and not (self._writer and self._writer.is_alive())

    def finish(self) -> None:
        """Wait for the pending save, if any, and make it complete.

        Raises:
            SaveError: as save().
        """
        if self._pending is None:
            self._wait_for_remover()
            return
        state, self._pending = self._pending, None
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        parts = self._gather((self._written, self._error))
        error = next((error for _, error in parts if error is not None), None)
        if error is None:
            files = {name: entry for part, _ in parts for name, entry in part.items()}
            error = self._on_first(lambda: self._complete(state, files))
        self._written, self._error = {}, None
        if error is not None:
            self._give_up(state, error)

    # What the steps above do

    def _wait_for_copies(self) -> None:
        began = time.perf_counter()
        self._copies.made.wait()
        self.waited_seconds += time.perf_counter() - began

    def _collect(self) -> dict[str, Any]:
        """What this rank has to write, by the file's name; tensors are the live ones."""
        collector = StateCollector()
        usual, self.engine.checkpoint_engine = self.engine.checkpoint_engine, collector
        # rank 0 would write a script beside the shards, outside of our care; export.py replaces it
        self.engine._copy_recovery_script = lambda folder: None
        try:
            self.engine.save_checkpoint("/", tag=SHARDS, save_latest=False)
        finally:
            self.engine.checkpoint_engine = usual
        files = {f"{SHARDS}/{path.name}": state for path, state in collector.files.items()}
        files[f"rng/rank_{self.ranks.rank:05d}.pt"] = rng_state()
        return files

    def _prepare(self, draft: Path, state: TrainerState, needed_bytes: int) -> None:
        """An empty draft with rank 0's small files, on a disk that has room for the rest."""
        self._wait_for_remover()
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in (*self.folder.glob("step_*.tmp"), *self.folder.glob("step_*.old")):
            shutil.rmtree(left_over)
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < needed_bytes:
            raise OSError(f"it needs {needed_bytes:,} bytes, the disk has {free_bytes:,} free")
        for part in (SHARDS, "rng"):
            (draft / part).mkdir(parents=True)
        model = self.engine.module
        model.config.save_pretrained(draft / "model")
        if model.can_generate():
            model.generation_config.save_pretrained(draft / "model")
        self.tokenizer.save_pretrained(draft / "model")
        (draft / "trainer_state.json").write_text(json.dumps(asdict(state), indent=2))

    def _write(self, draft: Path, files: dict[str, Any]) -> None:
        """This rank's files; runs in a thread, and leaves what came of it in the attributes."""
        try:
            self._copies.make()
            self._written = {
                name: write_measured(draft / name, lambda file, c=content: torch.save(c, file))
                for name, content in files.items()
            }
        except Exception as error:  # whatever it is, the other ranks have to hear of it
            self._error = f"{describe(error)} (rank {self.ranks.rank})"

    def _complete(self, state: TrainerState, files: dict[str, Any]) -> None:
        """Manifest, COMPLETE, the rename that makes it a checkpoint; then the older ones."""
        draft, target = self._draft(state), self.folder / f"step_{state.global_step:08d}"
        for path in sorted(draft.rglob("*")):
            name = str(path.relative_to(draft))
            if path.is_file() and name not in files:  # rank 0's small ones
                content = path.read_bytes()
                files[name] = write_measured(path, lambda file, c=content: file.write(c))
        optimizer = self.engine.basic_optimizer
        made_by = {
            "world_size": state.world_size,
            "zero_stage": state.zero_stage,
            "optimizer": type(optimizer).__name__,
            "plan_hash": state.plan_hash,
            "versions": {name: version(name) for name in PACKAGES},
        }
        manifest = {"made_by": made_by, "files": dict(sorted(files.items()))}
        text = json.dumps(manifest, indent=1)
        write_measured(draft / "manifest.json", lambda file: file.write(text.encode()))
        write_measured(draft / "COMPLETE", lambda file: file.write(b"complete\n"))
        if target.exists():  # a run resumed from before this step has come here again
            shutil.rmtree(hide_checkpoint(target))
        os.replace(draft, target)
        _sync_folder(self.folder)
        doomed = [hide_checkpoint(old) for old in self._superfluous(target)]
        # In a thread: 5 GB take the kernel a second.
        self._remover = threading.Thread(target=self._remove, args=(doomed,))
        self._remover.start()

    def _remove(self, doomed: list[Path]) -> None:
        for path in doomed:
            shutil.rmtree(path, ignore_errors=True)  # what is left, the next save removes
        remove_converted(self.folder)

    def _wait_for_remover(self) -> None:
        if self._remover.ident is not None:  # started
            self._remover.join()

    def _superfluous(self, newest: Path) -> list[Path]:
        """The checkpoints that checkpoint.keep_last, keep_every_steps and keep_best do not name."""
        config = self.config
        usable = [path for path in list_complete(self.folder) if fault(path) is None]
        states = {path: read_state(path) for path in usable}
        scored = [path for path in usable if states[path].eval_loss is not None]
        best = sorted(scored, key=lambda path: states[path].eval_loss)[: config.keep_best]
        kept = {newest, self.resumed_from, *usable[-config.keep_last :], *best}
        if config.keep_every_steps:
            kept |= {p for p in usable if states[p].global_step % config.keep_every_steps == 0}
        return [path for path in usable if path not in kept]

    def _give_up(self, state: TrainerState, error: str) -> None:
        line = f"checkpoint of step {state.global_step:,} in {self.folder} failed: {error}"
        if self.ranks.is_first:
            shutil.rmtree(self._draft(state), ignore_errors=True)
        dist.barrier(group=self.ranks.control)
        if self.config.on_failed_save == "stop":
            raise SaveError(
                f"{line}; older checkpoints are whole; make room, or say checkpoint.on_failed_save "
                "continue, and start again"
            )
        if self.ranks.is_first:
            print(f"WARNING: {line}; going on without it", flush=True)

    def _draft(self, state: TrainerState) -> Path:
        return self.folder / f"step_{state.global_step:08d}.tmp"

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(values, value, group=self.ranks.control)
        return values

    def _on_first(self, work: Callable[[], None]) -> str | None:
        """Do it on rank 0; on all ranks, what went wrong."""
        box: list[str | None] = [None]
        if self.ranks.is_first:
            try:
                work()
            except Exception as error:
                box[0] = describe(error)
        dist.broadcast_object_list(box, src=0, group=self.ranks.control)
        return box[0]


class StateCollector(CheckpointEngine):
    """In the place of DeepSpeed's writer: keeps what would be written, by path. A rank whose disk
    is full then fails in our hands, and not between two barriers of DeepSpeed's.
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


class TensorCopies:
    """Copies of a state in CPU memory, pinned where there is a GPU; the memory is used again.

    Only the optimizer's update changes the state, so the copies are made while the next forward and
    backward pass go on, and the update waits until they are `made`. Copying at once would hold the
    loop up by more than a tenth of a blocking save, and the first time, when the memory is new, by
    half of one.
    """

    def __init__(self) -> None:
        self.made = threading.Event()
        self.made.set()
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._buffers: list[torch.Tensor] = []
        self._originals: list[torch.Tensor] = []
        self._seen: dict[tuple, torch.Tensor] = {}

    def plan(self, state: Any) -> Any:
        """`state` as it is now, with memory in the place of every tensor, which `make` fills;
        tensors that are one stay one.
        """
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        planned = self._plan(state)
        del self._buffers[len(self._originals) :]
        self._seen = {}
        self.made.clear()
        return planned

    def make(self) -> None:
        """Fill what has been planned, if anything; another thread may."""
        try:
            with torch.cuda.stream(self._stream):
                for original, buffer in zip(self._originals, self._buffers, strict=False):
                    buffer.copy_(original, non_blocking=True)
            if self._stream:
                self._stream.synchronize()
        finally:
            self._originals = []
            self.made.set()

    def _plan(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            if key not in self._seen:
                self._seen[key] = self._buffer_for(value)
                self._originals.append(value.detach())
            return self._seen[key]
        if isinstance(value, dict):
            planned = {name: self._plan(item) for name, item in value.items()}
            return planned if type(value) is dict else type(value)(planned)
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._plan(item) for item in value)
        return copy.deepcopy(value)  # a loss scaler, for one, goes on counting

    def _buffer_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """The next buffer; the last save's, where it has the same shape."""
        at = len(self._originals)
        fits = at < len(self._buffers) and (
            self._buffers[at].shape == tensor.shape and self._buffers[at].dtype == tensor.dtype
        )
        if not fits:
            del self._buffers[at:]
            pinned = self._stream is not None
            self._buffers.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned))
        return self._buffers[at]


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0


class MeasuringFile:
    """A file being written whose size and checksum are known at the end."""

    def __init__(self, path: Path) -> None:
        # Ours takes its place: with its own CRC-32, torch.save writes .3 GB/s a core, without 1.2.
        torch.serialization.set_crc32_options(False)
        self.raw = path.open("wb")
        self.digest, self.bytes = xxhash.xxh3_64(), 0

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            self.digest.update(chunk)
            self.raw.write(chunk)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self.raw.flush()


def write_measured(path: Path, write: Callable[[Any], Any]) -> dict[str, Any]:
    """Write a file; size and checksum once it is on the disk for good.

    Raises:
        OSError: it is not.
    """
    file = MeasuringFile(path)
    try:
        write(file)
        file.flush()
        os.fsync(file.raw.fileno())
    finally:
        file.raw.close()
    return {"bytes": file.bytes, "xxh3_64": file.digest.hexdigest()}


def hide_checkpoint(path: Path) -> Path:
    """Rename a checkpoint that is to be removed: cut short, that leaves nothing that has COMPLETE
    and lacks files.
    """
    return path.rename(path.with_suffix(".old"))


def describe(error: Exception) -> str:
    """One line on what went wrong, with the free space where that is why."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# Find and verify


def list_complete(folder: Path) -> list[Path]:
    """Checkpoints that say they are complete, oldest first."""
    return sorted(path for path in folder.glob("step_????????") if (path / "COMPLETE").is_file())


def fault(checkpoint: Path, checksums: bool = False) -> str | None:
    """Why `checkpoint` cannot be used; None if every file of its manifest is there, in its size,
    and if asked for with its checksum.
    """
    if not (checkpoint / "COMPLETE").is_file():
        return "it has no COMPLETE: the save was cut short"
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        read_state(checkpoint)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest or trainer state cannot be read ({describe(error)})"
    for name, entry in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes instead of {entry['bytes']:,}"
        if checksums and checksum(path) != entry["xxh3_64"]:
            return f"{name} is damaged: its checksum is not the one that was written"
    return None


def checksum(path: Path) -> str:
    """xxh3 of a file, 64 bits in hexadecimal."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def find_checkpoint(config: CheckpointConfig, folder: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `checkpoint.resume` means, and a line for each one passed over.

    Raises:
        UserError: a given path is no usable checkpoint; all that are there are broken; or resume
            is none and the folder has checkpoints, which a second run would mix with its own.
    """
    resume, checksums = config.resume, config.verify == "checksums"
    present = sorted(folder.glob("step_????????"), reverse=True)
    if resume == "none":
        if present:
            raise UserError(
                f"{folder} has checkpoints of an earlier run; choose another output_dir, "
                "or checkpoint.resume auto"
            )
        return None, []
    if resume != "auto":
        if problem := fault(Path(resume), checksums):
            raise UserError(f"checkpoint.resume: {resume} is no usable checkpoint: {problem}")
        return Path(resume), []
    passed_over = []
    for checkpoint in present:
        problem = fault(checkpoint, checksums)
        if problem is None:
            return checkpoint, passed_over
        passed_over.append(f"passing over {checkpoint}: {problem}")
    if present:
        raise UserError(
            f"no usable checkpoint in {folder}: {'; '.join(passed_over)}; "
            "remove them to start at step 0"
        )
    drafts = [f"{path} is of a save that was cut short" for path in folder.glob("step_*.tmp")]
    return None, drafts


# --------------------------------------------------------------------------------------------------
# Resume


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer state of a checkpoint that `fault` found nothing wrong with."""
    return TrainerState(**json.loads((checkpoint / "trainer_state.json").read_text()))


def check_resumable(
    checkpoint: Path, saved: TrainerState, now: TrainerState, folder: Path, checksums: bool
) -> None:
    """Refuse what would not continue the same run, or would mix two runs in `folder`.

    Args:
        checksums: as for `fault`; what was passed over as damaged is no later part of the run.

    Raises:
        UserError: names what differs, or the checkpoint of `folder` that is further on.
    """
    later = [path for path in list_complete(folder) if path.name > f"step_{saved.global_step:08d}"]
    later = [path for path in later if fault(path, checksums) is None]
    if later:
        raise UserError(
            f"{checkpoint} is at step {saved.global_step}, but {folder} goes on to "
            f"{later[-1].name}; remove the later ones, or choose another output_dir"
        )
    for key, was in saved.optimization.items():
        if was != now.optimization[key]:
            raise UserError(
                f"{checkpoint}: {key} was {was}, this run's is {now.optimization[key]}; the saved "
                "optimizer keeps the old one, so go on with it, or use another output_dir"
            )
    for name, meaning in {
        "zero_stage": "ZeRO stage",
        "precision": "precision",
        "plan_hash": "plan (rows, their tokens, train.seed, global batch, data.window, weights, or "
        "the version of data/plan.py)",
    }.items():
        was, is_now = getattr(saved, name), getattr(now, name)
        if was != is_now:
            raise UserError(
                f"{checkpoint}: its {meaning} is {was}, this run's {is_now}; "
                "resume with the same, or start anew with another output_dir"
            )


def load_checkpoint(
    engine: "DeepSpeedEngine", checkpoint: Path, converted: Path | None, ranks: Ranks, seed: int
) -> None:
    """Weights, optimizer, schedule and this rank's RNG from `checkpoint`.

    Args:
        converted: its universal form, where it is of another number of ranks. Then there are no RNG
            states for these ranks, and they are seeded anew.
        seed: for that; train.seed.

    Raises:
        RuntimeError: DeepSpeed loaded nothing.
    """
    folder, tag = (checkpoint, SHARDS) if converted is None else (converted, universal.TAG)
    with universal.groups_kept(engine.basic_optimizer) if converted else nullcontext():
        loaded, _ = engine.load_checkpoint(str(folder), tag=tag)
    if loaded is None:
        raise RuntimeError(f"DeepSpeed loaded nothing from {folder}")
    state = read_state(checkpoint)
    if state.world_size == ranks.world_size:
        rng = checkpoint / "rng" / f"rank_{ranks.rank:05d}.pt"
        set_rng_state(torch.load(rng, weights_only=True))
    else:  # not the stream of step 0 once more
        seed_everything(seed + ranks.rank + 1_000_003 * state.global_step)
