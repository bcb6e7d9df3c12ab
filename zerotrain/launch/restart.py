"""What happens between a failure and the restart of a job: which hosts are left?"""

import threading
import time
from dataclasses import replace

from zerotrain.launch.checks import check_hosts
from zerotrain.launch.job import Job
from zerotrain.runtime.errors import RunFailed

RETRY_SECONDS = 5.0


def prepare_restart(job: Job, wait_seconds: float, stopped: threading.Event) -> tuple[Job, str]:
    """Wait until all hosts of the job pass preflight's checks; after `wait_seconds` go on with
    those that do, unless the job needs all of them.

    Args:
        stopped: set when the user has stopped the job.

    Returns:
        The job on these hosts, and the name of the newest complete checkpoint, "" without one.

    Raises:
        RunFailed: no host is healthy, the job needs all hosts, or it was stopped.
    """
    needs_all = job.config is not None and job.config.distributed.world_size is not None
    deadline = time.monotonic() + wait_seconds
    printed = ""
    while True:
        reports, findings = check_hosts(job)
        failed = [finding for finding in findings if finding.level == "FAIL"]
        unfit = {finding.host for finding in failed}
        hosts = {host: devices for host, devices in job.hosts.items() if host not in unfit}
        problem = "; ".join(map(": ".join, failed))
        late = time.monotonic() > deadline
        if len(hosts) == len(job.hosts) or (late and hosts and not needs_all):
            break
        if late or stopped.is_set():
            raise RunFailed(f"no restart: {problem}")
        if problem != printed:
            print(f"launch: waiting: {problem}")
            printed = problem
        stopped.wait(RETRY_SECONDS)
    if len(hosts) < len(job.hosts):
        print(f"launch: continuing on {', '.join(hosts)}: {problem}")
    saved = [reports[host]["checkpoint"] or "" for host in hosts]
    return replace(job, hosts=hosts), max(saved)
