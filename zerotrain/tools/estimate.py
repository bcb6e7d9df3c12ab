"""What a run takes under a DeepSpeed config on a cluster: memory, and the time of a step.

In the time nothing overlaps with anything, and latencies, padding, evaluation and saves are left
out: it compares DeepSpeed configs rather than forecasts a run.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from zerotrain.config.ds_config import (
    check_ranks,
    gpu_keys,
    group_sizes,
    offload_devices,
    secondary_ranks,
    zero_stage,
)
from zerotrain.config.schema import Config
from zerotrain.runtime.machine import Machine
from zerotrain.tools.memory import MemoryEstimate, estimate_memory, layer_widths
from zerotrain.training.setup import Architecture, Setup, resolve
from zerotrain.training.states import GIB, weight_bytes

USED_SHARE = 0.9  # of a GPU's memory: the rest is for what the estimate leaves out
BUDGET_STEP = 256  # tokens: the largest micro-batch is a multiple of it
MAX_BUDGET = 1 << 22
CPU_ADAM_PER_S = 4e9  # parameters that the CPUs of a node update (arXiv:2101.06840)
SAME_SPEED = 1.05  # times the fastest one's seconds: no difference, in arithmetic
LATENCY_SECONDS = 0.05  # in which launches of kernels and messages take longer than the arithmetic


def _assumed(default: float, text: str) -> float:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Hardware:
    """What is assumed of nodes and links, or was measured by preflight. Each is an option of
    scripts/plan.py.
    """

    mfu: float = _assumed(0.4, "share of the GPUs' peak that is reached, recomputation included")
    node_gb_per_s: float = _assumed(200, "bus bandwidth of an all-reduce on one node")
    network_gb_per_s: float = _assumed(50, "bus bandwidth of an all-reduce on several nodes")
    pcie_gb_per_s: float = _assumed(25, "between a GPU and CPU memory")
    nvme_gb_per_s: float = _assumed(5, "of a node's NVMe disks")
    cpu_memory_gib: float = _assumed(1000, "of a node")
    disk_gb_per_s: float = _assumed(2, "at which a checkpoint is written")
    node_mtbf_hours: float = _assumed(6000, "mean time between failures of a node")


@dataclass(frozen=True)
class GpuCluster:
    """What a run needs memory and time on."""

    nodes: int
    gpus: int
    """GPUs of a node, one for each of its ranks."""
    gpu_memory_gib: float
    peak_flops_per_s: float
    """Peak of a GPU in 16 bits."""
    hardware: Hardware = Hardware()

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Workload:
    """A run whose DeepSpeed config and cluster are open."""

    config: Config
    architecture: Architecture
    tokens: float
    """Tokens of an optimizer step, without padding."""
    flops: float
    """Floating-point operations of an optimizer step, without recomputed activations."""
    steps: int | None
    """Optimizer steps of the run; None if the number of its rows is unknown."""


@dataclass(frozen=True)
class Estimate:
    """A run under one DeepSpeed config on a cluster."""

    setup: Setup
    """The run with micro-batches of the config's tokens or, if less, of the largest number that
    fits, but of data.max_length at least.
    """
    memory: MemoryEstimate
    largest_micro_batch: int
    """Tokens of the largest micro-batch that fits, 0 if none does."""
    fits: bool
    micro_steps: int
    sent: float
    """Bytes that a rank sends per step."""
    seconds: float
    """Time of a step."""

    @property
    def file(self) -> str:
        return self.setup.config.ds_config

    @property
    def keeps_the_run(self) -> bool:
        """Whether it neither sums micro-steps in 16 bits nor has what has not been compared with
        plain torch here: quantized messages, and what else needs a GPU.
        """
        ds_config = self.setup.ds_config
        sums = ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
        is_summed = sums or weight_bytes(ds_config) == 4 or self.micro_steps == 1
        return is_summed and not gpu_keys(ds_config)


def estimate(workload: Workload, file: str, cluster: GpuCluster) -> Estimate:
    """The run with the DeepSpeed config `file`.

    Raises:
        UserError: the config cannot be used for this run, or not on as many ranks.
    """
    machine = Machine(cluster.ranks, cluster.gpus, precision="bf16")
    config = replace(workload.config, ds_config=file)
    setup = resolve(config, machine, workload.architecture)
    check_ranks(setup.config, setup.ds_config, cluster.ranks)
    limit = USED_SHARE * cluster.gpu_memory_gib * GIB

    def is_too_large(tokens: int) -> bool:
        return estimate_memory(with_micro_batch(setup, tokens)).peak > limit

    budgets = range(BUDGET_STEP, MAX_BUDGET, BUDGET_STEP)
    largest = BUDGET_STEP * bisect_left(budgets, True, key=is_too_large)
    data = setup.config.data
    budget = min(data.micro_batch_tokens, max(largest, data.max_length))
    setup = with_micro_batch(setup, budget)
    memory = estimate_memory(setup)
    cpu = max(memory.cpu, memory.loading)
    group = math.prod(group_sizes(setup.ds_config))
    micro_steps = math.ceil(workload.tokens * group / (cluster.ranks * budget))
    sent, seconds = _communication(setup, micro_steps, cluster)
    counts = setup.architecture.counts
    forward = counts.total / (2 * counts.total + counts.trained)  # share of the operations
    flops = workload.flops * (1 + forward * setup.config.model.activation_checkpointing)
    flops_per_s = cluster.ranks * cluster.peak_flops_per_s * cluster.hardware.mfu
    return Estimate(
        setup=setup,
        memory=memory,
        largest_micro_batch=largest,
        fits=memory.peak <= limit and cpu <= cluster.hardware.cpu_memory_gib * GIB,
        micro_steps=micro_steps,
        sent=sent,
        seconds=flops / flops_per_s + seconds + _offloading(setup, micro_steps, cluster),
    )


def with_micro_batch(setup: Setup, tokens: int) -> Setup:
    """The run with another data.micro_batch_tokens."""
    data = replace(setup.config.data, micro_batch_tokens=tokens)
    return replace(setup, config=replace(setup.config, data=data))


def fastest(estimates: Sequence[Estimate], own: str) -> list[Estimate]:
    """The estimates that fit and keep the run as it is, the fastest first. Those that are about as
    fast as the fastest, or faster than latencies allow, come before the others in their order, the
    run's own choice first.
    """
    usable = [each for each in estimates if each.fits and each.keeps_the_run]
    least = min((each.seconds for each in usable), default=0)
    about_equal = max(SAME_SPEED * least, LATENCY_SECONDS)

    def rank(each: Estimate) -> tuple[float, bool]:
        return max(each.seconds, about_equal), each.file != own

    return sorted(usable, key=rank)


def daly_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """The interval between saves that loses least time, by Daly 2006,
    doi.org/10.1016/j.future.2004.11.016; mtbf: mean time between failures of the job.
    """
    root = math.sqrt(save_seconds / (2 * mtbf_seconds))
    best = 2 * mtbf_seconds * root * (1 - root * 2 / 3 + root**2 / 9)
    return best if root < 1 else mtbf_seconds


# --------------------------------------------------------------------------------------------------
# Time


def _communication(setup: Setup, micro_steps: int, cluster: GpuCluster) -> tuple[float, float]:
    """Bytes that a rank sends in a step, and their seconds, by the volumes of ds_configs/README.md
    in rings over all ranks.
    """
    ds_config = setup.ds_config
    counts = setup.architecture.counts
    zero = ds_config["zero_optimization"]
    stage = zero_stage(ds_config)
    tensor, sequence = group_sizes(ds_config)
    inside = cluster.hardware.node_gb_per_s * 1e9
    # of a node's network, on which as many rings run at a time as a tensor-parallel group has ranks
    network = cluster.hardware.network_gb_per_s * 1e9 / tensor
    between = network if cluster.nodes > 1 else inside
    width = weight_bytes(ds_config)
    summed = 4 if ds_config.get("communication_data_type") == "fp32" else width
    summed = 0.5 if zero.get("zero_quantized_gradients") else summed
    ranks = cluster.ranks // tensor
    ring = (ranks - 1) / ranks / tensor
    gradients = ring * summed * counts.trained * (2, 2, 2 * micro_steps, micro_steps)[stage]
    forward = ring * width * counts.trained * (stage > 0)
    backward = 0.0
    if stage == 3:
        gathered = 1 if zero.get("zero_quantized_weights") else width
        forward = backward = ring * gathered * counts.total * micro_steps
    is_local = 1 < secondary_ranks(ds_config) <= cluster.gpus
    seconds = (gradients + forward) / between + backward / (inside if is_local else between)

    skeleton = setup.architecture.skeleton
    group = tensor * sequence
    h, q, k, *_ = layer_widths(skeleton)
    per_layer = 4 * h if tensor > 1 else 2 * (q + k) / sequence
    passes = 2 + setup.config.model.activation_checkpointing
    layers = int(skeleton.config.get_text_config().num_hidden_layers)
    tokens = setup.config.data.micro_batch_tokens * micro_steps
    shared = passes * layers * per_layer * width * tokens * (group - 1) / group
    seconds += shared / (inside if group <= cluster.gpus else between)
    return gradients + forward + backward + shared, seconds


def _offloading(setup: Setup, micro_steps: int, cluster: GpuCluster) -> float:
    """Seconds in which a step copies to and from CPU memory and NVMe, and the CPUs update."""
    optimizer, weights = offload_devices(setup.ds_config).values()
    width = weight_bytes(setup.ds_config)
    trained, total = (count / cluster.nodes for count in setup.architecture.counts)  # on a node
    bytes_per_s = {
        "none": math.inf,
        "cpu": cluster.hardware.pcie_gb_per_s * cluster.gpus * 1e9,
        "nvme": cluster.hardware.nvme_gb_per_s * 1e9,
    }
    seconds = 2 * micro_steps * width * total / bytes_per_s[weights]
    if optimizer != "none":
        copied = (4 * micro_steps + width) * trained
        seconds += copied / bytes_per_s["cpu"] + trained / CPU_ADAM_PER_S
    if optimizer == "nvme":
        seconds += 2 * 12 * trained / bytes_per_s["nvme"]
    return seconds
