"""Preflight's hosts checks: whether every host is fit for the job. Over ssh, no process group.

Each host reports facts about itself (cluster/probe.py) and tests the network. This module compares
them with each other and with what the job needs. If hosts differ, a finding names those that differ
from the majority, or in a tie, from the first host.
"""

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cluster.hostfile import world_size
from cluster.hosts import (
    INTERFACE_VARIABLES,
    TRY_SECONDS,
    HostError,
    RemoteHost,
    ask_all,
    candidate_addresses,
    explain_noise,
    interfaces_of,
    try_addresses,
)

if TYPE_CHECKING:
    from cluster.job import Job
    from config.schema import Config

CHECKS = {  # column -> what is checked
    "ssh": "reachable with BatchMode, with code and Python at the same paths",
    "hostfile": "has the same contents, if it exists on the host",
    "versions": "Python, torch, CUDA, NCCL, driver, deepspeed, transformers are equal",
    "code": "same commit, same files, no uncommitted changes",
    "slots": "no more ranks than GPUs, or on CPU than cores",
    "gpu": "free and healthy: processes, ECC errors, row remapping, throttling",
    "iface": "the interface in NCCL/GLOO_SOCKET_IFNAME exists and is the one in use",
    "master": "rank 0's address and port are free and reachable from the host",
    "mesh": "every other host can connect to it",
    "clock": "within a second of the others",
    "config": "the run config is valid and the same",
    "model": "model and tokenizer exist and are the same",
    "data": "data files exist and are the same",
    "output": "output_dir is writable, shared, and has space for one more checkpoint",
    "memory": "model states fit into the memory that the machine and its cgroup limits leave",
    "limits": "/dev/shm, memlock, open files",
}
SKEW_SECONDS = 1.0  # beyond this, log lines of two hosts cannot be ordered by time
CLOCK_TRIES = 5
SURVEY_SECONDS = 600  # gigabytes of model and data from a cold network disk
SMALL_SHM_BYTES = 1 << 30  # docker's default of 64 MiB is too small for NCCL and data workers
BUSY_GPU_BYTES = 2 << 30  # in use without a visible process: by another container
OPEN_FILES = 256  # of a process itself; sockets to every other rank come on top
SAME_VERSIONS = ("python", "torch", "CUDA", "NCCL", "deepspeed", "transformers", "driver")
GIB = 1 << 30

Level = Literal["ok", "warn", "fail", "none"]
Facts = Mapping[str, dict[str, Any]]
"""Host -> what probe.survey reported."""


@dataclass(frozen=True)
class Finding:
    """The result of one check on one host."""

    host: str
    check: str
    level: Level
    """none: it could not be checked, or there is nothing to check."""
    text: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.host}: {self.check}: {self.text}" + (f"; {self.cure}" if self.cure else "")


async def check_hosts(
    job: "Job",
    config: "Config | None",
    hosts: Sequence[RemoteHost],
    errors: Sequence[HostError],
) -> list[Finding]:
    """Check the connected hosts; those that could not be connected get a finding too.

    Args:
        config: None if the job's script is not train.py; the run's own checks are then skipped.
        hosts: the connected ones, in the order of the hostfile.
        errors: of the others.

    Returns:
        At least one finding for each host of the job and each check.
    """
    findings = reached(hosts, errors)
    if hosts:
        # one after the other: the survey uses all cores, which would disturb clocks and time-outs
        findings += await check_clocks(hosts)
        findings += await check_network(job, hosts)
        facts, failed = await take_survey(job, config, hosts)
        findings += failed
        findings += compare(job, config, facts)
        there = [host for host in hosts if host.name in facts]
        if config is not None and not config.checkpoint.node_local:
            findings += await check_shared(config.output_dir, facts, there)
    return complete([host.name for host in job.hosts], findings)


