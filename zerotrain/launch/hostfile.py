"""Read a hostfile: the hosts of a job, and the number of slots (ranks) on each host."""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from zerotrain.runtime.errors import UserError
from zerotrain.runtime.files import read_text

# ssh gets the name as an argument, so it must not look like an option.
LINE = re.compile(
    r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,252})\s+slots=([1-9]\d{0,2})(\s+max[_-]slots=\d{1,4})?"
)
Hosts = Mapping[str, list[int]]
"""The device numbers to use, one rank per device, by the name or address that ssh uses. Rank 0 is
on the first host.
"""


def read_hosts(path: str, include: str = "", exclude: str = "") -> Hosts:
    """Return the hosts of a file of `NAME slots=N` lines, as `deepspeed --hostfile` reads it.

    Args:
        include, exclude: hosts and slots to use or to leave out, in `deepspeed`'s syntax:
            `node-1@node-2:0,2`.

    Raises:
        UserError: the file cannot be read, or a line or a selection is wrong.
    """
    counts = {}
    for number, line in enumerate(read_text(path, "hostfile: ").splitlines(), start=1):
        content = line.split("#")[0].strip()
        if not content:
            continue
        match = LINE.fullmatch(content)
        if match is None or match[1] in counts:
            raise UserError(
                f"{path}:{number}: `{content[:80]}`: write `NAME slots=N`, once for each host, "
                "with N from 1 to 999 and a host name or IPv4 address as NAME; set a user, a port "
                "or an IPv6 address for a name in ~/.ssh/config"
            )
        counts[match[1]] = int(match[2])
    if not counts:
        raise UserError(f"hostfile {path}: no hosts; write `NAME slots=N` on each line")
    if not include and not exclude:
        return {name: list(range(slots)) for name, slots in counts.items()}
    from deepspeed.launcher.runner import parse_inclusion_exclusion  # takes seconds

    try:
        if selected := parse_inclusion_exclusion(counts, include, exclude):
            return selected
        raise ValueError("no hosts are left")
    except ValueError as error:
        raise UserError(
            f"--include '{include}' --exclude '{exclude}': {error}; give one of the two, with "
            f"hosts of {path} and slots counted from 0, as in node-1@node-2:0,2"
        ) from None


def between(least: int, most: int) -> Callable[[str], int]:
    """Return an argparse type that accepts whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        if not (text.isdecimal() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text} is not a number from {least} to {most}")
        return int(text)

    return number


def world_size(hosts: Hosts) -> int:
    return sum(map(len, hosts.values()))


def machine_id() -> str:
    """Return an id of this machine. Containers with a network of their own have different ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"


def refuse_same_machine(ids: Mapping[str, str]) -> None:
    """Check that the hosts are different machines.

    Args:
        ids: the `machine_id` of each host.

    Raises:
        UserError: two names are the same machine. Its ranks would share GPUs.
    """
    names = {}
    for host, machine in ids.items():
        if names.setdefault(machine, host) != host:
            raise UserError(
                f"hostfile: {names[machine]} and {host} are the same machine; list it once"
            )
