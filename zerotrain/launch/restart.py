"""Between a failure and the restart of a job: find the hosts that are left."""

import time
from dataclasses import replace

from zerotrain.launch.checks import check_hosts
from zerotrain.launch.host_report import Level
from zerotrain.launch.job import Job
from zerotrain.runtime.errors import RunFailed

RETRY_SECONDS = 5.0


def prepare_restart(job: Job, wait_seconds: float, received: list[int]) -> tuple[Job, str]:
    """Wait until all hosts of the job pass preflight's checks, and return the job to start.

    After `wait_seconds` the hosts that pass are enough, unless the job needs all of them.

    Args:
        received: the signals to stop that this process has received; it may grow meanwhile.

    Returns:
        The job on the healthy hosts, and the name of the newest complete checkpoint, "" without
        one.

    Raises:
        RunFailed: no host is healthy, the job needs all hosts, or it was stopped.
    """
    needs_all = job.config is not None and job.config.distributed.world_size is not None
    deadline = time.monotonic() + wait_seconds
    printed = ""
    while True:
        reports, findings = check_hosts(job)
        failed = {host: p for host, p in findings if p.level == Level.FAIL}
        hosts = {host: devices for host, devices in job.hosts.items() if host not in failed}
        problem = "; ".join(f"{host}: {p.check}: {p.text}" for host, p in failed.items())
        late = time.monotonic() > deadline
        if len(hosts) == len(job.hosts) or (late and hosts and not needs_all):
            break
        if late or received:
            raise RunFailed(f"no restart: {problem}")
        if problem != printed:
            print(f"launch: waiting: {problem}")
            printed = problem
        time.sleep(RETRY_SECONDS)
    if len(hosts) < len(job.hosts):
        print(f"launch: continuing on {', '.join(hosts)}: {problem}")
    return replace(job, hosts=hosts), max(reports[host]["checkpoint"] for host in hosts)
