"""Estimate the memory that a run needs, before any GPU is rented.

    python scripts/memory.py --config recipes/llama-3.1-8b.yaml [--nodes 1 --gpus 8]
        [--gpu_memory_gib 80] [--section.key value ...]

Prints the parts of a GPU's memory with their arithmetic, CPU memory per node and disk per
checkpoint; zerotrain/tools/memory_plan.py has the formulas and what they leave out. It needs
neither GPU nor weights: a model's sizes come from recipes/shapes.json, its folder, or its
config.json on the hub.
Nodes and GPUs are those in the recipe's head comment, unless given.
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.config.parse import parse_command_line
from zerotrain.runtime.errors import UserError, exit_on_error

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from zerotrain.config.schema import Config
    from zerotrain.model.trained import Counts
    from zerotrain.tools.memory_plan import Memory

GIB = 2**30
SHAPES = Path(__file__).resolve().parent.parent / "recipes" / "shapes.json"
CLUSTER = re.compile(r"^#   cluster +(\d+) nodes? x (\d+) GPUs? of (\d+) GB", re.MULTILINE)
SPARE = 0.9  # of a GPU's memory: the rest is for what the estimate leaves out


@dataclass(frozen=True)
class Cluster:
    """What a run needs memory on."""

    nodes: int
    gpus: int
    """Of each node."""
    gpu_memory_gib: int

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus} GPUs, {self.gpu_memory_gib} GB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="run config")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--gpus", type=int, help="of each node")
    parser.add_argument("--gpu_memory_gib", type=int, help="of each GPU, e.g. 80")
    args, rest = parser.parse_known_args()
    config = parse_command_line(["--config", args.config, *rest], "scripts/memory.py").config
    stated = cluster_of(Path(args.config).read_text(encoding="utf-8")) or Cluster(1, 1, 80)
    given = {name: value for name in vars(stated) if (value := getattr(args, name)) is not None}
    cluster = Cluster(**{**vars(stated), **given})
    if min(vars(cluster).values()) < 1:
        raise UserError("--nodes, --gpus and --gpu_memory_gib are positive numbers")

    memory, counts = plan(config, cluster)
    print(table(config, cluster, memory, counts))


def plan(config: "Config", cluster: Cluster) -> tuple["Memory", "Counts"]:
    """The estimate, and the numbers of the model's parameters.

    Raises:
        UserError: the model's config cannot be loaded, or the DeepSpeed config is wrong.
    """
    from zerotrain.config.ds_config import resolve_ds_config
    from zerotrain.model.architecture import hidden_size, meta_model
    from zerotrain.model.trained import count_trained
    from zerotrain.tools.memory_plan import count_quantized, estimate_memory

    skeleton = meta_model(load_shape(config), config.model.trust_remote_code)
    quantized = count_quantized(skeleton) if config.model.quantization else 0
    counts = count_trained(skeleton, config.model)
    config, _, ds_config = resolve_ds_config(config, "bf16", hidden_size(skeleton))
    shape = cluster.nodes * cluster.gpus, cluster.gpus
    return estimate_memory(config, skeleton, counts, quantized, ds_config, *shape), counts


def load_shape(config: "Config") -> "PretrainedConfig":
    """The architecture of the run's model: from recipes/shapes.json, else as in training."""
    from transformers import AutoConfig

    from zerotrain.model.load import load_model_config

    shapes = json.loads(SHAPES.read_text(encoding="utf-8")) if SHAPES.is_file() else {}
    if shape := shapes.get(config.model.name_or_path):
        return AutoConfig.for_model(**shape)
    return load_model_config(config)


def cluster_of(text: str) -> Cluster | None:
    """The cluster in a recipe's head comment."""
    found = CLUSTER.search(text)
    return Cluster(*map(int, found.groups())) if found else None


def table(config: "Config", cluster: Cluster, memory: "Memory", counts: "Counts") -> str:
    """The parts with their arithmetic, the peak, and whether it fits."""
    lines = [
        f"{config.model.name_or_path}: {counts.total:,} parameters, {counts.trained:,} trained",
        f"{cluster}, {config.ds_config}; estimated, not measured",
        "",
        "each GPU, all the time",
        *(f"  {p.name:<14}{p.size / GIB:8.1f} GiB   {p.how}" for p in memory.states),
        "and in the backward pass",
        *(f"  {p.name:<14}{p.size / GIB:8.1f} GiB   {p.how}" for p in memory.backward),
        "or in the update",
        f"  {memory.update.name:<14}{memory.update.size / GIB:8.1f} GiB   {memory.update.how}",
        f"  {'peak':<14}{memory.peak / GIB:8.1f} GiB",
        "",
        f"CPU memory per node {memory.loading / GIB:.0f} GiB while loading, "
        f"{memory.host / GIB:.0f} GiB in training",
        f"disk {memory.checkpoint / GIB:.0f} GiB per checkpoint, {memory.checkpoints} at a time",
    ]
    room = cluster.gpu_memory_gib * SPARE
    if memory.peak / GIB <= room:
        lines.append(f"fits: a tenth of {cluster.gpu_memory_gib} GiB stays free for the rest")
    else:
        lines.append(
            f"DOES NOT FIT into {room:.0f} GiB, nine tenths of a GPU: halve "
            "data.micro_batch_tokens, or use more GPUs, or a higher stage (ds_configs/README.md)"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    exit_on_error(main)
