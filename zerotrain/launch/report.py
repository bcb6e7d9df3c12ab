"""What a host says of itself to preflight: python -m zerotrain.launch.report

Standard input has [the arguments of train.py, or null for another script, the number of ranks on
this host] as JSON; the last line printed is the report, as JSON. Nothing on the host is changed,
except for a file that is made and removed in the run folder.
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
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from zerotrain.checkpoint.run_folder import checkpoints_folder, list_complete
from zerotrain.config.parse import dump_config, parse_command_line
from zerotrain.config.schema import chat_template_file
from zerotrain.rows.sources import local_files
from zerotrain.runtime.errors import UserError, describe

MARK = "REPORT "
PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "numpy")
BLOCK_BYTES = 1 << 20
BLOCKS = 64
GIB = 1 << 30
MIN_FREE_BYTES = 10 * GIB
MIN_OPEN_FILES = 1024
Problems = Iterator[tuple[str, str]]
"""(check, what is wrong and what to do); a warning ends with a question mark."""


def fingerprint(file: str) -> str:
    """Checksum of a file's size, of evenly spaced blocks of 1 MiB and of the last one: all of a
    file of up to 64 MiB; strong evidence, but no proof, for a larger one.
    """
    try:
        size = Path(file).stat().st_size
        checksum = xxhash.xxh3_64(str(size).encode())
        with Path(file).open("rb") as stream:
            starts = range(0, size, max(BLOCK_BYTES, size // BLOCKS))
            for start in (*starts, max(0, size - BLOCK_BYTES)):
                stream.seek(start)
                checksum.update(stream.read(BLOCK_BYTES))
        return checksum.hexdigest()
    except OSError as error:
        return f"cannot be read: {describe(error)}"


def fingerprints(files: Sequence[str | Path]) -> dict[str, str]:
    """Checksum of each file, or why it cannot be read."""
    return {str(file): fingerprint(str(file)) for file in files}


def disk_problems(folder: Path) -> Problems:
    """The run folder, or its nearest parent, cannot be written to, or is nearly full."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".preflight-"):
            pass
    except OSError as error:
        yield "disk", f"output_dir {folder} cannot be written to ({error.strerror})"
        return
    free = shutil.disk_usage(there).free
    if free < MIN_FREE_BYTES:
        yield "disk", f"output_dir {folder} has {free / GIB:.1f} GiB free; is that enough?"


def gpus() -> list[dict[str, Any]]:
    """name, used_bytes, ecc_errors (uncorrected, since the driver was loaded) and is_throttled (its
    clock, by heat or power) of each GPU; empty without a driver.
    """
    import pynvml

    def query(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except pynvml.NVMLError:  # this GPU does not support it
            return None

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    ecc = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    faults = (
        pynvml.nvmlClocksThrottleReasonHwSlowdown
        | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
    found = []
    for number in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(number)
        memory = query(pynvml.nvmlDeviceGetMemoryInfo, gpu)
        reasons = query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu) or 0
        found.append(
            {
                "name": str(pynvml.nvmlDeviceGetName(gpu)),
                "used_bytes": memory.used if memory else 0,
                "ecc_errors": query(pynvml.nvmlDeviceGetTotalEccErrors, gpu, *ecc) or 0,
                "is_throttled": reasons & faults != 0,
            }
        )
    return found


def machine_problems(facts: Mapping[str, Any]) -> Problems:
    """What is wrong with the GPUs and the limits of a host.

    Args:
        facts: the ones that `report` collects.
    """
    devices = facts["gpus"]
    count, what = (len(devices), "GPUs") if devices else (facts["cores"], "cores and no GPU")
    if facts["ranks"] > count:
        yield "gpus", f"{facts['ranks']} slots, but {count} {what}; lower slots= in the hostfile"
    for number, gpu in enumerate(devices):
        if gpu["used_bytes"] > GIB:
            used = gpu["used_bytes"] / GIB
            yield "gpus", f"GPU {number}: {used:.1f} GiB in use; end that process (nvidia-smi)"
        if gpu["ecc_errors"]:
            yield "gpus", f"GPU {number}: {gpu['ecc_errors']} memory errors; reset or replace it"
        if gpu["is_throttled"]:
            yield "gpus", f"GPU {number}: slowed down by heat or power; see `nvidia-smi -q`"
    if devices and facts["shm_bytes"] < GIB:
        yield "limits", "/dev/shm is under 1 GiB; docker run --shm-size=8g, or emptyDir in memory"
    if facts["infiniband"] and 0 <= facts["locked_bytes"] < GIB:
        yield "limits", "memlock is under 1 GiB, but RDMA pins memory; ulimit -l unlimited"
    if 0 <= facts["open_files"] < MIN_OPEN_FILES:
        yield "limits", f"{facts['open_files']} open files allowed; raise nofile in limits.conf"


def report(argv: Sequence[str] | None, ranks: int) -> dict[str, Any]:
    """What this host says of itself.

    Args:
        argv: arguments of train.py, None for another script.
        ranks: number of ranks on this host.

    Returns:
        `problems` of the host itself; `same`, what all hosts should have in common, by check and
        name; the names of the checks that were possible (`checked`); and the name of the newest
        `checkpoint`.
    """
    devices = gpus()
    facts = {
        "gpus": devices,
        "cores": len(os.sched_getaffinity(0)),
        "ranks": ranks,
        "shm_bytes": shutil.disk_usage("/dev/shm").total,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": Path("/sys/class/infiniband").is_dir(),
    }
    versions = {name: metadata.version(name) for name in PACKAGES}
    same = {
        "versions": {"python": platform.python_version(), **versions},
        "code": fingerprints([Path("train.py"), *sorted(Path("zerotrain").rglob("*.py"))]),
        "gpus": {"models": ", ".join(sorted({gpu["name"] for gpu in devices})) or "missing"},
    }
    problems = [*machine_problems(facts)]
    checked = ["ssh", "versions", "code", "clock", "gpus", "limits"]
    found = {"same": same, "problems": problems, "checked": checked, "checkpoint": None}
    if argv is None:
        return found
    try:
        config = parse_command_line(argv).config
    except UserError as error:
        problems.append(("config", str(error)))
        return found
    rows = []
    for source in chain(config.data.train_sources, *config.data.eval_sources.values()):
        try:
            rows += local_files(source.path) if source.path else []
        except UserError as error:
            problems.append(("data", str(error)))
    settings = xxhash.xxh3_64(dump_config(config).encode()).hexdigest()
    template = config.model.chat_template
    files = [config.ds_config, *([chat_template_file(template)] if template else [])]
    same["config"] = {"settings": settings, **fingerprints(files)}
    model = [file for file in Path(config.model.name_or_path).glob("*") if file.is_file()]
    same["model"] = fingerprints(model)
    same["data"] = fingerprints(rows)
    # what is on the hub has no files to compare
    checked += ["disk", *filter(same.get, ("config", "model", "data"))]
    folder = Path(config.output_dir).absolute()
    problems += disk_problems(folder)
    if saved := list_complete(checkpoints_folder(folder)):
        found["checkpoint"] = saved[-1].name
    return found


if __name__ == "__main__":
    found = report(*json.load(sys.stdin))
    print(f"\n{MARK}{json.dumps({**found, 'clock': time.time()})}", flush=True)
