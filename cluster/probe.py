"""Collects facts about the host it runs on, as plain JSON, which preflight compares.

The agent calls these functions in a separate process. They only report: the comparison is in
cluster/check_hosts.py, and nothing is changed on the host except for a temporary token file.

    survey(...)  all facts that the hosts checks need
"""

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from checkpoint.run_folder import checkpoints_folder, list_complete
from runtime.errors import UserError
from runtime.gpu import ask, ecc_errors, throttle_reasons
from runtime.host_memory import available_memory

if TYPE_CHECKING:
    from config.schema import Config

PACKAGES = ("torch", "transformers", "deepspeed")
ROOMS = ("runtime", "config", "data", "model", "checkpoint", "tracking", "cluster", "scripts")
CODE = ("train.py", *ROOMS)
BLOCK_BYTES = 1 << 20
BLOCKS_PER_FILE = 64
BLOCKS_PER_PATH = 2048
"""Fewer blocks of each file are read if there are many: 2 GiB at most per path of the config."""
NAMED_FILES = 200
"""Up to this many files of a path are compared one by one, more only as a whole."""


def survey(
    argv: list[str] | None,
    slots: int,
    world_size: int,
    hostfile: str | None,
    holds_first_rank: bool,
) -> dict[str, Any]:
    """All facts about this host; an entry is {"error": text} if it could not be found out.

    Args:
        argv: command line of train.py; None for another script, which has no run config.
        slots: number of ranks on this host.
        world_size: number of ranks on all hosts.
        hostfile: path of the launcher's hostfile, of which this host may have a copy.
        holds_first_rank: rank 0 runs here, which under ZeRO-3 loads the whole model.
    """
    facts = {
        "hostfile": _fact_or_error(hostfile_lines, hostfile),
        "gpus": _fact_or_error(gpus),
        "versions": _fact_or_error(versions),
        "code": _fact_or_error(code),
        "limits": _fact_or_error(limits),
        "memory": _fact_or_error(memory),
    }
    if argv is not None:
        # as in the job: whether the config is valid depends on the number of ranks
        os.environ.update(RANK="0", WORLD_SIZE=str(world_size), LOCAL_RANK="0")
        on_gpu = bool(facts["gpus"].get("gpus")) and os.environ.get("DS_ACCELERATOR") != "cpu"
        facts["config"] = _fact_or_error(config_mistake, argv)
        facts["paths"] = _fact_or_error(paths, argv)
        facts["needs"] = _fact_or_error(needs, argv, slots, world_size, on_gpu, holds_first_rank)
        facts["output"] = _fact_or_error(output, argv)
    return facts


