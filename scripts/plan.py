"""Show what a run needs and costs under each file of ds_configs/, and which file to use.

    python -m scripts.plan --config recipes/llama-3.1-8b.yaml [--nodes 2] [--gpus 8]
        [--gpu h100-80gb] [--price 2.5] [--links links.json] [--section.key value ...]

It needs no GPU and no weights. It prints memory, speed, hours and cost under each DeepSpeed config,
then the fastest config on fewer and more nodes, and the config to use.

The model's sizes come from recipes/shapes.json, the model's folder, or its config.json on the hub.
Local rows are tokenized as in training; if the tokenizer is not on this machine, or --mean_tokens
is given, they are only counted, without the hub. Nodes and GPUs default to the cluster in the
recipe's first comment, else to one A100 of 80 GB. zerotrain/tools/memory.py and
zerotrain/tools/estimate.py have the formulas and say what they leave out.
"""

import argparse
import json
import math
import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import AutoConfig, PretrainedConfig

from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import Config
from zerotrain.model.hub import split_revision
from zerotrain.model.load import load_model_config
from zerotrain.rows.sources import read_rows
from zerotrain.runtime.errors import UserError, exit_on_error
from zerotrain.runtime.files import read_text
from zerotrain.runtime.machine import GIB
from zerotrain.tools.estimate import (
    WORTHWHILE,
    Estimate,
    GpuCluster,
    Rates,
    Workload,
    estimate,
    fastest,
    find_gpu,
)
from zerotrain.tools.open_plans import open_plans
from zerotrain.training.setup import Architecture

REPO = Path(__file__).resolve().parent.parent
# A guess for rows whose tokenizer is missing. SmolLM2 has 2.9 in the JSON of gsm8k, prose has more.
CHARACTERS_PER_TOKEN = 3
LARGEST = 1e15  # Options must be smaller, so that no sum of a plan is infinite.
IN_RECIPE = re.compile(
    r"^#   cluster +(\d{1,6}) nodes? x (\d{1,6}) GPUs? of (\d{1,6}) GB", re.MULTILINE
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="run config")
    add("--nodes", type=int, help="number of nodes (the recipe's, else 1)")
    add("--gpus", type=int, help="GPUs per node (the recipe's, else 1)")
    add("--gpu", help="name and memory of a GPU: h100-80gb, h200-141gb ... (A100)")
    add("--price", type=float, help="price of one GPU hour")
    add("--links", metavar="FILE", help="file with measured bandwidths, from preflight --links")
    add("--mean_tokens", type=float, help="mean tokens per row (local rows', else max_length / 2)")
    add("--rows", type=int, help="rows of the sources, data.eval_fraction included (local rows')")
    for rate in fields(Rates):
        text = f"{rate.metadata['help']} ({rate.default:g})"
        add(f"--{rate.name}", type=float, default=rate.default, help=text)
    args, rest = parser.parse_known_args()
    config = parse_command_line(["--config", args.config, *rest], "python -m scripts.plan").config
    cluster = choose_cluster(args)
    for name, value in {**vars(args), **asdict(cluster.rates)}.items():
        if isinstance(value, int | float) and not 0 < value < LARGEST:
            raise UserError(f"--{name} {value}: give a number above 0 and below {LARGEST:g}")
    workload = make_workload(config, args.mean_tokens, args.rows)
    options = ("nodes", "gpus", "gpu")
    assumed = ", ".join(f"--{name}" for name in options if getattr(args, name) is None)
    show(workload, cluster, assumed, args.price)


def choose_cluster(args: argparse.Namespace) -> GpuCluster:
    """Return the cluster of the options, of the recipe's first comment, or one A100 of 80 GB."""
    rates = {rate.name: getattr(args, rate.name) for rate in fields(Rates)}
    try:
        links = json.loads(read_text(args.links)) if args.links else {}
        assumed = Rates(**rates | {name: float(rate) for name, rate in links.items()})
    except (ValueError, AttributeError, TypeError, OverflowError) as error:
        raise UserError(f"{args.links}: not written by preflight --links") from error
    nodes, gpus, gib = cluster_in(read_text(args.config))
    gpu = find_gpu(args.gpu or f"a100-{gib}gb")
    return GpuCluster(args.nodes or nodes, args.gpus or gpus, gpu, assumed)


