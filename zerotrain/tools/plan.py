"""What a run takes under a DeepSpeed config, on some nodes: memory, communication and time, from
config and architecture alone.

Nothing overlaps with anything here, and latencies, padding, evaluation and saves are left out: to
compare strategies rather than to forecast.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zerotrain.config.ds_config import gpu_keys, group_sizes, resolve_ds_config, zero_stage
from zerotrain.config.schema import Config
from zerotrain.model.architecture import hidden_size, text_config_of
from zerotrain.model.memory import GIB, Memory, estimate_memory, layer_widths, weight_bytes
from zerotrain.model.packing import resolve_batching
from zerotrain.model.tensor_parallel import check_tensor_parallel
from zerotrain.model.trained import Counts
from zerotrain.runtime.errors import UserError

SPARE = 0.9  # of a GPU's memory: the rest is for what the estimate leaves out
GRANULE = 256  # tokens: budgets are compared at multiples of it
MAX_BUDGET = 1 << 22
CLOSE = 1.05  # times the seconds of the fastest: no difference, in arithmetic without latencies
CPU_ADAM_PER_S = 4e9  # parameters that the CPUs of a node update (arXiv:2101.06840)


@dataclass(frozen=True)
class Cluster:
    """What a run needs memory on."""

    nodes: int
    gpus: int
    """Of each node."""
    gpu_memory_gib: int

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus} GPUs, {self.gpu_memory_gib} GB"


@dataclass(frozen=True)
class Row:
    """A run under one DeepSpeed config."""

    file: str
    simplicity: tuple[int, ...]
    """Ranks that share a micro-batch, ZeRO stage, length of the config: the less the simpler."""
    memory: Memory
    """With the config's token budget, or the largest one that fits."""
    largest_budget: int
    """Tokens of a micro-batch that fits."""
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
    skeleton: nn.Module
    """On the meta device, with requires_grad as in training."""
    counts: Counts
    tokens: float
    flops: float
    """Of an optimizer step, without recomputed activations."""
    steps: int | None
    """Of the run; None if the number of its rows is unknown."""
    cluster: Cluster
    assumed: Mapping[str, float]
    """The options of scripts/plan.py: rates, and memory of a node."""

    def row(self, file: str, nodes: int) -> Row:
        """The run with the DeepSpeed config `file` on some nodes.

        Raises:
            UserError: the config cannot be used for this run, or not on as many ranks.
        """
        config = replace(self.config, ds_config=file)
        skeleton = self.skeleton
        config, precision, ds_config = resolve_ds_config(config, "bf16", hidden_size(skeleton))
        ranks = nodes * self.cluster.gpus
        tensor, sequence = group_sizes(ds_config)
        check_tensor_parallel(config, ds_config, skeleton, self.counts, tensor)
        resolve_batching(config, skeleton, torch.device("cpu"), precision, sequence)
        group = tensor * sequence
        if ranks % group:
            raise UserError(f"{file}: {ranks} ranks are no multiple of its groups of {group}")

        def memory_of(tokens: int) -> Memory:
            run = replace(config, data=replace(config.data, micro_batch_tokens=tokens))
            shape = ranks, self.cluster.gpus
            return estimate_memory(run, skeleton, self.counts, ds_config, *shape)

        room = SPARE * self.cluster.gpu_memory_gib * GIB
        budgets = range(GRANULE, MAX_BUDGET, GRANULE)
        too_large = bisect_left(budgets, True, key=lambda tokens: memory_of(tokens).peak > room)
        largest = GRANULE * too_large
        wanted = config.data.micro_batch_tokens
        budget = min(wanted, largest) if largest >= config.data.max_length else wanted
        memory = memory_of(budget)
        micro_steps = math.ceil(self.tokens * group / (ranks * budget))
        sent, seconds = self._communication(ds_config, nodes, micro_steps, budget)
        trained, total = self.counts
        forward = total / (2 * total + trained)  # of the FLOPs: see count_flops
        recomputed = forward * config.model.activation_checkpointing
        compute = self.flops * (1 + recomputed) / ranks
        seconds += compute / (self.assumed["peak_flops_per_s"] * self.assumed["mfu"])
        sums = ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
        return Row(
            file=file,
            simplicity=(group, zero_stage(ds_config), len(str(ds_config))),
            memory=memory,
            largest_budget=largest,
            fits=memory.peak <= room
            and max(memory.loading, memory.host) <= self.assumed["cpu_memory_gib"] * GIB,
            micro_steps=micro_steps,
            sent=sent,
            seconds=seconds + self._offloading(ds_config, nodes, micro_steps),
            keeps_the_run=(sums or weight_bytes(ds_config) == 4 or micro_steps == 1)
            and not gpu_keys(ds_config),
        )

    def _communication(
        self, ds_config: dict[str, Any], nodes: int, micro_steps: int, budget: int
    ) -> tuple[float, float]:
        """Bytes that a rank sends in a step, and the seconds of it, by the volumes of
        ds_configs/README.md in rings over all ranks.
        """
        zero = ds_config["zero_optimization"]
        stage = zero_stage(ds_config)
        tensor_parallel, sequence_parallel = group_sizes(ds_config)
        ranks = nodes * self.cluster.gpus // tensor_parallel
        inside = self.assumed["node_gb_per_s"] * 1e9
        # that of a node, for as many rings at a time as a tensor-parallel group has ranks
        network = self.assumed["network_gb_per_s"] * 1e9 / tensor_parallel
        between = network if nodes > 1 else inside
        width = weight_bytes(ds_config)
        summed = 4 if ds_config.get("communication_data_type") == "fp32" else width
        summed = 0.5 if zero.get("zero_quantized_gradients") else summed
        ring = (ranks - 1) / ranks / tensor_parallel
        gradients = ring * summed * self.counts.trained
        forward = ring * width * self.counts.trained * (stage > 0)
        backward = 0.0
        if stage == 3:
            gathered = 1 if zero.get("zero_quantized_weights") else width
            forward = backward = ring * gathered * self.counts.total * micro_steps
        gradients *= (2, 2, 2 * micro_steps, micro_steps)[stage]
        is_local = 1 < zero.get("zero_hpz_partition_size", 1) <= self.cluster.gpus
        seconds = (gradients + forward) / between + backward / (inside if is_local else between)

        group = tensor_parallel * sequence_parallel
        h, q, k, *_ = layer_widths(self.skeleton)
        per_layer = 4 * h if tensor_parallel > 1 else 2 * (q + k) / sequence_parallel
        passes = 2 + self.config.model.activation_checkpointing
        passes *= int(text_config_of(self.skeleton.config).num_hidden_layers)
        shared = passes * per_layer * width * budget * micro_steps * (group - 1) / group
        seconds += shared / (inside if group <= self.cluster.gpus else between)
        return gradients + forward + backward + shared, seconds

    def _offloading(self, ds_config: dict[str, Any], nodes: int, micro_steps: int) -> float:
        """Seconds in which a step copies to and from CPU memory and NVMe, and the CPUs update."""
        zero = ds_config["zero_optimization"]
        optimizer, weights = (
            (zero.get(f"offload_{name}") or {}).get("device") for name in ("optimizer", "param")
        )
        width = weight_bytes(ds_config)
        trained, total = (count / nodes for count in self.counts)  # on a node
        rates = {"cpu": self.assumed["pcie_gb_per_s"] * self.cluster.gpus * 1e9}
        rates["nvme"] = self.assumed["nvme_gb_per_s"] * 1e9
        seconds = 2 * micro_steps * width * total / rates.get(weights, math.inf)
        if optimizer in rates:
            copied = (4 * micro_steps + width) * trained
            seconds += copied / rates["cpu"] + trained / CPU_ADAM_PER_S
        if optimizer == "nvme":
            seconds += 2 * 12 * trained / rates["nvme"]
        return seconds


def best_of(rows: list[Row], own: str) -> list[Row]:
    """The rows that fit and keep the run as it is, the fastest first. Of those that are CLOSE to
    the fastest, the run's own choice comes first, then the simplest.
    """
    usable = [row for row in rows if row.fits and row.keeps_the_run]
    fastest = min((row.seconds for row in usable), default=0)

    def rank(row: Row) -> tuple[float, ...]:
        if row.seconds > CLOSE * fastest:
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
