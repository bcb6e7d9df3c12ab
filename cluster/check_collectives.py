"""Preflight's collectives checks: process group, all-reduce and speeds with the real launcher.

cluster/collectives.py runs as a job; the states and results of its ranks arrive with the agents'
heartbeats.
"""

import asyncio
import json
import signal
import statistics
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from cluster.check_hosts import Finding, complete, some
from cluster.collectives import STEPS
from cluster.hosts import HostError, RemoteHost
from cluster.job import Ending, Job, new_id
from cluster.supervise import run_job

CHECKS = {
    "group": "the process group is formed in time",
    "sum": "an all-reduce over all ranks gives the right sum",
    "net": "bandwidth between hosts is about the same for all hosts",
    "matmul": "every rank computes about as fast as the others",
}
START_SECONDS = 60  # for the launcher, and for importing torch from a cold disk
MEASURE_SECONDS = 600  # for all measurements; each collective has --timeout seconds
HEARTBEAT_SECONDS = 20  # shorter than a job's: the states arrive with the heartbeats
SLOW_MATMUL = 0.8  # of the median. Equal GPUs differ by a few percent, a throttled one by more
SLOW_NET = 0.5  # of the median. Network paths differ somewhat; a degraded link by 2x or more
POLL_SECONDS = 0.2
SHOWN_LINES = 15  # of the launcher's output, if the job failed


@dataclass(frozen=True)
class Trial:
    """The outcome of the collectives checks."""

    findings: list[Finding]
    figures: dict[str, Any]
    """all_reduce_bus_bytes_per_s; pairs: [host, host, bytes_per_s]; matmul: [rank, host,
    flop_per_s]; backend. Empty if the ranks did not finish.
    """
    output: str
    """The last lines of the launcher's output, if it failed."""


async def check_collectives(
    job: Job,
    hosts: Sequence[RemoteHost],
    timeout_seconds: float,
    signals: "asyncio.Queue[int]",
) -> Trial:
    """Run the collectives on connected hosts.

    Args:
        timeout_seconds: for the process group, and for each collective.
        signals: SIGTERM and other signals that this process receives.

    Raises:
        UserError: the launcher is not installed, or does not support what the job needs.
    """
    trial = replace(
        job,
        id=new_id(),
        command=["-m", "cluster.collectives", "--timeout", f"{timeout_seconds:g}"],
        launch=replace(job.launch, heartbeat_seconds=HEARTBEAT_SECONDS),
    )
    names = [host.name for host in hosts]
    watchdog = asyncio.create_task(stop_in_time(trial, hosts, timeout_seconds, signals))
    with redirect_stdout(StringIO()) as output:
        try:
            ending = await run_job(trial, hosts, signals)
        except HostError as error:  # before anything was started
            finding = Finding(error.host, "group", "fail", error.problem)
            return Trial(complete(names, [finding], tuple(CHECKS)), {}, "")
        finally:
            watchdog.cancel()
    tail = "".join(output.getvalue().splitlines(keepends=True)[-SHOWN_LINES:])
    results = results_of(hosts)
    if ending.code == 0 and results is not None:
        findings, figures = judge_results(results, names)
        return Trial(complete(names, findings, tuple(CHECKS)), figures, "")
    findings = diagnose(hosts, ending, timeout_seconds)
    return Trial(complete(names, findings, tuple(CHECKS)), {}, tail)


