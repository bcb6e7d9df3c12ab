"""Before a job starts or restarts: find the hosts to run it on."""

import time
from collections.abc import Collection
from dataclasses import replace

from zerotrain.launch.checks import check_hosts
from zerotrain.launch.host_report import Level
from zerotrain.launch.job import Job
from zerotrain.runtime.errors import RunFailed

RETRY_SECONDS = 5.0


def choose_hosts(
    job: Job,
    chosen: list[str],
    wait_seconds: float,
    received: list[int],
    lost: Collection[str] = (),
) -> tuple[Job, str]:
    """Wait until each chosen host passes preflight's checks, or a spare host that passes has taken
    its place. Return the job to start.

    After `wait_seconds` the hosts that pass are enough, unless the job needs as many.

    Args:
        job: the job with all its hosts. Those that are not chosen are spare.
        chosen: the hosts to use, in the order of the ranks. A spare replaces a lost host here.
        received: the signals to stop that this process has received; it may grow meanwhile.
        lost: hosts that were just lost, which the first check does not wait for as long.

    Returns:
        The job on the healthy hosts, and the name of the newest complete checkpoint, "" without
        one.

    Raises:
        UserError: two hosts are the same machine.
        RunFailed: no host is healthy, the job needs more hosts, or it was stopped.
    """
    needs_all = job.config is not None and job.config.distributed.world_size is not None
    deadline = time.monotonic() + wait_seconds
    printed = ""
    while True:
        reports, findings = check_hosts(job, lost)
        lost = ()
        failed = {host: p for host, p in findings if p.level == Level.FAIL}
        spares = [host for host in job.hosts if host not in failed and host not in chosen]
        for place, host in enumerate(chosen):
            if host in failed and spares:
                chosen[place] = spares.pop(0)
        hosts = {host: job.hosts[host] for host in chosen if host not in failed}
        problem = "; ".join(f"{host}: {p.check}: {p.text}" for host, p in failed.items())
        late = time.monotonic() > deadline
        if len(hosts) == len(chosen) or (late and hosts and not needs_all):
            break
        if late or received:
            raise RunFailed(f"no start: {problem}")
        if problem != printed:
            print(f"launch: waiting: {problem}")
            printed = problem
        time.sleep(RETRY_SECONDS)
    if failed:
        print(f"launch: continuing on {', '.join(hosts)}: {problem}")
    return replace(job, hosts=hosts), max(reports[host]["checkpoint"] for host in hosts)
