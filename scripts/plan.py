"""What a run needs under every file of ds_configs/, and which one to use, before any GPU is rented.

    python scripts/plan.py --config recipes/llama-3.1-8b.yaml [--hostfile hostfile | --nodes 2
        --gpus 8] [--gpu h100-80gb] [--links links.json] [--section.key value ...]

Prints a row per DeepSpeed config, the run on fewer and more nodes, the interval of saves, and the
memory of the run's own choice (--ds_config FILE) with its arithmetic. It needs neither GPU nor
weights: a model's sizes come from recipes/shapes.json, its folder, or its config.json on the hub;
local rows are tokenized as in training, unless --mean_tokens is given. zerotrain/model/memory.py
and zerotrain/tools/plan.py have the formulas and what they leave out.
Nodes and GPUs are those in the recipe's head comment, unless given.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.config.parse import parse_command_line
from zerotrain.runtime.errors import UserError, exit_on_error
from zerotrain.runtime.files import read_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from zerotrain.config.schema import Config
    from zerotrain.tools.plan import Cluster, Planner, Row

REPO = Path(__file__).resolve().parent.parent
CLUSTER = re.compile(r"^#   cluster +(\d+) nodes? x (\d+) GPUs? of (\d+) GB", re.MULTILINE)
HOST = re.compile(r"^\s*[^\s#]+\s+slots=(\d+)", re.MULTILINE)
OPTIONS = {  # assumptions: default, help
    "mfu": (0.4, "share of the GPUs' peak that is reached, recomputed activations included"),
    "node_gb_per_s": (200.0, "bus bandwidth of an all-reduce on one node"),
    "network_gb_per_s": (50.0, "bus bandwidth of an all-reduce on several nodes"),
    "pcie_gb_per_s": (25.0, "between a GPU and CPU memory"),
    "nvme_gb_per_s": (5.0, "of a node's NVMe disks"),
    "cpu_memory_gib": (1000.0, "of a node"),
    "disk_gb_per_s": (2.0, "at which a checkpoint is written"),
    "node_mtbf_hours": (6000.0, "mean time between failures of a node"),
}
WORTH = 1.6  # times the tokens/s that a second node has to give


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="run config")
    add("--hostfile", help="of which the nodes and GPUs are")
    add("--nodes", type=int)
    add("--gpus", type=int, help="of each node")
    add("--gpu", help="name and memory of a GPU: h100-80gb, h200-141gb, a100-40gb ...")
    add("--links", metavar="FILE", help="what preflight --links has measured")
    add("--mean_tokens", type=float, help="of a row; default: of local rows, else max_length / 2")
    add("--rows", type=int, help="of an epoch; default: the local ones")
    for name, (default, text) in OPTIONS.items():
        add(f"--{name}", type=float, default=default, help=f"{text} ({default:g})")
    args, rest = parser.parse_known_args()
    config = parse_command_line(["--config", args.config, *rest], "scripts/plan.py").config
    cluster, peak = choose_cluster(args)
    assumed = {name: getattr(args, name) for name in OPTIONS} | measured_links(args.links)
    assumed["peak_flops_per_s"] = peak
    if min(vars(cluster).values()) < 1 or min(assumed.values()) <= 0:
        raise UserError("nodes, GPUs, memory and every rate are positive numbers")
    planner = make_planner(config, cluster, assumed, args.mean_tokens, args.rows)
    show(planner)


def choose_cluster(args: argparse.Namespace) -> tuple["Cluster", float]:
    """Nodes and GPUs as given, else as in the recipe; and the peak FLOP/s of a GPU."""
    from zerotrain.runtime.gpu import PEAK_TFLOPS, peak_flops_per_s
    from zerotrain.tools.plan import Cluster

    stated = cluster_of(read_text(args.config, "--config: ")) or Cluster(1, 1, 80)
    nodes, gpus = stated.nodes, stated.gpus
    if args.hostfile:
        slots = [int(n) for n in HOST.findall(read_text(args.hostfile, "--hostfile: "))]
        if not slots:
            raise UserError(f"{args.hostfile}: no hosts; expected `NAME slots=N` on each line")
        nodes, gpus = len(slots), min(slots)
    nodes, gpus = (args.nodes or nodes), (args.gpus or gpus)
    name = args.gpu or f"a100-{stated.gpu_memory_gib}gb"
    found = re.fullmatch(r"(.+)-(\d+)gb", name.lower())
    peak = peak_flops_per_s(found[1].replace("-", " ")) if found else None
    if peak is None:
        known = ", ".join(PEAK_TFLOPS)
        raise UserError(f"--gpu {name}: give one of {known}, and its memory, as in h100-80gb")
    return Cluster(nodes, gpus, int(found[2])), peak


def cluster_of(text: str) -> "Cluster | None":
    """The cluster in a recipe's head comment."""
    from zerotrain.tools.plan import Cluster

    found = CLUSTER.search(text)
    return Cluster(*map(int, found.groups())) if found else None


