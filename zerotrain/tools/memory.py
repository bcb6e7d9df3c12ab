"""An estimate of a run's memory, from its config and the architecture alone.

It is arithmetic: nothing is loaded or measured. The estimate leaves out CUDA's context, NCCL's
buffers, fragmentation in the allocator, dropout masks and dense attention masks (data.batching:
bucketed). Keep a tenth of a GPU free for them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PretrainedConfig

from zerotrain.config.ds_config import group_sizes, offload_devices, secondary_ranks, zero_stage
from zerotrain.model.architecture import hidden_size, sizes_of
from zerotrain.training.loss import chunk_size
from zerotrain.training.setup import Setup

USED_SHARE = 0.9  # A run fits if it needs at most this share of a GPU's memory.
MOMENTS = 8  # bytes per trained parameter: AdamW's two moments in fp32
MASTER = 4  # bytes per trained parameter: ZeRO keeps an fp32 copy even of fp32 weights
NF4_BYTES = 4.127 / 8  # 4 bits, and scales of blocks of 64 in 8 bits (arXiv:2305.14314, section 3)
LOSS_BYTES = 12  # per logit in the backward pass: fp32 log-probabilities and two gradients


class RunSizes:
    """The numbers that the formulas of memory and time take from a run."""

    def __init__(self, setup: Setup) -> None:
        ds_config = setup.ds_config
        skeleton = setup.architecture.skeleton
        text = skeleton.config.get_text_config()
        self.stage = zero_stage(ds_config)
        self.tensor, self.sequence = group_sizes(ds_config)
        self.optimizer_device, self.weights_device = offload_devices(ds_config).values()
        self.weight_bytes = weight_bytes(ds_config)
        self.layers = int(text.num_hidden_layers)
        self.hidden = hidden_size(skeleton)
        # Queries and keys stay 0 without attention.
        heads = _mean_size(text, "num_attention_heads") or 0
        head_dim = _mean_size(text, "head_dim") or (self.hidden // heads if heads else 0)
        self.queries = heads * head_dim
        self.keys = (_mean_size(text, "num_key_value_heads") or heads) * head_dim
        self.experts = _mean_size(text, "num_experts_per_tok") or 1
        names = ("moe_intermediate_size", "intermediate_size", "n_inner")
        inner = next((size for name in names if (size := _mean_size(text, name))), 4 * self.hidden)
        self.inner = inner * self.experts
        """Feed-forward width of all experts that a token visits."""

    @property
    def layer_bytes(self) -> tuple[float, float]:
        """Bytes per token that one layer keeps on a rank for its backward pass in 16 bits, and
        bytes of the gradients that exist at a time there.

        With hidden size h, query width q, key width k and feed-forward width f of the e experts
        that a token visits:

            16 h            two norms: input in fp32, normalized input, output
            6 q + 4 k       rotated queries and keys, values, attention's output and its copy
            8 f             gate, its activation, up, product; 6 f more are their gradients
            4 h e           input and output of each expert, in mixtures of them

        Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) count in this way. Here feed-forward
        blocks are gated, and attention keeps no scores. Further norms (Qwen 3, Gemma 3) are left
        out.
        """
        divided = (self.queries, self.keys, self.inner)
        q, k, f = (width / self.tensor for width in divided)
        of_experts = 4 * self.hidden * self.experts if self.experts > 1 else 0
        return 16 * self.hidden + 6 * q + 4 * k + 8 * f + of_experts, 6 * f


def weight_bytes(ds_config: dict[str, Any]) -> int:
    """Return the bytes of a weight: 2 in bf16 and fp16, 4 in fp32."""
    return 2 if ds_config["bf16"]["enabled"] or ds_config["fp16"]["enabled"] else 4


def _mean_size(text: PretrainedConfig, name: str) -> float | None:
    """Return a size of the architecture, as a mean if layers differ; None if it is missing."""
    sizes = sizes_of(text, name)
    return sum(sizes) / len(sizes) if sizes else None


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a run with micro-batches of data.micro_batch_tokens needs."""

    states: dict[str, float]
    """What a GPU holds all the time: weights, gradients, optimizer, buffers of communication."""
    kept: float
    """Activations that the forward pass keeps on a GPU without activation checkpointing."""
    inputs: float
    """Activations that it keeps with activation checkpointing: the input of each layer."""
    activations: float
    """`inputs` if the run has activation checkpointing, else `kept`."""
    loss: float
    """What the loss needs beside states and activations."""
    layer: float
    """What the backward pass of one layer, after the loss, needs beside states and activations."""
    update: float
    """What the optimizer's update needs beside the states."""
    cpu: float
    """CPU memory of a node in training."""
    loading: float
    """CPU memory of a node while the weights are loaded."""
    nvme: float
    """NVMe of a node."""

    @property
    def peak(self) -> float:
        """The most that one GPU holds: in the loss, in a layer's backward pass or in the update."""
        backward = self.activations + max(self.loss, self.layer)
        return sum(self.states.values()) + max(backward, self.update)


