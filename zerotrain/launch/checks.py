"""Preflight's checks of hosts: each compares their reports (zerotrain/launch/report.py)."""

import json
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from zerotrain.launch.hostfile import Host
from zerotrain.launch.job import Job, remote_command
from zerotrain.launch.report import MARK

REPORT_SECONDS = 120  # fingerprints of a model's files take some
MAX_CLOCK_SECONDS = 1.0
MIN_SHM_BYTES = 1 << 30
MIN_FREE_BYTES = 10 << 30
MIN_LOCKED_BYTES = 1 << 30
MIN_OPEN_FILES = 1024
MAX_USED_BYTES = 1 << 30  # by other processes on a GPU


@dataclass(frozen=True)
class Finding:
    """A problem that a check has found on a host."""

    host: str
    check: str
    text: str
    """What is wrong, and what to do."""
    is_warning: bool = False


Reports = Mapping[str, Mapping[str, Any]]
Problems = Iterator[tuple[str, str]]
"""(host, text) of each problem."""


def collect(job: Job) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """The reports of the hosts that can be reached, and what is wrong with the others."""
    argv = job.command[1:] if job.config is not None else None

    def report_of(host: Host) -> dict[str, Any] | str:
        arguments = ["-m", "zerotrain.launch.report"]
        command = remote_command(job.ssh, host.name, arguments)
        try:
            done = subprocess.run(
                command, input=json.dumps(argv), capture_output=True, text=True,
                timeout=REPORT_SECONDS, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no report within {REPORT_SECONDS} s"
        _, mark, text = done.stdout.rpartition(MARK)
        if not mark:
            last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return (
                f"{last[-1]}; needs `ssh -o BatchMode=yes {host.name}` without a password, and "
                "code and .venv at the same paths as here"
            )
        reported = json.loads(text)
        ahead_seconds = reported["clock"] - time.time()
        return {**reported, "ahead_seconds": ahead_seconds, "slots": len(host.slots)}

    with ThreadPoolExecutor(64) as pool:
        answers = dict(
            zip([h.name for h in job.hosts], pool.map(report_of, job.hosts), strict=True)
        )
    reports = {host: answer for host, answer in answers.items() if isinstance(answer, dict)}
    lost = [Finding(h, "ssh", answer) for h, answer in answers.items() if isinstance(answer, str)]
    return reports, lost


def usual_value(values: Mapping[str, str]) -> str:
    """The value that most hosts have, on a tie that of the first of them."""
    return Counter(values.values()).most_common(1)[0][0]


def check_same(section: str, cure: str, reports: Reports) -> Problems:
    """Versions or files that differ between the hosts, or cannot be read on one."""
    found = {h: r["same"][section] for h, r in reports.items() if section in r["same"]}
    odd: dict[str, list[str]] = {host: [] for host in found}
    for name in sorted({name for values in found.values() for name in values}):
        values = {host: there.get(name, "missing") for host, there in found.items()}
        usual = usual_value(values)
        for host, value in values.items():
            if value.startswith("cannot be read"):
                odd[host].append(f"{name} {value}")
            elif value != usual:
                odd[host].append(f"{name} is {value}, elsewhere {usual}")
    for host, texts in odd.items():
        if texts:
            more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
            yield host, f"{', '.join(texts[:3])}{more}; {cure}"


def check_clock(reports: Reports) -> Problems:
    middle = statistics.median([0.0, *(report["ahead_seconds"] for report in reports.values())])
    for host, report in reports.items():
        seconds = report["ahead_seconds"] - middle
        if abs(seconds) > MAX_CLOCK_SECONDS:
            yield host, f"clock is {seconds:+.1f} s from the others'; start chrony or ntpd there"


def check_gpus(reports: Reports) -> Problems:
    for host, report in reports.items():
        devices = report["gpus"]
        what = "GPUs"
        count = len(devices)
        if not devices:
            count = report["cores"]
            what = "cores and no GPU"
        if report["slots"] > count:
            yield host, f"{report['slots']} slots, but {count} {what}; lower slots= in the hostfile"
        for number, gpu in enumerate(devices):
            if gpu["used_bytes"] > MAX_USED_BYTES:
                used = gpu["used_bytes"] / 2**30
                yield host, f"GPU {number}: {used:.1f} GiB in use; end that process (nvidia-smi)"
            if gpu["ecc_errors"] or gpu["throttle"]:
                what = ", ".join([f"{gpu['ecc_errors']} memory errors", *gpu["throttle"]])
                yield host, f"GPU {number}: {what}; see `nvidia-smi -q`, reset or replace it"
    models = {h: ", ".join(sorted({gpu["name"] for gpu in r["gpus"]})) for h, r in reports.items()}
    usual = usual_value(models)
    for host, model in models.items():
        if model != usual:
            yield host, f"GPUs are {model or 'missing'}, elsewhere {usual or 'missing'}"


def check_config(reports: Reports) -> Problems:
    for host, report in reports.items():
        if report["mistake"]:
            yield host, report["mistake"]
    yield from check_same("config", SHARE, reports)


def check_disk(reports: Reports) -> Problems:
    for host, report in reports.items():
        disk = report.get("disk", {"problem": "", "free_bytes": MIN_FREE_BYTES})
        if disk["problem"]:
            yield host, f"output_dir {disk['folder']} cannot be written to ({disk['problem']})"
        elif disk["free_bytes"] < MIN_FREE_BYTES:
            free = disk["free_bytes"] / 2**30
            yield host, f"output_dir {disk['folder']} has {free:.1f} GiB free; is that enough?"


def check_limits(reports: Reports) -> Problems:
    for host, report in reports.items():
        if report["gpus"] and report["shm_bytes"] < MIN_SHM_BYTES:
            yield (
                host,
                "/dev/shm is under 1 GiB; docker run --shm-size=8g, or emptyDir in memory",
            )
        if report["infiniband"] and 0 <= report["locked_bytes"] < MIN_LOCKED_BYTES:
            yield host, "memlock is under 1 GiB, but RDMA pins memory; ulimit -l unlimited"
        if 0 <= report["open_files"] < MIN_OPEN_FILES:
            yield host, f"{report['open_files']} open files allowed; raise nofile in limits.conf"


SHARE = "copy one version to all hosts, or share the disk"
CHECKS: dict[str, Callable[[Reports], Problems]] = {
    "versions": partial(check_same, "versions", "install requirements.txt there"),
    "code": partial(check_same, "code", "check out one commit"),
    "clock": check_clock,
    "gpus": check_gpus,
    "config": check_config,
    "model": partial(check_same, "model", SHARE),
    "data": partial(check_same, "data", SHARE),
    "disk": check_disk,
    "limits": check_limits,
}


def check_hosts(job: Job) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """The reports of all hosts that can be reached, and what is wrong."""
    reports, findings = collect(job)
    if reports:
        for check, problems in CHECKS.items():
            findings += [
                Finding(host, check, text, is_warning=text.endswith("?"))
                for host, text in problems(reports)
            ]
    return reports, findings


def without(hosts: Sequence[Host], findings: Sequence[Finding]) -> list[Host]:
    """The hosts on which no check failed."""
    failed = {finding.host for finding in findings if not finding.is_warning}
    return [host for host in hosts if host.name not in failed]