def reached(hosts: Sequence[RemoteHost], errors: Sequence[HostError]) -> list[Finding]:
    """The ssh findings from `connect_all`."""
    findings = [Finding(e.host, "ssh", "fail", e.problem) for e in errors]
    for host in hosts:
        level, text = ("warn", explain_noise(host.noise)) if host.noise else ("ok", "")
        findings.append(Finding(host.name, "ssh", level, text or f"{host.facts['reached_at']}"))
    return findings


def complete(
    hosts: Sequence[str], findings: Sequence[Finding], checks: Sequence[str] = tuple(CHECKS)
) -> list[Finding]:
    """The findings, plus one of level none for each host and check that has none."""
    seen = {(f.host, f.check) for f in findings}
    blanks = [
        Finding(host, check, "none", "not checked")
        for host in hosts
        for check in checks
        if (host, check) not in seen
    ]
    return [*findings, *blanks]


# --------------------------------------------------------------------------------------------------
# Clocks and network


async def check_clocks(hosts: Sequence[RemoteHost]) -> list[Finding]:
    """Compare each host's clock with the median of all clocks, the launcher's included."""
    offsets = dict(
        zip([h.name for h in hosts], await asyncio.gather(*map(clock_offset, hosts)), strict=True)
    )
    return judge_clocks(offsets)


async def clock_offset(host: RemoteHost) -> float | None:
    """Seconds that the host's clock is ahead of this machine's; None without an answer.

    As in NTP, the answer with the shortest round trip counts: its error is at most half of that.
    """
    best = (float("inf"), 0.0)
    try:
        for _ in range(CLOCK_TRIES):
            sent = time.time()
            there = await host.ask("clock", seconds=10)
            received = time.time()
            best = min(best, (received - sent, there - (sent + received) / 2))
    except HostError:
        return None
    return best[1]


def judge_clocks(offsets: Mapping[str, float | None]) -> list[Finding]:
    """Findings from the offsets to the launcher's clock, in seconds."""
    known = sorted([0.0, *(o for o in offsets.values() if o is not None)])
    # of two middle values, the one nearer to the launcher's clock: it decides between two hosts
    median = min(statistics.median_low(known), statistics.median_high(known), key=abs)
    findings = []
    for host, offset in offsets.items():
        if offset is None:
            findings.append(Finding(host, "clock", "fail", "its clock could not be read"))
            continue
        skew_seconds = offset - median
        if abs(skew_seconds) > SKEW_SECONDS:
            direction = "ahead of" if skew_seconds > 0 else "behind"
            text = f"clock is {abs(skew_seconds):.1f} s {direction} the others"
            cure = "start chrony or ntpd there (`chronyc makestep`)"
            findings.append(Finding(host, "clock", "fail", text, cure))
        else:
            findings.append(Finding(host, "clock", "ok", f"{skew_seconds * 1000:+.0f} ms"))
    return findings


async def check_network(job: "Job", hosts: Sequence[RemoteHost]) -> list[Finding]:
    """Interfaces, rank 0's address and port, and connections between all hosts."""
    findings = check_interfaces(job.environment, hosts)
    if any(f.level == "fail" for f in findings):
        return findings
    address = None
    if hosts[0].name == job.hosts[0].name:  # else rank 0's host is not connected
        address, of_master = await check_master(job, hosts)
        findings += of_master
    own = await addresses_between(hosts, address)
    if address is not None:
        findings = check_routes(job.environment, hosts, own, address, findings)
    return findings + await check_mesh(hosts, own)


def check_interfaces(environment: Mapping[str, str], hosts: Sequence[RemoteHost]) -> list[Finding]:
    """Check that every host has the interfaces that the environment names."""
    findings = []
    for host in hosts:
        named = []
        for variable in INTERFACE_VARIABLES:
            if value := environment.get(variable):
                try:
                    interfaces_of(variable, value, host)
                    named.append(f"{variable}={value}")
                except HostError as error:
                    cure = f"name the interface that connects the hosts in {variable}"
                    findings.append(Finding(host.name, "iface", "fail", error.problem, cure))
        if len(named) == sum(bool(environment.get(v)) for v in INTERFACE_VARIABLES):
            text = ", ".join(named) or "none named: chosen by address"
            findings.append(Finding(host.name, "iface", "ok", text))
    return findings