def _fact_or_error(fact: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    try:
        return fact(*arguments)
    except Exception as error:  # whatever goes wrong on a host, its other facts are still reported
        return {"error": _first_line(error)}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def hostfile_lines(path: str | None) -> dict[str, Any]:
    """{"there": whether the file is on this host, "hosts": [[name, slots], ...]}."""
    from cluster.hostfile import read_hostfile

    if path is None or not Path(path).is_file():
        return {"there": False, "hosts": []}
    return {"there": True, "hosts": [[h.name, len(h.slots)] for h in read_hostfile(path)]}


# --------------------------------------------------------------------------------------------------
# Software


def versions() -> dict[str, Any]:
    """{"versions": name -> version of Python, the packages, and what torch was built with, "where":
    name -> folder, "interpreter": path}.

    The packages are imported as on a rank, so that one which shadows another is noticed.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    where: dict[str, str] = {}
    for name in PACKAGES:
        try:
            module = import_module(name)
        except Exception as error:
            found[name] = f"cannot be imported ({type(error).__name__}: {_first_line(error)})"
            continue
        found[name] = str(getattr(module, "__version__", "unknown"))
        where[name] = str(Path(module.__file__ or "").parent)
    try:
        import torch

        found["CUDA"] = torch.version.cuda
        # only a build with CUDA has NCCL
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if found["CUDA"] else None
    except Exception:  # reported above
        pass
    return {"versions": found, "where": where, "interpreter": sys.executable}


def code() -> dict[str, Any]:
    """{"commit": of git or None, "changed": Python files with uncommitted changes, "files": path ->
    checksum of every Python file that a run may import}, for the current folder.
    """
    files = {}
    for name in CODE:
        path = Path(name)
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            files[str(file)] = xxhash.xxh3_64_hexdigest(file.read_bytes())
    commit = _git("rev-parse", "HEAD")
    # without locks: another process may be using this repository
    status = _git("--no-optional-locks", "status", "--porcelain", "--", *CODE) or ""
    changed = [line[3:] for line in status.splitlines() if line.endswith(".py")]
    return {"commit": commit and commit.strip(), "changed": changed, "files": files}


def _git(*arguments: str) -> str | None:
    """Output of a git command; None without git, or if this folder is not a repository's root."""
    if not Path(".git").exists():
        return None
    # safe.directory: on a shared disk the repository may belong to another user
    command = ["git", "-c", "safe.directory=*", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


# --------------------------------------------------------------------------------------------------
# Config, model, data


def _config(argv: list[str]) -> "Config":
    from config.parse import parse_command_line

    return parse_command_line(argv, validate=False).config


def config_mistake(argv: list[str]) -> dict[str, Any]:
    """{"mistake": train.py's message if it rejects this command line on this host, else None}."""
    from data.check_sources import parse_with_sources

    try:
        parse_with_sources(argv)
    except UserError as mistake:
        return {"mistake": str(mistake)}
    return {"mistake": None}


def paths(argv: list[str]) -> dict[str, Any]:
    """{"paths": a record for each path and hub id of the run}.

    A record has key (of the config) and name; and either error; or files, bytes, fingerprint and
    each (name -> fingerprint, if there are few files); or for a hub id commit (the cached one, or
    None) and for a model weights (whether they are cached, or not needed).
    """
    from config.schema import chat_template_file
    from data.sources import local_files, name_of

    config = _config(argv)
    named: list[tuple[str, str, Callable[[], Iterable[str]]]] = []

    def files_of(name: str) -> Callable[[], Iterable[str]]:
        return lambda: [name]

    for name in config_files(argv):
        named.append(("--config", name, files_of(name)))
    named.append(("ds_config", config.ds_config, files_of(config.ds_config)))
    if config.model.chat_template:
        template = config.model.chat_template
        file = str(chat_template_file(template))
        named.append(("model.chat_template", template, files_of(file)))
    if config.checkpoint.resume not in ("auto", "none"):
        resume = config.checkpoint.resume
        named.append(("checkpoint.resume", resume, files_of(f"{resume}/manifest.json")))
    records = []
    for key, name in dict.fromkeys(
        [
            ("model.name_or_path", config.model.name_or_path),
            ("model.tokenizer", config.tokenizer_name),
        ]
    ):
        if key == "model.tokenizer" and name == config.model.name_or_path:
            continue
        if Path(name).exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
            named.append((key, name, files_of(name)))
        else:
            wants_weights = key == "model.name_or_path" and not config.model.from_config
            records.append(_hub_model(key, name, config.model.revision, wants_weights))
    for sources in ("train_sources", "eval_sources"):
        key = f"data.{sources}"
        for source in config.data.sources(sources):
            if source.path is not None:
                path = source.path
                named.append((key, path, lambda path=path: local_files(path)))
            elif source.hub is not None:
                commit = _cached(source.hub, "README.md", source.revision, "dataset")
                records.append({"key": key, "name": name_of(source), "commit": commit})
    for key, name, files in named:
        try:
            records.append({"key": key, "name": name, **fingerprint(files())})
        except (OSError, UserError) as error:
            reason = getattr(error, "strerror", None)
            text = f"{reason}: {error.filename}" if reason else str(error)
            records.append({"key": key, "name": name, "error": text})
    return {"paths": records}


def config_files(argv: list[str]) -> list[str]:
    from config.places import config_files

    return [name for name in config_files(argv).split(", ") if name != "command line"]


def _hub_model(key: str, name: str, revision: str | None, wants_weights: bool) -> dict[str, Any]:
    """Which commit of a model or tokenizer is in the hub cache, and whether its weights are."""
    from model.base import weight_files  # imports transformers

    file = "config.json" if key == "model.name_or_path" else "tokenizer_config.json"
    commit = _cached(name, file, revision, "model")
    weights = not wants_weights or bool(weight_files(name, revision))
    return {"key": key, "name": name, "commit": commit, "weights": weights}


def _cached(repository: str, file: str, revision: str | None, kind: str) -> str | None:
    """The commit of a hub repository whose `file` is in the cache; nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repository, file, revision=revision, repo_type=kind)
    if not isinstance(path, str):
        return None
    parts = Path(path).parts
    return parts[parts.index("snapshots") + 1]


def fingerprint(names: Iterable[str]) -> dict[str, Any]:
    """One checksum of the names, sizes and contents of files and folders.

    Files of up to 64 MiB are read in full. Larger ones are sampled: 64 blocks of 1 MiB, evenly
    spread from the first byte to the last, or fewer if there are more than 32 files, so that at
    most 2 GiB are read. Equal fingerprints of sampled files are strong evidence, not proof.

    Raises:
        OSError: a file cannot be read.
    """
    files: list[Path] = []
    for name in names:
        path = Path(name)
        inside = path.is_dir() and sorted(f for f in path.rglob("*") if f.is_file())
        files += inside if inside is not False else [path]
    blocks = max(1, min(BLOCKS_PER_FILE, BLOCKS_PER_PATH // max(1, len(files))))
    whole, each, size = xxhash.xxh3_64(), {}, 0
    for file in files:
        bytes_of_file = file.stat().st_size
        checksum = xxhash.xxh3_64(b"%d" % bytes_of_file)
        with file.open("rb") as stream:
            if bytes_of_file <= blocks * BLOCK_BYTES:
                while block := stream.read(BLOCK_BYTES):
                    checksum.update(block)
            else:
                for i in range(blocks):
                    stream.seek((bytes_of_file - BLOCK_BYTES) * i // max(1, blocks - 1))
                    checksum.update(stream.read(BLOCK_BYTES))
        each[str(file)] = checksum.hexdigest()
        whole.update(f"{file}\0{checksum.hexdigest()}\n".encode())
        size += bytes_of_file
    return {
        "files": len(files),
        "bytes": size,
        "fingerprint": whole.hexdigest(),
        "each": each if len(each) <= NAMED_FILES else {},
    }


# --------------------------------------------------------------------------------------------------
# Output folder


def output(argv: list[str]) -> dict[str, Any]:
    """Whether output_dir can be written to, the free space on its disk, and how many complete
    checkpoints it has. If it does not exist, its nearest parent folder is tried.
    """
    folder = Path(_config(argv).output_dir)
    there = nearest(folder)
    usage = shutil.disk_usage(there)
    facts: dict[str, Any] = {
        "folder": str(folder),
        "nearest": str(there),
        "free_bytes": usage.free,
        "checkpoints": len(list_complete(checkpoints_folder(folder))),
        "problem": None,
    }
    token = there / f".preflight-{uuid.uuid4().hex}"
    try:
        token.write_bytes(b"x")
        token.unlink()
    except OSError as error:
        facts["problem"] = error.strerror
    return facts


def nearest(folder: Path) -> Path:
    """The folder itself, or the first of its parents that exists."""
    folder = folder.absolute()
    return next(p for p in (folder, *folder.parents) if p.is_dir())


def make_token(folder: str) -> str:
    """Write a file to the folder, or to its nearest existing parent; returns its path."""
    token = nearest(Path(folder)) / f".preflight-{uuid.uuid4().hex}"
    token.write_text("written by preflight, to find out which hosts share this disk\n")
    return str(token)


def sees_token(token: str) -> bool:
    """Whether that file appears here within a second: a network disk may lag."""
    for _ in range(5):
        if Path(token).exists():
            return True
        time.sleep(0.25)
    return False


def remove_token(token: str) -> None:
    Path(token).unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# Machine


def gpus() -> dict[str, Any]:
    """{"driver": version or None, "gpus": a record for each GPU}; no GPUs without a driver.

    A record has name, used_bytes, total_bytes, processes (ids of compute processes),
    ecc_errors (uncorrected since the driver was loaded; None without ECC), repair (row remapping:
    "pending", "failed"), slowed (why the clock is throttled).
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return {"driver": None, "gpus": []}
    found = []
    for i in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(i)
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        processes = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, device) or []
        remapped = ask(pynvml.nvmlDeviceGetRemappedRows, device) or (0, 0, 0, 0)
        found.append(
            {
                "name": _text(pynvml.nvmlDeviceGetName(device)),
                "used_bytes": memory.used,
                "total_bytes": memory.total,
                "processes": [process.pid for process in processes],
                "ecc_errors": ecc_errors(device),
                "repair": [
                    n for n, on in zip(("pending", "failed"), remapped[2:], strict=True) if on
                ],
                "slowed": throttle_reasons(device),
            }
        )
    driver = _text(pynvml.nvmlSystemGetDriverVersion())
    pynvml.nvmlShutdown()
    return {"driver": driver, "gpus": found}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def limits() -> dict[str, Any]:
    """Cores that this process may use, bytes of /dev/shm, and resource limits (-1: unlimited)."""
    infiniband = Path("/sys/class/infiniband")
    shm = os.statvfs("/dev/shm")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "shm_bytes": shm.f_frsize * shm.f_blocks,
        "shm_free_bytes": shm.f_frsize * shm.f_bavail,
        "memlock_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "infiniband": sorted(d.name for d in infiniband.iterdir()) if infiniband.is_dir() else [],
    }