def estimate_memory(setup: Setup) -> MemoryEstimate:
    """Estimate the memory of a run with bf16, fp16 or fp32 weights and AdamW.

    With checkpointing, a layer keeps only its input, and one layer at a time is recomputed
    (Korthikanti et al. 2022, arXiv:2205.05198, section 5). The loss is done before any layer's
    backward pass begins, so the larger of the two counts. All tokens are assumed to be supervised.
    """
    sizes = RunSizes(setup)
    states = _model_states(setup, sizes)
    on_gpu = dict(states.on_device)
    if sizes.stage >= 2:
        on_gpu["buffers"] = _buffers(setup, sizes)
    tokens = setup.config.data.micro_batch_tokens // sizes.sequence
    kept, gradients = (sizes.weight_bytes / 2 * tokens * n for n in sizes.layer_bytes)
    inputs = sizes.weight_bytes * sizes.layers * sizes.hidden * tokens
    recomputes = setup.config.model.activation_checkpointing
    cpu, nvme = _node_memory(setup, sizes, states)
    readers = 1 if sizes.stage == 3 else setup.machine.local_ranks  # read files at the same time
    return MemoryEstimate(
        states=on_gpu,
        kept=sizes.layers * kept,
        inputs=inputs,
        activations=inputs if recomputes else sizes.layers * kept,
        loss=_loss(setup, sizes, tokens),
        layer=gradients + kept * recomputes,
        update=_update(setup, sizes, states),
        cpu=cpu,
        loading=readers * sizes.weight_bytes * setup.architecture.counts.total,
        nvme=nvme,
    )


class _ModelStates(NamedTuple):
    """Weights, gradients and optimizer of a rank, which it holds during the whole run."""

    on_device: dict[str, float]
    """Bytes in the memory of the GPU, by name."""
    offloaded: dict[str, float]
    """Bytes that ZeRO-Offload has moved to CPU memory or NVMe, by name."""
    trained: float
    """Number of trained parameters for which a rank computes gradients."""
    updated: float
    """Number of trained parameters that a rank updates."""


def _model_states(setup: Setup, sizes: RunSizes) -> _ModelStates:
    ds_config = setup.ds_config
    skeleton = setup.architecture.skeleton
    counts = setup.architecture.counts
    stage, width = sizes.stage, sizes.weight_bytes
    ranks = setup.machine.ranks // sizes.tensor  # ZeRO partitions over tensor-parallel groups.
    sums = ds_config.get("data_types", {}).get("grad_accum_dtype")
    summed = 4 if sums == "fp32" else width
    linear = {m.weight for m in skeleton.modules() if isinstance(m, nn.Linear)}
    # Tensor parallelism needs a model without frozen weights, and divides all but the embeddings.
    divided = linear.difference(skeleton.get_input_embeddings().parameters())
    elsewhere = (1 - 1 / sizes.tensor) * sum(p.numel() for p in divided)
    total = counts.total - elsewhere
    trained = counts.trained - elsewhere
    updated = trained / ranks if stage >= 1 else trained
    quantized = 0
    if setup.config.model.quantization:  # Frozen linear layers but the output head have 4 bits.
        in_4_bits = linear.difference(skeleton.get_output_embeddings().parameters())
        quantized = sum(p.numel() for p in in_4_bits if not p.requires_grad)

    held = width * (total - quantized) + NF4_BYTES * quantized
    weights = held / (ranks if stage == 3 else 1)
    secondary = secondary_ranks(ds_config)
    if secondary > 1:  # a second partition, over a node's GPUs
        weights += held / secondary
    is_wider = summed != width
    # Stage 1's BF16_Optimizer keeps the 16-bit gradients next to their sum in fp32.
    gradients = summed + (width if stage < 2 and is_wider else 0)
    states = {
        "weights": weights,
        "gradients": gradients * trained / (ranks if stage >= 2 else 1),
        "optimizer": (MOMENTS + (MASTER if stage or width < 4 else 0)) * updated,
    }
    moved = {
        "weights": sizes.weights_device != "none",
        # ZeRO 2 sums 16-bit gradients in fp32 on the GPU, even with offload.
        "gradients": sizes.optimizer_device != "none" and not (stage == 2 and is_wider),
        "optimizer": sizes.optimizer_device != "none",
    }
    offloaded = {name: states.pop(name) for name in moved if moved[name]}
    return _ModelStates(states, offloaded, trained, updated)


