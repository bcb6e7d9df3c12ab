"""What preflight wants to know about a host, collected there: python -m zerotrain.launch.report

Standard input has the arguments of train.py as JSON, or null for another script; the last line
printed is the report, as JSON. Nothing on the host is changed, except for a file that is made and
removed in the run folder.
"""

import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from zerotrain.checkpoint.run_folder import checkpoints_folder, list_complete
from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import Config, chat_template_file
from zerotrain.data.sources import local_files
from zerotrain.runtime.errors import UserError, describe

MARK = "REPORT "
PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "numpy", "accelerate")
BLOCK_BYTES = 1 << 20
BLOCKS = 64


def versions() -> dict[str, str]:
    """Version of Python and of each package; torch's names the CUDA that it was built for."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def code() -> dict[str, str]:
    """Checksum of every Python file that a run may import."""
    files = [Path("train.py"), *sorted(Path("zerotrain").rglob("*.py"))]
    return {str(file): checksum(str(file)) for file in files}


def fingerprint(file: Path) -> str:
    """Checksum of a file's size and of up to 64 evenly spaced blocks of 1 MiB: all of a file of up
    to 64 MiB; strong evidence, but no proof, for a larger one.
    """
    size = file.stat().st_size
    checksum = xxhash.xxh3_64(str(size).encode())
    count = min(BLOCKS, -(-size // BLOCK_BYTES))
    with file.open("rb") as stream:
        for block in range(count):
            if size > BLOCKS * BLOCK_BYTES:
                stream.seek((size - BLOCK_BYTES) * block // (BLOCKS - 1))
            checksum.update(stream.read(BLOCK_BYTES))
    return checksum.hexdigest()


def files_of(config: Config, argv: Sequence[str]) -> dict[str, dict[str, str]]:
    """Checksums of the files that the run reads, or what is wrong, by check and path."""
    config_files = [word.partition("=")[2] or argv[i + 1] for i, word in enumerate(argv)
                    if word == "--config" or word.startswith("--config=")]  # fmt: skip
    named = {"config": [*config_files, config.ds_config], "model": [], "data": []}
    if config.model.chat_template:
        named["config"].append(str(chat_template_file(config.model.chat_template)))
    if Path(config.model.name_or_path).is_dir():
        folder = Path(config.model.name_or_path)
        named["model"] = [str(file) for file in sorted(folder.iterdir()) if file.is_file()]
    problems = {}
    sources = [*config.data.sources("train_sources"), *config.data.sources("eval_sources")]
    for source in sources:
        try:
            named["data"] += local_files(source.path) if source.path else []
        except UserError as error:
            problems[str(source.path)] = str(error)
    found = {check: {name: checksum(name) for name in names} for check, names in named.items()}
    found["data"] |= problems
    return found


def checksum(name: str) -> str:
    try:
        return fingerprint(Path(name))
    except OSError as error:
        return f"cannot be read: {describe(error)}"


def disk(folder: Path) -> dict[str, Any]:
    """Whether the run folder, or the nearest parent that exists, can be written to; free bytes."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    problem = ""
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".preflight-"):
            pass
    except OSError as error:
        problem = str(error.strerror)
    return {"folder": str(folder), "free_bytes": shutil.disk_usage(there).free, "problem": problem}


def gpus() -> list[dict[str, Any]]:
    """name, used_bytes, ecc_errors (uncorrected, since the driver was loaded) and throttle (why its
    clock is throttled) of each GPU; empty without a driver.
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
    faults = {
        "hardware slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "heat": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
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
                "throttle": [name for name, mask in faults.items() if reasons & mask],
            }
        )
    return found


def report(argv: Sequence[str] | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "same": {"versions": versions(), "code": code()},
        "gpus": gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "shm_bytes": shutil.disk_usage("/dev/shm").total,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": Path("/sys/class/infiniband").is_dir(),
        "mistake": "",
    }
    if argv is None:
        return facts
    try:
        config = parse_command_line(argv).config
    except UserError as error:
        return {**facts, "mistake": str(error)}
    folder = Path(config.output_dir).absolute()
    saved = list_complete(checkpoints_folder(folder))
    facts["disk"] = disk(folder)
    facts["checkpoint"] = saved[-1].name if saved else None
    facts["same"] |= files_of(config, argv)
    return facts


if __name__ == "__main__":
    facts = report(json.load(sys.stdin))
    print(f"\n{MARK}{json.dumps({**facts, 'clock': time.time()})}", flush=True)
