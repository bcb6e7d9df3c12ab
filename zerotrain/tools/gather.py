"""Combine what nodes without a shared disk have of a checkpoint."""

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from zerotrain.checkpoint.manifest import read_manifest
from zerotrain.checkpoint.run_folder import COMPLETE, MANIFEST, STEP, checkpoints_folder
from zerotrain.runtime.errors import UserError
from zerotrain.tools.saved import checkpoint_problem

MAX_CONNECTIONS = 16  # hosts that are contacted at the same time
Copy = Callable[..., None]
"""copy(host, its folder, a folder here, *options of rsync)"""


def rsync_from(ssh: list[str]) -> Copy:
    """Copies from hosts, by rsync over the ssh command `ssh`."""
    return partial(_rsync, lambda host, there: ["-e", shlex.join(ssh), f"{host}:{there}/"])


def rsync_from_disks(copies: Path) -> Copy:
    """Copies from a folder here that has a folder for each node, with its disk."""
    return partial(_rsync, lambda host, there: [f"{copies.absolute()}/{host}/{there}/"])


def _rsync(
    source: Callable[[str, Path], list[str]], host: str, there: Path, here: Path, *options: str
) -> None:
    """Copy a folder of a host.

    Args:
        source: maps the host and its folder to arguments of rsync.

    Raises:
        UserError: names the host, and the first thing that rsync or ssh says.
    """
    command = ["rsync", "-ts", *options, *source(host, there), f"{here}/"]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        lines = finished.stderr.split("\n")
        raise UserError(f"{host}: {lines[0]} (rsync ended with code {finished.returncode})")


def gather(copy: Copy, hosts: Sequence[str], source: Path, small_files: Path, draft: Path) -> Path:
    """Fill `draft`, an empty folder, with the checkpoint that the hosts have at `source`.

    Args:
        source: a checkpoint, or a run folder, of which the newest checkpoint is taken that is
            complete on every host.
        small_files: an empty folder for the manifests of each host's checkpoints.

    Returns:
        The checkpoint's folder on the hosts.

    Raises:
        UserError: a host, which is named, cannot be reached or has no such checkpoint; or a file is
            on no host, or damaged.
    """
    is_checkpoint = re.fullmatch(STEP, source.name) is not None
    folder = source.parent if is_checkpoint else checkpoints_folder(source)
    wanted = source.name if is_checkpoint else "step_" + 8 * "[0-9]"
    small = [f"--include=/{wanted}/{name}" for name in (COMPLETE, MANIFEST)]

    def copy_small_files(host: str) -> None:
        (small_files / host).mkdir()
        copy(host, folder, small_files / host, "-r", f"--include=/{wanted}/", *small, "--exclude=*")

    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        list(pool.map(copy_small_files, hosts))
    for name in sorted({path.name for path in small_files.glob("*/step_*")}, reverse=True):
        lacking = [host for host in hosts if not (small_files / host / name / COMPLETE).is_file()]
        if lacking:
            print(f"skipping {folder / name}: not complete on {lacking[0]}", flush=True)
        elif len({read_manifest(small_files / host / name).save_id for host in hosts}) > 1:
            print(f"skipping {folder / name}: the hosts have different saves", flush=True)
        else:
            break
    else:
        raise UserError(f"the hosts have no checkpoint of the same save at {source}")
    for host in hosts:
        copy(host, folder / name, draft, "-r", "--ignore-existing")
    if problem := checkpoint_problem(draft):
        raise UserError(f"{folder / name}: {problem}; are all hosts of the run listed?")
    return folder / name
