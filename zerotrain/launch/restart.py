"""What happens between a failure and the restart of a job: which hosts are left?"""

import threading
import time
from dataclasses import replace

from zerotrain.launch.checks import check_hosts, without
from zerotrain.launch.job import Job
from zerotrain.runtime.errors import RunFailed

RETRY_SECONDS = 5.0


def prepare_restart(
    job: Job, wait_seconds: float, stopped: threading.Event
) -> tuple[Job, str | None]:
    """Wait until all hosts of the job pass preflight's checks; after `wait_seconds` go on with
    those that do, unless the job needs all of them.

    Args:
        stopped: set when the user has stopped the job.

    Returns:
        The job on these hosts, and the name of the newest complete checkpoint.

    Raises:
        RunFailed: no host is healthy, the job needs all hosts, or it was stopped.
    """
    config = job.config
    needs_all = config is not None and config.distributed.world_size is not None
    deadline = time.monotonic() + wait_seconds
    printed = ""
    while True:
        reports, findings = check_hosts(job)
        hosts = without(job.hosts, findings)
        problem = "; ".join(f"{f.host}: {f.check}: {f.text}" for f in findings if not f.is_warning)
        late = time.monotonic() > deadline
        if len(hosts) == len(job.hosts) or (late and hosts and not needs_all):
            break
        if late or stopped.is_set():
            raise RunFailed(f"no restart: {problem}")
        if problem != printed:
            print(f"launch: waiting: {problem}", flush=True)
            printed = problem
        stopped.wait(RETRY_SECONDS)
    if len(hosts) < len(job.hosts):
        print(f"launch: continuing on {', '.join(h.name for h in hosts)}: {problem}", flush=True)
    saved = [reports[host.name].get("checkpoint") for host in hosts]
    newest = max((name for name in saved if name), default=None)
    return replace(job, hosts=hosts), newest
