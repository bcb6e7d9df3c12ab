"""Check the hosts of a hostfile before a job:

    python -m scripts.preflight --hostfile hostfile [--hosts_only] [--links FILE] [options of
        scripts/launch.sh] -- train.py --config recipes/mine.yaml [--section.key value ...]

First each host reports on itself over ssh, and the reports are checked; then, unless a check has
failed, a job on all ranks measures the links (--hosts_only leaves it out, --links FILE also writes
them to a file). docs/multi_node.md lists the checks. Exit code: 0 nothing failed, 1 a
check failed, 2 a mistake in the input.
"""

import sys
from dataclasses import replace

import pandas as pd

from zerotrain.launch.checks import CHECKS, check_hosts
from zerotrain.launch.hostfile import between
from zerotrain.launch.job import job_of, job_parser
from zerotrain.launch.launch import launch
from zerotrain.runtime.errors import EXIT_FAILURE, exit_on_error


def main() -> None:
    parser = job_parser("python -m scripts.preflight")
    parser.add_argument("--hosts_only", action="store_true", help="without the job on all ranks")
    parser.add_argument(
        "--timeout", type=between(1, 86_400), default=60,
        help="seconds in which the ranks have to meet, and a collective to end (60)",
    )  # fmt: skip
    parser.add_argument(
        "--links",
        default="",
        metavar="FILE",
        help="write the bandwidths there, on the first host, for the plan of a run",
    )
    arguments = parser.parse_args()
    job = job_of(arguments)
    reports, findings = check_hosts(job)
    table = pd.DataFrame("-", index=[*job.hosts], columns=[*CHECKS])  # not checked
    for host, report in reports.items():
        table.loc[host, report.get("checked", [])] = "ok"
    for finding in findings:
        table.loc[finding.host, finding.check] = finding.level
    print(table.to_string())
    for finding in findings:
        print(f"{finding.level}  {': '.join(finding)}")
    if any(finding.level == "FAIL" for finding in findings):
        sys.exit(EXIT_FAILURE)
    if not arguments.hosts_only:
        names = [host for host, devices in job.hosts.items() for _ in devices]
        program = ["-m", "zerotrain.launch.bandwidth", str(arguments.timeout), arguments.links]
        program += names
        if launch(replace(job, command=program)).code != 0:
            sys.exit(EXIT_FAILURE)


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