async def check_master(job: "Job", hosts: Sequence[RemoteHost]) -> tuple[str | None, list[Finding]]:
    """Rank 0's address, or None if no address works for all hosts; and the findings."""
    first = hosts[0].name
    try:
        candidates = await candidate_addresses(hosts, job.environment, job.master_addr)
        address, port, errors = await try_addresses(hosts, candidates, job.master_port)
    except HostError as error:
        return None, [Finding(error.host, "master", "fail", error.problem)]
    if address is not None:
        return address, [Finding(h.name, "master", "ok", f"{address} port {port}") for h in hosts]
    # if all others fail, rank 0's host is the cause
    if len(errors) > 1 and len(errors) == len(hosts) - 1:
        text = f"no other host can connect to it; {errors[0].host} {errors[0].problem}"
        return None, [Finding(first, "master", "fail", text)]
    failed = {error.host for error in errors}
    findings = [Finding(error.host, "master", "fail", error.problem) for error in errors]
    findings += [Finding(h.name, "master", "ok", "") for h in hosts if h.name not in failed]
    return None, findings


async def addresses_between(hosts: Sequence[RemoteHost], address: str | None) -> dict[str, str]:
    """Host -> the address at which the others should reach it: the one it uses to connect to
    rank 0's `address`, or if that is None, the one that ssh used.
    """
    if address is None:
        return {h.name: h.facts["reached_at"] for h in hosts if h.facts["reached_at"]}
    answers = await ask_all(hosts[1:], "source_address", target=address)
    own = {hosts[0].name: address}
    for host, answer in zip(hosts[1:], answers, strict=True):
        if isinstance(answer, str):
            own[host.name] = answer
    return own


def check_routes(
    environment: Mapping[str, str],
    hosts: Sequence[RemoteHost],
    own: Mapping[str, str],
    address: str,
    findings: Sequence[Finding],
) -> list[Finding]:
    """The findings, with each host failed that connects to rank 0 over another interface."""
    wrong = {}
    for host in hosts:
        interface = {a: n for n, a in host.facts["addresses"]}.get(own.get(host.name, ""))
        for variable in INTERFACE_VARIABLES:
            value = environment.get(variable)
            if value and interface and interface not in interfaces_of(variable, value, host):
                text = f"connects to {address} from {interface}, but {variable}={value}"
                cure = "name interfaces of the same network on all hosts, or fix the routes"
                wrong[host.name] = Finding(host.name, "iface", "fail", text, cure)
    kept = [f for f in findings if not (f.check == "iface" and f.host in wrong)]
    return [*kept, *wrong.values()]


async def check_mesh(hosts: Sequence[RemoteHost], own: Mapping[str, str]) -> list[Finding]:
    """Let every host listen on a free port and all others connect to it: ranks connect to each
    other on arbitrary ports, and a firewall may block one direction only.
    """
    hosts = [host for host in hosts if host.name in own]
    ports = await ask_all(hosts, "listen", port=0)
    listening = [h for h, port in zip(hosts, ports, strict=True) if isinstance(port, int)]
    targets = {
        h.name: (own[h.name], p) for h, p in zip(hosts, ports, strict=True) if h in listening
    }
    try:
        answers = await asyncio.gather(
            *(
                host.ask(
                    "connect",
                    targets=[target for name, target in targets.items() if name != host.name],
                    timeout_seconds=TRY_SECONDS,
                )
                for host in listening
            ),
            return_exceptions=True,
        )
    finally:
        await ask_all(listening, "unlisten")
    problems: dict[str, dict[str, str | None]] = {}
    for host, answer in zip(listening, answers, strict=True):
        if isinstance(answer, list):
            others = [name for name in targets if name != host.name]
            problems[host.name] = dict(zip(others, answer, strict=True))
    return judge_mesh(problems, targets)


