"""Say which rank has not joined a collective, after a run has hung.

    python -m scripts.who_waits runs/mine
    python -m scripts.who_waits FOLDER        # of files that torch has written at the timeout

At 9/10 of the timeout, each rank writes its last collectives to collectives_RANK in the run folder.
With a disk per node, copy these files into one folder first. Reading them runs no code in them.
"""

import argparse
import re
from pathlib import Path

from zerotrain.runtime.errors import UserError, exit_on_error, printable
from zerotrain.tools.collectives import known_hosts, read_calls, who_waits

SAME_HANG_SECONDS = 600
"""Files of one hang are not older than the newest by more."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the run folder, or another")
    folder = parser.parse_args().folder
    times = {
        path: path.stat().st_mtime
        for path in sorted(folder.glob("*_*[0-9]"))
        if path.is_file() and re.fullmatch(r"[a-z_]+_\d+", path.name)
    }
    if not times:
        raise UserError(
            f"{folder}: no files with collectives of ranks; give the run folder of a run that has "
            "hung for 9/10 of distributed.timeout_seconds"
        )
    by_rank, hosts = {}, known_hosts(folder)
    for path, time in times.items():
        if time > max(times.values()) - SAME_HANG_SECONDS:
            rank, host, calls = read_calls(path)
            by_rank[rank] = calls
            hosts[rank] = host or hosts.get(rank, "")
    lines = [*who_waits(by_rank, hosts)]
    same = f"all {len(by_rank)} ranks have made the same calls: look at their stacks and GPUs"
    for line in lines or [same]:
        print(printable(line))


if __name__ == "__main__":
    exit_on_error(main)
