"""The strategies of a run compared: a row per DeepSpeed config."""

import math
from dataclasses import dataclass, replace

from zerotrain.config.ds_config import (
    check_ranks,
    gpu_keys,
    group_sizes,
    offload_devices,
    zero_stage,
)
from zerotrain.config.schema import Config
from zerotrain.runtime.machine import Machine
from zerotrain.tools.memory import Memory
from zerotrain.tools.strategy import Cluster, Strategy
from zerotrain.training.setup import Architecture, resolve
from zerotrain.training.states import GIB, MASTER, MOMENTS, weight_bytes

CLOSE = 1.05  # times the seconds of the fastest: no difference, in arithmetic without latencies
LATENCY_SECONDS = 0.05  # in which launches of kernels and messages take longer than the arithmetic


@dataclass(frozen=True)
class Row:
    """A run under one DeepSpeed config."""

    file: str
    simplicity: tuple[int, ...]
    """Ranks that share a micro-batch, ZeRO stage, length of the config: the less the simpler."""
    memory: Memory
    """With the config's token budget or, if less, the largest that fits, but max_length at least.
    """
    largest_budget: int
    """Tokens of a micro-batch that fits."""
    host: float
    """Bytes of a node's CPU memory, also while the weights are loaded."""
    nvme: float
    """Bytes of a node's NVMe."""
    fits: bool
    micro_steps: int
    sent: float
    """Bytes that a rank sends per step."""
    seconds: float
    """Of a step."""
    keeps_the_run: bool
    """Neither sums of micro-steps in 16 bits, nor what has not been compared with plain torch here:
    quantized messages, and what else needs a GPU.
    """


@dataclass(frozen=True)
class Planner:
    """A run whose strategy is open."""

    config: Config
    architecture: Architecture
    tokens: float
    flops: float
    """Of an optimizer step, without recomputed activations."""
    steps: int | None
    """Of the run; None if the number of its rows is unknown."""
    cluster: Cluster

    def row(self, file: str, nodes: int) -> Row:
        """The run with the DeepSpeed config `file` on some nodes.

        Raises:
            UserError: the config cannot be used for this run, or not on as many ranks.
        """
        cluster = replace(self.cluster, ranks=nodes * self.cluster.gpus)
        model = self.architecture
        machine = Machine(cluster.ranks, cluster.gpus, precision="bf16")
        setup = resolve(replace(self.config, ds_config=file), machine, model)
        config = setup.config
        ds_config = setup.ds_config
        check_ranks(config, ds_config, cluster.ranks)
        shared = math.prod(group_sizes(ds_config))
        strategy = Strategy(config, ds_config, model.skeleton, model.counts, cluster)

        largest = strategy.largest_budget()
        budget = min(config.data.micro_batch_tokens, max(largest, config.data.max_length))
        memory = strategy.memory(budget)
        step = strategy.step(budget, self.tokens, self.flops)
        host, nvme = node_memory(strategy, memory)
        # under ZeRO 3 the first rank alone reads the files
        readers = 1 if zero_stage(ds_config) == 3 else cluster.gpus
        host = max(host, readers * weight_bytes(ds_config) * model.counts.total)
        sums = ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
        return Row(
            file=file,
            simplicity=(shared, zero_stage(ds_config), len(str(ds_config))),
            memory=memory,
            largest_budget=largest,
            host=host,
            nvme=nvme,
            fits=strategy.fits(memory) and host <= cluster.assumed["cpu_memory_gib"] * GIB,
            micro_steps=step.micro_steps,
            sent=step.sent,
            seconds=step.seconds,
            keeps_the_run=(sums or weight_bytes(ds_config) == 4 or step.micro_steps == 1)
            and not gpu_keys(ds_config),
        )


def node_memory(strategy: Strategy, memory: Memory) -> tuple[float, float]:
    """Bytes of a node's CPU memory and of its NVMe in training.

    Args:
        memory: of a GPU.
    """
    ds_config = strategy.ds_config
    zero = ds_config["zero_optimization"]
    stage = zero_stage(ds_config)
    width = weight_bytes(ds_config)
    gpus = strategy.cluster.gpus
    places = offload_devices(ds_config)
    place_of = {"weights": places["param"], "gradients": "cpu", "optimizer": places["optimizer"]}
    size = {"cpu": 0.0, "nvme": 0.0, "none": 0.0}
    for name, moved in memory.offloaded.items():
        size[place_of[name]] += moved
    if places["optimizer"] != "none":
        size[places["optimizer"]] += MASTER * memory.share  # fp32 gradients that CPU Adam reads
        if stage < 3:
            size["cpu"] += width * memory.share  # updated weights, on their way back to the GPU
    if places["optimizer"] == "nvme":
        chunk = min(memory.share, zero.get("sub_group_size", 1e9))
        size["cpu"] += 4 * zero["offload_optimizer"].get("buffer_count", 4) * chunk
    if places["param"] == "nvme":
        block = zero["offload_param"]
        buffers = block.get("buffer_count", 5) * block.get("buffer_size", 1e8)
        size["cpu"] += width * buffers
    if strategy.config.checkpoint.async_save:
        copied = width * strategy.counts.total / gpus if stage < 3 else 0
        size["cpu"] += (MOMENTS + MASTER) * memory.share + copied
    return gpus * size["cpu"], gpus * size["nvme"]


def best_of(rows: list[Row], own: str) -> list[Row]:
    """The rows that fit and keep the run as it is, the fastest first. Of those that are CLOSE to
    the fastest, or faster than latencies allow, the run's own choice comes first, then the
    simplest.
    """
    usable = [row for row in rows if row.fits and row.keeps_the_run]
    fastest = min((row.seconds for row in usable), default=0)

    def rank(row: Row) -> tuple[float, ...]:
        if row.seconds > max(CLOSE * fastest, LATENCY_SECONDS):
            return 2, row.seconds
        return row.file != own, *row.simplicity

    return sorted(usable, key=rank)


def daly_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """The interval between saves that loses least time, by Daly 2006,
    doi.org/10.1016/j.future.2004.11.016; mtbf: mean time between failures of the job.
    """
    root = math.sqrt(save_seconds / (2 * mtbf_seconds))
    best = 2 * mtbf_seconds * root * (1 - root * 2 / 3 + root**2 / 9)
    return best if root < 1 else mtbf_seconds