def measured_links(file: str | None) -> dict[str, float]:
    """The bandwidths that preflight has measured: that of the slowest node, and that of all."""
    if file is None:
        return {}
    try:
        measured = json.loads(read_text(file, "--links: "))
        inside = [value for name, value in measured.items() if name.startswith("inside ")]
        found = {"node_gb_per_s": min(inside)} if inside else {}
        return found | {"network_gb_per_s": measured["all ranks"]} if len(inside) != 1 else found
    except (ValueError, AttributeError, KeyError) as error:
        raise UserError(f"--links {file}: not what preflight --links writes") from error


def make_planner(
    config: "Config",
    cluster: "Cluster",
    assumed: dict[str, float],
    mean_tokens: float | None = None,
    rows: int | None = None,
) -> "Planner":
    """The run, with the lengths of its rows if they are local and mean_tokens is not given.

    Raises:
        UserError: the model's config cannot be loaded, or a row cannot be used.
    """
    import numpy as np

    from zerotrain.data.data_plan import make_budget, make_plans
    from zerotrain.model.architecture import count_flops, linear_cost, meta_model
    from zerotrain.model.load import load_tokenizer
    from zerotrain.model.trained import count_trained
    from zerotrain.tools.plan import Planner, Work

    skeleton = meta_model(load_shape(config), config.model.trust_remote_code)
    cost = linear_cost(skeleton)
    counts = count_trained(skeleton, config.model)
    lengths = np.array([mean_tokens or config.data.max_length / 2])
    supervised = lengths.sum()
    if mean_tokens is None and all(s.path for s in config.data.sources("train_sources")):
        budget = make_budget(config.data, cluster.nodes * cluster.gpus, cost)
        data = make_plans(config, load_tokenizer(config), budget)[0].data
        lengths, supervised, rows = data.lengths, data.supervised.sum(), rows or len(data)
    work = Work.of(config, count_flops(skeleton), lengths, supervised, rows)
    return Planner(config, skeleton, counts, work, cluster, assumed)


def load_shape(config: "Config") -> "PretrainedConfig":
    """The architecture of the run's model: from recipes/shapes.json, else as in training."""
    from transformers import AutoConfig

    from zerotrain.model.load import load_model_config

    file = REPO / "recipes" / "shapes.json"
    shapes = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if shape := shapes.get(config.model.name_or_path):
        return AutoConfig.for_model(**shape)
    return load_model_config(config)


# --------------------------------------------------------------------------------------------------
# What is printed


def show(planner: "Planner") -> None:
    """Print the tables, and what follows from them."""
    from zerotrain.tools.plan import best_of

    config = planner.config
    cluster = planner.cluster
    own = config.ds_config
    files = [str(file.relative_to(REPO)) for file in sorted(REPO.glob("ds_configs/*.json"))]
    files += [own] * (own not in files)
    rows, refused = rows_of(planner, files, cluster.nodes)
    steps = planner.work.steps
    print(
        f"{config.model.name_or_path}: {planner.counts.total:,} parameters, "
        f"{planner.counts.trained:,} trained; {f'{steps:,}' if steps else 'an unknown number of'} "
        f"steps of {planner.work.tokens:,.0f} tokens\n{cluster}; assumed: "
        + ", ".join(f"{name} {value:,.4g}" for name, value in planner.assumed.items())
    )
    parts = ("weights", "gradients", "optimizer", "buffers")
    heads = ("kept", "recomputed", "loss", "peak", "CPU", "NVMe", "fits")
    title = (
        f"GiB of a GPU (activations kept or recomputed; the peak has "
        f"{config.data.micro_batch_tokens:,} tokens a micro-batch, or what fits) and of a node "
        "(CPU, NVMe);\nthe largest data.micro_batch_tokens that fits"
    )
    cells = [sizes(row, parts) for row in rows]
    show_table(title, ["", *parts, *heads], cells)
    heads = ("micro-steps", "GB sent per rank", "s per step", "tokens/s", "hours")
    cells = [[*speed(planner, row), "yes" if row.fits else "no"] for row in rows]
    show_table("a step, and the run", ["", *heads, "fits"], cells)
    print("".join(f"not possible: {text}\n" for text in refused))
    doubled = {2**n for n in range(cluster.nodes.bit_length())}
    counts = sorted({1, 2, cluster.nodes, *doubled})
    best = {nodes: best_of(rows_of(planner, files, nodes)[0], own) for nodes in counts}
    cells = [[str(nodes), *speed(planner, found[0])] for nodes, found in best.items() if found]
    show_table("the fastest that fits on so many nodes", ["nodes", "", *heads], cells)
    show_parts(planner.row(own, cluster.nodes), cluster)
    conclude(planner, best)


