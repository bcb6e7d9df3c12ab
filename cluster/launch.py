"""scripts/launch.sh: runs one training job on the hosts of a hostfile and watches it until it ends.

`deepspeed` starts the ranks. An agent on every host (cluster/agent.py), reached over its own ssh
connection, holds the job's environment and secrets, reports the state of the host's ranks every
few seconds, and ends them when the job is over for whatever reason. The exit code is the job's: 0
only if every rank has ended with 0.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from checkpoint.run_folder import checkpoints_folder
from cluster.check_hosts import check_hosts
from cluster.hostfile import Host
from cluster.hosts import RemoteHost, ask_all, connect_all, explain_noise
from cluster.job import Job, job_of, new_id, parse_arguments, queue_of_signals
from cluster.supervise import RETRY_SECONDS, heard, run_job
from runtime.errors import EXIT_USER_MISTAKE, UserError, exit_on_error


async def launch(job: Job, max_restarts: int) -> int:
    """Run the job and restart it after a failure, until `max_restarts` restarts in a row have
    produced no newer checkpoint. A host that fails its checks is left out and checked again at the
    next restart.

    Returns:
        The job's exit code.

    Raises:
        UserError: a host cannot be reached at the start, or no restart is possible.
    """
    signals = queue_of_signals()
    hosts, errors = await connect_all(job.hosts, job.reach, Path.cwd())
    if errors:
        await close_all(hosts)
        more = f" And {len(errors) - 3} other hosts: run preflight.py to list them all."
        raise UserError("; ".join(map(str, errors[:3])) + (more if len(errors) > 3 else ""))
    for host in hosts:
        if host.noise:
            print(f"launch: {host.name}: {explain_noise(host.noise)}", flush=True)
    saved = await newest_checkpoint(job, hosts)
    fruitless = 0  # restarts since the last new checkpoint
    while True:
        start = replace(job, id=new_id(), hosts=[Host(h.name, h.slots) for h in hosts])
        try:
            ending = await run_job(start, hosts, signals)
            before, saved = saved, await newest_checkpoint(job, hosts)
        finally:
            await close_all(hosts)
        if ending.cause:  # repeated as the last line
            line = f"launch: {ending.cause} (exit code {ending.code})"
            print(line, file=sys.stderr, flush=True)
        fruitless = 0 if saved != before else fruitless
        over = ending.stopped_by_user or ending.code in (0, EXIT_USER_MISTAKE)
        if over or fruitless >= max_restarts:
            return ending.code
        fruitless += 1
        hosts = await wait_for_hosts(job, signals)
        count = f" ({fruitless} of {max_restarts} without progress)" if fruitless > 1 else ""
        print(f"launch: restart from {saved or 'the beginning'}{count}", flush=True)


async def newest_checkpoint(job: Job, hosts: Sequence[RemoteHost]) -> str | None:
    """Name of the newest complete checkpoint in output_dir on any host; None if there is none."""
    if job.config is None:
        return None
    folder = str(checkpoints_folder(job.config.output_dir))
    names = await ask_all(heard(job, hosts), "newest_checkpoint", seconds=10, folder=folder)
    return max((name for name in names if isinstance(name, str)), default=None)


async def wait_for_hosts(job: Job, signals: "asyncio.Queue[int]") -> list[RemoteHost]:
    """Wait until all hosts of the job pass preflight's stage 1. After launch.restart_wait_seconds,
    continue with the healthy hosts only, unless the job needs all of them.

    Raises:
        UserError: no host is healthy, the job needs all hosts, or a signal arrived.
    """
    deadline = time.monotonic() + job.launch.restart_wait_seconds
    printed = ""
    while True:
        hosts, problems = await healthy_hosts(job)
        if hosts and not problems:
            return hosts
        await close_all(hosts)
        late = time.monotonic() > deadline
        if late and hosts and not job.needs_all_hosts:
            names = {host.name for host in hosts}
            reduced = replace(job, hosts=[host for host in job.hosts if host.name in names])
            hosts, more_problems = await healthy_hosts(reduced)  # checks compare the hosts
            if hosts and not more_problems:
                lost = ", ".join(host.name for host in job.hosts if host.name not in names)
                print(f"launch: continuing without {lost}: {'; '.join(problems)}", flush=True)
                return hosts
            await close_all(hosts)
            problems += more_problems
        problem = "; ".join(problems)
        if late or not signals.empty():
            raise UserError(f"no restart: {problem}")
        if problem != printed:
            print(f"launch: waiting: {problem}", flush=True)
            printed = problem
        await asyncio.sleep(RETRY_SECONDS)


async def healthy_hosts(job: Job) -> tuple[list[RemoteHost], list[str]]:
    """The hosts that pass preflight's stage 1, connected, and what is wrong with the others."""
    hosts, errors = await connect_all(job.hosts, job.reach, Path.cwd())
    findings = await check_hosts(job, job.config, hosts, errors)
    failures = [finding for finding in findings if finding.level == "fail"]
    failed = {finding.host for finding in failures}
    await close_all([host for host in hosts if host.name in failed])
    healthy = [host for host in hosts if host.name not in failed]
    return healthy, [f"{f.host}: {f.check}: {f.text}" for f in failures]


async def close_all(hosts: Sequence[RemoteHost]) -> None:
    await asyncio.gather(*(host.close() for host in hosts))


def main(argv: Sequence[str]) -> int:
    arguments, command = parse_arguments(argv)
    return asyncio.run(launch(job_of(arguments, command), arguments.max_restarts))


if __name__ == "__main__":
    sys.exit(exit_on_error(lambda: main(sys.argv[1:])))
