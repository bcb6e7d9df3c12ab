"""What a run needs under every file of ds_configs/, and which one to use, before any GPU is rented.

    python scripts/plan.py --config recipes/llama-3.1-8b.yaml [--hostfile hostfile | --nodes 2
        --gpus 8] [--gpu h100-80gb] [--links links.json] [--section.key value ...]

Prints a row per DeepSpeed config, the fastest one on fewer and more nodes, the interval of saves,
and the memory of the run's own choice (--ds_config FILE). It needs neither GPU nor weights: a
model's sizes come from recipes/shapes.json, its folder, or its config.json on the hub; local rows
are tokenized as in training, unless --mean_tokens is given. zerotrain/tools/memory.py and
zerotrain/tools/estimate.py have the formulas and what they leave out. Nodes and GPUs are those in
the first comment of the recipe that is given, or one GPU, unless they are options; --gpu is an A100
unless given.
"""

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import Config
from zerotrain.model.load import load_model_config
from zerotrain.runtime.errors import UserError, exit_on_error
from zerotrain.runtime.files import read_text
from zerotrain.runtime.machine import PEAK_TFLOPS, peak_flops_per_s
from zerotrain.tools.estimate import (
    Estimate,
    GpuCluster,
    Hardware,
    Workload,
    daly_seconds,
    estimate,
    fastest,
)
from zerotrain.tools.open_plans import open_plans
from zerotrain.training.setup import Architecture
from zerotrain.training.states import GIB, MASTER, MOMENTS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

REPO = Path(__file__).resolve().parent.parent
IN_RECIPE = re.compile(r"^#   cluster +(\d+) nodes? x (\d+) GPUs? of (\d+) GB", re.MULTILINE)
HOST = re.compile(r"^\s*[^\s#]+\s+slots=(\d+)", re.MULTILINE)
PARTS = ("weights", "gradients", "optimizer", "buffers")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="run config")
    add("--hostfile", help="names the nodes and their GPUs")
    add("--nodes", type=int)
    add("--gpus", type=int, help="of each node")
    add("--gpu", help="name and memory of a GPU: h100-80gb, h200-141gb, a100-40gb ...")
    add("--links", metavar="FILE", help="what preflight --links has measured")
    add("--mean_tokens", type=float, help="of a row; default: of local rows, else max_length / 2")
    add("--rows", type=int, help="of an epoch; default: the local ones")
    for rate in fields(Hardware):
        text = f"{rate.metadata['help']} ({rate.default:g})"
        add(f"--{rate.name}", type=float, default=rate.default, help=text)
    args, rest = parser.parse_known_args()
    config = parse_command_line(["--config", args.config, *rest], "scripts/plan.py").config
    cluster = choose_cluster(args)
    named = {name: getattr(args, name) for name in ("nodes", "gpus", "mean_tokens", "rows")}
    for name, value in {**asdict(cluster.hardware), **named}.items():
        if value is not None and value <= 0:
            raise UserError(f"--{name} {value:g}: must be more than 0")
    show(make_workload(config, args.mean_tokens, args.rows), cluster)


def choose_cluster(args: argparse.Namespace) -> GpuCluster:
    """The options, else the cluster in the recipe's first comment, else one A100 of 80 GB."""
    rates = {rate.name: getattr(args, rate.name) for rate in fields(Hardware)}
    try:
        links = json.loads(read_text(args.links)) if args.links else {}
        hardware = Hardware(**rates | {name: float(rate) for name, rate in links.items()})
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{args.links}: not what preflight --links writes") from error
    nodes, gpus, gib = cluster_in(read_text(args.config))
    if args.hostfile:
        slots = [int(count) for count in HOST.findall(read_text(args.hostfile))]
        if not slots:
            raise UserError(f"{args.hostfile}: no hosts; expected `NAME slots=N` on each line")
        nodes, gpus = len(slots), min(slots)
    name, _, memory = (args.gpu or f"a100-{gib}gb").removesuffix("gb").rpartition("-")
    peak = peak_flops_per_s(name.replace("-", " "))
    if peak is None or not memory.isdecimal():
        known = ", ".join(PEAK_TFLOPS)
        raise UserError(f"--gpu {args.gpu}: give one of {known}, and its memory, as in h100-80gb")
    return GpuCluster(args.nodes or nodes, args.gpus or gpus, int(memory), peak, hardware)


def cluster_in(recipe: str) -> tuple[int, int, int]:
    """Nodes, GPUs of each and GiB of a GPU in the first comment of a recipe, or one GPU of 80."""
    found = IN_RECIPE.search(recipe)
    return tuple(map(int, found.groups())) if found else (1, 1, 80)