def cluster_in(recipe: str) -> tuple[int, int, int]:
    """Return nodes, GPUs per node and GiB per GPU from a recipe's first comment, else 1, 1, 80."""
    found = IN_RECIPE.search(recipe)
    return tuple(map(int, found.groups())) if found else (1, 1, 80)


def make_workload(
    config: Config, mean_tokens: float | None = None, rows: int | None = None
) -> Workload:
    """Return the run. Local rows give its lengths, unless mean_tokens is given.

    Args:
        rows: rows of the sources, with those that data.eval_fraction holds out; None: local rows.

    Raises:
        UserError: the model's config cannot be loaded, or a row is rejected.
    """
    train, held_out = config.train, config.data.eval_fraction
    model = Architecture.of(config.model, load_shape(config))
    lengths = supervised = np.array([mean_tokens or config.data.max_length / 2])
    trained = None
    if all(source.path for source in config.data.train_sources):
        if mean_tokens is None and has_tokenizer(config):
            plan = open_plans(config, world_size=1)[2]
            epoch = plan.order.slice(0, 0, plan.order.places)
            lengths, supervised = plan.data.lengths[epoch], plan.data.supervised[epoch]
            trained = len(epoch)
        else:
            tokens = count_tokens(config)
            rows = rows or len(tokens)
            if mean_tokens is None:
                lengths = supervised = tokens
    if rows:
        trained = rows - (held_out and max(1, round(rows * held_out)))
    examples = train.global_batch_size or train.global_batch_tokens / lengths.mean()
    return Workload(
        config,
        model,
        tokens=examples * lengths.mean(),
        supervised=examples * supervised.mean(),
        attention=examples
        * (model.flops.of_examples(lengths, 0) - model.flops.token * lengths.sum())
        / len(lengths),
        recomputed=float(config.model.activation_checkpointing),
        steps=train.steps or (trained and train.epochs * math.ceil(trained / examples)),
    )


def has_tokenizer(config: Config) -> bool:
    """Whether the run's tokenizer is in a folder or in the hub's cache on this machine."""
    name, _ = split_revision(config.model.tokenizer or config.model.name_or_path)
    cached = f"models--{name.replace('/', '--')}/snapshots/*/tokenizer.json"
    return Path(name).is_dir() or any(Path(HF_HUB_CACHE).glob(cached))


def count_tokens(config: Config) -> np.ndarray:
    """Return about how many tokens each local row of an epoch has, by its characters."""
    print(
        f"rows are not tokenized here: 1 token per {CHARACTERS_PER_TOKEN} characters is assumed, "
        "unless --mean_tokens is given or scripts.tokenize has run"
    )
    tokens = []
    for source in config.data.train_sources:
        of_rows = [len(row.text) / CHARACTERS_PER_TOKEN for row in read_rows(source)]
        if not of_rows:
            raise UserError(f"{source.path}: it has no rows; add some")
        tokens.append(np.resize(of_rows, round(len(of_rows) * source.repeat)))
    return np.concatenate(tokens).clip(2, config.data.max_length)


def load_shape(config: Config) -> PretrainedConfig:
    """Return the architecture of the run's model, from recipes/shapes.json or as in training."""
    file = REPO / "recipes" / "shapes.json"
    shapes = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if shape := shapes.get(config.model.name_or_path):
        return AutoConfig.for_model(**shape)
    return load_model_config(config.model)


# --------------------------------------------------------------------------------------------------
# What is printed


