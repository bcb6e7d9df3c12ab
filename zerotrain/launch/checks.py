"""Preflight's checks: collect a report from every host, and compare the reports."""

import json
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from zerotrain.launch.host_report import Problem
from zerotrain.launch.hostfile import refuse_same_machine
from zerotrain.launch.job import Job, needs_of, remote_command
from zerotrain.runtime.errors import first_of

LOST_CONNECT_SECONDS = 4
REPORT_SECONDS = 120  # checksums of a model's files take a while
MAX_CLOCK_SECONDS = 1.0
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
CHECKS = ("ssh", *CURES, "clock", "disk", "limits")
Reports = Mapping[str, Mapping[str, Any]]
"""The report of each host. An unreachable host's report has only `problems`."""


def read_report(job: Job, host: str) -> dict[str, Any]:
    """Return a host's report, with the seconds by which its clock is ahead of the clock here."""
    argv = job.command[1:] if job.config is not None else None
    try:
        done = subprocess.run(
            remote_command(job, host, "zerotrain.launch.host_report"), capture_output=True,
            input=json.dumps([argv, len(job.hosts[host])]), timeout=REPORT_SECONDS, text=True,
            start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"problems": [("ssh", f"no report within {REPORT_SECONDS} s")]}
    if done.returncode != 0:
        last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        why = f"{last[-1].removeprefix('ssh: ')}; {needs_of(host)}"
        return {"problems": [("ssh", why)]}
    report = json.loads(done.stdout.splitlines()[-1])  # a ~/.bashrc may print lines before it
    return {**report, "ahead_seconds": report["clock"] - time.time()}


def differences(reports: Reports) -> Iterator[tuple[str, Problem]]:
    """Yield (host, problem) where versions, files, GPUs or clocks differ from most hosts.

    If two values are equally frequent, the first host's value is right.
    """
    reached = {host: report for host, report in reports.items() if "same" in report}
    for check, cure in CURES.items():
        found = {h: r["same"][check] for h, r in reached.items() if check in r["same"]}
        usual = {}
        for name in sorted({name for values in found.values() for name in values}):
            counts = Counter(values.get(name, "missing") for values in found.values())
            usual[name] = counts.most_common(1)[0][0]
        for host, values in found.items():
            there = {name: values.get(name, "missing") for name in usual}
            odd = [f"{n}: {v}, elsewhere {usual[n]}" for n, v in there.items() if v != usual[n]]
            if odd:
                yield host, Problem(check, f"{first_of(odd)}; {cure}")
    ahead = {host: report["ahead_seconds"] for host, report in reached.items()}
    middle = statistics.median([0.0, *ahead.values()])
    for host, seconds in ahead.items():
        if abs(seconds - middle) > MAX_CLOCK_SECONDS:
            text = f"{seconds - middle:+.1f} s from the other clocks; start chrony or ntpd there"
            yield host, Problem("clock", text)


def check_hosts(job: Job, lost: Collection[str] = ()) -> tuple[Reports, list[tuple[str, Problem]]]:
    """Return the reports of all hosts, and (host, problem) for each problem.

    Args:
        lost: hosts whose ssh has to answer within LOST_CONNECT_SECONDS.

    Raises:
        UserError: two hosts are the same machine.
    """
    # ssh takes the first value of an option.
    hasty = replace(job, ssh=[job.ssh[0], f"-oConnectTimeout={LOST_CONNECT_SECONDS}", *job.ssh[1:]])
    jobs = [hasty if host in lost else job for host in job.hosts]
    with ThreadPoolExecutor(64) as pool:
        found = pool.map(read_report, jobs, job.hosts)
        reports = dict(zip(job.hosts, found, strict=True))
    refuse_same_machine({host: r["machine"] for host, r in reports.items() if "machine" in r})
    own = [(host, Problem(*problem)) for host, r in reports.items() for problem in r["problems"]]
    return reports, [*own, *differences(reports)]
