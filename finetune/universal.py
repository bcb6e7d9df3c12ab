"""A checkpoint for another number of ranks, by way of DeepSpeed's universal format.

ZeRO's shards are cut for one number of ranks. The universal form has a file for each parameter and
each of its AdamW moments, of which every rank of any number takes its part.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from finetune.errors import UserError

TAG = "universal"  # the folder in the converted checkpoint that engine.load_checkpoint is given
DISK_FACTOR = 2.5  # of the shards' bytes: fragments and merged files; measured 2.4 with AdamW


def is_needed(saved_world_size: int, world_size: int, zero_stage: int) -> bool:
    """Whether a checkpoint has to be converted; at stage 0 every rank has the same whole state."""
    return zero_stage > 0 and saved_world_size != world_size


def convert(checkpoint: Path, zero_stage: int, shards: Path, world_size: int) -> Path:
    """The converted form of a checkpoint, made beside it unless it is there already. Called by one
    process; begun anew where an earlier one was cut short.

    Args:
        shards: DeepSpeed's folder in the checkpoint.
        world_size: the ranks that it is for, to say so.

    Raises:
        UserError: not enough room on the disk.
        RuntimeError: DeepSpeed cannot convert it.
    """
    target = checkpoint.with_name(f"{checkpoint.name}.{TAG}")
    if (target / "COMPLETE").is_file():
        return target
    draft = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    shard_bytes = sum(e["bytes"] for name, e in files.items() if name.startswith(shards.name))
    needed, free = int(DISK_FACTOR * shard_bytes), shutil.disk_usage(checkpoint).free
    if free < needed:
        raise UserError(
            f"{checkpoint}: to convert it for {world_size} ranks takes {needed:,} bytes beside it, "
            f"and {free:,} are free; make room, or go on with as many ranks as before"
        )
    print(
        f"converting {checkpoint} for {world_size} ranks; needs {needed / 2**20:,.0f} MiB of disk",
        flush=True,
    )
    draft.mkdir()
    began = time.perf_counter()
    workers = str(len(os.sched_getaffinity(0)))
    command = [
        sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal",
        "--input_folder", str(shards), "--output_folder", str(draft / TAG),
        "--num_extract_workers", workers, "--num_merge_workers", workers,
    ]  # fmt: skip
    if zero_stage < 3:
        command.append("--inject_missing_state")
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        last = (finished.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(f"DeepSpeed cannot convert {checkpoint}: {last}")
    (draft / "COMPLETE").write_text("complete\n")
    os.replace(draft, target)
    print(f"converted in {time.perf_counter() - began:.1f} s", flush=True)
    return target


@contextmanager
def groups_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Load a converted checkpoint inside; afterwards each parameter group has its own settings.

    At stage 3 DeepSpeed 0.19.8 gives all groups those of the first one, so that biases and norms
    would decay as well, and all parameters one and the same step tensor, which then counts every
    update several times: the curve was off by 2e-3 after four steps.
    """
    own = [
        {k: v for k, v in group.items() if k not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
    yield
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def remove_converted(folder: Path) -> None:
    """All converted forms in `folder`, whole or cut short: they are used once."""
    for path in folder.glob(f"step_*.{TAG}*"):
        shutil.rmtree(path)
