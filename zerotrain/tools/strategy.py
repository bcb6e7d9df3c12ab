"""What a step takes under a DeepSpeed config, on some nodes: communication, time, and the largest
micro-batch that fits, from config and architecture alone.

Nothing overlaps with anything here, and latencies, padding, evaluation and saves are left out: to
compare strategies rather than to forecast.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from zerotrain.config.ds_config import group_sizes, offload_devices, zero_stage
from zerotrain.config.schema import Config
from zerotrain.model.architecture import text_config_of
from zerotrain.model.trained import Counts
from zerotrain.tools.memory import Memory, estimate_memory, layer_widths
from zerotrain.training.states import GIB, weight_bytes

SPARE = 0.9  # of a GPU's memory: the rest is for what the estimate leaves out
GRANULE = 256  # tokens: budgets are compared at multiples of it
MAX_BUDGET = 1 << 22
CPU_ADAM_PER_S = 4e9  # parameters that the CPUs of a node update (arXiv:2101.06840)
ASSUMED_RATES = {
    "mfu": 0.4,
    "node_gb_per_s": 200.0,
    "network_gb_per_s": 50.0,
    "pcie_gb_per_s": 25.0,
    "nvme_gb_per_s": 5.0,
}
"""The options of scripts/plan.py, which explains them; rates that a run does not measure."""


@dataclass(frozen=True)
class Cluster:
    """What a run needs memory and time on."""

    ranks: int
    gpus: int
    """Of a node, one for each of its ranks."""
    gpu_memory_gib: float
    assumed: Mapping[str, float]
    """ASSUMED_RATES or measured ones, and peak_flops_per_s of a GPU, NaN if unknown."""

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.gpus)


class StepEstimate(NamedTuple):
    """What an optimizer step takes."""

    micro_steps: int
    sent: float
    """Bytes that a rank sends."""
    seconds: float
    """NaN if the GPU's peak is unknown."""


@dataclass(frozen=True)
class Strategy:
    """A run under one DeepSpeed config."""

    config: Config
    ds_config: dict[str, Any]
    """Merged with the run config: no value is "auto"."""
    skeleton: nn.Module
    """The model on the meta device, with requires_grad as in training."""
    counts: Counts
    cluster: Cluster

    def memory(self, budget: int) -> Memory:
        """With micro-batches of `budget` tokens."""
        run = replace(self.config, data=replace(self.config.data, micro_batch_tokens=budget))
        ranks = self.cluster.ranks
        return estimate_memory(run, self.skeleton, self.counts, self.ds_config, ranks)

    def fits(self, memory: Memory) -> bool:
        """Whether a GPU holds it."""
        return memory.peak <= SPARE * self.cluster.gpu_memory_gib * GIB

    def largest_budget(self) -> int:
        """Tokens of the largest micro-batch that fits, 0 if none does."""
        budgets = range(GRANULE, MAX_BUDGET, GRANULE)
        too_large = bisect_left(budgets, True, key=lambda n: not self.fits(self.memory(n)))
        return GRANULE * too_large

    def step(self, budget: int, tokens: float, flops: float) -> StepEstimate:
        """A step of `tokens` tokens, without padding, in micro-batches of at most `budget`.

        Args:
            flops: of the step, without recomputed activations.
        """
        ranks = self.cluster.ranks
        group = math.prod(group_sizes(self.ds_config))
        micro_steps = math.ceil(tokens * group / (ranks * budget))
        sent, seconds = self._communication(micro_steps, budget)
        forward = self.counts.total / (2 * self.counts.total + self.counts.trained)  # of the FLOPs
        recomputed = forward * self.config.model.activation_checkpointing
        assumed = self.cluster.assumed
        compute = flops * (1 + recomputed) / (ranks * assumed["peak_flops_per_s"] * assumed["mfu"])
        seconds += compute + self._offloading(micro_steps)
        return StepEstimate(micro_steps, sent, seconds)

    def _communication(self, micro_steps: int, budget: int) -> tuple[float, float]:
        """Bytes that a rank sends in a step, and the seconds of it, by the volumes of
        ds_configs/README.md in rings over all ranks.
        """
        ds_config = self.ds_config
        zero = ds_config["zero_optimization"]
        stage = zero_stage(ds_config)
        tensor_parallel, sequence_parallel = group_sizes(ds_config)
        ranks = self.cluster.ranks // tensor_parallel
        inside = self.cluster.assumed["node_gb_per_s"] * 1e9
        # that of a node, for as many rings at a time as a tensor-parallel group has ranks
        network = self.cluster.assumed["network_gb_per_s"] * 1e9 / tensor_parallel
        between = network if self.cluster.nodes > 1 else inside
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

    def _offloading(self, micro_steps: int) -> float:
        """Seconds in which a step copies to and from CPU memory and NVMe, and the CPUs update."""
        optimizer, weights = offload_devices(self.ds_config).values()
        width = weight_bytes(self.ds_config)
        trained, total = (count / self.cluster.nodes for count in self.counts)  # on a node
        rates = {"cpu": self.cluster.assumed["pcie_gb_per_s"] * self.cluster.gpus * 1e9}
        rates["nvme"] = self.cluster.assumed["nvme_gb_per_s"] * 1e9
        seconds = 2 * micro_steps * width * total / rates.get(weights, math.inf)
        if optimizer in rates:
            copied = (4 * micro_steps + width) * trained
            seconds += copied / rates["cpu"] + trained / CPU_ADAM_PER_S
        if optimizer == "nvme":
            seconds += 2 * 12 * trained / rates["nvme"]
        return seconds
