"""Preflight's checks of hosts: what each says of itself (zerotrain/launch/report.py), and how they
differ.
"""

import json
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from zerotrain.launch.job import Job, remote_command
from zerotrain.launch.report import MARK
from zerotrain.runtime.errors import first_of

REPORT_SECONDS = 120  # fingerprints of a model's files take some
MAX_CLOCK_SECONDS = 1.0
CHECKS = (
    "ssh", "versions", "code", "clock", "gpus", "config", "model", "data", "disk", "limits",
)  # fmt: skip
SHARE = "copy one version to all hosts, or share the disk"
CURES = {
    "versions": "install requirements.txt there",
    "code": "check out one commit",
    "gpus": "use hosts with the same GPUs",
    "config": SHARE,
    "model": SHARE,
    "data": SHARE,
}
"""What to do where hosts differ, by section of a report's `same`."""


class Finding(NamedTuple):
    """A problem that a check has found on a host."""

    host: str
    check: str
    text: str
    """What is wrong, and what to do."""

    @property
    def level(self) -> str:
        return "warn" if self.text.endswith("?") else "FAIL"


Reports = Mapping[str, Mapping[str, Any]]
"""What each host has reported; one that could not be reached has only `problems`."""


def report_of(job: Job, host: str) -> dict[str, Any]:
    """What a host reports, with the seconds by which its clock is ahead of the one here."""
    argv = job.command[1:] if job.config is not None else None
    try:
        done = subprocess.run(
            remote_command(job, host, "zerotrain.launch.report"), capture_output=True, text=True,
            input=json.dumps([argv, len(job.hosts[host])]), timeout=REPORT_SECONDS,
            start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"problems": [("ssh", f"no report within {REPORT_SECONDS} s")]}
    _, mark, text = done.stdout.rpartition(MARK)
    if not mark:
        last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        why = (
            f"{last[-1].removeprefix('ssh: ')}; needs `ssh -o BatchMode=yes {host}` without a "
            "password, and code and .venv at the same paths as here"
        )
        return {"problems": [("ssh", why)]}
    report = json.loads(text)
    return {**report, "ahead_seconds": report["clock"] - time.time()}


def differences(reports: Reports) -> Iterator[Finding]:
    """Versions, files, GPUs and clocks of hosts that are not as those of most hosts, on a tie as
    those of the first; and what cannot be read on a host.
    """
    reached = {host: report for host, report in reports.items() if "same" in report}
    for check, cure in CURES.items():
        found = {h: r["same"][check] for h, r in reached.items() if check in r["same"]}
        odd = {host: [] for host in found}
        for name in sorted({name for values in found.values() for name in values}):
            values = {host: there.get(name, "missing") for host, there in found.items()}
            usual = Counter(values.values()).most_common(1)[0][0]
            for host, value in values.items():
                if value != usual or value.startswith("cannot be read"):
                    odd[host].append(f"{name}: {value}, elsewhere {usual}")
        yield from (Finding(h, check, f"{first_of(o)}; {cure}") for h, o in odd.items() if o)
    ahead = {host: report["ahead_seconds"] for host, report in reached.items()}
    middle = statistics.median([0.0, *ahead.values()])
    for host, seconds in ahead.items():
        if abs(seconds - middle) > MAX_CLOCK_SECONDS:
            text = (
                f"clock is {seconds - middle:+.1f} s from the others'; start chrony or ntpd there"
            )
            yield Finding(host, "clock", text)


def check_hosts(job: Job) -> tuple[Reports, list[Finding]]:
    """The reports of all hosts, and what is wrong."""
    with ThreadPoolExecutor(64) as pool:
        found = pool.map(partial(report_of, job), job.hosts)
        reports = dict(zip(job.hosts, found, strict=True))
    own = [Finding(host, *problem) for host, r in reports.items() for problem in r["problems"]]
    return reports, [*own, *differences(reports)]
