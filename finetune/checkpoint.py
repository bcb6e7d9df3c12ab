"""Save, verify, find, resume, rotate, export. A checkpoint is complete or it does not exist.

    checkpoints/step_00001000/
        deepspeed/            DeepSpeed's shards: weights, optimizer, schedule
        rng/rank_00000.pt     one per rank
        model/                config.json, tokenizer: what export needs besides the weights
        trainer_state.json    position, plan hash, layout, versions
        manifest.json         size and checksum of every file above
        COMPLETE              written last

It is written as step_00001000.tmp and renamed when whole.
"""

import io
import json
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.distributed import Ranks
from finetune.errors import UserError
from finetune.seeding import rng_state, set_rng_state

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from transformers import PreTrainedTokenizerBase

SHARDS = "deepspeed"  # DeepSpeed's tag inside the checkpoint's folder
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
    wandb_id: str | None = None


# --------------------------------------------------------------------------------------------------
# Save


def save_checkpoint(
    engine: "DeepSpeedEngine",
    state: TrainerState,
    ranks: Ranks,
    folder: Path,
    tokenizer: "PreTrainedTokenizerBase",
    keep_last: int,
) -> Path:
    """Write `folder`/step_XXXXXXXX on all ranks together, then remove all but the newest
    `keep_last` complete ones.

    The folder is shared by all ranks.

    Raises:
        OSError: e.g. the disk is full; what was written stays under a name that is no checkpoint's.
    """
    target = folder / f"step_{state.global_step:08d}"
    draft = target.with_suffix(".tmp")
    if ranks.is_first:
        shutil.rmtree(draft, ignore_errors=True)
        (draft / "rng").mkdir(parents=True)
        (draft / "trainer_state.json").write_text(
            json.dumps(
                {**asdict(state), "versions": {name: version(name) for name in PACKAGES}}, indent=2
            )
        )
        engine.module.config.save_pretrained(draft / "model")
        if engine.module.can_generate():
            engine.module.generation_config.save_pretrained(draft / "model")
        tokenizer.save_pretrained(draft / "model")
    dist.barrier(group=ranks.control)
    engine.save_checkpoint(str(draft), tag=SHARDS, save_latest=False)
    torch.save(rng_state(), draft / "rng" / f"rank_{ranks.rank:05d}.pt")
    dist.barrier(group=ranks.control)

    files = sorted(path for path in draft.rglob("*") if path.is_file())
    mine = {
        str(path.relative_to(draft)): _measure(path)
        for path in files[ranks.rank :: ranks.world_size]
    }
    parts: list[dict[str, Any]] = [{}] * ranks.world_size
    dist.all_gather_object(parts, mine, group=ranks.control)
    if ranks.is_first:
        manifest = {name: entry for part in parts for name, entry in part.items()}
        _write_durably(
            draft / "manifest.json", json.dumps(dict(sorted(manifest.items())), indent=1)
        )
        _write_durably(draft / "COMPLETE", f"{state.global_step}\n")
        if target.exists():  # a run resumed from before this step has come here again
            shutil.rmtree(target)
        os.replace(draft, target)
        _sync_folder(folder)
        usable = [path for path in list_complete(folder) if fault(path) is None]
        for old in usable[:-keep_last]:
            shutil.rmtree(old)
    dist.barrier(group=ranks.control)
    return target


