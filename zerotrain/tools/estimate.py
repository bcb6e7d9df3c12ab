"""An estimate of a run under a DeepSpeed config on a cluster: memory, and the time of a step.

The time follows a roofline model. Matrix products, attention and the output head each reach a share
of the GPU's peak. The bandwidth of its memory limits elementwise work and the update. Each layer
costs kernel launches. Communication counts as far as compute does not hide it. Padding, evaluation
and saves are left out. The template's benchmarks fit the constants to published runs and measure
the errors of forecasts of other runs.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zerotrain.config.ds_config import check_ranks, secondary_ranks
from zerotrain.config.schema import Config
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.machine import GIB, PEAK_FLOPS_PER_S, Machine
from zerotrain.tools.memory import USED_SHARE, MemoryEstimate, RunSizes, estimate_memory
from zerotrain.training.setup import Architecture, Setup, resolve

BUDGET_STEP = 256  # The largest micro-batch is a multiple of this many tokens.
MAX_BUDGET = 1 << 22
SAME_SPEED = 1.05  # A step up to 1.05 times as long as the shortest counts as equally fast.
WORTHWHILE = 0.75  # More nodes are a waste if a GPU keeps less than this share of its tokens/s.
A100_FLOPS_PER_S = PEAK_FLOPS_PER_S["A100"]
UPDATE_BYTES = 28  # per parameter: AdamW reads four fp32 values and writes three
FUSED = 0.5  # model.compile moves this share of the elementwise bytes.
SOFTNESS = 0.15  # Communication stops being hidden gradually, over this share of the window.
MEMORY_TB_PER_S = {
    "B200": {180: 8.0},
    "H200 NVL": {141: 4.8},
    "H200": {141: 4.8},
    "H100 PCIe": {80: 2.0},
    "H100 NVL": {94: 3.9},
    "H100": {80: 3.35, 96: 2.4},
    "A100": {80: 2.04, 40: 1.56},
    "L40S": {48: 0.86},
    "V100": {32: 0.9},
    "MI300X": {192: 5.3},
}
"""Bandwidth of a GPU's memory by its data sheet: name in PEAK_FLOPS_PER_S, GB, TB/s."""


def _rate(default: float, text: str) -> float:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Rates:
    """Speeds of GPUs, links and disks. Each is an option of scripts/plan.py."""

    matmul_share: float = _rate(0.796, "share of an A100's peak that matrix products reach")
    attention_share: float = _rate(0.305, "share of an A100's peak that attention reaches")
    head_share: float = _rate(0.308, "share of an A100's peak that the output head reaches")
    peak_exponent: float = _rate(0.275, "x: a peak N times an A100's counts as N ** (1 - x)")
    elementwise_passes: float = _rate(1.65, "times that a pass moves the bytes kept for backward")
    launch_seconds: float = _rate(7.9e-5, "seconds to launch a layer's kernels, per micro-step")
    update_passes: float = _rate(1.18, "times that the update moves 28 bytes per parameter")
    node_gb_per_s: float = _rate(155, "GB/s, bus bandwidth of an all-reduce on one node")
    network_gb_per_s: float = _rate(172, "GB/s, bus bandwidth of an all-reduce on several nodes")
    hidden_share: float = _rate(0.628, "share of compute that can hide communication")
    collective_seconds: float = _rate(1.96e-5, "seconds per collective and doubling of the ranks")
    pcie_gb_per_s: float = _rate(18.1, "GB/s between a GPU and CPU memory")
    cpu_adam_per_s: float = _rate(4.29e8, "parameters/s that the CPUs of a node update")
    slowdown: float = _rate(1, "factor on the compute time of the published runs")
    nvme_gb_per_s: float = _rate(5, "GB/s of a node's NVMe disks")
    cpu_memory_gib: float = _rate(1000, "GiB of CPU memory of a node")


class Gpu(NamedTuple):
    """A kind of GPU, as forecasts need it."""

    name: str
    """Name in PEAK_FLOPS_PER_S."""
    memory_gib: int
    flops_per_s: float
    """Peak in 16 bits."""
    bytes_per_s: float
    """Bandwidth of its memory."""