def rows_of(planner: "Planner", files: list[str], nodes: int) -> tuple[list["Row"], list[str]]:
    """The rows of the configs that can be used, and why the others cannot."""
    rows = []
    refused = []
    for file in files:
        try:
            rows.append(planner.row(file, nodes))
        except UserError as error:
            refused.append(f"not possible: {error}")
    return rows, refused


def sizes(row: "Row", states: Sequence[str]) -> list[str]:
    from zerotrain.model.memory import GIB

    memory = row.memory
    of_states = {part.name: part.size for part in memory.states}
    found = [*(of_states.get(name, 0) for name in states), row.kept, row.recomputed]
    found += [memory.loss.size, memory.peak, memory.host, memory.nvme]
    numbers = [f"{size / GIB:,.1f}" for size in found]
    return [Path(row.file).stem, *numbers, f"{row.largest_budget:,}"]


def speed(planner: "Planner", row: "Row") -> list[str]:
    work = planner.work
    run = f"{row.seconds * work.steps / 3600:,.1f}" if work.steps else "give --rows"
    step = (f"{row.sent / 1e9:,.1f}", f"{row.seconds:,.3g}", f"{work.tokens / row.seconds:,.0f}")
    return [Path(row.file).stem, str(row.micro_steps), *step, run]


def show_table(title: str, heads: list[str], cells: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None)
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left")
    for row in cells:
        table.add_row(*row)
    Console(width=140, highlight=False).print(table)


def show_parts(row: "Row", cluster: "Cluster") -> None:
    """The memory of one config with its arithmetic."""
    from zerotrain.model.memory import GIB

    memory = row.memory
    either = {
        "all the time": memory.states,
        "and in the backward pass": [memory.activations],
        "with the larger of": [memory.loss, memory.layer],
        "or in the update": [memory.update],
    }
    print(f"\n{row.file}: each GPU, estimated, not measured")
    for when, parts in either.items():
        print(when)
        for part in parts:
            print(f"  {part.name:<14}{part.size / GIB:8.1f} GiB   {part.how}")
    print(
        f"peak {memory.peak / GIB:.1f} GiB of {cluster.gpu_memory_gib}, a tenth of which stays "
        f"free for the rest: {'fits' if row.fits else 'DOES NOT FIT'}\n"
        f"CPU memory per node {memory.loading / GIB:.0f} GiB while loading, "
        f"{memory.host / GIB:.0f} GiB in training\n"
        f"disk {memory.checkpoint / GIB:.0f} GiB per checkpoint, {memory.checkpoints} at a time"
    )


def conclude(planner: "Planner", best: dict[int, list["Row"]]) -> None:
    """Which config to use and why, whether a second node pays, and how often to save."""
    from zerotrain.tools.plan import daly_seconds

    assumed = planner.assumed
    nodes = planner.cluster.nodes
    if best[1] and best[2]:
        gain = best[1][0].seconds / best[2][0].seconds
        verdict = "worth it" if gain >= WORTH else f"not worth it, less than {WORTH}"
        print(f"\nsecond node: {gain:.2f} times the tokens/s of one: {verdict}")
    if not best[nodes]:
        print("use: nothing fits: lower data.micro_batch_tokens and data.max_length, or more GPUs")
        return
    first, *others = best[nodes]
    save = first.memory.checkpoint / assumed["disk_gb_per_s"] / 1e9
    interval = daly_seconds(save, 3600 * assumed["node_mtbf_hours"] / nodes)
    print(f"saves: checkpoint.every_minutes {interval / 60:.0f}, by Daly's formula for saves of "
          f"{save:.0f} s and a failure every {assumed['node_mtbf_hours'] / nodes:,.0f} h"
          )  # fmt: skip
    reason = f"{first.seconds:.3g} s per step"
    if others:
        reason += f", the next is {others[0].file} with {others[0].seconds:.3g} s"
    budget = min(planner.config.data.micro_batch_tokens, first.largest_budget)
    print(f"use: {first.file}, data.micro_batch_tokens {budget:,}: the fastest that fits, {reason}")


if __name__ == "__main__":
    exit_on_error(main)
