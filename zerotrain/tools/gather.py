"""Combine the parts of a checkpoint from nodes without a shared disk."""

import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zerotrain.checkpoint.manifest import read_manifest
from zerotrain.checkpoint.run_folder import COMPLETE, MANIFEST, STEP, checkpoints_folder
from zerotrain.runtime.errors import UserError
from zerotrain.tools.saved import checkpoint_problem

MAX_CONNECTIONS = 16  # hosts at the same time


def gather(
    places: Mapping[str, str], options: list[str], source: Path, small_files: Path, draft: Path
) -> Path:
    """Fill `draft`, an empty folder, with the checkpoint that the hosts have at `source`.

    Args:
        places: prefix of each host's folders: "host:" for rsync, or a folder on this machine.
        options: options of rsync.
        source: a checkpoint, or a run folder, from which the newest checkpoint that is complete on
            every host is taken.
        small_files: an empty folder for the manifests of each host's checkpoints.

    Returns:
        The checkpoint's folder on the hosts.

    Raises:
        UserError: a host cannot be reached, or has no such checkpoint; or a file is damaged or
            missing on all hosts.
    """
    is_checkpoint = re.fullmatch(STEP, source.name) is not None
    folder = source.parent if is_checkpoint else checkpoints_folder(source)
    wanted = source.name if is_checkpoint else "step_" + 8 * "[0-9]"
    small = [f"--include=/{wanted}/{name}" for name in (COMPLETE, MANIFEST)]

    def copy(host: str, there: Path, here: Path, *more: str) -> None:
        command = ["rsync", "-rts", *options, *more, f"{places[host]}{there}/", f"{here}/"]
        finished = subprocess.run(command, capture_output=True, text=True)
        if finished.returncode:
            line = finished.stderr.partition("\n")[0]
            raise UserError(f"{host}: {line} (rsync ended with code {finished.returncode})")

    def copy_small_files(host: str) -> None:
        (small_files / host).mkdir()
        copy(host, folder, small_files / host, f"--include=/{wanted}/", *small, "--exclude=*")

    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        list(pool.map(copy_small_files, places))
    for name in sorted({path.name for path in small_files.glob("*/step_*")}, reverse=True):
        lacking = [host for host in places if not (small_files / host / name / COMPLETE).is_file()]
        if lacking:
            print(f"skipping {folder / name}: not complete on {lacking[0]}")
        elif len({read_manifest(small_files / host / name).save_id for host in places}) > 1:
            print(f"skipping {folder / name}: the hosts have different saves")
        else:
            break
    else:
        raise UserError(f"{source}: the hosts have no checkpoint of the same save; check the path")
    for host in places:
        copy(host, folder / name, draft, "--ignore-existing")
    if problem := checkpoint_problem(draft):
        raise UserError(f"{folder / name}: {problem}; list all hosts, or take another step")
    return folder / name