def find_gpu(text: str) -> Gpu:
    """Return the GPU that a text names, such as h100-80gb, or a driver's NVIDIA A100-SXM4-40GB.

    Raises:
        UserError: the GPU is unknown.
    """
    given = text.lower().replace("-", " ")
    name = next((part for part in PEAK_FLOPS_PER_S if part.lower() in given), None)
    if name not in MEMORY_TB_PER_S:
        known = ", ".join(MEMORY_TB_PER_S)
        raise UserError(f"--gpu {text} is unknown: give one of {known}, with its GB: h100-80gb")
    tb_per_s = MEMORY_TB_PER_S[name]
    sizes = [int(size) for size in re.findall(r"\b(\d{1,6})(?:gb)?\b", given)] or [*tb_per_s]
    of_size = next((tb_per_s[size] for size in sizes if size in tb_per_s), max(tb_per_s.values()))
    return Gpu(name, sizes[0], PEAK_FLOPS_PER_S[name], 1e12 * of_size)


@dataclass(frozen=True)
class GpuCluster:
    """The GPUs of a run, and the rates of a forecast."""

    nodes: int
    gpus: int
    """Number of GPUs per node. Each GPU has one rank."""
    gpu: Gpu
    rates: Rates = Rates()

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Workload:
    """A run before its DeepSpeed config and cluster are chosen."""

    config: Config
    architecture: Architecture
    tokens: float
    """Tokens per optimizer step, without padding."""
    supervised: float
    """Targets of the loss per optimizer step."""
    attention: float
    """FLOPs of attention per optimizer step."""
    recomputed: float
    """Share of the forward pass that the backward pass repeats."""
    steps: int | None
    """Optimizer steps of the run; None if the number of rows is unknown."""


@dataclass(frozen=True)
class Estimate:
    """A run under one DeepSpeed config on a cluster."""

    workload: Workload
    cluster: GpuCluster
    setup: Setup
    """The run with the config's data.micro_batch_tokens, lowered to the largest that fits, but at
    least data.max_length.
    """
    memory: MemoryEstimate
    largest_micro_batch: int
    """Tokens of the largest micro-batch that fits; 0 if none fits."""
    fits: bool
    micro_steps: int
    sent: float
    """Bytes that a rank sends per step."""
    seconds: float
    """Seconds per step."""

    @property
    def tokens_per_s(self) -> float:
        return self.workload.tokens / self.seconds

    @property
    def hours(self) -> float | None:
        """Duration of the run; None if the number of its steps is unknown."""
        return self.workload.steps and self.workload.steps * self.seconds / 3600

    @property
    def file(self) -> str:
        return self.setup.config.ds_config

    @property
    def typical_error(self) -> str:
        """Error that 90% of forecasts stayed within, for published runs held out of the fit.
        `rough`: known from two runs only. `unseen`: no published run is of the kind.
        """
        sizes = RunSizes(self.setup)
        if {sizes.optimizer_device, sizes.weights_device} != {"none"}:
            return "rough"
        if sizes.tensor * sizes.sequence > 1 or sizes.experts > 1:
            return "unseen"
        return "15 %" if self.cluster.gpu.name in ("A100", "H100") else "25 %"

    @property
    def keeps_the_run(self) -> bool:
        """Whether training is unchanged: no gradients of micro-steps are summed in 16 bits."""
        sums = self.setup.ds_config.get("data_types", {}).get("grad_accum_dtype")
        return sums == "fp32" or self.micro_steps == 1 or RunSizes(self.setup).weight_bytes == 4


