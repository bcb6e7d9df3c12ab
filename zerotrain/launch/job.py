"""A job on the hosts of a hostfile, and the command-line options that describe it."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import Config
from zerotrain.launch.hostfile import Hosts, read_hosts
from zerotrain.runtime.errors import UserError

PREFIXES = (
    "NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "TRITON_", "CUDA_", "CUBLAS_", "OMP_",
    "HF_", "WANDB_", "MLFLOW_", "SWANLAB_", "TRACKIO_", "DS_", "BACKUP_URL",
)  # fmt: skip
"""Beginnings of the names of environment variables that are always sent to the hosts."""


@dataclass(frozen=True)
class Job:
    """A command and the hosts to run it on."""

    hosts: Hosts
    command: list[str]
    """The script and its arguments, without `python`."""
    environment: dict[str, str]
    """Variables for the ranks. They travel through ssh's standard input, never on a command line:
    no shell expands them, and other users of a machine cannot read them.
    """
    ssh: list[str]
    """The ssh command with its options."""
    master_addr: str | None = None
    config: Config | None = None
    """The run config if the script is train.py or the rehearsal of a run."""


def ssh_command(ssh_args: str) -> list[str]:
    """Return the ssh command with its options.

    It never prompts. It ends when the host has been silent for three intervals, 36 s.

    Raises:
        UserError: --ssh_args has an open quote.
    """
    try:
        given = shlex.split(ssh_args)
    except ValueError as error:
        raise UserError(f"--ssh_args {ssh_args}: {error}") from None
    options = ("BatchMode=yes", "ConnectTimeout=10", "ControlPath=none",
               "ServerAliveInterval=12", "ServerAliveCountMax=2")  # fmt: skip
    return ["ssh", "-T", *given, *(f"-o{option}" for option in options)]


def remote_command(job: Job, host: str, module: str) -> list[str]:
    """Return the command that runs a module on a host, in this process's working folder."""
    python = shlex.join([sys.executable, "-u", "-m", module])
    return [*job.ssh, host, f"cd {shlex.quote(str(Path.cwd()))} && exec {python}"]


def needs_of(host: str) -> str:
    """Return what a host needs to start ranks, for the message that it does not."""
    python = Path(sys.executable).resolve()
    return (
        f"needs `ssh -o BatchMode=yes {host}` without a password, and code, .venv and its Python "
        f"({python}) at the same paths as here"
    )


def host_parser(needs_hostfile: bool = False, **settings: Any) -> argparse.ArgumentParser:
    """Return a parser of the options that select the hosts and say how to reach them.

    Args:
        settings: arguments of ArgumentParser.
    """
    parser = argparse.ArgumentParser(**settings, allow_abbrev=False)
    add = parser.add_argument
    lines = "file of `NAME slots=N` lines; see hostfile.example"
    add("--hostfile", required=needs_hostfile, metavar="FILE", help=lines)
    add("--include", default="", metavar="SPEC", help="use only node-1@node-2:0,2")
    add("--exclude", default="", metavar="SPEC", help="use all except node-1@node-2:0,2")
    add("--ssh_args", default="", metavar="ARGS", help='options of ssh, as in "-F my_ssh_config"')
    return parser


def job_parser(program: str) -> argparse.ArgumentParser:
    """Return a parser of the options that launch.sh, preflight.py and scaling_test.py share."""
    usage = "%(prog)s --hostfile FILE [options] -- train.py --config FILE ..."
    parser = host_parser(needs_hostfile=True, prog=program, usage=usage)
    add = parser.add_argument
    add("command", nargs="+", metavar="SCRIPT", help="after --, the script and its arguments")
    address = "address of the first host for the others; default: the address that ssh uses"
    add("--master_addr", metavar="ADDRESS", help=address)
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME",
        help="environment variable to send to the ranks. Always sent: "
        f"{', '.join(f'{prefix}*' for prefix in PREFIXES)}",
    )
    return parser


def variables_to_send(names: Sequence[str]) -> dict[str, str]:
    """Return the variables of this process with a name in `names` or a known prefix.

    Raises:
        UserError: a name is not set.
    """
    for name in names:
        if name not in os.environ:
            raise UserError(
                f"--env {name.partition('=')[0]}: not set here; give the name of a variable that "
                "is, as in `NAME=VALUE scripts/launch.sh --env NAME ...`"
            )
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIXES) or name in names
    }


def job_of(arguments: argparse.Namespace) -> Job:
    """Return the job that the command line describes.

    Raises:
        UserError: the command, the hostfile, an option or the run config is wrong.
    """
    script, *rest = arguments.command
    if not Path(script).is_file():
        raise UserError(
            f"{script}: no such script; after --, give the script and its arguments, as in "
            "`-- train.py --config recipes/demo.yaml`"
        )
    config = None
    if Path(script).stem in ("train", "rehearse"):
        config = parse_command_line(rest).config
    if any(Path(folder, ".deepspeed_env").exists() for folder in (".", Path.home())):
        raise UserError(
            ".deepspeed_env: only `deepspeed` reads this file; rename it, set its variables in "
            "this shell, and name them with --env"
        )
    return Job(
        hosts=read_hosts(arguments.hostfile, arguments.include, arguments.exclude),
        command=arguments.command,
        environment=variables_to_send(arguments.env),
        ssh=ssh_command(arguments.ssh_args),
        master_addr=arguments.master_addr,
        config=config,
    )
