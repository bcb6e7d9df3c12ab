"""Measure how training speed grows with the number of nodes, and what keeps it from growing.

    python scripts/scaling_test.py --hostfile hostfile --config recipes/mine.yaml --nodes 1,2,4
        [--strong] [--steps 30] [--output runs/scaling] [--section.key value ...]

Runs the config for a few steps on the first 1, 2 and 4 hosts, by scripts/launch.sh, whose options
--include, --exclude, --launcher, --env, --ssh_args, --master_addr and --master_port are passed on.
Scaling is weak: the config's global batch is that of the smallest number of nodes and grows with
the ranks, so that each rank has the same work. With --strong the global batch stays, and each rank
has less. Evaluation and W&B are off; the checkpoint that a run writes at its end is removed.

Efficiency is tokens/s per rank, relative to the smallest number of nodes, and so is the split of a
step's time: waiting for data; compute, which is that of the smallest number of nodes (with what
its ranks communicate) times the growth of the slowest rank's time outside of collectives; and
communication, which is the rest. Results go to OUTPUT/scaling.json and OUTPUT/scaling.png. Exit
code 1 if a run fails; the others still count.
"""

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from checkpoint.run_folder import METRICS, checkpoints_folder, list_checkpoints, remove
from cluster.hostfile import Host, read_hostfile, select_hosts, world_size
from cluster.job import LAUNCHERS, add_host_options
from config.parse import parse_command_line
from config.schema import Config
from runtime.errors import (
    EXIT_FAILURE,
    UserError,
    describe,
    exit_code_of_signal,
    exit_on_error,
)
from runtime.files import replace_text
from tracking.history import OF_RANKS, Records, read_records

