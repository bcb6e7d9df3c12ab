"""Combine the per-node checkpoints of checkpoint.node_local into one ordinary checkpoint."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from zerotrain.checkpoint.manifest import Manifest, file_problem, read_manifest
from zerotrain.checkpoint.run_folder import (
    COMPLETE,
    MANIFEST,
    STEP,
    TRAINER_STATE,
    checkpoints_folder,
)
from zerotrain.checkpoint.shards import shard_name
from zerotrain.checkpoint.state import read_state
from zerotrain.runtime.errors import UserError, describe, some

AT_ONCE = 16  # hosts that are contacted at the same time
Copy = Callable[..., None]
"""copy(host, its folder, a folder here, *options of rsync, names=files to copy)"""


def rsync_from(ssh: list[str]) -> Copy:
    """Copies from hosts, by rsync over the ssh command `ssh`."""

    def copy(host: str, there: Path, here: Path, *options: str, names: str = "") -> None:
        _rsync(host, ["-e", shlex.join(ssh), f"{host}:{there}/"], here, options, names)

    return copy


def rsync_from_disks(copies: Path) -> Copy:
    """Copies from a folder here that has a folder for each node, with its disk."""

    def copy(host: str, there: Path, here: Path, *options: str, names: str = "") -> None:
        _rsync(host, [f"{copies.absolute()}/{host}/{there}/"], here, options, names)

    return copy


def _rsync(host: str, source: list[str], here: Path, options: Sequence[str], names: str) -> None:
    """Raises UserError: names the host, and the first thing that rsync or ssh says."""
    command = ["rsync", "-ts", *options, *source, f"{here}/"]
    finished = subprocess.run(command, input=names, capture_output=True, text=True)
    if finished.returncode:
        lines = finished.stderr.split("\n")
        raise UserError(f"{host}: {lines[0]} (rsync ended with code {finished.returncode})")


def gather(copy: Copy, hosts: Sequence[str], source: Path, asked: Path, draft: Path) -> Path:
    """Fill `draft`, an empty folder, with the checkpoint that the hosts have at `source`.

    Args:
        source: a checkpoint, or a run folder, of which the newest checkpoint is taken that is
            complete on every host.
        asked: an empty folder for the small files of each host's checkpoints.

    Returns:
        The checkpoint's folder on the hosts.

    Raises:
        UserError: a host, which is named, cannot be reached, or its part is missing or damaged; the
            files of some ranks are on no host; or the disk has too little space.
    """
    # 1. Fetch the small files that describe the parts of each host.
    is_checkpoint = re.fullmatch(STEP, source.name) is not None
    folder = source.parent if is_checkpoint else checkpoints_folder(source)
    wanted = source.name if is_checkpoint else "step_" + 8 * "[0-9]"
    small = [f"--include=/{wanted}/{name}" for name in (COMPLETE, MANIFEST, TRAINER_STATE)]

    def ask(host: str) -> None:
        (asked / host).mkdir()
        copy(host, folder, asked / host, "-r", f"--include=/{wanted}/", *small, "--exclude=*")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ask, hosts))

    # 2. Choose the newest checkpoint that is complete and the same save on all hosts.
    problems = []
    for name in sorted({path.name for path in asked.glob("*/step_*")}, reverse=True):
        try:
            manifests = {host: _read_part(asked / host / name, host) for host in hosts}
            if len({manifest.save_id for manifest in manifests.values()}) > 1:
                raise UserError("the hosts have different saves")
            break
        except UserError as error:
            problems.append(f"{folder / name}: {error}")
    else:
        raise UserError("; ".join(problems) or f"no host has a checkpoint at {source}")
    for problem in problems:
        print(f"skipping {problem}", flush=True)
    files = {}
    plan: dict[str, list[str]] = {}  # each file from the first host that has it
    for host, manifest in manifests.items():
        plan[host] = [file for file in manifest.files if file not in files]
        files |= manifest.files
    ranks = range(read_state(asked / hosts[0] / name).run.world_size)
    missing = [rank for rank in ranks if shard_name(rank) not in files]
    if missing:
        raise UserError(
            f"{folder / name}: no host has the files of ranks {some(missing, 8)}; are all hosts of "
            "the run listed?"
        )

    # 3. Fetch the files, and check them against the manifests.
    needed, free = sum(entry.bytes for entry in files.values()), shutil.disk_usage(draft).free
    if free < needed:
        raise UserError(f"{draft.parent}: needs {needed:,} bytes, but the disk has {free:,} free")
    for host, names in plan.items():
        print(f"{host}: {len(names)} files", flush=True)
        copy(host, folder / name, draft, "--files-from=-", names="\n".join(names))
        for file in names:
            problem = file_problem(draft, file, files[file], checksums=True)
            if problem is not None:
                raise UserError(f"{host}: {folder / name}: {problem}")

    # 4. Write one manifest for all files.
    whole = Manifest(manifests[hosts[0]].made_by, dict(sorted(files.items())))
    (draft / MANIFEST).write_text(json.dumps(asdict(whole), indent=1))
    (draft / COMPLETE).write_text("complete\n")
    return folder / name


def _read_part(part: Path, host: str) -> Manifest:
    """Raises UserError: why the part of a checkpoint on a host cannot be used."""
    if not (part / COMPLETE).is_file():
        raise UserError(f"{host} does not have all of it")
    try:
        read_state(part)
        return read_manifest(part)
    except (OSError, ValueError) as error:
        raise UserError(f"{host}: {describe(error)}") from error
