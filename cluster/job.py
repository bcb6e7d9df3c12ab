"""A job on the hosts of a hostfile: what it runs, where, and how it ended; and its command line."""

import argparse
import asyncio
import os
import re
import shlex
import signal
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster.environment import deepspeed_env_files, environment_of_job
from cluster.hostfile import Host, read_hostfile, select_hosts, world_size
from cluster.hosts import Reach
from config.parse import parse_command_line
from config.schema import Config, LaunchConfig
from runtime.errors import UserError

PLAIN_PATH = re.compile(r"[\w./+=@,:-]+")  # deepspeed does not quote it, pdsh replaces %h and %n
LAUNCHERS = ("pdsh", "openmpi", "slurm", "torchrun")


@dataclass(frozen=True)
class Job:
    """A command and the hosts to run it on."""

    hosts: list[Host]
    command: list[str]
    """The script and its arguments, without `python`."""
    environment: dict[str, str]
    launcher: str = "pdsh"
    config: Config | None = None
    """The run config if the script is train.py."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    master_addr: str | None = None
    master_port: int | None = None
    reach: Reach = field(default_factory=Reach)
    hostfile: str | None = None
    """Path of the file that `hosts` were read from."""
    id: str = ""
    """Identifies all processes and folders of one start of the job."""

    @property
    def needs_all_hosts(self) -> bool:
        """Whether the job cannot continue without one of its hosts: launch.world_size is set, or
        each host has only its own ranks' shards of a checkpoint.
        """
        node_local = self.config is not None and self.config.checkpoint.node_local
        return node_local or self.launch.world_size is not None


def new_id() -> str:
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True)
class Ending:
    """How a job ended."""

    code: int
    cause: str | None = None
    """One line; None if the code is 0."""
    stopped_by_user: bool = False


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the command line into the options before `--` and the command after it."""
    parser = argparse.ArgumentParser(
        prog="scripts/launch.sh",
        usage="scripts/launch.sh --hostfile FILE [options] -- train.py --config FILE ...",
        description="Run a training job on the hosts of a hostfile and return its exit code.",
    )
    add_host_options(parser)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="pdsh", help="default: pdsh")
    parser.add_argument(
        "--max_restarts",
        type=int,
        default=0,
        metavar="N",
        help="after a failure, restart on the healthy hosts from the last complete checkpoint; "
        "give up after N restarts in a row without a newer one",
    )
    options, command = list(argv), []
    if "--" in options:
        end = options.index("--")
        options, command = options[:end], options[end + 1 :]
    parser.add_argument(
        "--heartbeat_seconds",
        type=int,
        metavar="N",
        help="overrides launch.heartbeat_seconds of train.py's config",
    )
    arguments = parser.parse_args(options)
    if arguments.max_restarts < 0:
        parser.error(f"--max_restarts {arguments.max_restarts}: must be at least 0")
    if arguments.heartbeat_seconds is not None and arguments.heartbeat_seconds < 5:
        parser.error(f"--heartbeat_seconds {arguments.heartbeat_seconds}: must be at least 5")
    if not command:
        parser.error("no command; give script and arguments after --: -- train.py --config FILE")
    return arguments, command


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that launch.sh and preflight.py share."""
    add = parser.add_argument
    add("--hostfile", required=True, help="a file of `NAME slots=N` lines; see hostfile.example")
    add("--include", default="", metavar="SPEC", help="only these: node-1@node-2:0,2")
    add("--exclude", default="", metavar="SPEC", help="all but these")
    add("--master_addr", metavar="ADDRESS", help="of the first host; default: one all can reach")
    add("--master_port", type=int, metavar="PORT", help="default: a free port")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="also send this variable; NCCL_*, GLOO_*, TORCH_*, HF_*, WANDB_*, OMP_*, CUDA_*, DS_* "
        "and those in .deepspeed_env are always sent",
    )
    add("--ssh_args", default="", metavar="ARGS", help='options of ssh: "-F my_ssh_config"')


def job_of(arguments: argparse.Namespace, command: list[str]) -> Job:
    """The job described by the command line.

    Raises:
        UserError: the hostfile, an option, the environment, the run config or the path of this
            code is wrong.
    """
    for path in (Path.cwd(), Path(sys.executable)):
        if not PLAIN_PATH.fullmatch(str(path)):
            raise UserError(
                f"{path}: launchers pass this path through shells and pdsh on the hosts; move the "
                "code to one of letters, digits and . _ - + = @ , : only, and make .venv there"
            )
    hosts = select_hosts(read_hostfile(arguments.hostfile), arguments.include, arguments.exclude)
    config, launch = None, LaunchConfig()
    if Path(command[0]).name == "train.py":
        config = parse_command_line(command[1:], validate=False).config
        launch = config.launch
    if getattr(arguments, "heartbeat_seconds", None) is not None:
        launch = replace(launch, heartbeat_seconds=arguments.heartbeat_seconds)
    if launch.world_size not in (None, world_size(hosts)):
        raise UserError(
            f"launch.world_size is {launch.world_size}, but the slots of {arguments.hostfile} "
            f"add up to {world_size(hosts)}"
        )
    return Job(
        hosts=hosts,
        command=command,
        environment=environment_of_job(os.environ, arguments.env, deepspeed_env_files()),
        launcher=getattr(arguments, "launcher", "pdsh"),
        config=config,
        launch=launch,
        master_addr=arguments.master_addr,
        master_port=arguments.master_port,
        reach=Reach(
            ssh_args=tuple(shlex.split(arguments.ssh_args)),
            by_srun=getattr(arguments, "launcher", "") == "slurm",
        ),
        hostfile=arguments.hostfile,
    )


def queue_of_signals() -> "asyncio.Queue[int]":
    """A queue that receives the SIGINT, SIGTERM and SIGUSR1 of this process."""
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        asyncio.get_running_loop().add_signal_handler(number, queue.put_nowait, number)
    return queue
