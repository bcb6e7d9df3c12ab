"""An estimate of a run's memory, from its config and the architecture alone.

It is arithmetic: nothing is loaded or measured. CUDA's context, NCCL's buffers, what the allocator
loses to fragmentation, dropout masks and dense attention masks (data.batching: bucketed) are left
out; keep a tenth of a GPU free for them.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from zerotrain.config.ds_config import group_sizes, offload_devices, zero_stage
from zerotrain.config.schema import Config
from zerotrain.model.architecture import hidden_size, sizes_of, text_config_of
from zerotrain.model.trained import Counts
from zerotrain.training.states import GIB, model_states, weight_bytes

LOSS_BYTES = 12  # per logit in the backward pass: fp32 log-probabilities and two gradients


@dataclass(frozen=True)
class Memory:
    """Estimated bytes."""

    states: dict[str, float]
    """By name, on each GPU all the time: weights, gradients, optimizer, communication buffers."""
    kept: float
    """In addition, what the forward pass keeps for the backward pass: without checkpointing,"""
    inputs: float
    """and with it, the input of each layer."""
    activations: float
    """The one of these two that the run has."""
    loss: float
    """In addition to states and activations, in the loss."""
    layer: float
    """In addition to states and activations, in the backward pass of one layer, after the loss."""
    update: float
    """In addition to the states in the optimizer's update."""
    share: float
    """Trained parameters that one rank updates."""
    offloaded: dict[str, float]
    """What ZeRO-Offload has moved from each GPU: some of weights, gradients, optimizer."""

    @property
    def at_peak(self) -> dict[str, float]:
        """What one GPU holds when it holds most."""
        last = {"logits": self.loss} if self.loss > self.layer else {"one layer": self.layer}
        backward = {"activations": self.activations, **last}
        in_backward = sum(backward.values()) > self.update
        return self.states | (backward if in_backward else {"update": self.update})

    @property
    def peak(self) -> float:
        """Of one GPU."""
        return sum(self.at_peak.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.3g}" for name, size in self.at_peak.items())
        return f"{self.peak / GIB:.3g} GiB per rank, estimated: {parts}"


def estimate_memory(
    config: Config,
    skeleton: nn.Module,
    counts: Counts,
    ds_config: dict[str, Any],
    ranks: int,
) -> Memory:
    """The memory of a run with bf16, fp16 or fp32 weights and AdamW.

    Args:
        skeleton: the model on the meta device, with requires_grad as in training.
        counts: numbers of its parameters.
        ds_config: merged, with no value "auto".

    Raises:
        UserError: the ZeRO stage is not a number.
    """
    states = model_states(config.model, skeleton, counts, ds_config, ranks)
    stage = zero_stage(ds_config)
    zero = ds_config.get("zero_optimization", {})
    width = weight_bytes(ds_config)
    on_gpu = dict(states.on_device)
    if stage >= 2:
        on_gpu["buffers"] = _buffers(skeleton, zero, stage, width)
    on_cpu = offload_devices(ds_config)["optimizer"] != "none"
    return Memory(
        states=on_gpu,
        **_backward(config, skeleton, width, *group_sizes(ds_config)),
        update=_update(states.trained, states.updated, zero, stage, on_cpu),
        share=states.updated,
        offloaded=states.offloaded,
    )


def _update(trained: float, share: float, zero: dict[str, Any], stage: int, on_cpu: bool) -> float:
    """The temporaries of the update: a square root in torch's AdamW; under ZeRO 3 a copy of the
    gradients, sub-group by sub-group; under ZeRO 0 and 1 the bucket of the all-reduce that precedes
    it (MEMORY_OPT_ALLREDUCE_SIZE).
    """
    if on_cpu:
        return 0
    if stage == 3:
        return 8 * min(share, zero.get("sub_group_size", 1e9))
    return 4 * max(share, min(trained, 5e8) if stage < 2 else 0)