def estimate(workload: Workload, file: str, cluster: GpuCluster) -> Estimate:
    """Estimate the run with the DeepSpeed config `file`.

    Raises:
        UserError: the config does not fit this run or this number of ranks.
    """
    machine = Machine(cluster.ranks, cluster.gpus, "cuda", "bf16")
    config = replace(workload.config, ds_config=file)
    setup = resolve(config, machine, workload.architecture)
    check_ranks(setup.config, setup.ds_config, cluster.ranks)
    limit = USED_SHARE * cluster.gpu.memory_gib * GIB

    def is_too_large(tokens: int) -> bool:
        return estimate_memory(with_micro_batch(setup, tokens)).peak > limit

    budgets = range(BUDGET_STEP, MAX_BUDGET, BUDGET_STEP)
    largest = BUDGET_STEP * bisect_left(budgets, True, key=is_too_large)
    data = setup.config.data
    budget = min(data.micro_batch_tokens, max(largest, data.max_length))
    setup = with_micro_batch(setup, budget)
    memory = estimate_memory(setup)
    cpu = max(memory.cpu, memory.loading)
    sizes = RunSizes(setup)
    group = sizes.tensor * sizes.sequence
    micro_steps = math.ceil(workload.tokens * group / (cluster.ranks * budget))
    sent, seconds = step_time(setup, workload, micro_steps, cluster)
    return Estimate(
        workload=workload,
        cluster=cluster,
        setup=setup,
        memory=memory,
        largest_micro_batch=largest,
        fits=memory.peak <= limit and cpu <= cluster.rates.cpu_memory_gib * GIB,
        micro_steps=micro_steps,
        sent=sent,
        seconds=seconds,
    )


def with_micro_batch(setup: Setup, tokens: int) -> Setup:
    """Return the run with micro-batches of `tokens` tokens."""
    data = replace(setup.config.data, micro_batch_tokens=tokens)
    return replace(setup, config=replace(setup.config, data=data))


def fastest(estimates: Sequence[Estimate], own: str) -> list[Estimate]:
    """Return the estimates that fit and leave training unchanged, the fastest first.

    Estimates that are about as fast as the fastest keep their order, but `own` comes first.

    Args:
        own: the DeepSpeed config of the run.
    """
    usable = [each for each in estimates if each.fits and each.keeps_the_run]
    about_equal = SAME_SPEED * min((each.seconds for each in usable), default=0)
    return sorted(usable, key=lambda each: (max(each.seconds, about_equal), each.file != own))


# --------------------------------------------------------------------------------------------------
# Time


def step_time(
    setup: Setup, workload: Workload, micro_steps: int, cluster: GpuCluster
) -> tuple[float, float]:
    """Return the bytes that a rank sends in an optimizer step, and the seconds of the step. The
    seconds are an array if the rates of the cluster are arrays.
    """
    rates = cluster.rates
    sizes = RunSizes(setup)
    compute = _compute(setup, sizes, workload, micro_steps, cluster)
    sent, seconds, shared, shared_seconds = _communication(setup, sizes, micro_steps, cluster)
    # Below stage 2, only the last micro-step reduces gradients.
    window = rates.hidden_share * compute / (1 if sizes.stage >= 2 else micro_steps)
    late = seconds - window
    exposed = (late + (late**2 + (SOFTNESS * window) ** 2) ** 0.5) / 2  # a smooth max(late, 0)
    offload = _offloading(setup, sizes, micro_steps, cluster)
    return sent + shared, compute + exposed + shared_seconds + offload


def _compute(
    setup: Setup, sizes: RunSizes, workload: Workload, micro_steps: int, cluster: GpuCluster
) -> float:
    """Seconds of compute on a GPU, without the update of offloaded parameters."""
    rates = cluster.rates
    model = setup.architecture
    counts = model.counts
    again = workload.recomputed
    forward = counts.total / (2 * counts.total + counts.trained)  # share of the operations
    seconds_at_peak = (
        model.flops.token * workload.tokens * (1 + forward * again) / rates.matmul_share
        # FlashAttention computes the scores once more in its backward pass.
        + workload.attention * (3.5 + again) / 3 / rates.attention_share
        + model.flops.supervised_token * workload.supervised / rates.head_share
    ) / (cluster.ranks * cluster.gpu.flops_per_s)
    peaks = cluster.gpu.flops_per_s / A100_FLOPS_PER_S
    moved = (
        _elementwise_bytes(sizes) * sizes.layers * workload.tokens * sizes.tensor / cluster.ranks
    )
    moved *= (3 + again) * rates.elementwise_passes * (FUSED if setup.config.model.compile else 1)
    launches = sizes.layers * micro_steps * (3 + again) / 4
    if sizes.optimizer_device == "none":
        updated = counts.trained / (cluster.ranks if sizes.stage else sizes.tensor)
        moved = moved + UPDATE_BYTES * updated * rates.update_passes
    seconds = seconds_at_peak * peaks**rates.peak_exponent + moved / cluster.gpu.bytes_per_s
    return rates.slowdown * (seconds + launches * rates.launch_seconds)