def judge_mesh(
    problems: Mapping[str, Mapping[str, str | None]], targets: Mapping[str, tuple[str, int]]
) -> list[Finding]:
    """Findings from the connections between hosts.

    Args:
        problems: from -> to -> None, or why the connection failed.
        targets: host -> its address and port.
    """
    cure = "let the hosts connect to each other on all ports"
    findings, blocked = [], set()
    for host, answers in problems.items():
        if len(answers) > 1 and None not in answers.values():
            why = next(iter(answers.values()))
            text = f"cannot connect to any other host ({why})"
            findings.append(Finding(host, "mesh", "fail", text, f"a firewall there? {cure}"))
            blocked.add(host)
    for host, (address, port) in targets.items():
        if host in blocked:
            continue
        whys = {
            other: why
            for other, answers in problems.items()
            if other not in blocked and (why := answers.get(host)) is not None
        }
        if whys:
            who = "no other host" if len(whys) == len(targets) - 1 > 1 else None
            who = f"{who} can" if who else f"{some(whys)} cannot"
            text = f"{who} connect to it at {address} port {port} ({next(iter(whys.values()))})"
            findings.append(Finding(host, "mesh", "fail", text, f"a firewall there? {cure}"))
        else:
            findings.append(Finding(host, "mesh", "ok", address))
    return findings


def gib(count: float) -> str:
    """A number of bytes, formatted."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.0f} MiB"


def some(names: Sequence[str] | Mapping[str, Any], most: int = 3) -> str:
    """The names joined with commas, or the first few and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# --------------------------------------------------------------------------------------------------
# What the hosts report


async def take_survey(
    job: "Job", config: "Config | None", hosts: Sequence[RemoteHost]
) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """The facts of each host that reported them, and findings for the others."""
    answers = await asyncio.gather(
        *(
            host.ask(
                "call",
                seconds=SURVEY_SECONDS + 10,
                timeout_seconds=SURVEY_SECONDS,
                name="survey",
                arguments={
                    "argv": None if config is None else job.command[1:],
                    "slots": len(host.slots),
                    "world_size": world_size(job.hosts),
                    "hostfile": job.hostfile,
                    "holds_first_rank": host.name == job.hosts[0].name,
                },
                environment=job.environment,
            )
            for host in hosts
        ),
        return_exceptions=True,
    )
    facts, failed = {}, []
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, HostError):
            text = f"could not be checked ({answer.problem})"
            cure = "run `python -c 'import cluster.probe'` in the checkout there"
            failed.append(Finding(host.name, "versions", "fail", text, cure))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            facts[host.name] = answer
    return facts, failed


def compare(job: "Job", config: "Config | None", facts: Facts) -> list[Finding]:
    """Findings from facts alone."""
    if not facts:
        return []
    slots = {host.name: host.slots for host in job.hosts}
    on_gpu = job.environment.get("DS_ACCELERATOR") != "cpu"
    findings = check_hostfile(job, facts)
    findings += check_versions(facts)
    findings += check_code(facts)
    findings += check_gpus(facts, slots, on_gpu)
    findings += check_limits(facts, world_size(job.hosts), on_gpu)
    if config is not None:
        findings += check_config(facts)
        findings += check_paths(facts)
        findings += check_output(facts)
        findings += check_memory(facts)
    return findings