def show(workload: Workload, cluster: GpuCluster, assumed: str, price: float | None) -> None:
    """Print the tables, and what follows from them.

    Args:
        assumed: options of the cluster that were not given.
        price: price of one GPU hour.
    """
    own = workload.config.ds_config
    read_text(own, "ds_config: ")
    files = [str(file.relative_to(REPO)) for file in sorted(REPO.glob("ds_configs/*.json"))]
    if own not in files:
        files.append(own)
    estimates, problems = estimate_each(workload, files, cluster)
    if not estimates:
        raise UserError(problems[0])
    counts = workload.architecture.counts
    gpu = cluster.gpu
    rates = ", ".join(f"{name}={rate:g}" for name, rate in asdict(cluster.rates).items())
    steps = f"{workload.steps:,} steps" if workload.steps else "steps (their number needs --rows)"
    print(
        f"{workload.config.model.name_or_path}: {counts.total:,} parameters, {counts.trained:,} "
        f"trained; {steps} of {workload.tokens:,.0f} tokens\n"
        f"{cluster.nodes} x {cluster.gpus} {gpu.name}, {gpu.memory_gib} GB, "
        f"{gpu.flops_per_s / 1e12:,g} TFLOP/s"
        f"{assumed and f'; assumed, because not given: {assumed}'}\n\n"
        "GiB per GPU, but CPU and NVMe per node; activations without checkpointing, and "
        "checkpointed; tokens: the largest micro-batch that fits"
    )
    show_table([memory_cells(each) for each in estimates])
    for caveat in {each.memory.caveat for each in estimates} - {""}:
        print(f"activations: {caveat}")
    print(
        "\nGB that a rank sends per step; hours and cost (--price) of the run; off by: 90% of such "
        "forecasts were within this error"
    )
    show_table(time_cells(estimates, price))
    for why in problems:
        print(f"not possible: {why}")
    rates = textwrap.fill(f"assumed, by option: {rates}", 100, break_on_hyphens=False)
    print(f"\n{rates}")

    nodes = cluster.nodes
    fastest_on = {}
    for size in sorted({1, 2, nodes, *(2**n for n in range(nodes.bit_length()))}):
        of_size, _ = estimate_each(workload, files, replace(cluster, nodes=size))
        if usable := fastest(of_size, own):
            fastest_on[size] = usable[0]
    if fastest_on:
        print("\nfastest config that fits, by number of nodes")
        show_table(time_cells(fastest_on.values(), price))
        kept = {n: each.tokens_per_s / n for n, each in fastest_on.items()}
        least = min(kept)
        worth = max(n for n in kept if kept[n] >= WORTHWHILE * kept[least])
        print(
            f"nodes: on up to {worth}, a GPU keeps at least {WORTHWHILE:.0%} of its tokens/s on "
            f"{least}"
        )
    if nodes not in fastest_on:
        print("use: nothing fits; lower data.micro_batch_tokens and data.max_length, or add GPUs")
        return
    first = fastest_on[nodes]
    print(
        f"use: {first.file}, the fastest that fits or about as fast: {digits(first.seconds)} s per "
        "step"
    )


def estimate_each(
    workload: Workload, files: Sequence[str], cluster: GpuCluster
) -> tuple[list[Estimate], list[str]]:
    """Return the estimates under the configs that fit the run, and the errors of the others."""
    estimates, problems = [], []
    for file in files:
        try:
            estimates.append(estimate(workload, file, cluster))
        except UserError as error:
            problems.append(str(error))
    return estimates, problems


def memory_cells(each: Estimate) -> dict[str, Any]:
    memory = each.memory
    sizes = {
        **memory.states,
        "activations": memory.kept,
        "checkpointed": memory.inputs,
        "loss": memory.loss,
        "peak": memory.peak,
        "CPU": max(memory.cpu, memory.loading),
        "NVMe": memory.nvme,
    }
    in_gib = {name: size / GIB for name, size in sizes.items()}
    return {"": Path(each.file).stem, "tokens": each.largest_micro_batch, **in_gib}


def time_cells(estimates: Collection[Estimate], price: float | None) -> list[dict[str, Any]]:
    """Return a row of a table for each estimate. The last column is a bar of its speed."""
    most = max(each.tokens_per_s for each in estimates)
    return [
        {
            "": Path(each.file).stem,
            "nodes": each.cluster.nodes,
            "fits": "yes" if each.fits else "no",
            "micro-steps": each.micro_steps,
            "GB sent": each.sent / 1e9,
            "s per step": each.seconds,
            "tokens/s": each.tokens_per_s,
            "hours": each.hours or "-",
            "cost": each.hours * each.cluster.ranks * price if each.hours and price else "-",
            "off by": each.typical_error,
            " ": f"{'█' * round(20 * each.tokens_per_s / most):20}",
        }
        for each in estimates
    ]


def show_table(records: Sequence[dict[str, Any]]) -> None:
    print(pd.DataFrame(records).to_string(index=False, na_rep="0", float_format=digits))


def digits(value: float) -> str:
    """Return a number with at least three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    exit_on_error(main)
