"""Measure how training speed grows with the number of nodes, and what keeps it from growing.

    python -m scripts.scaling_test --nodes 1 2 4 --hostfile hostfile [options of scripts/launch.sh]
        [--strong] [--steps 30] [--output runs/scaling] -- train.py --config recipes/mine.yaml ...

Runs the config for a few steps on the first 1, 2 and 4 hosts. Scaling is weak: the smallest number
of nodes has the config's global batch, and others have more, so that each rank has the same work.
With --strong the global batch stays. Efficiency is tokens/s per rank, relative to the smallest
number of nodes. The phase that has grown most shows the cause: `data` the loader; `forward`,
`backward` and `optimizer` the network, because a rank's own work stays the same.
Exit code 1 if a run fails; the other sizes are still run. Ctrl-C skips the sizes that are left.
"""

import shutil
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pandas as pd

from zerotrain.launch.hostfile import Hosts, between, world_size
from zerotrain.launch.job import Job, job_of, job_parser
from zerotrain.launch.launch import launch
from zerotrain.runtime.errors import EXIT_FAILURE, UserError, exit_on_error
from zerotrain.tools.local_ranks import short_run
from zerotrain.tools.new_folder import own_folder
from zerotrain.tools.records import PHASES, read_metrics

WARM_UP_STEPS = 5  # not measured: they load kernels, allocate memory and open connections


def short_job(job: Job, hosts: Hosts, growth: float, steps: int, folder: Path) -> Job:
    """Return the job on some hosts, with a few steps and a global batch `growth` times as large."""
    train = job.config.train
    batch = f"--train.{train.global_batch_key}={max(1, round(growth * train.global_batch))}"
    words = [*short_run(steps), f"--output_dir={folder.absolute()}", batch]
    return replace(job, hosts=hosts, command=[*job.command, *words])


def measure(folder: Path, ranks: int) -> dict[str, float]:
    """Return ranks, tokens/s, and seconds per step by phase, after the warm-up."""
    steps = pd.DataFrame(read_metrics(folder)[WARM_UP_STEPS:])
    speed = steps.tokens.sum() / steps.step_seconds.sum()
    return {"ranks": ranks, "tokens/s": speed, **steps[PHASES].mean()}


def main() -> None:
    parser = job_parser("python -m scripts.scaling_test")
    add = parser.add_argument
    add(
        "--nodes",
        type=int,
        nargs="+",
        required=True,
        metavar="N",
        help="numbers of hosts to run on",
    )
    add("--strong", action="store_true", help="keep the global batch")
    add(
        "--steps",
        type=between(WARM_UP_STEPS + 1, 10**6),
        default=30,
        help=f"steps per size, the first {WARM_UP_STEPS} not measured (30)",
    )
    add(
        "--output",
        type=Path,
        default=Path("runs/scaling"),
        metavar="FOLDER",
        help="folder for the runs (runs/scaling)",
    )
    arguments = parser.parse_args()
    job = job_of(arguments)
    if Path(job.command[0]).name != "train.py":
        raise UserError(f"{job.command[0]} cannot be measured: give train.py and its flags")
    sizes = sorted({*arguments.nodes})
    if not 1 <= sizes[0] <= sizes[-1] <= len(job.hosts):
        raise UserError(f"--nodes {sizes}: give numbers from 1 to {len(job.hosts)}")

    own_folder(arguments.output)
    found = {}
    smallest = world_size(dict(islice(job.hosts.items(), sizes[0])))
    for nodes in sizes:
        hosts = dict(islice(job.hosts.items(), nodes))
        ranks = world_size(hosts)
        growth = 1 if arguments.strong else ranks / smallest
        folder = arguments.output / f"nodes_{nodes}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            outcome = launch(short_job(job, hosts, growth, arguments.steps, folder))
        except UserError as error:
            print(f"{nodes} nodes: {error}", file=sys.stderr)
            continue
        if outcome.code == 0:
            found[nodes] = measure(folder, ranks)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        if outcome.stopped_by_user:
            break
    print(f"{'strong' if arguments.strong else 'weak'} scaling, seconds per step by phase")
    if found:
        table = pd.DataFrame(found.values(), index=pd.Index(found, name="nodes"))
        of_rank = table["tokens/s"] / table.ranks
        table["efficiency"] = of_rank / of_rank.iloc[0]
        table["grown most"] = (table - table.iloc[0])[PHASES].iloc[1:].idxmax(axis=1)
        table["tokens/s"] = table["tokens/s"].map("{:,.0f}".format)
        print(table.to_string(na_rep="-", float_format="{:,.4g}".format))
    if len(found) < len(sizes):
        sys.exit(EXIT_FAILURE)


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