def unlike_most(values: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The most common value, in a tie the one that comes first; and the hosts that have another
    one.
    """
    written = {host: json.dumps(value, sort_keys=True) for host, value in values.items()}
    counts = Counter(written.values())  # in the order of the hosts
    common = max(counts, key=lambda value: counts[value])
    return json.loads(common), [host for host, value in written.items() if value != common]


def each(
    facts: Facts, part: str, check: str, judge: Callable[[str, dict[str, Any]], list[Finding]]
) -> list[Finding]:
    """The findings of `judge(host, facts[host][part])` for every host; for a host that could not
    find out, a finding with its error.
    """
    findings = []
    for host, of_host in facts.items():
        if "error" in of_host[part]:
            findings.append(
                Finding(host, check, "fail", f"cannot be checked: {of_host[part]['error']}")
            )
        else:
            findings += judge(host, of_host[part])
    return findings


def check_hostfile(job: "Job", facts: Facts) -> list[Finding]:
    """Check copies of the hostfile on other hosts, which may have been edited on one side only."""
    common: dict[str, int] = {}
    if job.hostfile is not None:
        from cluster.hostfile import read_hostfile

        common = {host.name: len(host.slots) for host in read_hostfile(job.hostfile)}

    def judge(host: str, reported: dict[str, Any]) -> list[Finding]:
        there = {name: slots for name, slots in reported["hosts"]}
        if not reported["there"]:
            return [Finding(host, "hostfile", "ok", "no copy there, and none needed")]
        if list(there.items()) == list(common.items()):
            return [Finding(host, "hostfile", "ok", "the same")]
        named = [n for n in [*common, *there] if common.get(n) != there.get(n)]
        if named:
            name = named[0]
            here, its = (f"slots={h[name]}" if name in h else "nothing" for h in (common, there))
            what = f"says {its} for {name}, the launcher's says {here}"
        else:
            what = "has the hosts in another order"
        text = f"{job.hostfile} there {what}"
        return [Finding(host, "hostfile", "fail", text, "copy one file to all hosts")]

    return each(facts, "hostfile", "hostfile", judge)


def check_versions(facts: Facts) -> list[Finding]:
    """Check that versions are equal on all hosts, and that the packages can be imported."""
    reported = {h: f["versions"] for h, f in facts.items() if "error" not in f["versions"]}
    numbers = {
        h: {**t["versions"], "driver": facts[h]["gpus"].get("driver")} for h, t in reported.items()
    }
    findings: dict[str, list[str]] = {host: [] for host in reported}
    for name in SAME_VERSIONS:
        values = {host: number.get(name) for host, number in numbers.items()}
        if not values:
            continue
        common, odd = unlike_most(values)
        for host in odd:
            where = reported[host]["where"].get(name)
            at = f" from {where}" if where else ""
            findings[host].append(f"{name} is {values[host]}{at}, elsewhere {common}")
        for host, value in values.items():
            if host not in odd and value is not None and "cannot be imported" in value:
                findings[host].append(f"{name} {value}")

    def judge(host: str, _: dict[str, Any]) -> list[Finding]:
        if findings[host]:
            cure = "install requirements.txt there; does PYTHONPATH hide it?"
            return [Finding(host, "versions", "fail", ", ".join(findings[host]), cure)]
        text = ", ".join(f"{n} {v}" for n, v in numbers[host].items() if v is not None)
        return [Finding(host, "versions", "ok", text)]

    return each(facts, "versions", "versions", judge)


def check_code(facts: Facts) -> list[Finding]:
    """Check for one commit and the same files. Uncommitted changes that are the same on all hosts
    only warn.
    """
    reported = {h: f["code"] for h, f in facts.items() if "error" not in f["code"]}
    if not reported:
        return each(facts, "code", "code", lambda host, code: [])
    commit, other_commit = unlike_most({h: t["commit"] for h, t in reported.items()})
    files, other_files = unlike_most({h: t["files"] for h, t in reported.items()})

    def judge(host: str, code: dict[str, Any]) -> list[Finding]:
        wrong = []
        if host in other_commit:
            wrong.append(f"commit is {short(code['commit'])}, elsewhere {short(commit)}")
        if host in other_files:
            names = [n for n in {**files, **code["files"]} if files.get(n) != code["files"].get(n)]
            wrong.append(f"{some(names)} differ{'s' if len(names) == 1 else ''} from the others'")
        if wrong:
            cure = "check out one commit on all hosts, or use a shared disk"
            return [Finding(host, "code", "fail", ", ".join(wrong), cure)]
        if code["changed"]:
            text = f"not committed, the same on all hosts: {some(code['changed'])}"
            return [Finding(host, "code", "warn", text, "commit them to keep the run reproducible")]
        return [Finding(host, "code", "ok", short(code["commit"]))]

    return each(facts, "code", "code", judge)


def short(commit: str | None) -> str:
    return commit[:10] if commit else "none (no git repository)"


def check_gpus(
    facts: Facts, slots: Mapping[str, Sequence[int]], on_gpu: bool = True
) -> list[Finding]:
    """Compare slots with GPUs, or with cores on CPU; and check the GPUs that the job uses."""

    def judge(host: str, reported: dict[str, Any]) -> list[Finding]:
        devices, wanted = reported["gpus"] if on_gpu else [], slots[host]
        if not devices:
            cores = facts[host]["limits"].get("cores", len(wanted))
            findings = [Finding(host, "gpu", "none", "no GPU")]
            if len(wanted) > cores:
                text = f"slots={len(wanted)}, but it has {cores} cores and no GPU"
                cure = f"use at most slots={cores} in the hostfile"
                return [*findings, Finding(host, "slots", "fail", text, cure)]
            return [*findings, Finding(host, "slots", "ok", f"{len(wanted)} of {cores} cores")]
        findings = []
        if max(wanted) >= len(devices):
            text = f"slot {max(wanted)} is requested, but it has {len(devices)} GPUs"
            cure = f"use at most slots={len(devices)}, or check for a failed GPU (`nvidia-smi`)"
            findings.append(Finding(host, "slots", "fail", text, cure))
        else:
            text = f"{len(wanted)} of {len(devices)} GPUs"
            findings.append(Finding(host, "slots", "ok", text))
        return findings + [
            finding
            for i in wanted
            if i < len(devices)
            for finding in judge_gpu(host, i, devices[i])
        ]

    findings = each(facts, "gpus", "gpu", judge)
    models = {
        host: sorted({gpu["name"] for gpu in reported["gpus"].get("gpus", [])})
        for host, reported in facts.items()
    }
    common, odd = unlike_most(models)
    for host in odd if on_gpu else []:
        text = f"has {some(models[host]) or 'no GPU'}, elsewhere {some(common) or 'no GPU'}"
        level: Level = "warn" if models[host] and common else "fail"
        findings.append(Finding(host, "gpu", level, text, "exclude it, or fix its driver"))
    return findings


def judge_gpu(host: str, number: int, gpu: Mapping[str, Any]) -> list[Finding]:
    """One GPU that the job will use."""

    def finding(level: Level, text: str, cure: str) -> Finding:
        return Finding(host, "gpu", level, f"GPU {number}: {text}", cure)

    findings = []
    used = f"{gib(gpu['used_bytes'])} in use"
    if gpu["processes"]:
        pids = some([str(pid) for pid in gpu["processes"]])
        findings.append(finding("fail", f"{used} by process {pids}", "end it, or exclude the host"))
    elif gpu["used_bytes"] > BUSY_GPU_BYTES:
        cure = "look for another container that uses it, or exclude the host"
        findings.append(finding("fail", f"{used} by no visible process", cure))
    if gpu["ecc_errors"]:
        text = f"{gpu['ecc_errors']} uncorrected memory errors"
        findings.append(finding("fail", text, "reset or replace the GPU (`nvidia-smi -q -d ECC`)"))
    if gpu["repair"]:
        text = f"row remapping {' and '.join(gpu['repair'])}"
        findings.append(finding("fail", text, "reset the GPU; if that fails, replace it"))
    if gpu["slowed"]:
        text = f"its clock is throttled ({', '.join(gpu['slowed'])})"
        findings.append(
            finding("fail", text, "check cooling and power (`nvidia-smi -q -d PERFORMANCE`)")
        )
    return findings or [Finding(host, "gpu", "ok", f"GPU {number}: {gpu['name']}")]


def check_config(facts: Facts) -> list[Finding]:
    """Check that train.py accepts the config on each host. Problems with paths are left to
    check_paths, which reports them under the check that the path belongs to.
    """

    def judge(host: str, reported: dict[str, Any]) -> list[Finding]:
        missing = [r for r in facts[host]["paths"].get("paths", []) if "error" in r]
        if reported["mistake"] and not missing:
            return [Finding(host, "config", "fail", reported["mistake"])]
        return [Finding(host, "config", "ok", "valid")]

    return each(facts, "config", "config", judge)


def check_paths(facts: Facts) -> list[Finding]:
    """Check that every path and hub id of the run exists and is the same on all hosts."""
    records = {
        host: {(r["key"], r["name"]): r for r in of_host["paths"]["paths"]}
        for host, of_host in facts.items()
        if "error" not in of_host["paths"]
    }
    every = list(dict.fromkeys(name for of_host in records.values() for name in of_host))
    findings = []
    for key, name in every:
        check = key.split(".")[0] if key.startswith(("model", "data")) else "config"
        here = {h: r[key, name] for h, r in records.items() if (key, name) in r}
        fine = {
            h: r.get("fingerprint", r.get("commit")) for h, r in here.items() if "error" not in r
        }
        common, odd = unlike_most(fine) if fine else (None, [])
        example = next((here[h] for h in fine if h not in odd), {})
        for host in records:
            record = here.get(host)
            where = f"{key}: {name}"
            if record is None:
                text = f"{where} is not in its config"
                findings.append(Finding(host, check, "fail", text, "copy one config to all hosts"))
            elif "error" in record:
                text = f"{key}: {record['error']}"
                cure = "copy it there, or put it on a shared disk"
                findings.append(Finding(host, check, "fail", text, cure))
            elif host in odd and "commit" in record:
                there, common_one = short_hub(record["commit"]), short_hub(common)
                text = f"{where} is cached at {there}, elsewhere {common_one}"
                cure = "set a revision, or share HF_HOME"
                findings.append(Finding(host, check, "fail", text, cure))
            elif host in odd:
                text = f"{where} {difference(record, example)}"
                cure = "copy one version to all hosts"
                findings.append(Finding(host, check, "fail", text, cure))
            elif "commit" in record and not (record["commit"] and record.get("weights", True)):
                what = "its weights are not" if record["commit"] else "is not"
                text = f"{where}: {what} cached and will be downloaded"
                cure = "download it once, to a shared HF_HOME"
                findings.append(Finding(host, check, "warn", text, cure))
            else:
                findings.append(Finding(host, check, "ok", where))
    return [*each(facts, "paths", "data", lambda host, paths: []), *findings]


def short_hub(commit: str | None) -> str:
    return commit[:10] if commit else "nothing"


def difference(record: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """How a fingerprint differs from another host's, as text."""
    if record["files"] != other["files"]:
        return f"has {record['files']} files, elsewhere {other['files']}"
    names = [n for n, checksum in record["each"].items() if other["each"].get(n) != checksum]
    which = f" ({some(names)})" if len(record["each"]) > 1 and names else ""
    if record["bytes"] != other["bytes"]:
        return f"has {record['bytes']:,} bytes, elsewhere {other['bytes']:,}{which}"
    return f"has other contents than elsewhere{which}"


def check_output(facts: Facts) -> list[Finding]:
    """Check that output_dir is writable and has space for one more checkpoint than are kept: the
    oldest is deleted only after the newest is complete.
    """

    def judge(host: str, reported: dict[str, Any]) -> list[Finding]:
        folder, free = reported["folder"], reported["free_bytes"]
        if reported["problem"]:
            text = f"output_dir {folder} cannot be written to ({reported['problem']})"
            cure = f"fix owner or mount of {reported['nearest']}, or use another folder"
            return [Finding(host, "output", "fail", text, cure)]
        need = facts[host]["needs"]
        if not need.get("checkpoint_bytes"):
            return [Finding(host, "output", "ok", f"{gib(free)} free")]
        count = max(1, need["keep"] + 1 - reported["checkpoints"])
        wanted = count * need["checkpoint_bytes"]
        text = (
            f"{gib(free)} free for {count} more checkpoints of about "
            f"{gib(need['checkpoint_bytes'])}"
        )
        if free < wanted:
            cure = "free some space, or lower checkpoint.keep_last"
            return [Finding(host, "output", "fail", f"output_dir {folder} has {text}", cure)]
        return [Finding(host, "output", "ok", text)]

    return each(facts, "output", "output", judge)


async def check_shared(output_dir: str, facts: Facts, hosts: Sequence[RemoteHost]) -> list[Finding]:
    """Check that a file which one host writes to output_dir appears on the others."""
    writers = [h for h in hosts if not facts[h.name]["output"].get("problem", "no answer")]
    if len(hosts) < 2 or not writers:
        return []
    writer, call = writers[0], {"environment": {}, "timeout_seconds": 30}
    others = [host for host in hosts if host is not writer]
    try:
        token = await writer.ask(
            "call", name="make_token", arguments={"folder": output_dir}, **call
        )
    except HostError as error:
        return [Finding(writer.name, "output", "fail", error.problem)]
    try:
        seen = await ask_all(others, "call", name="sees_token", arguments={"token": token}, **call)
    finally:
        await ask_all([writer], "call", name="remove_token", arguments={"token": token}, **call)
    where = "none" if not any(s is True for s in seen) else "not all"
    return [
        Finding(
            host.name,
            "output",
            "fail",
            f"output_dir {output_dir} is node-local: {where} of the other hosts see what "
            f"{writer.name} writes there",
            "use an output_dir on a shared disk, or set checkpoint.node_local",
        )
        for host, answer in zip(others, seen, strict=True)
        if answer is not True
    ]


def check_memory(facts: Facts) -> list[Finding]:
    """Compare the model states kept in host memory with what machine and cgroup limits leave."""

    def judge(host: str, reported: dict[str, Any]) -> list[Finding]:
        need = facts[host]["needs"].get("memory_bytes")
        available = reported["available_bytes"]
        if need is None:
            text = f"{gib(available)} ({reported['limited_by']}); the need is unknown"
            return [Finding(host, "memory", "none", text)]
        left = f"{gib(available)} left ({reported['limited_by']})"
        text = f"{left} for model states of about {gib(need)}"
        cure = "use a higher ZeRO stage, fewer ranks there, less offload, or a larger limit"
        if need > available:
            return [Finding(host, "memory", "fail", text, cure)]
        level: Level = "warn" if need > 0.8 * available else "ok"
        return [Finding(host, "memory", level, text, cure if level == "warn" else "")]

    return each(facts, "memory", "memory", judge)


def check_limits(facts: Facts, ranks: int, on_gpu: bool = True) -> list[Finding]:
    """Check the size of /dev/shm, locked memory for RDMA, and open files."""

    def judge(host: str, reported: dict[str, Any]) -> list[Finding]:
        findings = []
        uses_gpu = on_gpu and bool(facts[host]["gpus"].get("gpus"))
        if reported["shm_bytes"] < SMALL_SHM_BYTES:
            text = f"/dev/shm has {reported['shm_bytes'] / (1 << 20):.0f} MiB"
            cure = "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir in Memory"
            level: Level = "fail" if uses_gpu else "warn"
            findings.append(Finding(host, "limits", level, text, cure))
        locked = reported["memlock_bytes"]
        if reported["infiniband"] and 0 <= locked < GIB:
            text = f"memlock is {locked / (1 << 20):.0f} MiB, but RDMA pins its buffers"
            cure = "set `* - memlock unlimited` in limits.conf, or docker run --ulimit memlock=-1"
            findings.append(Finding(host, "limits", "fail", text, cure))
        wanted = OPEN_FILES + 4 * ranks
        if 0 <= reported["open_files"] < wanted:
            text = f"{reported['open_files']} open files are allowed, but a rank may need {wanted}"
            findings.append(Finding(host, "limits", "fail", text, "raise nofile in limits.conf"))
        text = f"/dev/shm {gib(reported['shm_bytes'])}, {reported['open_files']} open files"
        return findings or [Finding(host, "limits", "ok", text)]

    return each(facts, "limits", "limits", judge)
