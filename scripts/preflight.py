"""Check the hosts of a hostfile before a job:

    python -m scripts.preflight --hostfile hostfile [--hosts_only] [--links FILE] [options of
        scripts/launch.sh] -- train.py --config recipes/mine.yaml [--section.key value ...]

Each host first reports on itself over ssh. If the reports pass all checks, a job on all ranks
measures the links. docs/multi_node.md lists the checks. Exit code: 0 all checks passed, 1 a check
failed, 2 a mistake in the input.
"""

import sys
from dataclasses import replace

import pandas as pd

from zerotrain.launch.checks import CHECKS, check_hosts
from zerotrain.launch.host_report import Level
from zerotrain.launch.hostfile import between
from zerotrain.launch.job import job_of, job_parser
from zerotrain.launch.launch import launch
from zerotrain.runtime.errors import EXIT_FAILURE, exit_on_error


def main() -> None:
    parser = job_parser("python -m scripts.preflight")
    add = parser.add_argument
    add("--hosts_only", action="store_true", help="skip the job that measures the links")
    add(
        "--timeout", type=between(1, 86_400), default=60,
        help="seconds for the ranks to meet, and for a collective to finish (60)",
    )  # fmt: skip
    add(
        "--links",
        default="",
        metavar="FILE",
        help="file on the first host to write bandwidths to, for scripts.plan --links",
    )
    arguments = parser.parse_args()
    job = job_of(arguments)
    reports, findings = check_hosts(job)
    table = pd.DataFrame("-", index=[*job.hosts], columns=[*CHECKS])
    for host, report in reports.items():
        table.loc[host, report.get("checked", [])] = "ok"
    lines = []
    for host, problem in findings:
        table.loc[host, problem.check] = problem.level
        lines.append(f"{problem.level}  {host}: {problem.check}: {problem.text}")
    print(table.to_string(), *lines, sep="\n")
    if any(problem.level == Level.FAIL for _, problem in findings):
        sys.exit(EXIT_FAILURE)
    if not arguments.hosts_only:
        program = ["-m", "zerotrain.launch.bandwidth", str(arguments.timeout), arguments.links]
        program += [host for host, devices in job.hosts.items() for _ in devices]
        if launch(replace(job, command=program)).code != 0:
            sys.exit(EXIT_FAILURE)


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
