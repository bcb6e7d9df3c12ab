"""What a run needs under every file of ds_configs/, and which one to use, before any GPU is rented.

    python scripts/plan.py --config recipes/llama-3.1-8b.yaml [--hostfile hostfile | --nodes 2
        --gpus 8] [--gpu h100-80gb] [--links links.json] [--section.key value ...]

Prints a row per DeepSpeed config, the fastest one on fewer and more nodes, the interval of saves,
and the memory of the run's own choice (--ds_config FILE). It needs neither GPU nor weights: a
model's sizes come from recipes/shapes.json, its folder, or its config.json on the hub; local rows
are tokenized as in training, unless --mean_tokens is given.
zerotrain/tools/memory.py and zerotrain/tools/strategy.py have the formulas and what they leave out.
Nodes and GPUs are those in the first comment of the recipe that is given, or one GPU, unless
they are options; --gpu is an A100 unless given.
"""

import argparse
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import Config
from zerotrain.data.data_plan import make_plans
from zerotrain.model.load import load_model_config, load_tokenizer
from zerotrain.runtime.errors import UserError, exit_on_error
from zerotrain.runtime.files import read_text
from zerotrain.runtime.machine import PEAK_TFLOPS, Machine, peak_flops_per_s
from zerotrain.tools.plan import Planner, Row, best_of, daly_seconds
from zerotrain.tools.strategy import ASSUMED_RATES, Cluster
from zerotrain.training.setup import Architecture, resolve
from zerotrain.training.states import GIB, MASTER, MOMENTS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