def make_workload(
    config: Config, mean_tokens: float | None = None, rows: int | None = None
) -> Workload:
    """The run, with the lengths of its rows if they are local and mean_tokens is not given.

    Raises:
        UserError: the model's config cannot be loaded, or a row cannot be used.
    """
    import numpy as np

    train = config.train
    model = Architecture.of(config, load_shape(config))
    lengths = supervised = np.array([mean_tokens or config.data.max_length / 2])
    if mean_tokens is None and all(s.path for s in config.data.sources("train_sources")):
        data = open_plans(config, world_size=1)[2].data
        lengths, supervised, rows = data.lengths, data.supervised, rows or len(data)
    examples = train.global_batch_size or train.global_batch_tokens / lengths.mean()
    flops = model.flops.of_examples(lengths, supervised.sum()) / len(lengths)
    steps = train.steps or (rows and train.epochs * math.ceil(rows / examples))
    return Workload(config, model, examples * lengths.mean(), examples * flops, steps)


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


def show(workload: Workload, cluster: GpuCluster) -> None:
    """Print the tables, and what follows from them."""
    own = workload.config.ds_config
    read_text(own, "ds_config: ")
    files = [str(file.relative_to(REPO)) for file in sorted(REPO.glob("ds_configs/*.json"))]
    files += [own] * (own not in files)
    found, refused = estimate_each(workload, files, cluster)
    if not found:
        raise UserError(refused[0])
    counts = workload.architecture.counts
    hardware = cluster.hardware
    rates = ", ".join(f"{name} {rate:,g}" for name, rate in asdict(hardware).items())
    print(
        f"{workload.config.model.name_or_path}: {counts.total:,} parameters, {counts.trained:,} "
        f"trained; {workload.steps or '--rows'} steps of {workload.tokens:,.0f} tokens\n"
        f"{cluster.nodes} x {cluster.gpus} GPUs, {cluster.gpu_memory_gib} GB, "
        f"{cluster.peak_flops_per_s / 1e12:,g} TFLOP/s; assumed: nothing overlaps, {rates}\n\n"
        "GiB of a GPU, and of a node (CPU, NVMe); activations without and with checkpointing; "
        "tokens: the largest micro-batch that fits"
    )
    show_table([memory_cells(each) for each in found])
    print("\nhours of the run, GB that a rank sends in a step")
    show_table([time_cells(workload, each) for each in found])
    for why in refused:
        print(f"not possible: {why}")

    nodes = cluster.nodes
    best = {}
    for size in sorted({1, 2, nodes, *(2**n for n in range(nodes.bit_length()))}):
        of_size, _ = estimate_each(workload, files, replace(cluster, nodes=size))
        if usable := fastest(of_size, own):
            best[size] = usable[0]
    if best:
        print("\nthe fastest that fits")
        show_table([{"nodes": n, **time_cells(workload, each)} for n, each in best.items()])
    if nodes not in best:
        print("use: nothing fits: lower data.micro_batch_tokens and data.max_length, or more GPUs")
        return
    saved = (MASTER + MOMENTS) * counts.trained
    seconds = saved / hardware.disk_gb_per_s / 1e9
    minutes = daly_seconds(seconds, 3600 * hardware.node_mtbf_hours / nodes) / 60
    first = best[nodes]
    print(
        f"save: checkpoint.every_minutes {minutes:.0f}, by Daly's formula; a checkpoint has "
        f"{digits(saved / GIB)} GiB\n"
        f"use: {first.file}, the fastest that fits, or the first of about equally fast ones: "
        f"{digits(first.seconds)} s per step"
    )


def estimate_each(
    workload: Workload, files: Sequence[str], cluster: GpuCluster
) -> tuple[list[Estimate], list[str]]:
    """The estimates under the configs that can be used, and why the others cannot."""
    found = []
    refused = []
    for file in files:
        try:
            found.append(estimate(workload, file, cluster))
        except UserError as error:
            refused.append(str(error))
    return found, refused


def memory_cells(each: Estimate) -> dict[str, Any]:
    memory = each.memory
    sizes = {name: memory.states.get(name, 0) for name in PARTS} | {
        "activations": memory.kept,
        "checkpointed": memory.inputs,
        "loss": memory.loss,
        "peak": memory.peak,
        "CPU": max(memory.cpu, memory.loading),
        "NVMe": memory.nvme,
    }
    in_gib = {name: size / GIB for name, size in sizes.items()}
    return {"": Path(each.file).stem, **in_gib, "tokens": each.largest_micro_batch}


def time_cells(workload: Workload, each: Estimate) -> dict[str, Any]:
    return {
        "": Path(each.file).stem,
        "fits": "yes" if each.fits else "no",
        "micro-steps": each.micro_steps,
        "GB sent": each.sent / 1e9,
        "s per step": each.seconds,
        "tokens/s": workload.tokens / each.seconds,
        "hours": workload.steps * each.seconds / 3600 if workload.steps else "-",
    }


def show_table(records: Sequence[dict[str, Any]]) -> None:
    import pandas as pd

    print(pd.DataFrame(records, dtype=object).map(digits).to_string(index=False))


def digits(value: float | str) -> str:
    """A number with three significant digits at least."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    exit_on_error(main)
