"""The hostfile: the hosts of a job and the number of slots, that is ranks, on each of them."""

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import UserError

FORM = "expected `NAME slots=N`"
# Commands get it as an argument: it must not look like an option or a path.
NAME = re.compile(r"[A-Za-z0-9_](?!.*\.\.)[A-Za-z0-9_.-]{0,252}")
MOST_SLOTS = 1024  # the most GPUs in one host are 16 to 72; each slot is a process


@dataclass(frozen=True)
class Host:
    """One line of the hostfile."""

    name: str
    """The name or address that ssh uses."""
    slots: tuple[int, ...]
    """Numbers of the devices to use, one rank per device."""


def read_hostfile(path: str | Path) -> list[Host]:
    """Read a file of `NAME slots=N` lines. Rank 0 is on the first host.

    Empty lines and comments, from a # to the end of the line, are skipped. `max_slots=M`, as in
    Open MPI's hostfiles, is allowed beside slots and must not be lower.

    Raises:
        UserError: the file cannot be read or a line is wrong; names the file and the line.
    """
    hosts: dict[str, Host] = {}
    numbers: dict[str, int] = {}
    for number, line in enumerate(_text_of(path).splitlines(), start=1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        where = f"{path}:{number}"
        name, *words = text.split()
        slots = _slots_of(f"{where}: `{text}`: {FORM}", words)
        if "@" in name:
            raise UserError(
                f"{where}: {name}: user@ is not supported (the launcher splits at @); put `User "
                f"{name.split('@')[0]}` for that host into ~/.ssh/config"
            )
        if not NAME.fullmatch(name):
            raise UserError(f"{where}: {name}: not a valid host name or address")
        if slots > MOST_SLOTS:
            raise UserError(f"{where}: {name} has more than {MOST_SLOTS:,} slots; give its GPUs")
        if slots == 0:
            raise UserError(
                f"{where}: {name} has slots=0; give its number of GPUs, or delete the line"
            )
        if name in hosts:
            raise UserError(f"{where}: {name} is already listed in line {numbers[name]}")
        hosts[name], numbers[name] = Host(name, tuple(range(slots))), number
    if not hosts:
        raise UserError(f"hostfile {path}: no hosts; {FORM} on each line")
    return list(hosts.values())


def _text_of(path: str | Path) -> str:
    """The text of a hostfile.

    Raises:
        UserError: it cannot be read, is not UTF-8, or begins with a byte-order mark, which
            `deepspeed` and `mpirun` would read as part of the first name.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"hostfile {path}: cannot read it ({error.strerror}); copy hostfile.example and edit it"
        ) from None
    cure = "save it as UTF-8 without a byte-order mark (BOM)"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path}:1: the file is UTF-16; {cure}")
    if content.startswith(codecs.BOM_UTF8):
        raise UserError(f"{path}:1: the file begins with a byte-order mark; {cure}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{number}: not UTF-8 text; {cure}") from None


def _slots_of(where: str, words: Sequence[str]) -> int:
    """The number of slots given by the words after a host's name.

    Args:
        where: the beginning of an error message.

    Raises:
        UserError: `slots=N` is missing, N is not a whole number, or there are other words.
    """
    if re.search("( |^)=|=( |$)", " ".join(words)):
        raise UserError(f"{where} without spaces around the =")
    counts: dict[str, int] = {}
    for word in words:
        key, _, value = word.replace("max-slots", "max_slots").partition("=")
        if key not in ("slots", "max_slots") or key in counts:
            raise UserError(f"{where}, but found `{word}`; only max_slots=M may follow")
        if not re.fullmatch("[0-9]{1,9}", value):
            raise UserError(f"{where} with a whole number, not `{word}`")
        counts[key] = int(value)
    if "slots" not in counts:
        missing = f"{where}; slots=N, the number of GPUs, is missing"
        if "max_slots" in counts:
            missing += "; max_slots is only an upper limit"
        raise UserError(missing)
    if counts["slots"] > counts.get("max_slots", counts["slots"]):
        raise UserError(
            f"{where}: slots={counts['slots']} is more than max_slots={counts['max_slots']}; "
            "lower slots, or delete max_slots"
        )
    return counts["slots"]


def select_hosts(hosts: Sequence[Host], include: str, exclude: str) -> list[Host]:
    """The hosts and slots selected by --include or --exclude.

    The syntax and its meaning are those of `deepspeed` (parse_inclusion_exclusion):
    `node-1@node-2:0,2`. A host without slots means all of its slots, unless it is also given with
    slots.

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
        wanted = {int(s) for s in slots.split(",")} if colon else set()
        if unknown := wanted - set(known[name].slots):
            raise UserError(
                f"{option} {part}: {name} has slots 0 to {len(known[name].slots) - 1}, "
                f"not {min(unknown)}"
            )
        chosen.setdefault(name, set()).update(wanted)
    selected = []
    for host in hosts:
        named = chosen[host.name] or set(host.slots) if host.name in chosen else set()
        slots = tuple(s for s in host.slots if (s in named) == bool(include))
        if slots:
            selected.append(Host(host.name, slots))
    if not selected:
        raise UserError(f"{option} {include or exclude}: leaves no hosts")
    return selected


def format_hostfile(hosts: Sequence[Host]) -> str:
    """The hosts as text that read_hostfile, `deepspeed --hostfile` and `mpirun` can read. It has
    only the number of slots per host; cluster/rank.py selects the devices.
    """
    return "".join(f"{host.name} slots={len(host.slots)}\n" for host in hosts)


def world_size(hosts: Sequence[Host]) -> int:
    return sum(len(host.slots) for host in hosts)
