"""Measure the goodput of a run that is killed again and again, on two real ssh hosts.

    sudo PYTHONPATH=$PWD .venv/bin/python -m benchmarks.goodput [--minutes 30] [--kill_every 90]

The hosts are network namespaces of this machine, each with an sshd (tests/launch/namespaces.py;
needs root). scripts/launch.sh trains recipes/demo.yaml on one rank of each and saves every 20
steps. Every --kill_every seconds one of --faults happens, in turn:

    rank, wrapper   SIGKILL for the rank or the node wrapper of the second host
    first           SIGKILL for the rank of the first host
    network         the link of the second host is cut for 30 s, which do not count
    host            the link of the second host is cut, and all its processes are killed. A third
                    host takes over, and the lost one comes back as spare

The run is stopped after --minutes. A run without faults follows, of --compare steps, and has to
have the same curve bit for bit. Flags of train.py may follow, such as --checkpoint.async_save true.

Exit code 0: the curves are equal, and the goodput is at least --goal.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path += ["tests", "tests/launch"]

from harness.processes import wait_until
from harness.runs import determined
from namespaces import WHY_NOT, Hosts, start

from zerotrain.runtime.errors import EXIT_FAILURE, UserError, exit_on_error
from zerotrain.tools.goodput import USEFUL, measure_goodput
from zerotrain.tools.records import read_metrics

KILLED = {
    "rank": "[t]rain.py --config", "wrapper": "[z]erotrain.launch.node",
    "first": "[t]rain.py --config",
}  # fmt: skip
"""Patterns that find the process to kill."""
FAULTS = (*KILLED, "network", "host")
CUT_SECONDS = 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=30, help="minutes of the run with kills (30)")
    add("--kill_every", type=float, default=90, metavar="SECONDS", help="(90)")
    add("--save_every", type=int, default=20, metavar="STEPS", help="(20)")
    add("--faults", nargs="+", choices=FAULTS, default=[*KILLED], help="(rank wrapper first)")
    add("--compare", type=int, default=600, metavar="STEPS", help="of the run without faults (600)")
    add("--goal", type=float, default=0.93, help="least goodput (0.93)")
    args, args.flags = parser.parse_known_args()
    if WHY_NOT is not None:
        raise UserError(f"no hosts can be made on this machine: {WHY_NOT}")
    with TemporaryDirectory(prefix="goodput-") as folder:
        hosts = Hosts(Path(folder))
        try:
            hosts.up()
            is_reached = measure(hosts, Path(folder), args)
        finally:
            hosts.down()
    sys.exit(0 if is_reached else EXIT_FAILURE)


def measure(hosts: Hosts, folder: Path, args: argparse.Namespace) -> bool:
    """Run with and without kills, print the results, and return whether they are good."""
    run_folder, log = folder / "run", folder / "log"
    job = start_job(hosts, run_folder, log, 100_000, args)
    kills = []
    cut_seconds = 0
    second = 2
    try:
        wait_until(lambda: steps_of(run_folder), job, log, interval=1)
        end = time.time() + 60 * args.minutes
        while (due := time.time() + args.kill_every) < end:
            time.sleep(due - time.time())
            fault = args.faults[len(kills) % len(args.faults)]
            kills.append(time.time())
            if fault in KILLED:
                host = 1 if fault == "first" else second
                hosts.run(host, f"pkill -KILL -n -f '{KILLED[fault]}'")
                continue
            hosts.cut(second)
            if fault == "network":
                time.sleep(CUT_SECONDS)
                cut_seconds += CUT_SECONDS
                hosts.mend(second)
                continue
            hosts.kill(second)
            wait_until(lambda: seconds_to_next_step(run_folder, kills[-1]), job, log, interval=1)
            hosts.mend(second)
            hosts.boot(second)
            second = 5 - second
        time.sleep(max(0.0, end - time.time()))
        (run_folder / "stop").touch()
        code = job.wait(120)
    finally:
        job.kill()
    if code != 0:
        raise UserError(f"the run ended with exit code {code}:\n{log.read_text()[-3000:]}")
    goodput = measure_goodput(run_folder)
    took = [step["step_seconds"] for step in steps_of(run_folder)]
    # A step that lasts as long as a cut has waited for it.
    waited = sum(CUT_SECONDS for seconds in took if seconds > CUT_SECONDS)
    wall = goodput.wall_seconds - cut_seconds
    share = (goodput.seconds[USEFUL] - waited) / wall
    print(f"goodput {share:.3f} of {wall:,.0f} s, {len(kills)} faults")
    for part, seconds in goodput.seconds.items():
        print(f"  {part:32} {seconds:8.1f} s  {seconds / goodput.wall_seconds:6.1%}")
    waits = [wait for kill in kills if (wait := seconds_to_next_step(run_folder, kill)) is not None]
    if waits:
        print(
            f"from a fault to the next step: median {median(waits):.1f} s, most {max(waits):.1f} s"
        )
    done = determined(run_folder)
    compared = min(args.compare, len(done))
    print(f"{len(done)} steps; the run without faults takes {compared}", flush=True)
    job = start_job(hosts, folder / "whole", log, compared, args)
    code = job.wait(24 * 3600)
    is_equal = code == 0 and determined(folder / "whole") == done[:compared]
    print("the curves are equal" if is_equal else "the curves DIFFER")
    return is_equal and share >= args.goal


def start_job(
    hosts: Hosts, run_folder: Path, log: Path, steps: int, args: argparse.Namespace
) -> subprocess.Popen:
    """Start launch.sh on both hosts. A constant rate makes the curve independent of `steps`."""
    hostfile = run_folder.with_name("hostfile")
    names = ("node-1", "node-2", "node-3")[: 2 + ("host" in args.faults)]
    if len(names) > 2:
        hosts.boot(3)
    hostfile.write_text("".join(f"{name} slots=1\n" for name in names), encoding="utf-8")
    flags = {
        "output_dir": run_folder, "train.steps": steps, "train.lr_schedule": "constant_with_warmup",
        "data.eval_sources": "[]", "eval.every_steps": 0, "checkpoint.every_steps": args.save_every,
        "tracking.wandb": "disabled",
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items()]
    return start(
        hosts, log, "scripts/launch.sh", "--hostfile", hostfile, "--max_restarts", 1000,
        "--nodes", 2, "--", "train.py", "--config", "recipes/demo.yaml", *words, *args.flags,
    )  # fmt: skip


def steps_of(run_folder: Path) -> list[dict]:
    return read_metrics(run_folder) if (run_folder / "metrics.jsonl").exists() else []


def seconds_to_next_step(run_folder: Path, kill: float) -> float | None:
    """Return the seconds from a kill to the end of the first step after the restart; None if the
    run has not kept that step.
    """
    started = [s["time"] for s in read_metrics(run_folder, "start") if s["time"] > kill]
    after = [s["time"] for s in steps_of(run_folder) if started and s["time"] > min(started)]
    return min(after) - kill if after else None


if __name__ == "__main__":
    exit_on_error(main)
