"""A job on the hosts of a hostfile, and the command-line options that describe it."""

import argparse
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import Config
from zerotrain.launch.environment import PREFIXES, deepspeed_env_files, environment_of_job
from zerotrain.launch.hostfile import Hosts, between, read_hosts, world_size
from zerotrain.runtime.errors import UserError


@dataclass(frozen=True)
class Job:
    """A command and the hosts to run it on."""

    hosts: Hosts
    command: list[str]
    """The script and its arguments, without `python`."""
    environment: dict[str, str]
    ssh: list[str]
    """The ssh command with its options."""
    heartbeat_seconds: int = 60
    master_addr: str | None = None
    config: Config | None = None
    """The run config if the script is train.py or scripts/rehearse.py."""


def ssh_command(ssh_args: str, heartbeat_seconds: int = 60) -> list[str]:
    """Return the ssh command with its options.

    It never prompts. It ends within `heartbeat_seconds` after the host has fallen silent.

    Raises:
        UserError: --ssh_args has an open quote.
    """
    try:
        given = shlex.split(ssh_args)
    except ValueError as error:
        raise UserError(f"--ssh_args {ssh_args}: {error}") from None
    interval = max(1, heartbeat_seconds // 5)  # ssh gives up after three intervals
    options = ("BatchMode=yes", "ConnectTimeout=10", "ControlPath=none",
               f"ServerAliveInterval={interval}", "ServerAliveCountMax=2")  # fmt: skip
    return ["ssh", "-T", *given, *(f"-o{option}" for option in options)]


def remote_command(job: Job, host: str, module: str) -> list[str]:
    """Return the command that runs a module on a host, in this process's working folder."""
    python = shlex.join([sys.executable, "-u", "-m", module])
    return [*job.ssh, host, f"cd {shlex.quote(str(Path.cwd()))} && exec {python}"]


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
        help="environment variable to send to the ranks. Always sent: variables in .deepspeed_env, "
        f"and {', '.join(f'{prefix}*' for prefix in PREFIXES)}",
    )
    add(
        "--heartbeat_seconds",
        type=between(5, 86_400),
        default=60,
        metavar="N",
        help="seconds until the job ends on all hosts after a host stops responding (60)",
    )
    return parser


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
    hosts = read_hosts(arguments.hostfile, arguments.include, arguments.exclude)
    config = None
    if Path(script).stem in ("train", "rehearse"):
        config = parse_command_line(rest).config
        slots = world_size(hosts)
        if config.distributed.world_size not in (None, slots):
            raise UserError(
                f"distributed.world_size is {config.distributed.world_size}, but the slots of "
                f"{arguments.hostfile} add up to {slots}; change one of them"
            )
    return Job(
        hosts=hosts,
        command=arguments.command,
        environment=environment_of_job(os.environ, arguments.env, deepspeed_env_files()),
        ssh=ssh_command(arguments.ssh_args, arguments.heartbeat_seconds),
        heartbeat_seconds=arguments.heartbeat_seconds,
        master_addr=arguments.master_addr,
        config=config,
    )
