"""What a run takes under a DeepSpeed config on a cluster: memory, and the time of a step.

The time is that of a roofline: matrix products, attention and the output head each reach a share of
the GPU's peak; elementwise work and the update are limited by the bandwidth of its memory; layers
cost launches of kernels; and of the communication counts what compute does not hide. Padding,
evaluation and saves are left out. The template's benchmarks fit the constants to published runs,
and show how far forecasts of others are off.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zerotrain.config.ds_config import (
    check_ranks,
    group_sizes,
    offload_devices,
    secondary_ranks,
    zero_stage,
)
from zerotrain.config.schema import Config
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.machine import GIB, Machine, peak_flops_per_s
from zerotrain.tools.memory import MemoryEstimate, estimate_memory, layer_bytes, layer_widths
from zerotrain.tools.states import weight_bytes
from zerotrain.training.setup import Architecture, Setup, resolve

USED_SHARE = 0.9  # of a GPU's memory: the rest is for what the estimate leaves out
BUDGET_STEP = 256  # tokens: the largest micro-batch is a multiple of it
MAX_BUDGET = 1 << 22
SAME_SPEED = 1.05  # times the fastest one's seconds: no difference
WORTHWHILE = 0.75  # of a GPU's tokens/s: if it keeps less, further nodes are a waste
A100_FLOPS_PER_S = 312e12
UPDATE_BYTES = 28  # of a parameter: AdamW reads four fp32 values and writes three
FUSED = 0.5  # of the elementwise bytes: what model.compile moves
SOFTNESS = 0.15  # of the window: how gradually communication stops being hidden
MEMORY_TB_PER_S = {
    "b200 180": 8.0,
    "h200 141": 4.8,
    "h100 pcie 80": 2.0,
    "h100 nvl 94": 3.9,
    "h100 80": 3.35,
    "h100 96": 2.4,
    "a100 80": 2.04,
    "a100 40": 1.56,
    "l40s 48": 0.86,
    "v100 32": 0.9,
    "mi300x 192": 5.3,
}
"""Part of a GPU's name, and its GB: bandwidth of its memory, of its data sheet. Of several entries
whose part is in the name counts the one with its GB, else the first one.
"""


def _rate(default: float, text: str) -> float:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Rates:
    """How fast GPUs, links and disks are. Each is an option of scripts/plan.py."""

    matmul_share: float = _rate(0.796, "share of an A100's peak that matrix products reach")
    attention_share: float = _rate(0.305, "share of an A100's peak that attention reaches")
    head_share: float = _rate(0.308, "share of an A100's peak that the output head reaches")
    peak_exponent: float = _rate(0.275, "a peak N times an A100's counts as N to 1 minus this")
    elementwise_passes: float = _rate(1.65, "times that a pass moves what a layer's backward keeps")
    launch_seconds: float = _rate(7.9e-5, "of a layer's kernels in a micro-step")
    update_passes: float = _rate(1.18, "times that the update moves its 28 bytes per parameter")
    node_gb_per_s: float = _rate(155, "bus bandwidth of an all-reduce on one node")
    network_gb_per_s: float = _rate(172, "bus bandwidth of an all-reduce on several nodes")
    hidden_share: float = _rate(0.628, "share of compute that communication hides behind")
    collective_seconds: float = _rate(1.96e-5, "latency of a collective per doubling of the ranks")
    pcie_gb_per_s: float = _rate(18.1, "between a GPU and CPU memory")
    cpu_adam_per_s: float = _rate(4.29e8, "parameters that the CPUs of a node update")
    slowdown: float = _rate(1, "times the compute of the runs that the table has")
    nvme_gb_per_s: float = _rate(5, "of a node's NVMe disks")
    cpu_memory_gib: float = _rate(1000, "of a node")
    disk_gb_per_s: float = _rate(2, "at which a checkpoint is written")
    node_mtbf_hours: float = _rate(6000, "mean time between failures of a node")


class Gpu(NamedTuple):
    """What forecasts need of a GPU."""

    name: str
    """In lower case, as in h100."""
    memory_gib: int
    flops_per_s: float
    """Peak in 16 bits."""
    bytes_per_s: float
    """Bandwidth of its memory."""


def find_gpu(text: str) -> Gpu:
    """The GPU of a name, as in h100-80gb, or of a driver's name, as in NVIDIA A100-SXM4-40GB, some
    of which have no GB. Raises UserError: it is not known.
    """
    given = text.lower().replace("-", " ")
    peak = peak_flops_per_s(given)
    entries = [entry for entry in MEMORY_TB_PER_S if entry.rpartition(" ")[0] in given]
    if peak is None or not entries:
        raise UserError(f"--gpu {text}: give one of {', '.join(MEMORY_TB_PER_S)}, as in h100-80gb")
    sizes = re.findall(r"\b(\d{1,6})(?:gb)?\b", given)  # GB, if any
    best = max(entries, key=lambda entry: entry.rpartition(" ")[2] in sizes)
    name, _, gib = best.rpartition(" ")
    return Gpu(name, int((sizes or [gib])[-1]), peak, 1e12 * MEMORY_TB_PER_S[best])


@dataclass(frozen=True)
class GpuCluster:
    """What a run needs memory and time on."""

    nodes: int
    gpus: int
    """GPUs of a node, one for each of its ranks."""
    gpu: Gpu
    rates: Rates = Rates()

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
    supervised: float
    """How many of them are targets of the loss."""
    pairs: float
    """Pairs of a token and itself or one before it in its example, of an optimizer step."""
    recomputed: float
    """Share of the forward pass that the backward pass repeats."""
    steps: int | None
    """Optimizer steps of the run; None if the number of its rows is unknown."""


@dataclass(frozen=True)
class Estimate:
    """A run under one DeepSpeed config on a cluster."""

    workload: Workload
    cluster: GpuCluster
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
    def tokens_per_s(self) -> float:
        return self.workload.tokens / self.seconds

    @property
    def hours(self) -> float | None:
        """Of the run; None if the number of its steps is unknown."""
        return self.workload.steps and self.workload.steps * self.seconds / 3600

    @property
    def file(self) -> str:
        return self.setup.config.ds_config

    @property
    def typical_error(self) -> str:
        """How far nine of ten forecasts of the kind were off, in the runs that the template's
        benchmarks hold out.
        """
        ds_config = self.setup.ds_config
        experts = layer_widths(self.setup.architecture.skeleton)[-1]
        if set(offload_devices(ds_config).values()) != {"none"}:
            return "rough"  # two published runs
        if group_sizes(ds_config) != (1, 1) or experts > 1:
            return "unseen"
        return "15 %" if self.cluster.gpu.name in ("a100", "h100") else "25 %"

    @property
    def keeps_the_run(self) -> bool:
        """Whether it does not sum micro-steps in 16 bits."""
        ds_config = self.setup.ds_config
        sums = ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
        return sums or weight_bytes(ds_config) == 4 or self.micro_steps == 1


def estimate(workload: Workload, file: str, cluster: GpuCluster) -> Estimate:
    """The run with the DeepSpeed config `file`.

    Raises:
        UserError: the config cannot be used for this run, or not on as many ranks.
    """
    machine = Machine(cluster.ranks, cluster.gpus, precision="bf16")
    config = replace(workload.config, ds_config=file)
    setup = resolve(config, machine, workload.architecture)
    # not before: on cuda it would look for the kernels of this machine
    setup = replace(setup, machine=replace(machine, device="cuda"))
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
    group = math.prod(group_sizes(setup.ds_config))
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
    """The run with another data.micro_batch_tokens."""
    data = replace(setup.config.data, micro_batch_tokens=tokens)
    return replace(setup, config=replace(setup.config, data=data))


def fastest(estimates: Sequence[Estimate], own: str) -> list[Estimate]:
    """The estimates that fit and keep the run as it is, the fastest first. Those that are about as
    fast as the fastest come before the others in their order, the run's own choice first.
    """
    usable = [each for each in estimates if each.fits and each.keeps_the_run]
    about_equal = SAME_SPEED * min((each.seconds for each in usable), default=0)
    return sorted(usable, key=lambda each: (max(each.seconds, about_equal), each.file != own))


def save_interval(checkpoint_bytes: float, cluster: GpuCluster) -> float:
    """The seconds between saves that lose least time, by Young 1974, doi.org/10.1145/361147.361115.
    Saves take much less time than lies between failures of the job.
    """
    rates = cluster.rates
    save_seconds = checkpoint_bytes / rates.disk_gb_per_s / 1e9
    return math.sqrt(2 * save_seconds * 3600 * rates.node_mtbf_hours / cluster.nodes)


# --------------------------------------------------------------------------------------------------
# Time


def step_time(
    setup: Setup, workload: Workload, micro_steps: int, cluster: GpuCluster
) -> tuple[float, float]:
    """Bytes that a rank sends in an optimizer step, and the seconds of the step. The rates of the
    cluster may be arrays: so are the seconds then.
    """
    rates = cluster.rates
    compute = _compute(setup, workload, micro_steps, cluster)
    stage = zero_stage(setup.ds_config)
    sent, seconds, shared, shared_seconds = _communication(setup, micro_steps, cluster)
    # below stage 2, gradients are reduced in the last micro-step alone
    window = rates.hidden_share * compute / (1 if stage >= 2 else micro_steps)
    late = seconds - window
    exposed = (late + (late**2 + (SOFTNESS * window) ** 2) ** 0.5) / 2  # max(late, 0), smoothed
    offload = _offloading(setup, micro_steps, cluster)
    return sent + shared, compute + exposed + shared_seconds + offload


def _compute(setup: Setup, workload: Workload, micro_steps: int, cluster: GpuCluster) -> float:
    """Seconds in which a GPU computes, without the update of offloaded parameters."""
    rates = cluster.rates
    model = setup.architecture
    counts = model.counts
    again = workload.recomputed
    forward = counts.total / (2 * counts.total + counts.trained)  # share of the operations
    seconds_at_peak = (
        model.flops.token * workload.tokens * (1 + forward * again) / rates.matmul_share
        # FlashAttention computes the scores once more in its backward pass
        + model.flops.pair * workload.pairs * (3.5 + again) / 3 / rates.attention_share
        + model.flops.supervised_token * workload.supervised / rates.head_share
    ) / (cluster.ranks * cluster.gpu.flops_per_s)
    peaks = cluster.gpu.flops_per_s / A100_FLOPS_PER_S
    tensor, _ = group_sizes(setup.ds_config)
    kept, _ = layer_bytes(model.skeleton, tensor)
    layers = int(model.skeleton.config.get_text_config().num_hidden_layers)
    moved = kept * layers * workload.tokens * tensor / cluster.ranks
    moved *= (3 + again) * rates.elementwise_passes * (FUSED if setup.config.model.compile else 1)
    launches = layers * micro_steps * (3 + again) / 4
    if offload_devices(setup.ds_config)["optimizer"] == "none":
        updated = counts.trained / (cluster.ranks if zero_stage(setup.ds_config) else tensor)
        moved = moved + UPDATE_BYTES * updated * rates.update_passes
    seconds = seconds_at_peak * peaks**rates.peak_exponent + moved / cluster.gpu.bytes_per_s
    return rates.slowdown * (seconds + launches * rates.launch_seconds)


def _communication(
    setup: Setup, micro_steps: int, cluster: GpuCluster
) -> tuple[float, float, float, float]:
    """Bytes that a rank sends in a step for ZeRO, by the volumes of ds_configs/README.md in rings
    over all ranks, and their seconds; and bytes and seconds of tensor or sequence parallelism,
    for which compute waits.
    """
    ds_config = setup.ds_config
    counts = setup.architecture.counts
    stage = zero_stage(ds_config)
    tensor, sequence = group_sizes(ds_config)
    skeleton = setup.architecture.skeleton
    layers = int(skeleton.config.get_text_config().num_hidden_layers)
    inside = cluster.rates.node_gb_per_s * 1e9
    # of a node's network, on which as many rings run at a time as a tensor-parallel group has ranks
    network = cluster.rates.network_gb_per_s * 1e9 / tensor
    between = network if cluster.nodes > 1 else inside
    width = weight_bytes(ds_config)
    summed = 4 if ds_config.get("communication_data_type") == "fp32" else width
    ranks = cluster.ranks // tensor
    ring = (ranks - 1) / ranks / tensor
    gradients = ring * summed * counts.trained * (2, 2, 2 * micro_steps, micro_steps)[stage]
    forward = ring * width * counts.trained * (stage > 0)
    backward = 0.0
    if stage == 3:
        forward = backward = ring * width * counts.total * micro_steps
    is_local = 1 < secondary_ranks(ds_config) <= cluster.gpus
    seconds = (gradients + forward) / between + backward / (inside if is_local else between)
    collectives = layers * (1, 1, micro_steps, 3 * micro_steps)[stage] * math.log2(ranks)
    seconds += collectives * cluster.rates.collective_seconds

    group = tensor * sequence
    h, q, k, *_ = layer_widths(skeleton)
    per_layer = 4 * h if tensor > 1 else 2 * (q + k) / sequence
    passes = 2 + setup.config.model.activation_checkpointing
    tokens = setup.config.data.micro_batch_tokens * micro_steps
    shared = passes * layers * per_layer * width * tokens * (group - 1) / group
    shared_seconds = shared / (inside if group <= cluster.gpus else between)
    return gradients + forward + backward, seconds, shared, shared_seconds


def _offloading(setup: Setup, micro_steps: int, cluster: GpuCluster) -> float:
    """Seconds in which a step copies to and from CPU memory and NVMe, and the CPUs update."""
    optimizer, weights = offload_devices(setup.ds_config).values()
    width = weight_bytes(setup.ds_config)
    trained, total = (count / cluster.nodes for count in setup.architecture.counts)  # on a node
    bytes_per_s = {
        "none": math.inf,
        "cpu": cluster.rates.pcie_gb_per_s * cluster.gpus * 1e9,
        "nvme": cluster.rates.nvme_gb_per_s * 1e9,
    }
    seconds = 2 * micro_steps * width * total / bytes_per_s[weights]
    if optimizer != "none":
        copied = (4 * micro_steps + width) * trained
        seconds += copied / bytes_per_s["cpu"] + trained / cluster.rates.cpu_adam_per_s
    if optimizer == "nvme":
        seconds += 2 * 12 * trained / bytes_per_s["nvme"]
    return seconds
