"""The hostfile: the hosts of a job and the number of slots, that is ranks, on each of them."""

import argparse
import re
from collections.abc import Callable, Mapping

from zerotrain.runtime.errors import UserError
from zerotrain.runtime.files import read_text

# ssh gets the name as an argument: it must not look like an option.
LINE = re.compile(
    r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,252})\s+slots=([1-9]\d{0,2})(\s+max[_-]slots=\d{1,4})?"
)
Hosts = Mapping[str, list[int]]
"""Numbers of the devices to use, one rank per device, by the name or address that ssh uses. Rank 0
is on the first host.
"""


def read_hosts(path: str, include: str = "", exclude: str = "") -> Hosts:
    """Read a file of `NAME slots=N` lines, as `deepspeed --hostfile` reads it.

    Args:
        include, exclude: hosts and slots to use or to leave out, with the syntax and the meaning
            of `deepspeed`: `node-1@node-2:0,2`.

    Raises:
        UserError: the file cannot be read, or a line, which is named, or a selection is wrong.
    """
    counts = {}
    for number, line in enumerate(read_text(path, "hostfile: ").splitlines(), start=1):
        content = line.split("#")[0].strip()
        if not content:
            continue
        match = LINE.fullmatch(content)
        if match is None or match[1] in counts:
            raise UserError(
                f"{path}:{number}: `{content[:80]}`: expected `NAME slots=N`, once for each host, "
                "with 1 to 999 GPUs as N and a host name or IPv4 address as NAME; a user, a port "
                "or an IPv6 address belongs under a name in ~/.ssh/config"
            )
        counts[match[1]] = int(match[2])
    if not counts:
        raise UserError(f"hostfile {path}: no hosts; expected `NAME slots=N` on each line")
    if not include and not exclude:
        return {name: list(range(slots)) for name, slots in counts.items()}
    from deepspeed.launcher.runner import parse_inclusion_exclusion  # takes seconds

    try:
        if selected := parse_inclusion_exclusion(counts, include, exclude):
            return selected
        raise ValueError("no hosts are left")
    except ValueError as error:
        raise UserError(
            f"--include '{include}' --exclude '{exclude}': {error}; give one of them, with hosts "
            f"of {path} and their slots, counted from 0: node-1@node-2:0,2"
        ) from None


def between(least: int, most: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        if not (text.isdecimal() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text} is no number from {least} to {most}")
        return int(text)

    return number


def world_size(hosts: Hosts) -> int:
    return sum(map(len, hosts.values()))
