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


def unlike_most(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The hosts whose value differs from the most frequent one, on a tie the first; with that."""
    counts = Counter(map(repr, values.values()))
    usual = max(counts, key=counts.__getitem__)
    common = next(value for value in values.values() if repr(value) == usual)
    return ((host, common) for host, value in values.items() if repr(value) != usual)


def check_versions(reports: Reports) -> Problems:
    for host, common in unlike_most({h: report["versions"] for h, report in reports.items()}):
        here = reports[host]["versions"]
        odd = [f"{n} is {v}, elsewhere {common[n]}" for n, v in here.items() if v != common[n]]
        yield host, f"{'; '.join(odd)}; install requirements.txt there"


def check_code(reports: Reports) -> Problems:
    for host, common in unlike_most({h: report["code"] for h, report in reports.items()}):
        here = reports[host]["code"]
        odd = sorted(n for n in {*here, *common} if here.get(n) != common.get(n))
        yield host, f"{len(odd)} files differ ({', '.join(odd[:3])}); check out one commit"


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
    names = {h: sorted({gpu["name"] for gpu in report["gpus"]}) for h, report in reports.items()}
    for host, common in unlike_most(names):
        yield host, f"GPUs are {names[host] or 'missing'}, elsewhere {common}"


def check_config(reports: Reports) -> Problems:
    for host, report in reports.items():
        if report["mistake"]:
            yield host, report["mistake"]
    yield from differing_files("config", reports)


def differing_files(check: str, reports: Reports) -> Problems:
    """Files that cannot be read on a host, or differ from those on the others."""
    found = {h: report["files"][check] for h, report in reports.items() if "files" in report}
    names = sorted({name for files in found.values() for name in files})
    for name in names:
        for host, files in found.items():
            if "cannot be read" in files.get(name, ""):
                yield host, f"{name} {files[name]}; copy it there, or share the disk"
        for host, _ in unlike_most({h: files.get(name) for h, files in found.items()}):
            if name not in found[host]:
                yield host, f"{name} is missing there; copy it, or share the disk"
            elif "cannot be read" not in found[host][name]:
                yield host, f"{name} differs from the other hosts'; copy one version to all"


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


CHECKS: dict[str, Callable[[Reports], Problems]] = {
    "versions": check_versions,
    "code": check_code,
    "clock": check_clock,
    "gpus": check_gpus,
    "config": check_config,
    "model": partial(differing_files, "model"),
    "data": partial(differing_files, "data"),
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
