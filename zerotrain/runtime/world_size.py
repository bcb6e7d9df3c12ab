"""Whether as many ranks have started as the config and the hostfile say."""

import argparse
import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil
from deepspeed.launcher.runner import fetch_hostfile

from zerotrain.runtime.errors import UserError
from zerotrain.runtime.rank_env import rank_variables


def check_world_size(expected: int | None) -> None:
    """Check the world size against distributed.world_size and the hostfile of a bare `deepspeed
    --hostfile FILE`, which only warns if FILE is missing and then trains on one machine.

    Args:
        expected: distributed.world_size.

    Raises:
        UserError: names the place that says otherwise.
    """
    world_size = int(rank_variables(os.environ).get("WORLD_SIZE", "1"))
    expectations = {"distributed.world_size": expected}
    for process in psutil.Process().parents():
        with suppress(psutil.Error):
            hostfile, is_filtered = _hostfile_of(process.cmdline())
            if hostfile is not None:
                slots = fetch_hostfile(str(Path(process.cwd()) / hostfile))
                if slots is None:
                    raise UserError(
                        f"hostfile {hostfile}: cannot read it: No such file or directory; "
                        "deepspeed would train on this machine alone"
                    )
                if not is_filtered:
                    expectations[f"--hostfile {hostfile}"] = sum(slots.values())
    for name, number in expectations.items():
        if number not in (None, world_size):
            raise UserError(
                f"{name} says {number} ranks, but WORLD_SIZE is {world_size}: "
                f"this process is on {socket.gethostname()}; were all hosts started, with the same "
                "hostfile?"
            )


def _hostfile_of(words: list[str]) -> tuple[str | None, bool]:
    """FILE of a `deepspeed --hostfile FILE [options] script.py ...`, and whether the options select
    some of its hosts.
    """
    if not any(Path(word).name == "deepspeed" for word in words[:2]):
        return None, False
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-H", "--hostfile")
    filters = ("-i", "--include", "-e", "--exclude", "--num_nodes", "--num_gpus")
    parser.add_argument(*filters, dest="filter")
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    options, _ = parser.parse_known_args(words[:script])
    return options.hostfile, options.filter is not None