def _measure(path: Path) -> dict[str, Any]:
    """Size and checksum of a file that is on disk when this returns."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3_64": digest.hexdigest()}


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# Find and verify


def list_complete(folder: Path) -> list[Path]:
    """Checkpoints that say they are complete, oldest first."""
    return sorted(path for path in folder.glob("step_????????") if (path / "COMPLETE").is_file())


def fault(checkpoint: Path) -> str | None:
    """Why `checkpoint` cannot be used; None if every file of its manifest is there, in its size."""
    if not (checkpoint / "COMPLETE").is_file():
        return "it has no COMPLETE: the save was cut short"
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        return f"its manifest or trainer state cannot be read ({error})"
    for name, entry in manifest.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes instead of {entry['bytes']:,}"
    return None


def find_checkpoint(resume: str, folder: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `checkpoint.resume` means, and a line for each one passed over.

    Raises:
        UserError: a given path is no usable checkpoint; all that are there are broken; or resume
            is none and the folder has checkpoints, which a second run would mix with its own.
    """
    present = sorted(folder.glob("step_????????"), reverse=True)
    if resume == "none":
        if present:
            raise UserError(
                f"{folder} has checkpoints of an earlier run; choose another output_dir, "
                "or checkpoint.resume auto"
            )
        return None, []
    if resume != "auto":
        if problem := fault(Path(resume)):
            raise UserError(f"checkpoint.resume: {resume} is no usable checkpoint: {problem}")
        return Path(resume), []
    passed_over = []
    for checkpoint in present:
        problem = fault(checkpoint)
        if problem is None:
            return checkpoint, passed_over
        passed_over.append(f"passing over {checkpoint}: {problem}")
    if present:
        raise UserError(
            f"no usable checkpoint in {folder}: {'; '.join(passed_over)}; "
            "remove them to start at step 0"
        )
    return None, []


# --------------------------------------------------------------------------------------------------
# Resume


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer state of a checkpoint that `fault` found nothing wrong with."""
    saved = json.loads((checkpoint / "trainer_state.json").read_text())
    return TrainerState(**{name: saved[name] for name in TrainerState.__dataclass_fields__})


def check_resumable(checkpoint: Path, saved: TrainerState, now: TrainerState, folder: Path) -> None:
    """Refuse what would not continue the same run, or would mix two runs in `folder`.

    Raises:
        UserError: names what differs, or the checkpoint of `folder` that is further on.
    """
    later = [path for path in list_complete(folder) if fault(path) is None]
    if later and read_state(later[-1]).global_step > saved.global_step:
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
        "world_size": "ranks",
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


def load_checkpoint(engine: "DeepSpeedEngine", checkpoint: Path, ranks: Ranks) -> None:
    """Weights, optimizer, schedule and this rank's RNG from `checkpoint`.

    Raises:
        RuntimeError: DeepSpeed loaded nothing.
    """
    loaded, _ = engine.load_checkpoint(str(checkpoint), tag=SHARDS)
    if loaded is None:
        raise RuntimeError(f"DeepSpeed loaded nothing from {checkpoint}")
    set_rng_state(torch.load(checkpoint / "rng" / f"rank_{ranks.rank:05d}.pt", weights_only=True))


# --------------------------------------------------------------------------------------------------
# Export


def export_checkpoint(checkpoint: Path, out: Path, dtype: str | None = None) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer) that `from_pretrained` loads.

    The weights are the fp32 master weights (stage 0: the model's own), in `dtype` (float32,
    bfloat16 ...), by default the precision of the run. Takes CPU memory for about two copies of
    the model in fp32.

    Raises:
        UserError: the checkpoint is not usable, or `out` is not empty.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if problem := fault(checkpoint):
        raise UserError(f"{checkpoint} is no usable checkpoint: {problem}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty, or no folder; give a new one")
    state = read_state(checkpoint)
    if state.zero_stage == 0:
        saved = torch.load(
            checkpoint / SHARDS / "mp_rank_00_model_states.pt",
            map_location="cpu",
            weights_only=False,
        )
        weights = saved["module"]
    else:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it is chatty
            weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=SHARDS)
    config = AutoConfig.from_pretrained(checkpoint / "model")
    default = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[state.precision]
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype or default))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = set(model.all_tied_weights_keys)
    if unexpected or set(missing) - tied:
        raise RuntimeError(
            f"{checkpoint}: weights do not fit: missing {sorted(set(missing) - tied)}, "
            f"left over {unexpected}"
        )
    model.tie_weights()
    draft = out.with_name(out.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    if (checkpoint / "model" / "generation_config.json").exists():
        shutil.copy(checkpoint / "model" / "generation_config.json", draft)
    AutoTokenizer.from_pretrained(checkpoint / "model").save_pretrained(draft)
    if out.exists():
        out.rmdir()
    os.replace(draft, out)