async def stop_in_time(
    job: Job,
    hosts: Sequence[RemoteHost],
    timeout_seconds: float,
    signals: "asyncio.Queue[int]",
) -> None:
    """End a trial whose ranks do not start: without ranks no time-out of theirs ends it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_SECONDS + timeout_seconds
    expected = sum(len(host.slots) for host in job.hosts)
    while loop.time() < deadline:
        await asyncio.sleep(POLL_SECONDS)
        steps = [step_of(record) for host in hosts for record in host.ranks]
        if len(steps) == expected and min(steps) >= STEPS.index("all-reduce"):
            await asyncio.sleep(MEASURE_SECONDS)
            break
    for _ in range(2):  # the second one ends the job immediately
        signals.put_nowait(signal.SIGTERM)


def step_of(record: Mapping[str, Any]) -> int:
    """How far a rank has got: the index of its state in STEPS."""
    found = [i for i, step in enumerate(STEPS) if record["state"].startswith(step)]
    return max(found, key=lambda i: len(STEPS[i]), default=0)


def results_of(hosts: Sequence[RemoteHost]) -> dict[str, Any] | None:
    for host in hosts:
        for record in host.ranks:
            if record["rank"] == 0 and record["state"].startswith("done {"):
                return json.loads(record["state"].removeprefix("done "))
    return None


def diagnose(hosts: Sequence[RemoteHost], ending: Ending, timeout_seconds: float) -> list[Finding]:
    """Which hosts hold up the others: those whose ranks are behind."""
    findings = []
    steps = [step_of(record) for host in hosts for record in host.ranks]
    slowest, fastest = min(steps, default=0), max(steps, default=0)
    grouped = STEPS.index("all-reduce")
    check = "group" if slowest < grouped else "sum" if slowest == grouped else "net"
    seconds = f"within {timeout_seconds:g} s"
    for host in hosts:
        if missing := len(host.slots) - len(host.ranks):
            text = f"{missing} of its {len(host.slots)} ranks did not start"
            cure = "can the launcher reach it? its last output is below"
            findings.append(Finding(host.name, "group", "fail", text, cure))
        behind = [r for r in host.ranks if step_of(r) == slowest < fastest]
        if not behind:
            continue
        numbers = some([str(r["rank"]) for r in behind])
        waits = "the others are waiting for it" if len(behind) == 1 else "the others are waiting"
        state = behind[0]["state"] if slowest else "starting Python and importing torch"
        what = f"rank {numbers} got no further than `{state}` {seconds}"
        cure = "look at its processes with `py-spy dump`; check its network with --stage 1"
        findings.append(Finding(host.name, check, "fail", f"{what}; {waits}", cure))
    if not findings:  # all are at the same step: report what the launcher noticed first
        text = ending.cause or f"the ranks did not get past `{STEPS[slowest]}` {seconds}"
        findings = [Finding(named_in(text, hosts), check, "fail", text)]
    return findings


def named_in(text: str, hosts: Sequence[RemoteHost]) -> str:
    """The host that `text` names, else the first one."""
    words = text.replace(":", " ").replace(",", " ").split()
    return next((host.name for host in hosts if host.name in words), hosts[0].name)


def judge_results(
    reported: Mapping[str, Any], names: Sequence[str]
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings and figures from what the ranks measured.

    Args:
        reported: {"backend", "results" per rank}, as cluster/collectives.py reports them.
        names: of the hosts, in rank order; a host's own host name may be different.
    """
    results = reported["results"]
    own_names = list(dict.fromkeys(r["host"] for r in results))
    # ranks are assigned host by host, in the order of the hostfile
    name_of = dict(zip(own_names, names, strict=True)) if len(own_names) == len(names) else {}
    host_of = {r["rank"]: name_of.get(r["host"], r["host"]) for r in results}
    findings = [Finding(name, "group", "ok", reported["backend"]) for name in names]
    pairs = [
        (host_of[p["ranks"][0]], host_of[p["ranks"][1]], p["bytes_per_s"])
        for r in results
        for p in r["pairs"]
    ]
    rates = [(r["rank"], host_of[r["rank"]], r["matmul_flop_per_s"]) for r in results]
    for r in results:
        if r["sum"] != r["expected_sum"]:
            got, expected = f"{r['sum']:g}", f"{r['expected_sum']:g}"
            text = f"rank {r['rank']} got {got} from an all-reduce instead of {expected}"
            cure = "compare torch and NCCL versions, then test its memory and network card"
            findings.append(Finding(host_of[r["rank"]], "sum", "fail", text, cure))
    bus = min(r["all_reduce"]["bus_bytes_per_s"] for r in results)
    findings += [*judge_pairs(pairs), *judge_rates(rates)]
    failed = {(f.host, f.check) for f in findings}
    findings += [
        Finding(name, check, "ok", "")
        for name in names
        for check in ("sum", "net", "matmul")
        if (name, check) not in failed and not (check == "net" and len(names) == 1)
    ]
    figures = {
        "backend": reported["backend"],
        "all_reduce_bytes": results[0]["all_reduce"]["bytes"],
        "all_reduce_bus_bytes_per_s": bus,
        "pairs": [list(pair) for pair in pairs],
        "matmul": [list(rate) for rate in rates],
    }
    return findings, figures


def judge_pairs(pairs: Sequence[tuple[str, str, float]]) -> list[Finding]:
    """Slow hosts, then slow pairs among the other hosts.

    Hosts are compared by their best pair: with few hosts a slow one is in so many of the pairs that
    it would lower their median.

    Args:
        pairs: (host, host, bytes per second).
    """
    best: dict[str, float] = {}
    for a, b, rate in pairs:
        best[a], best[b] = max(best.get(a, 0), rate), max(best.get(b, 0), rate)
    if len(best) < 3:  # a single pair: nothing to compare it with
        return []
    cure = "check its link speed (`ethtool`, `ibstat`), its cable, other jobs on the network"
    median = statistics.median(best.values())
    findings, slow = [], set()
    for host, rate in best.items():
        if rate < SLOW_NET * median:
            text = f"{mb(rate)} at best with any other host, the others reach {mb(median)}"
            findings.append(Finding(host, "net", "warn", text, cure))
            slow.add(host)
    rest = [pair for pair in pairs if not slow & set(pair[:2])]
    median = statistics.median(rate for _, _, rate in rest or pairs)
    for a, b, rate in rest:
        if rate < SLOW_NET * median:
            text = f"{mb(rate)} between it and {b}, the median of all pairs is {mb(median)}"
            findings.append(Finding(a, "net", "warn", text, cure))
    return findings


def judge_rates(rates: Sequence[tuple[int, str, float]]) -> list[Finding]:
    """Warnings for the ranks that compute slowly.

    Args:
        rates: (rank, host, FLOP/s).
    """
    median = statistics.median(rate for *_, rate in rates)
    cure = "all ranks wait for it: check for throttling, other processes, a different GPU model"
    return [
        Finding(
            host,
            "matmul",
            "warn",
            f"rank {rank} reaches {rate / 1e9:,.0f} GFLOP/s, the median is {median / 1e9:,.0f}",
            cure,
        )
        for rank, host, rate in rates
        if rate < SLOW_MATMUL * median
    ]


def mb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s"
