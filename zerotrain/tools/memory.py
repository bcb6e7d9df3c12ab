"""An estimate of a run's memory, from its config and the architecture alone.

It is arithmetic: nothing is loaded or measured. CUDA's context, NCCL's buffers, what the allocator
loses to fragmentation, dropout masks and dense attention masks (data.batching: bucketed) are left
out; keep a tenth of a GPU free for them.
"""

from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig

from zerotrain.config.ds_config import group_sizes, offload_devices, zero_stage
from zerotrain.model.architecture import hidden_size, sizes_of
from zerotrain.tools.states import MASTER, MOMENTS, ModelStates, model_states, weight_bytes
from zerotrain.training.loss import chunk_size
from zerotrain.training.setup import Setup

LOSS_BYTES = 12  # per logit in the backward pass: fp32 log-probabilities and two gradients


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a run with micro-batches of data.micro_batch_tokens needs."""

    states: dict[str, float]
    """What a GPU holds all the time, by name: weights, gradients, optimizer, communication buffers.
    """
    kept: float
    """What the forward pass keeps for the backward pass on a GPU without activation checkpointing.
    """
    inputs: float
    """What it keeps with activation checkpointing: the input of each layer."""
    activations: float
    """The one of `kept` and `inputs` that the run has."""
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
    """The memory of a run with bf16, fp16 or fp32 weights and AdamW.

    With checkpointing, a layer keeps its input alone, and one layer at a time is recomputed
    (Korthikanti et al. 2022, arXiv:2205.05198, section 5). The loss is done before any layer's
    backward pass begins, so the larger of the two counts. Every token is taken to be supervised.

    Raises:
        UserError: the ZeRO stage is not a number.
    """
    states = model_states(setup)
    skeleton = setup.architecture.skeleton
    width = weight_bytes(setup.ds_config)
    stage = zero_stage(setup.ds_config)
    on_gpu = dict(states.on_device)
    if stage >= 2:
        on_gpu["buffers"] = _buffers(setup)
    tensor_parallel, sequence_parallel = group_sizes(setup.ds_config)
    tokens = setup.config.data.micro_batch_tokens // sequence_parallel
    layers = int(skeleton.config.get_text_config().num_hidden_layers)
    kept, gradients = (width / 2 * tokens * n for n in layer_bytes(skeleton, tensor_parallel))
    inputs = width * layers * hidden_size(skeleton) * tokens
    recomputes = setup.config.model.activation_checkpointing
    cpu, nvme = _node_memory(setup, states)
    readers = 1 if stage == 3 else setup.machine.local_ranks  # of the files, at the same time
    return MemoryEstimate(
        states=on_gpu,
        kept=layers * kept,
        inputs=inputs,
        activations=inputs if recomputes else layers * kept,
        loss=_loss(setup, tokens),
        layer=gradients + kept * recomputes,
        update=_update(setup, states),
        cpu=cpu,
        loading=readers * width * setup.architecture.counts.total,
        nvme=nvme,
    )


def layer_bytes(skeleton: nn.Module, tensor_parallel: int) -> tuple[float, float]:
    """Bytes per token that one layer keeps on a rank for its backward pass in 16 bits, and bytes of
    the gradients that exist at a time there.

    With hidden size h, query width q, key width k and feed-forward width f of the e experts that a
    token visits:

        16 h            two norms: input in fp32, normalized input, output
        6 q + 4 k       rotated queries and keys, values, attention's output and its copy
        8 f             gate, its activation, up, product; 6 f more are their gradients
        4 h e           input and output of each expert, in mixtures of them

    This is the count of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) for gated
    feed-forward blocks and attention that keeps no scores. Further norms (Qwen 3, Gemma 3) are left
    out.
    """
    h, *divided, e = layer_widths(skeleton)
    q, k, f = (width / tensor_parallel for width in divided)
    return 16 * h + 6 * q + 4 * k + 8 * f + (4 * h * e if e > 1 else 0), 6 * f


def layer_widths(skeleton: nn.Module) -> tuple[float, float, float, float, float]:
    """Hidden size, width of all queries, width of all keys, feed-forward width of all experts that
    a token visits, and their number. Queries and keys are 0 without attention.
    """
    text = skeleton.config.get_text_config()
    hidden = hidden_size(skeleton)
    heads = _mean_size(text, "num_attention_heads") or 0
    head_dim = _mean_size(text, "head_dim") or (hidden // heads if heads else 0)
    kv_heads = _mean_size(text, "num_key_value_heads") or heads
    names = ("moe_intermediate_size", "intermediate_size", "n_inner")
    inner = next((size for name in names if (size := _mean_size(text, name))), 4 * hidden)
    experts = _mean_size(text, "num_experts_per_tok") or 1
    return hidden, heads * head_dim, kv_heads * head_dim, inner * experts, experts


def _mean_size(text: PretrainedConfig, name: str) -> float | None:
    """A size of the architecture: the mean if it differs between layers, None if it is missing."""
    sizes = sizes_of(text, name)
    return sum(sizes) / len(sizes) if sizes else None


def _loss(setup: Setup, tokens: int) -> float:
    """Logits, and input and gradient of the output head. The loss over chunks computes all
    gradients at once: it sums the gradient of the head in fp32.
    """
    skeleton = setup.architecture.skeleton
    width = weight_bytes(setup.ds_config)
    vocabulary = int(skeleton.config.get_text_config().vocab_size)
    logits = min(tokens, chunk_size(setup.machine.device, vocabulary))
    head = skeleton.get_output_embeddings()
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    states = 2 * width * hidden_size(skeleton) * tokens
    return LOSS_BYTES * logits * vocabulary + states + (4 + width) * trained


def _update(setup: Setup, states: ModelStates) -> float:
    """The temporaries of the update: a square root in torch's AdamW, if it is not fused; under ZeRO
    3 a copy of the gradients in fp32, sub-group by sub-group; under ZeRO 0 and 1 the bucket of the
    all-reduce that precedes it (MEMORY_OPT_ALLREDUCE_SIZE).
    """
    stage = zero_stage(setup.ds_config)
    if offload_devices(setup.ds_config)["optimizer"] != "none":
        return 0
    is_fused = setup.ds_config.get("optimizer", {}).get("params", {}).get("fused")
    root = 0 if is_fused else 4
    if stage == 3:
        return (root + 4) * min(states.updated, _sub_group(setup))
    return max(root * states.updated, 4 * min(states.trained, 5e8) if stage < 2 else 0)


def _buffers(setup: Setup) -> float:
    """What ZeRO 2 and 3 of DeepSpeed 0.19.8 need beside the model states: buckets of gradients,
    copied to communication_data_type, fp32, if they are in 16 bits, where a gradient larger than a
    bucket is on its own; and under ZeRO 3 the gathered weights.
    """
    zero = setup.ds_config.get("zero_optimization", {})
    width = weight_bytes(setup.ds_config)
    parameters = list(setup.architecture.skeleton.parameters())
    trained = [p.numel() for p in parameters if p.requires_grad]
    largest = max(trained, default=0)
    bucket = min(zero.get("reduce_bucket_size", 5e8), sum(trained))
    reduced = (width + 4 if width < 4 else width) * max(bucket, largest)
    if zero_stage(setup.ds_config) == 2:
        return width * bucket * (2 if zero.get("overlap_comm") else 1) + reduced
    live = min(zero.get("stage3_max_live_parameters", 1e9), sum(p.numel() for p in parameters))
    # reduce_scatter_coalesced flattens them into another one
    return width * (live + bucket) + reduced + 4 * max(bucket, largest)


def _node_memory(setup: Setup, states: ModelStates) -> tuple[float, float]:
    """Bytes of a node's CPU memory and of its NVMe in training."""
    ds_config = setup.ds_config
    zero = ds_config.get("zero_optimization", {})
    width = weight_bytes(ds_config)
    gpus = setup.machine.local_ranks
    whole_weights = width if zero_stage(ds_config) < 3 else 0
    places = offload_devices(ds_config)
    optimizer = places["optimizer"]
    size = {"cpu": 0.0, "nvme": 0.0, "none": 0.0}
    place_of = {"weights": places["param"], "gradients": "cpu", "optimizer": optimizer}
    for name, moved in states.offloaded.items():
        size[place_of[name]] += moved
    if optimizer != "none":
        size[optimizer] += MASTER * states.updated  # fp32 gradients that CPU Adam reads
        size["cpu"] += whole_weights * states.updated  # updated, on their way back to the GPU
    if optimizer == "nvme":
        buffers = zero["offload_optimizer"].get("buffer_count", 4)
        size["cpu"] += 4 * buffers * min(states.updated, _sub_group(setup))
    if places["param"] == "nvme":
        block = zero["offload_param"]
        size["cpu"] += width * block.get("buffer_count", 5) * block.get("buffer_size", 1e8)
    if setup.config.checkpoint.async_save:
        copied = whole_weights * setup.architecture.counts.total / gpus
        size["cpu"] += (MOMENTS + MASTER) * states.updated + copied
    return gpus * size["cpu"], gpus * size["nvme"]


def _sub_group(setup: Setup) -> float:
    """Parameters that ZeRO 3 updates at a time."""
    return setup.ds_config.get("zero_optimization", {}).get("sub_group_size", 1e9)
