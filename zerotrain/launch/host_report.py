"""Print a report of this host for preflight: python -m zerotrain.launch.host_report

Standard input holds a JSON list: the arguments of train.py (null for a different script) and the
number of ranks on this host. The last line printed is the report, as JSON. The program changes
nothing on the host, except that it creates and removes a file in the run folder.
"""

import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from zerotrain.checkpoint.run_folder import checkpoints_folder, list_complete
from zerotrain.config.parse import dump_config, parse_command_line
from zerotrain.config.schema import chat_template_file
from zerotrain.launch.hostfile import machine_id
from zerotrain.rows.sources import local_files
from zerotrain.runtime.errors import UserError, describe

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "numpy")
BLOCK_BYTES = 1 << 20
BLOCKS = 64
GIB = 1 << 30
MIN_FREE_BYTES = 10 * GIB


class Level(StrEnum):
    """Whether a job can start in spite of a problem. Preflight prints the value."""

    FAIL = "FAIL"
    WARN = "warn"


class Problem(NamedTuple):
    """A problem of a host."""

    check: str
    text: str
    """What is wrong, and what to do."""
    level: Level = Level.FAIL


def checksum(file: str | Path) -> str:
    """Return a checksum of a file's size and content, or why the file cannot be read.

    It covers the whole content up to 64 MiB. Of a larger file it covers 64 evenly spaced blocks of
    1 MiB, so it can miss a small change.
    """
    try:
        size = Path(file).stat().st_size
        digest = xxhash.xxh3_64(str(size).encode())
        with Path(file).open("rb") as stream:
            for start in range(0, size, max(BLOCK_BYTES, size // BLOCKS)):
                stream.seek(start)
                digest.update(stream.read(BLOCK_BYTES))
        return digest.hexdigest()
    except OSError as error:
        return f"cannot be read: {describe(error)}"


def checksums(files: Sequence[str | Path]) -> dict[str, str]:
    """Return the checksum of each file."""
    return {str(file): checksum(file) for file in files}


def disk_problems(folder: Path) -> Iterator[Problem]:
    """Yield a problem if the run folder is not writable or its disk is nearly full.

    A folder that does not exist yet is judged by its nearest parent.
    """
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".preflight-"):
            pass
    except OSError as error:
        yield Problem("disk", f"output_dir {folder}: not writable ({error.strerror}); change it")
        return
    free = shutil.disk_usage(there).free
    if free < MIN_FREE_BYTES:
        text = f"output_dir {folder}: {free / GIB:.1f} GiB free; each checkpoint needs room"
        yield Problem("disk", text, Level.WARN)


def gpus() -> list[dict[str, Any]]:
    """Return name, used_bytes and ecc_errors of each GPU; an empty list without a driver.

    ecc_errors counts uncorrected memory errors since the driver was loaded.
    """
    import pynvml

    def query(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except pynvml.NVMLError:  # this GPU does not support the question
            return None

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    ecc = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    found = []
    for number in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(number)
        memory = query(pynvml.nvmlDeviceGetMemoryInfo, gpu)
        found.append(
            {
                "name": pynvml.nvmlDeviceGetName(gpu),
                "used_bytes": memory.used if memory else 0,
                "ecc_errors": query(pynvml.nvmlDeviceGetTotalEccErrors, gpu, *ecc) or 0,
            }
        )
    return found


def machine_problems(devices: Sequence[Mapping[str, Any]], ranks: int) -> Iterator[Problem]:
    """Yield the problems of this host's GPUs and limits.

    Args:
        devices: the host's GPUs, as `gpus` returns them.
        ranks: number of ranks on this host.
    """
    cores = len(os.sched_getaffinity(0))
    count, what = (len(devices), "GPUs") if devices else (cores, "cores and no GPU")
    if ranks > count:
        text = f"{ranks} slots, but {count} {what}; lower slots= in the hostfile"
        yield Problem("gpus", text)
    for number, gpu in enumerate(devices):
        if gpu["used_bytes"] > GIB:
            text = f"GPU {number}: {gpu['used_bytes'] / GIB:.1f} GiB in use"
            yield Problem("gpus", f"{text}; end the process that nvidia-smi lists")
        if gpu["ecc_errors"]:
            text = f"GPU {number}: {gpu['ecc_errors']} memory errors; reset or replace it"
            yield Problem("gpus", text)
    if devices and shutil.disk_usage("/dev/shm").total < GIB:
        text = "/dev/shm is smaller than 1 GiB; docker run --shm-size=8g, or emptyDir in memory"
        yield Problem("limits", text)
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)  # -1: unlimited
    if Path("/sys/class/infiniband").is_dir() and 0 <= locked_bytes < GIB:
        text = "memlock is below 1 GiB, but RDMA pins memory; ulimit -l unlimited"
        yield Problem("limits", text)


def report(argv: Sequence[str] | None, ranks: int) -> dict[str, Any]:
    """Return the report of this host.

    Args:
        argv: arguments of train.py, None for a different script.
        ranks: number of ranks on this host.

    Returns:
        `problems`: the host's own problems.
        `same`: values that should be equal on all hosts, by check and name.
        `checked`: names of the checks that were possible.
        `checkpoint`: name of the newest complete checkpoint, "" without one.
    """
    devices = gpus()
    versions = {name: metadata.version(name) for name in PACKAGES}
    same = {
        "versions": {"python": platform.python_version(), **versions},
        "code": checksums([Path("train.py"), *sorted(Path("zerotrain").rglob("*.py"))]),
        "gpus": {"models": ", ".join(sorted({gpu["name"] for gpu in devices})) or "missing"},
    }
    problems = [*machine_problems(devices, ranks)]
    checked = ["ssh", "versions", "code", "clock", "gpus", "limits"]
    found = {"same": same, "problems": problems, "checked": checked, "checkpoint": ""}
    if argv is None:
        return found
    try:
        config = parse_command_line(argv).config
    except UserError as error:
        problems.append(Problem("config", str(error)))
        return found
    rows = []
    for source in chain(config.data.train_sources, *config.data.eval_sources.values()):
        try:
            rows += local_files(source.path) if source.path else []
        except UserError as error:
            problems.append(Problem("data", str(error)))
    settings = xxhash.xxh3_64(dump_config(config).encode()).hexdigest()
    template = config.model.chat_template
    files = [config.ds_config, *([chat_template_file(template)] if template else [])]
    same["config"] = {"settings": settings, **checksums(files)}
    model = [file for file in Path(config.model.name_or_path).glob("*") if file.is_file()]
    same["model"] = checksums(model)
    same["data"] = checksums(rows)
    # Models and data on the hub have no files here to compare.
    checked += ["disk", *filter(same.get, ("config", "model", "data"))]
    folder = Path(config.output_dir).absolute()
    problems += disk_problems(folder)
    if saved := list_complete(checkpoints_folder(folder)):
        found["checkpoint"] = saved[-1].name
    return found


if __name__ == "__main__":
    found = report(*json.load(sys.stdin))
    print(json.dumps({**found, "machine": machine_id(), "clock": time.time()}))
