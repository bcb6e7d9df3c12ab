"""A job on the hosts of a hostfile: what it runs, where, how hosts are reached; its options."""

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
    master_port: int | None = None
    config: Config | None = None
    """The run config if the script is train.py, or rehearses it."""


def ssh_command(ssh_args: str, heartbeat_seconds: int = 60) -> list[str]:
    """ssh with its options: it never prompts, and ends when the host has been silent.

    Raises:
        UserError: --ssh_args has an open quote.
    """
    try:
        given = shlex.split(ssh_args)
    except ValueError as error:
        raise UserError(f"--ssh_args {ssh_args}: {error}") from None
    interval = max(1, heartbeat_seconds // 5)  # ssh ends after three intervals
    options = ("BatchMode=yes", "ConnectTimeout=10", "ControlPath=none",
               f"ServerAliveInterval={interval}", "ServerAliveCountMax=2")  # fmt: skip
    return ["ssh", "-T", *given, *(f"-o{option}" for option in options)]


def remote_command(job: Job, host: str, module: str) -> list[str]:
    """The command that runs a module on a host, in the folder that this process is in."""
    python = shlex.join([sys.executable, "-u", "-m", module])
    return [*job.ssh, host, f"cd {shlex.quote(str(Path.cwd()))} && exec {python}"]


def host_parser(**settings: Any) -> argparse.ArgumentParser:
    """A parser of the options that say which hosts there are and how to reach them.

    Args:
        settings: of the parser.
    """
    parser = argparse.ArgumentParser(**settings, allow_abbrev=False)
    add = parser.add_argument
    add("--hostfile", help="a file of `NAME slots=N` lines; see hostfile.example")
    add("--include", default="", metavar="SPEC", help="only these: node-1@node-2:0,2")
    add("--exclude", default="", metavar="SPEC", help="all but these")
    add("--ssh_args", default="", metavar="ARGS", help='options of ssh: "-F my_ssh_config"')
    return parser


def job_parser(program: str) -> argparse.ArgumentParser:
    """A parser of the options that launch.sh, preflight.py and scaling_test.py share."""
    usage = "%(prog)s --hostfile FILE [options] -- train.py --config FILE ..."
    parser = host_parser(prog=program, usage=usage)
    add = parser.add_argument
    add("command", nargs="*", help="after --, the script to run and its arguments")
    add("--master_addr", metavar="ADDRESS", help="of the first host; default: as ssh reaches it")
    add("--master_port", type=between(1, 65535), metavar="PORT", help="default: a free port")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help=f"also send this variable; {', '.join(f'{prefix}*' for prefix in PREFIXES)} and those "
        "in .deepspeed_env are always sent",
    )
    add(
        "--heartbeat_seconds",
        type=between(5, 86_400),
        default=60,
        metavar="N",
        help="when a host stops responding, the job ends on all hosts within this time (60)",
    )
    return parser


def job_of(arguments: argparse.Namespace) -> Job:
    """The job described by the command line.

    Raises:
        UserError: the command, the hostfile, an option or the run config is wrong.
    """
    command = arguments.command
    script, *rest = command or [""]
    if script.startswith("-"):
        script, rest = "", command
    if not arguments.hostfile or not Path(script).is_file():
        problem = f"there is no script {script}" if script else "the script is missing"
        raise UserError(
            f"{problem if arguments.hostfile else '--hostfile is missing'}; give both, as in "
            f"`--hostfile hostfile -- train.py {' '.join(rest) or '--config recipes/demo.yaml'}` "
            "with a copy of hostfile.example"
        )
    hosts = read_hosts(arguments.hostfile, arguments.include, arguments.exclude)
    config = None
    if Path(command[0]).stem in ("train", "rehearse"):
        config = parse_command_line(command[1:]).config
        slots = world_size(hosts)
        if config.distributed.world_size not in (None, slots):
            raise UserError(
                f"distributed.world_size is {config.distributed.world_size}, but the slots of "
                f"{arguments.hostfile} add up to {slots}; change one of them"
            )
    return Job(
        hosts=hosts,
        command=command,
        environment=environment_of_job(os.environ, arguments.env, deepspeed_env_files()),
        ssh=ssh_command(arguments.ssh_args, arguments.heartbeat_seconds),
        heartbeat_seconds=arguments.heartbeat_seconds,
        master_addr=arguments.master_addr,
        master_port=arguments.master_port,
        config=config,
    )
