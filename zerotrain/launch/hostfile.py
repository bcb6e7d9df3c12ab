"""The hostfile: the hosts of a job and the number of slots, that is ranks, on each of them."""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerotrain.runtime.errors import UserError, describe

LINE = re.compile(r"(\S+)\s+slots=(\d{1,4})(\s+max[_-]slots=\d{1,4})?")
# ssh gets it as an argument: it must not look like an option.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
MAX_SLOTS = 1024


@dataclass(frozen=True)
class Host:
    """One line of the hostfile."""

    name: str
    """The name or address that ssh uses."""
    slots: tuple[int, ...]
    """Numbers of the devices to use, one rank per device."""


def read_hostfile(path: str | Path) -> list[Host]:
    """Read a file of `NAME slots=N` lines, as `deepspeed --hostfile` reads it. Rank 0 is on the
    first host.

    Raises:
        UserError: the file cannot be read or a line is wrong; names the file and the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"hostfile {path}: cannot read it as UTF-8 text ({describe(error)}); copy "
            "hostfile.example and edit it"
        ) from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#")[0].strip()
        if not content:
            continue
        where = f"{path}:{number}: `{content[:80]}`"
        match = LINE.fullmatch(content)
        if match is None:
            raise UserError(f"{where}: expected `NAME slots=N` with the number of GPUs as N")
        name = match[1]
        slots = int(match[2])
        if not NAME.fullmatch(name):
            raise UserError(
                f"{where}: {name!r} is no host name or IPv4 address; a user, a port or an IPv6 "
                "address belongs under a name in ~/.ssh/config"
            )
        if not 1 <= slots <= MAX_SLOTS:
            raise UserError(f"{where}: give the number of GPUs, 1 to {MAX_SLOTS}, as slots")
        if name in hosts:
            raise UserError(f"{where}: {name} is already listed above")
        hosts[name] = Host(name, tuple(range(slots)))
    if not hosts:
        raise UserError(f"hostfile {path}: no hosts; expected `NAME slots=N` on each line")
    return list(hosts.values())


def select_hosts(hosts: Sequence[Host], include: str, exclude: str) -> list[Host]:
    """The hosts and slots selected by --include or --exclude, with the syntax and the meaning of
    `deepspeed` (parse_inclusion_exclusion): `node-1@node-2:0,2`.

    Raises:
        UserError: an unknown host or slot, both options at once, or no hosts left.
    """
    if include and exclude:
        raise UserError("give --include or --exclude, not both")
    if not include and not exclude:
        return list(hosts)
    option = "--include" if include else "--exclude"
    known = {host.name: host for host in hosts}
    chosen: dict[str, set[int]] = {}
    for part in (include or exclude).split("@"):
        name, colon, slots = part.partition(":")
        if name not in known:
            raise UserError(f"{option} {part}: no such host in the hostfile ({', '.join(known)})")
        if colon and not re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", slots):
            raise UserError(f"{option} {part}: write slots as numbers with commas: {name}:0,2")
        wanted = {int(slot) for slot in slots.split(",")} if colon else set()
        if unknown := wanted - set(known[name].slots):
            raise UserError(
                f"{option} {part}: {name} has slots 0 to {len(known[name].slots) - 1}, "
                f"not {min(unknown)}"
            )
        chosen.setdefault(name, set()).update(wanted)
    selected = []
    for host in hosts:
        named = chosen[host.name] or set(host.slots) if host.name in chosen else set()
        slots = tuple(slot for slot in host.slots if (slot in named) == bool(include))
        if slots:
            selected.append(Host(host.name, slots))
    if not selected:
        raise UserError(f"{option} {include or exclude}: leaves no hosts")
    return selected


def between(least: int, most: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        if not (text.isdecimal() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text} is no number from {least} to {most}")
        return int(text)

    return number


def world_size(hosts: Sequence[Host]) -> int:
    return sum(len(host.slots) for host in hosts)