REPO = Path(__file__).resolve().parent.parent
CLUSTER = re.compile(r"^#   cluster +(\d+) nodes? x (\d+) GPUs? of (\d+) GB", re.MULTILINE)
HOST = re.compile(r"^\s*[^\s#]+\s+slots=(\d+)", re.MULTILINE)
ASSUMED = {
    **ASSUMED_RATES,
    "cpu_memory_gib": 1000.0,
    "disk_gb_per_s": 2.0,
    "node_mtbf_hours": 6000.0,
}
HELP = {
    "mfu": "share of the GPUs' peak in 16 bits that is reached, recomputed activations included",
    "node_gb_per_s": "bus bandwidth of an all-reduce on one node",
    "network_gb_per_s": "bus bandwidth of an all-reduce on several nodes",
    "pcie_gb_per_s": "between a GPU and CPU memory",
    "nvme_gb_per_s": "of a node's NVMe disks",
    "cpu_memory_gib": "of a node",
    "disk_gb_per_s": "at which a checkpoint is written",
    "node_mtbf_hours": "mean time between failures of a node",
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
    for name, default in ASSUMED.items():
        add(f"--{name}", type=float, default=default, help=f"{HELP[name]} ({default:g})")
    args, rest = parser.parse_known_args()
    config = parse_command_line(["--config", args.config, *rest], "scripts/plan.py").config
    cluster = choose_cluster(args)
    given = [n for n in (args.nodes, args.gpus, args.mean_tokens, args.rows) if n is not None]
    if min(cluster.gpus, cluster.gpu_memory_gib, *cluster.assumed.values(), *given) <= 0:
        raise UserError("nodes, GPUs, rows, tokens, memory and every rate are positive numbers")
    show(make_planner(config, cluster, args.mean_tokens, args.rows))


def choose_cluster(args: argparse.Namespace) -> Cluster:
    """Nodes and GPUs as given, else as in the recipe, and what is assumed of them."""
    assumed = {name: getattr(args, name) for name in ASSUMED}
    if args.links:
        try:
            links = json.loads(read_text(args.links))
            assumed |= {name: float(rate) for name, rate in links.items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise UserError(f"{args.links}: not what preflight --links writes") from error
    stated = cluster_of(read_text(args.config)) or Cluster(1, 1, 80, {})
    slots = [stated.gpus] * stated.nodes
    if args.hostfile:
        slots = [int(count) for count in HOST.findall(read_text(args.hostfile))]
        if not slots:
            raise UserError(f"{args.hostfile}: no hosts; expected `NAME slots=N` on each line")
    name = args.gpu or f"a100-{stated.gpu_memory_gib:.0f}gb"
    kind, _, memory = name.rpartition("-")
    peak = peak_flops_per_s(kind.replace("-", " "))
    gib = memory.removesuffix("gb")
    if peak is None or not gib.isdecimal():
        known = ", ".join(PEAK_TFLOPS)
        raise UserError(f"--gpu {name}: give one of {known}, and its memory, as in h100-80gb")
    gpus = args.gpus or min(slots)
    assumed["peak_flops_per_s"] = peak
    return Cluster((args.nodes or len(slots)) * gpus, gpus, int(gib), assumed)


def cluster_of(text: str, assumed: Mapping[str, float] = ASSUMED) -> Cluster | None:
    """The cluster in a recipe's head comment."""
    if found := CLUSTER.search(text):
        nodes, gpus, gib = map(int, found.groups())
        return Cluster(nodes * gpus, gpus, gib, assumed)
    return None


def make_planner(
    config: Config,
    cluster: Cluster,
    mean_tokens: float | None = None,
    rows: int | None = None,
) -> Planner:
    """The run, with the lengths of its rows if they are local and mean_tokens is not given.

    Raises:
        UserError: the model's config cannot be loaded, or a row cannot be used.
    """
    import numpy as np

    train = config.train
    model = Architecture.of(config, load_shape(config))
    lengths = supervised = np.array([mean_tokens or config.data.max_length / 2])
    if mean_tokens is None and all(s.path for s in config.data.sources("train_sources")):
        setup = resolve(config, Machine(cluster.ranks, cluster.gpus, precision="bf16"), model)
        data = make_plans(setup.config, load_tokenizer(config), setup.budget)[0].data
        lengths, supervised, rows = data.lengths, data.supervised, rows or len(data)
    mean = lengths.mean()
    examples = train.global_batch_size or train.global_batch_tokens / mean
    flops = model.flops.of_examples(lengths, supervised.sum()) / len(lengths)
    steps = train.steps or (rows and train.epochs * math.ceil(rows / examples))
    work = examples * mean, examples * flops, steps
    cluster = replace(cluster, assumed={**cluster.assumed, "mean_tokens": mean})
    return Planner(config, model, *work, cluster)


def load_shape(config: Config) -> "PretrainedConfig":
    """The architecture of the run's model: from recipes/shapes.json, else as in training."""
    from transformers import AutoConfig

    file = REPO / "recipes" / "shapes.json"
    shapes = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if shape := shapes.get(config.model.name_or_path):
        return AutoConfig.for_model(**shape)
    return load_model_config(config)


# --------------------------------------------------------------------------------------------------
# What is printed


def show(planner: Planner) -> None:
    """Print the tables, and what follows from them."""
    cluster = planner.cluster
    nodes = cluster.nodes
    assumed = cluster.assumed
    own = planner.config.ds_config
    files = [str(file.relative_to(REPO)) for file in sorted(REPO.glob("ds_configs/*.json"))]
    files += [own] * (own not in files)
    read_text(own, "ds_config: ")
    refused: list[str] = []
    rows = rows_of(planner, files, nodes, refused)
    if not rows:
        raise UserError(refused[0])
    print(
        f"{planner.config.model.name_or_path}: {planner.architecture.counts.total:,} parameters, "
        f"{planner.architecture.counts.trained:,} trained; steps of {planner.tokens:,.0f} tokens, "
        f"{planner.steps or '--rows'} of them\n{nodes} x {cluster.gpus} GPUs, "
        f"{cluster.gpu_memory_gib:.0f} GB; assumed: nothing overlaps, "
        + ", ".join(f"{name} {value:,.4g}" for name, value in assumed.items())
    )
    print(
        "\nGiB of a GPU, and of a node (CPU, NVMe); activations without and with checkpointing; "
        "tokens: the largest micro-batch that fits"
    )
    show_table([sizes(row) for row in rows])
    print("\nhours of the run, GB that a rank sends in a step")
    show_table([speed(planner, row) for row in rows])
    print("\n".join(f"not possible: {why}" for why in refused))
    for row in rows:
        if row.file == own:
            print(f"{own}: {row.memory}")

    counts = sorted({1, 2, nodes, *(2**n for n in range(nodes.bit_length()))})
    best = {count: best_of(rows_of(planner, files, count, []), own) for count in counts}
    print("\nthe fastest that fits")
    show_table([{"nodes": n} | speed(planner, found[0]) for n, found in best.items() if found])
    if best[1] and best[2]:
        gain = best[1][0].seconds / best[2][0].seconds
        verdict = "worth it" if gain >= WORTH else f"not worth it, less than {WORTH}"
        print(f"a second node gives {gain:.2f} times the tokens/s: {verdict}")
    if not best[nodes]:
        print("use: nothing fits: lower data.micro_batch_tokens and data.max_length, or more GPUs")
        return
    first, *others = best[nodes]
    saved = (MASTER + MOMENTS) * planner.architecture.counts.trained
    save_seconds = saved / assumed["disk_gb_per_s"] / 1e9
    hours = assumed["node_mtbf_hours"] / nodes
    minutes = daly_seconds(save_seconds, 3600 * hours) / 60
    print(
        f"save: checkpoint.every_minutes {minutes:.0f}, by Daly's formula for saves of "
        f"{digits(save_seconds)} s and a failure every {hours:,.0f} h; a checkpoint has "
        f"{digits(saved / GIB)} GiB\n"
        f"use: {first.file}, the fastest that fits, or the simplest of equally fast ones: "
        f"{first.seconds:.3g} s per step"
        + "".join(f"; {row.file} {row.seconds:.3g}" for row in others[:2])
    )


def rows_of(planner: Planner, files: list[str], nodes: int, refused: list[str]) -> list[Row]:
    """The rows of the configs that can be used; why others cannot is added to `refused`."""
    rows = []
    for file in files:
        try:
            rows.append(planner.row(file, nodes))
        except UserError as error:
            refused.append(str(error))
    return rows


def show_table(records: list[dict[str, Any]]) -> None:
    import pandas as pd

    print(pd.DataFrame(records).to_string(index=False, na_rep="-", float_format=digits))


def digits(value: float) -> str:
    """Three significant ones at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def sizes(row: Row) -> dict[str, Any]:
    memory = row.memory
    parts = memory.states | {
        "activations": memory.kept,
        "checkpointed": memory.inputs,
        "loss": memory.loss,
        "peak": memory.peak,
        "CPU": row.host,
        "NVMe": row.nvme,
    }
    in_gib = {name: size / GIB for name, size in parts.items()}
    return {"": Path(row.file).stem} | in_gib | {"tokens": row.largest_budget}


def speed(planner: Planner, row: Row) -> dict[str, Any]:
    return {
        "": Path(row.file).stem,
        "fits": "yes" if row.fits else "no",
        "micro-steps": row.micro_steps,
        "GB sent": row.sent / 1e9,
        "s per step": f"{row.seconds:.3g}",
        "tokens/s": f"{planner.tokens / row.seconds:,.0f}",
        "hours": (planner.steps or math.nan) * row.seconds / 3600,
    }


if __name__ == "__main__":
    exit_on_error(main)