def memory() -> dict[str, Any]:
    """{"available_bytes": that can still be allocated, "limited_by": what limits them}."""
    available_bytes, limited_by = available_memory()
    return {"available_bytes": available_bytes, "limited_by": limited_by}


def needs(
    argv: list[str], slots: int, world_size: int, on_gpu: bool, holds_first_rank: bool
) -> dict[str, Any]:
    """{"memory_bytes": for model states on this host, "checkpoint_bytes": of one checkpoint on this
    host's disk, "parameters", "keep": number of checkpoints}.

    An estimate, without activations and libraries; None for a model that is not on this host yet.
    """
    from config.ds_config import merge_ds_config, resolve_precision, zero_stage
    from model.architecture import hidden_size
    from model.load import load_model_config
    from model.memory import estimate_memory
    from model.trained import trained_skeleton

    config = _config(argv)
    facts: dict[str, Any] = {"memory_bytes": None, "checkpoint_bytes": None, "parameters": None,
                             "keep": config.checkpoint.keep_last}  # fmt: skip
    name = config.model.name_or_path
    if not Path(name).is_dir() and not _cached(name, "config.json", config.model.revision, "model"):
        return facts
    architecture = load_model_config(config)
    skeleton, counts = trained_skeleton(config.model, architecture)
    precision = resolve_precision(config, "bf16" if on_gpu else "fp32")
    ds_config = merge_ds_config(config, precision, hidden_size(architecture))
    estimate = estimate_memory(
        config, skeleton, counts.quantized, ds_config, world_size, local_ranks=slots
    )
    memory_bytes = estimate.host
    if not on_gpu:
        memory_bytes += slots * sum(part.size for part in estimate.states)
    elif zero_stage(ds_config) < 3 or holds_first_rank:
        memory_bytes += estimate.loading
    return {**facts, "memory_bytes": int(memory_bytes), "parameters": counts.total,
            "checkpoint_bytes": int(estimate.checkpoint)}  # fmt: skip
