"""Which rank has not joined a collective, from the records that torch keeps of each rank's calls.

A rank's file has one record for each library. It is what HangWatch has written, or a pickle of
torch's own (TORCH_FR_DUMP_TEMP_FILE). Every library numbers the calls in a group of ranks, so calls
of the same number belong together. torch has an analyzer too, but it unpickles the files, evaluates
texts in them, and finds no groups in gloo's.
"""

import io
import json
import pickle
import re
import reprlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerotrain.runtime.errors import UserError, describe, first_of
from zerotrain.tools.records import read_metrics

MAX_BYTES = 1 << 28
MAX_ENTRIES = 100_000
MAX_TEXT_CHARACTERS = 1 << 20  # enough for a group's list of ranks
MAX_CALL_CHARACTERS = 200
SIZES = reprlib.Repr()  # writes the sizes of a call's tensors, and ... for further ones
SIZES.maxlevel, SIZES.maxlist, SIZES.maxtuple = 3, 16, 16
HEAD = re.compile(r"\[rank (\d+) @ ([^]]*)\] ")
OF_OTHER_SIZES = re.compile(r":(gather|scatter|all_?to_?all)")
"""Calls whose tensors may have another size on each rank."""
Group = tuple[str, str]
"""Name and description; the members, if they are recorded."""
Calls = Mapping[Group, Mapping[int, str]]
"""The calls of a rank: those in a group by their numbers, as texts that are equal on all ranks."""


class DataUnpickler(pickle._Unpickler):
    """Builds containers, texts and numbers only. It is the one written in Python, because the other
    allocates as much memory as a file demands.
    """

    def find_class(self, module: str, name: str) -> None:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_calls(file: Path) -> tuple[int, str, Calls]:
    """Return a rank, its host, "" if it is not recorded, and its calls.

    Raises:
        UserError: the file is no such record.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES)
        head, *lines = data.splitlines()
        if named := HEAD.fullmatch(head.decode(errors="replace")):
            rank, host = named.groups()
            records = [json.loads(line) for line in lines]
        else:
            rank, host = re.search(r"\d*$", file.name)[0], ""
            records = [DataUnpickler(io.BytesIO(data)).load()]
        calls = defaultdict(dict)
        for record in records:
            add_calls(record, calls)
        return int(rank), host, calls
    except Exception as error:  # unpickling and a record of another shape raise many kinds
        raise UserError(
            f"{file}: not a record of collectives ({describe(error)[:200]}); give the files that "
            "one hang has left"
        ) from error


def add_calls(record: Mapping[str, Any], calls: dict[Group, dict[int, str]]) -> None:
    """Add the calls of a record, in torch's format 2.

    A pickle of a few bytes may stand for lists of any size, which contain each other. So only texts
    and numbers are taken as they are, and only the first values of lists.
    """
    if not text_of(record["version"]).startswith("2."):
        raise ValueError(f"its version is {record['version']}, not 2")
    entries = record.get("entries", [])
    if len(entries) > MAX_ENTRIES:
        raise ValueError(f"it has over {MAX_ENTRIES:,} calls")
    groups = {
        name: (f"{name} ({text_of(group['desc'])})", text_of(group["ranks"]))
        for name, group in record["pg_config"].items()
        if group["ranks"] != "[]"  # as in gloo's records
    } or {"0": ("0 (default_pg)", "")}
    partial = None
    if entries and entries[0]["record_id"] > 0:
        # A full record drops its oldest calls. Of those with this number it may have dropped some.
        partial = place_of(entries[0])
    else:  # A group without calls has none.
        calls.update({group: {} for group in groups.values() if group not in calls})
    coalesced = defaultdict(list)  # calls that share a number
    for entry in entries:
        place = place_of(entry)
        if entry["is_p2p"] or place == partial:
            continue
        name, description, number = place
        text = text_of(entry["profiling_name"])
        if not OF_OTHER_SIZES.search(text):
            text += f" {SIZES.repr(entry['input_sizes'])}"
        group = groups.get(name, (f"{name} ({description})", ""))
        coalesced[group, number].append(text)
    for (group, number), texts in coalesced.items():
        text = " + ".join([*filter(None, [calls[group].get(number)]), *texts])
        if len(text) > MAX_CALL_CHARACTERS:
            digest = zlib.crc32(text.encode(errors="replace"))
            text = f"{text[:MAX_CALL_CHARACTERS]} ... ({len(text):,} characters, {digest:08x})"
        calls[group][number] = text


def place_of(entry: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return the name and description of a call's group, and its number there."""
    name, description = entry["process_group"]
    return text_of(name), text_of(description), int(entry["collective_seq_id"]) % (1 << 64)


def text_of(value: Any) -> str:
    """Return a text as it is. Raises ValueError: it is something else, or too long."""
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARACTERS:
        raise ValueError("not a short text")
    return value


def disagreements(by_rank: Mapping[int, Calls]) -> Iterator[tuple[Group, int, dict[int, str]]]:
    """Yield the first call on which the ranks of a group disagree, for each such group: the group,
    the call's number, and each rank's call of that number, "" for none.
    """
    for group in dict.fromkeys(group for calls in by_rank.values() for group in calls):
        known = {rank: calls[group] for rank, calls in by_rank.items() if group in calls}
        # A full record has dropped its oldest calls, on each rank another number of them.
        first = max((min(calls) for calls in known.values() if calls), default=0)
        numbers = {number for calls in known.values() for number in calls if number >= first}
        for number in sorted(numbers):
            found = {rank: calls.get(number, "") for rank, calls in known.items()}
            if len({*found.values()}) > 1:
                yield group, number, found
                break


def who_waits(by_rank: Mapping[int, Calls], hosts: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each rank that is not in the same call as most ranks of a group.

    Args:
        hosts: the host of each rank of the run, "" if unknown.
    """

    def named(rank: int) -> str:
        return f"rank {rank} @ {hosts[rank]}" if hosts.get(rank) else f"rank {rank}"

    for rank in sorted(hosts.keys() - by_rank.keys()):
        yield f"{named(rank)}: no record: it is stopped, or busy outside Python, or lost"
    for place, number, found in disagreements(by_rank):
        group, _ = place
        # If as many ranks differ, those are right whose call has followed the last one before, as
        # in each step of a run; or else those that have made a call.
        calls = by_rank[min(found)][place]
        last = calls.get(number - 1)
        before = {calls[n] for n in calls if n < number and calls.get(n - 1) == last}
        counts = Counter(found.values())
        usual = max(found.values(), key=lambda call: (counts[call], call in before, call != ""))
        others = f"ranks {first_of([rank for rank, call in found.items() if call == usual])}"
        where = f"call {number} of group {group}"
        for rank, call in sorted(found.items()):
            if call and not usual:
                yield f"{named(rank)} waits in {call}, {where}, which {others} have not called"
            elif call != usual:
                done = f"; it has called {call} instead" if call else ""
                yield f"{named(rank)} has not joined {usual}, {where}, which {others} have{done}"


def known_hosts(run_folder: Path) -> dict[int, str]:
    """Return the hosts of a run's ranks, "" if it has not recorded them yet; empty if the folder is
    none of a run.
    """
    with suppress(UserError, LookupError, TypeError, ValueError):
        hosts = dict.fromkeys(range(read_metrics(run_folder, "start")[-1]["world_size"]), "")
        for window in read_metrics(run_folder, "ranks")[-1:]:
            hosts |= {rank: str(each["host"]) for rank, each in enumerate(window["ranks"])}
        return hosts
    return {}