def layer_bytes(skeleton: nn.Module, tensor_parallel: int) -> tuple[float, float]:
    """Bytes per token that one layer keeps on a rank for its backward pass in 16 bits, and those of
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


def _backward(
    config: Config,
    skeleton: nn.Module,
    width: int,
    tensor_parallel: int,
    sequence_parallel: int,
) -> dict[str, float]:
    """What a GPU holds of one micro-batch in the backward pass.

    With checkpointing, a layer keeps its input alone, and one layer at a time is recomputed
    (Korthikanti et al., section 5). The loss is done before any layer's backward pass begins, so
    the larger of the two counts. Every token is taken to be supervised.
    """
    tokens = config.data.micro_batch_tokens // sequence_parallel
    layers = int(text_config_of(skeleton.config).num_hidden_layers)
    sizes = layer_bytes(skeleton, tensor_parallel)
    kept, gradients = (width / 2 * tokens * size for size in sizes)
    inputs = width * layers * hidden_size(skeleton) * tokens
    recompute = config.model.activation_checkpointing
    return {
        "kept": layers * kept,
        "inputs": inputs,
        "activations": inputs if recompute else layers * kept,
        "layer": gradients + kept * recompute,
        "loss": _loss(config, skeleton, width, tokens),
    }


def _loss(config: Config, skeleton: nn.Module, width: int, tokens: int) -> float:
    """Logits, and input and gradient of the output head. The loss over chunks computes all
    gradients at once: it sums those of the head in fp32.
    """
    vocabulary = int(text_config_of(skeleton.config).vocab_size)
    chunk = config.model.loss_chunk_tokens
    logits = min(tokens, chunk or tokens)
    head = skeleton.get_output_embeddings()
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad) if chunk else 0
    states = 2 * width * hidden_size(skeleton) * tokens
    return LOSS_BYTES * logits * vocabulary + states + (4 + width) * trained


def _buffers(skeleton: nn.Module, zero: dict[str, Any], stage: int, width: int) -> float:
    """What ZeRO 2 and 3 of DeepSpeed 0.19.8 need beside the model states: buckets of gradients,
    copied to communication_data_type, fp32, if they are in 16 bits, where a gradient larger than a
    bucket is on its own; and under ZeRO 3 the gathered weights.
    """
    trained = [p.numel() for p in skeleton.parameters() if p.requires_grad]
    largest = max(trained, default=0)
    bucket = min(zero.get("reduce_bucket_size", 5e8), sum(trained))
    reduced = (width + 4 if width < 4 else width) * max(bucket, largest)
    if stage == 2:
        buckets = 2 if zero.get("overlap_comm") else 1
        return width * bucket * buckets + reduced
    live = sum(p.numel() for p in skeleton.parameters())
    live = min(zero.get("stage3_max_live_parameters", 1e9), live)
    # reduce_scatter_coalesced flattens them into another one
    return width * (live + bucket) + reduced + 4 * max(bucket, largest)


def layer_widths(skeleton: nn.Module) -> tuple[float, float, float, float, float]:
    """Hidden size, width of all queries, width of all keys, feed-forward width of all experts that
    a token visits, and their number. Queries and keys are 0 without attention.
    """
    text = text_config_of(skeleton.config)
    hidden = hidden_size(skeleton)
    heads = _size(text, "num_attention_heads") or 0
    head_dim = _size(text, "head_dim") or (hidden // heads if heads else 0)
    kv_heads = _size(text, "num_key_value_heads") or heads
    names = ("moe_intermediate_size", "intermediate_size", "n_inner")
    inner = next((size for name in names if (size := _size(text, name))), 4 * hidden)
    experts = _size(text, "num_experts_per_tok") or 1
    return hidden, heads * head_dim, kv_heads * head_dim, inner * experts, experts


def _size(text: PretrainedConfig, name: str) -> float | None:
    """A size of the architecture: the mean if it differs between layers, None if it is missing."""
    sizes = sizes_of(text, name)
    return sum(sizes) / len(sizes) if sizes else None
