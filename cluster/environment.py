"""The environment variables that are sent to the hosts.

They are sent through ssh's standard input into a file that only the user can read, never on a
command line, so that no quoting is needed and secrets stay secret.
"""

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.errors import UserError
from runtime.redact import is_secret

ALLOWED = ("NCCL_", "GLOO_", "TORCH_", "HF_", "WANDB_", "OMP_", "CUDA_", "DS_")
# cluster/rank.py sets the devices of each host; a value from here would override that.
NEVER_SENT = {"CUDA_VISIBLE_DEVICES", "DS_ENV_FILE"}
# What a launcher needs to find its programs and to reach the hosts. deepspeed, which also puts
# variables on the hosts' command lines, gets nothing else: it takes PYTHON*, MLFLOW*, UCX*, MV2*
# and those of the accelerator, such as NCCL*, without being asked.
FOR_LAUNCHERS = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TERM", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "DS_ACCELERATOR", "SSH_*", "KRB5*", "PDSH_*",
    "OMPI_*", "OPAL_*", "PRTE_*", "PMIX_*", "SLURM_*", "SLURMD_*",
)  # fmt: skip


def environment_of_job(
    here: Mapping[str, str], added: Sequence[str], files: Sequence[Path] = ()
) -> dict[str, str]:
    """Variables for the ranks: those of `here` with an allowed prefix, those of `.deepspeed_env`
    files, and those that the user adds. Later ones override earlier ones.

    Args:
        here: the environment of launch.sh.
        added: `NAME`, whose value is taken from `here`, or `NAME=VALUE`.
        files: files of `NAME=VALUE` lines; a value extends to the end of its line, as DeepSpeed
            reads it.

    Raises:
        UserError: NAME is not set here, is not a valid name, is CUDA_VISIBLE_DEVICES, or is a
            secret whose value is on the command line; or a line of a file is not NAME=VALUE.
    """
    job = {n: v for n, v in here.items() if n.startswith(ALLOWED) and n not in NEVER_SENT}
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            text = line.strip().removeprefix("export ")
            if not text or text.startswith("#"):
                continue
            name, equals, value = text.partition("=")
            if not equals or not _is_name(name):
                raise UserError(f"{path}:{number}: not a line of the form NAME=VALUE")
            job[name] = value
    for item in added:
        name, equals, value = item.partition("=")
        if not _is_name(name):
            raise UserError(f"--env {name}: not the name of a variable")
        if name == "CUDA_VISIBLE_DEVICES":
            raise UserError(
                f"--env {name}: the hostfile decides which devices are used; to select some, give "
                "--include, as in --include node-1:0,2"
            )
        if equals and is_secret(name, value):
            raise UserError(
                f"--env {name}=...: everyone on this machine can read command lines; set {name} in "
                f"the environment and give --env {name}"
            )
        if not equals and name not in here:
            raise UserError(f"--env {name}: not set here; set it, or give --env {name}=VALUE")
        job[name] = value if equals else here[name]
    return job


def environment_of_launcher(here: Mapping[str, str]) -> dict[str, str]:
    """The variables of `here` for processes that log them or put them on command lines, as
    `deepspeed` does.
    """
    return {
        name: value
        for name, value in here.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in FOR_LAUNCHERS)
        and not is_secret(name, value)
    }


def deepspeed_env_files() -> list[Path]:
    """The environment files that `deepspeed` itself would read, in its order."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    return [p for p in dict.fromkeys((Path.home() / name, Path(name))) if p.is_file()]


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*", text) is not None