def _elementwise_bytes(sizes: RunSizes) -> float:
    """Bytes per token in 16 bits that a layer's operations beside products read or write: two
    norms, rotated states, a gated feed-forward block, and input and output of each expert.
    """
    divided = (sizes.queries, sizes.keys, sizes.inner)
    q, k, f = (width / sizes.tensor for width in divided)
    of_experts = 4 * sizes.hidden * sizes.experts if sizes.experts > 1 else 0
    return 16 * sizes.hidden + 6 * q + 4 * k + 8 * f + of_experts


def _communication(
    setup: Setup, sizes: RunSizes, micro_steps: int, cluster: GpuCluster
) -> tuple[float, float, float, float]:
    """Bytes that a rank sends in a step for ZeRO, and their seconds; then bytes and seconds of
    tensor or sequence parallelism, for which compute waits. ZeRO has the volumes of
    ds_configs/README.md in rings over all ranks.
    """
    ds_config = setup.ds_config
    counts = setup.architecture.counts
    stage, width, layers = sizes.stage, sizes.weight_bytes, sizes.layers
    inside = cluster.rates.node_gb_per_s * 1e9
    # The rings of the ranks of a tensor-parallel group share a node's network.
    network = cluster.rates.network_gb_per_s * 1e9 / sizes.tensor
    between = network if cluster.nodes > 1 else inside
    summed = 4 if ds_config.get("communication_data_type") == "fp32" else width
    ranks = cluster.ranks // sizes.tensor
    ring = (ranks - 1) / ranks / sizes.tensor
    gradients = ring * summed * counts.trained * (2, 2, 2 * micro_steps, micro_steps)[stage]
    forward = ring * width * counts.trained * (stage > 0)
    backward = 0.0
    if stage == 3:
        forward = backward = ring * width * counts.total * micro_steps
    is_local = 1 < secondary_ranks(ds_config) <= cluster.gpus
    seconds = (gradients + forward) / between + backward / (inside if is_local else between)
    collectives = layers * (1, 1, micro_steps, 3 * micro_steps)[stage] * math.log2(ranks)
    seconds += collectives * cluster.rates.collective_seconds

    group = sizes.tensor * sizes.sequence
    exchanged = 2 * (sizes.queries + sizes.keys) / sizes.sequence
    per_layer = 4 * sizes.hidden if sizes.tensor > 1 else exchanged
    passes = 2 + setup.config.model.activation_checkpointing
    tokens = setup.config.data.micro_batch_tokens * micro_steps
    shared = passes * layers * per_layer * width * tokens * (group - 1) / group
    shared_seconds = shared / (inside if group <= cluster.gpus else between)
    return gradients + forward + backward, seconds, shared, shared_seconds


def _offloading(setup: Setup, sizes: RunSizes, micro_steps: int, cluster: GpuCluster) -> float:
    """Seconds per step for copies to and from CPU memory and NVMe, and for the CPUs' update."""
    width = sizes.weight_bytes
    trained, total = (count / cluster.nodes for count in setup.architecture.counts)  # on a node
    bytes_per_s = {
        "none": math.inf,
        "cpu": cluster.rates.pcie_gb_per_s * cluster.gpus * 1e9,
        "nvme": cluster.rates.nvme_gb_per_s * 1e9,
    }
    seconds = 2 * micro_steps * width * total / bytes_per_s[sizes.weights_device]
    if sizes.optimizer_device != "none":
        copied = (4 * micro_steps + width) * trained
        seconds += copied / bytes_per_s["cpu"] + trained / cluster.rates.cpu_adam_per_s
    if sizes.optimizer_device == "nvme":
        seconds += 2 * 12 * trained / bytes_per_s["nvme"]
    return seconds