REPO = Path(__file__).resolve().parent.parent
WARM_UP_STEPS = 5  # not measured: kernels are loaded, memory is allocated, connections are made
WINDOW_STEPS = 5  # between two measurements of the time of each rank
GOOD = 0.8  # efficiency
NOTICED = 0.05  # of a step: smaller growth is noise
UNSPLIT = "compute and communication"
ORDER = ("compute", "data", "communication", UNSPLIT)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The speed on some nodes."""

    nodes: int
    ranks: int
    tokens_per_s: float
    step_seconds: float
    """Mean."""
    data_seconds: float
    """Mean of the rank that waits longest for data."""
    own_seconds: float | None
    """Mean of the slowest rank outside of collectives, without data; None if it is not recorded."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """A measurement beside that on the fewest nodes."""

    measured: Measured
    efficiency: float
    """Tokens/s per rank, relative to the fewest nodes."""
    parts: dict[str, float]
    """Seconds per step by names from ORDER; they add up to step_seconds."""
    growth: dict[str, float]
    """Seconds per step by part, beyond what linear scaling would have."""

    def grown(self) -> str:
        """Which part has grown most, for people."""
        part = max(self.growth, key=self.growth.__getitem__)
        share = self.growth[part] / self.measured.step_seconds
        return f"{part} +{self.growth[part]:.3g} s" if share > NOTICED else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_host_options(parser)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="pdsh")
    parser.add_argument("--nodes", required=True, metavar="N,N,...", help="numbers of hosts")
    parser.add_argument("--strong", action="store_true", help="the same global batch on all sizes")
    parser.add_argument("--steps", type=int, default=30, help=f"{WARM_UP_STEPS} are not measured")
    parser.add_argument("--output", type=Path, default=Path("runs/scaling"), metavar="FOLDER")
    args, flags = parser.parse_known_args()
    hosts = select_hosts(read_hostfile(args.hostfile), args.include, args.exclude)
    sizes = sizes_of(args.nodes, len(hosts))
    if args.steps < WARM_UP_STEPS + WINDOW_STEPS:
        raise UserError(f"--steps: {args.steps} is less than {WARM_UP_STEPS + WINDOW_STEPS}")
    config = parse_command_line(flags, prog="scaling_test.py", validate=False).config
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(exit_code_of_signal(number)))

    measured, failed = [], False
    for nodes in sizes:
        on, first = hosts[:nodes], hosts[: sizes[0]]
        growth = 1 if args.strong else world_size(on) / world_size(first)
        batch = max(1, round(config.train.global_batch * growth))
        try:
            ours = run_flags(config, batch, args.steps, folder_of(args.output, nodes))
            measured.append(run(args, on, [*flags, *ours]))
            print(f"{count(nodes)}: {measured[-1].tokens_per_s:,.0f} tokens/s", flush=True)
        except RuntimeError as error:
            failed = True
            print(f"{count(nodes)}: {error}", file=sys.stderr, flush=True)
    if measured:
        report(compare(measured, args.strong), args)
    if failed:
        sys.exit(EXIT_FAILURE)


def sizes_of(text: str, most: int) -> list[int]:
    """The numbers of --nodes, rising.

    Raises:
        UserError: not such a list, or one is larger than `most`, the number of hosts.
    """
    try:
        sizes = sorted({int(number) for number in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise UserError(f"--nodes: {text!r} is not a list of numbers like 1,2,4")
    if sizes[-1] > most:
        raise UserError(f"--nodes: {sizes[-1]} is more than the {most} hosts of the hostfile")
    return sizes


def count(nodes: int) -> str:
    return f"{nodes} node" if nodes == 1 else f"{nodes} nodes"


def folder_of(output: Path, nodes: int) -> Path:
    return output / f"nodes_{nodes}"


def run_flags(config: Config, batch: int, steps: int, folder: Path) -> list[str]:
    """Flags that turn a run config into a short run of its own."""
    flags = {
        "output_dir": str(folder),
        f"train.{config.train.global_batch_key}": batch,
        "train.steps": steps,
        "train.epochs": "null",
        "data.eval_sources": "[]",
        "data.eval_fraction": 0,
        "checkpoint.every_steps": 0,
        "checkpoint.every": "null",
        "checkpoint.resume": "none",
        "checkpoint.weights_only": "false",
        "eval.generate": 0,
        "eval.metric": "eval_loss",
        "eval.patience": 0,
        "launch.world_size": "null",
        "tracking.wandb": "disabled",
        "tracking.rank_window_steps": WINDOW_STEPS,
    }
    return [f"--{key}={value}" for key, value in flags.items()]


def run(args: argparse.Namespace, hosts: Sequence[Host], flags: Sequence[str]) -> Measured:
    """Run the job on these hosts and measure it.

    Raises:
        RuntimeError: it failed; one line that says how and where its output is.
    """
    folder = folder_of(args.output, len(hosts))
    include = "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)
    options = [f"--hostfile={args.hostfile}", f"--include={include}", f"--launcher={args.launcher}"]
    options += [f"--env={text}" for text in args.env]
    options += [
        f"--{name}={value}"
        for name in ("ssh_args", "master_addr", "master_port")
        if (value := getattr(args, name))
    ]
    command = [str(REPO / "scripts" / "launch.sh"), *options, "--", "train.py", *flags]
    log = folder / "launch.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    except OSError as error:
        raise UserError(f"--output: cannot write {folder}: {describe(error)}") from None
    try:
        code = process.wait()
    except BaseException:  # Ctrl-C and SIGTERM: the job ends on all hosts
        process.terminate()
        process.wait()
        raise
    finally:
        for path in list_checkpoints(checkpoints_folder(folder)):
            remove(path)
    if code != 0:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "error: " in line] or lines or ["no output"]
        raise RuntimeError(f"exit code {code}: {errors[-1].strip()} ({log})")
    return measure(read_records(folder / METRICS), len(hosts), world_size(hosts))


def measure(records: Records, nodes: int, ranks: int) -> Measured:
    """The speed of a run after its warm-up.

    The times of each rank are in the records `ranks`. Those of the slowest one count, since a rank
    that waits for it in a collective does not wait for the network.
    """
    train = {key: values[WARM_UP_STEPS:] for key, values in records.train.items()}
    seconds, own = train["step_seconds"], None
    data = float(train["data_seconds"].mean())
    windows = [window.values for window in records.windows if window.values.keys() >= set(OF_RANKS)]
    if windows := windows[1:]:  # the first one is the warm-up
        own_seconds, waits = (np.mean([w[key] for w in windows], axis=0) for key in OF_RANKS)
        own, data = float((own_seconds - waits).max()), float(waits.max())
    speed = float(train["tokens"].sum() / seconds.sum())
    return Measured(nodes, ranks, speed, float(seconds.mean()), data, own)


def compare(measured: Sequence[Measured], strong: bool) -> list[Compared]:
    """Each measurement beside the first one."""
    base, found = measured[0], []
    rest = base.step_seconds - base.data_seconds  # compute, and communication of the fewest nodes
    is_split = all(size.own_seconds for size in measured)
    for size in measured:
        # the same step time under weak scaling, and less of it, by the ranks, under strong
        linear = base.ranks / size.ranks if strong else 1.0
        parts = {"data": size.data_seconds, UNSPLIT: size.step_seconds - size.data_seconds}
        expected = {"data": base.data_seconds * linear, UNSPLIT: rest * linear}
        if is_split:
            busy = parts.pop(UNSPLIT)
            compute = min(busy, rest * size.own_seconds / base.own_seconds)
            parts |= {"compute": compute, "communication": busy - compute}
            expected |= {"compute": expected.pop(UNSPLIT), "communication": 0.0}
        growth = {part: parts[part] - expected[part] for part in parts}
        efficiency = (size.tokens_per_s / size.ranks) / (base.tokens_per_s / base.ranks)
        found.append(Compared(size, efficiency, parts, growth))
    return found


def report(sizes: Sequence[Compared], args: argparse.Namespace) -> None:
    """Print the table, and write JSON and plot.

    Raises:
        UserError: they cannot be written.
    """
    kind = "strong" if args.strong else "weak"
    print(f"\n{kind} scaling; efficiency relative to {count(sizes[0].measured.nodes)}\n")
    parts = [part for part in ORDER if part in sizes[0].parts]
    heads = ["nodes", "ranks", "tokens/s", "efficiency", "", "s/step", *parts, "grown most"]
    rows = [heads]
    for size in sizes:
        of, low = size.measured, size.efficiency < GOOD
        seconds = [f"{size.parts[part]:.4f}" for part in parts]
        rows.append([
            str(of.nodes), str(of.ranks), f"{of.tokens_per_s:,.0f}", f"{size.efficiency:.1%}",
            f"below {GOOD:.0%}" if low else "", f"{of.step_seconds:.4f}", *seconds, size.grown(),
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)))
    if UNSPLIT in parts:
        print(f"\n  {UNSPLIT}: not split, because a run has no records of the time of each rank")
    text = json.dumps(
        {
            "scaling": kind,
            "steps": args.steps - WARM_UP_STEPS,
            "sizes": [
                {
                    **dataclasses.asdict(size.measured),
                    "efficiency": size.efficiency,
                    "parts_seconds": size.parts,
                    "growth_seconds": size.growth,
                }
                for size in sizes
            ],
        },
        indent=2,
    )
    table, plot = args.output / "scaling.json", args.output / "scaling.png"
    try:
        replace_text(table, text + "\n")
        draw(sizes, parts, kind, plot)
    except OSError as error:
        raise UserError(f"--output: cannot write {args.output}: {describe(error)}") from None
    print(f"\n  {table}\n  {plot}")


def draw(sizes: Sequence[Compared], parts: Sequence[str], kind: str, out: Path) -> None:
    """Draw speed beside linear and 80 % of it, and the parts of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    base, ranks = sizes[0].measured, [size.measured.ranks for size in sizes]
    linear = [base.tokens_per_s * count / base.ranks for count in ranks]
    left.plot(ranks, linear, "--", color="#888888", label="linear")
    left.plot(ranks, [GOOD * speed for speed in linear], ":", color="#c0392b", label=f"{GOOD:.0%}")
    speeds = [size.measured.tokens_per_s for size in sizes]
    left.plot(ranks, speeds, "o-", color="#4878a8", label="measured")
    for x, y, size in zip(ranks, speeds, sizes, strict=True):
        text = f"{size.efficiency:.0%}"
        left.annotate(text, (x, y), (0, -16), textcoords="offset points", ha="center")
    left.set(
        xlabel="ranks", ylabel="tokens/s", title=f"{kind} scaling", ylim=(0, None), xticks=ranks
    )
    left.margins(x=0.1)
    left.legend(frameon=False)
    names, bottom = [str(size.measured.nodes) for size in sizes], [0.0] * len(sizes)
    colors = ("#4878a8", "#59a14f", "#e08a4a", "#4878a8")
    for part, color in zip(ORDER, colors, strict=True):
        if part in parts:
            heights = [size.parts[part] for size in sizes]
            right.bar(names, heights, bottom=bottom, color=color, label=part)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    right.set(xlabel="nodes", ylabel="seconds per step", title="where a step's time goes")
    right.legend(frameon=False)
    figure.savefig(out, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    exit_on_error(main)
