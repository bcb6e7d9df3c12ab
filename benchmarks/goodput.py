"""Measure the goodput of a run that is killed again and again, on two real ssh hosts.

    sudo PYTHONPATH=$PWD .venv/bin/python -m benchmarks.goodput [--minutes 30] [--kill_every 90]

The hosts are network namespaces of this machine, each with an sshd (tests/launch/namespaces.py;
needs root). scripts/launch.sh trains recipes/demo.yaml on one rank of each and saves every 20
steps. Every --kill_every seconds SIGKILL ends, in turn, a rank of the second host, the node wrapper
of the second host, and a rank of the first host. The run is stopped after --minutes. A run without
kills follows, of as many steps or --compare steps, and has to have the same curve bit for bit.
Flags of train.py may follow, such as --checkpoint.async_save true.

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
from zerotrain.tools.goodput import measure_goodput
from zerotrain.tools.records import read_metrics

VICTIMS = ((2, "[t]rain.py --config"), (2, "[z]erotrain.launch.node"), (1, "[t]rain.py --config"))
"""Host, and a pattern that finds the process to kill there."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=30, help="minutes of the run with kills (30)")
    add("--kill_every", type=float, default=90, metavar="SECONDS", help="(90)")
    add("--save_every", type=int, default=20, metavar="STEPS", help="(20)")
    add("--compare", type=int, metavar="STEPS", help="steps of the run without kills (all)")
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
    try:
        wait_until(lambda: steps_of(run_folder), job, log, interval=1)
        end = time.time() + 60 * args.minutes
        while (due := time.time() + args.kill_every) < end:
            time.sleep(due - time.time())
            host, pattern = VICTIMS[len(kills) % len(VICTIMS)]
            kills.append(time.time())
            hosts.run(host, f"pkill -KILL -n -f '{pattern}'")
        time.sleep(max(0.0, end - time.time()))
        (run_folder / "stop").touch()
        code = job.wait(120)
    finally:
        job.kill()
    if code != 0:
        raise UserError(f"the run ended with exit code {code}:\n{log.read_text()[-3000:]}")
    goodput = measure_goodput(run_folder)
    print(f"goodput {goodput.share:.3f} of {goodput.wall_seconds:,.0f} s, {len(kills)} kills")
    for part, seconds in goodput.seconds.items():
        print(f"  {part:32} {seconds:8.1f} s  {seconds / goodput.wall_seconds:6.1%}")
    waits = [wait for kill in kills if (wait := seconds_to_next_step(run_folder, kill)) is not None]
    if waits:
        print(
            f"from a kill to the next step: median {median(waits):.1f} s, most {max(waits):.1f} s"
        )
    done = determined(run_folder)
    compared = min(args.compare or len(done), len(done))
    print(f"{len(done)} steps; the run without kills takes {compared}", flush=True)
    job = start_job(hosts, folder / "whole", log, compared, args)
    code = job.wait(24 * 3600)
    is_equal = code == 0 and determined(folder / "whole") == done[:compared]
    print("the curves are equal" if is_equal else "the curves DIFFER")
    return is_equal and goodput.share >= args.goal


def start_job(
    hosts: Hosts, run_folder: Path, log: Path, steps: int, args: argparse.Namespace
) -> subprocess.Popen:
    """Start launch.sh on both hosts. A constant rate makes the curve independent of `steps`."""
    hostfile = run_folder.with_name("hostfile")
    hostfile.write_text("node-1 slots=1\nnode-2 slots=1\n", encoding="utf-8")
    flags = {
        "output_dir": run_folder, "train.steps": steps, "train.lr_schedule": "constant_with_warmup",
        "data.eval_sources": "[]", "eval.every_steps": 0, "checkpoint.every_steps": args.save_every,
        "tracking.wandb": "disabled",
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items()]
    return start(
        hosts, log, "scripts/launch.sh", "--hostfile", hostfile, "--max_restarts", 1000, "--",
        "train.py", "--config", "recipes/demo.yaml", *words, *args.flags,
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