def _loss(setup: Setup, sizes: RunSizes, tokens: int) -> float:
    """Bytes of the logits, and of input and gradient of the output head. The loss over chunks sums
    the head's gradient in fp32.
    """
    skeleton = setup.architecture.skeleton
    vocabulary = int(skeleton.config.get_text_config().vocab_size)
    logits = min(tokens, chunk_size(setup.machine.device, vocabulary))
    head = skeleton.get_output_embeddings()
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    inputs = 2 * sizes.weight_bytes * sizes.hidden * tokens
    return LOSS_BYTES * logits * vocabulary + inputs + (4 + sizes.weight_bytes) * trained


def _update(setup: Setup, sizes: RunSizes, states: _ModelStates) -> float:
    """Bytes of the update's temporaries. torch's AdamW computes a square root if it is not fused.
    ZeRO 3 copies the gradients to fp32, one sub-group at a time. ZeRO 0 and 1 fill the bucket of
    an all-reduce first (MEMORY_OPT_ALLREDUCE_SIZE).
    """
    if sizes.optimizer_device != "none":
        return 0
    is_fused = setup.ds_config.get("optimizer", {}).get("params", {}).get("fused")
    root = 0 if is_fused else 4
    if sizes.stage == 3:
        return (root + 4) * min(states.updated, _sub_group(setup))
    return max(root * states.updated, 4 * min(states.trained, 5e8) if sizes.stage < 2 else 0)


def _buffers(setup: Setup, sizes: RunSizes) -> float:
    """Bytes that ZeRO 2 and 3 of DeepSpeed 0.19.8 need beside the model states.

    Gradients are reduced in buckets; a gradient larger than a bucket is reduced on its own. Those
    in 16 bits are copied to communication_data_type, fp32. ZeRO 3 also has the gathered weights.
    """
    zero = setup.ds_config["zero_optimization"]
    width = sizes.weight_bytes
    parameters = list(setup.architecture.skeleton.parameters())
    trained = [p.numel() for p in parameters if p.requires_grad]
    largest = max(trained, default=0)
    bucket = min(zero.get("reduce_bucket_size", 5e8), sum(trained))
    reduced = (width + 4 if width < 4 else width) * max(bucket, largest)
    if sizes.stage == 2:
        return width * bucket * (2 if zero.get("overlap_comm") else 1) + reduced
    live = min(zero.get("stage3_max_live_parameters", 1e9), sum(p.numel() for p in parameters))
    # The last term is for reduce_scatter_coalesced, which flattens the gradients.
    return width * (live + bucket) + reduced + 4 * max(bucket, largest)


def _node_memory(setup: Setup, sizes: RunSizes, states: _ModelStates) -> tuple[float, float]:
    """Bytes of a node's CPU memory and of its NVMe in training."""
    zero = setup.ds_config["zero_optimization"]
    width = sizes.weight_bytes
    optimizer = sizes.optimizer_device
    whole_weights = width if sizes.stage < 3 else 0
    size = {"cpu": 0.0, "nvme": 0.0, "none": 0.0}
    device_of = {"weights": sizes.weights_device, "gradients": "cpu", "optimizer": optimizer}
    for name, moved in states.offloaded.items():
        size[device_of[name]] += moved
    if optimizer != "none":
        size[optimizer] += MASTER * states.updated  # fp32 gradients that CPU Adam reads
        size["cpu"] += whole_weights * states.updated  # updated weights, before they are copied
    if optimizer == "nvme":
        buffers = zero["offload_optimizer"].get("buffer_count", 4)
        size["cpu"] += 4 * buffers * min(states.updated, _sub_group(setup))
    if sizes.weights_device == "nvme":
        block = zero["offload_param"]
        size["cpu"] += width * block.get("buffer_count", 5) * block.get("buffer_size", 1e8)
    gpus = setup.machine.local_ranks
    if setup.config.checkpoint.async_save:
        copied = whole_weights * setup.architecture.counts.total / gpus
        size["cpu"] += (MOMENTS + MASTER) * states.updated + copied
    return gpus * size["cpu"], gpus * size["nvme"]


def _sub_group(setup: Setup) -> float:
    """Number of parameters that ZeRO 3 updates at a time."""
    return setup.ds_config["zero_optimization"].get("sub_group_size", 1e9)
