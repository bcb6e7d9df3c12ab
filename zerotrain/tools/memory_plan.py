"""An estimate of a run's memory, from its config and the architecture alone.

It is arithmetic: nothing is loaded or measured. CUDA's context, NCCL's buffers, what the allocator
loses to fragmentation, dropout masks and dense attention masks (data.batching: bucketed) are left
out; keep a tenth of a GPU free for them.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from zerotrain.config.ds_config import zero_stage
from zerotrain.config.schema import Config
from zerotrain.model.architecture import hidden_size, text_config_of
from zerotrain.model.trained import Counts

MOMENTS = 8  # bytes per trained parameter, AdamW's two in fp32
MASTER = 4  # an fp32 copy of each trained weight: ZeRO keeps one even of fp32 weights
NF4_BYTES = 4.127 / 8  # 4 bits, and scales of blocks of 64 in 8 bits (arXiv:2305.14314, section 3)
LOSS_BYTES = 12  # per logit in the backward pass: fp32 log-probabilities and two gradients


@dataclass(frozen=True)
class Part:
    """A share of a GPU's memory."""

    name: str
    size: float
    """Bytes."""
    how: str
    """The arithmetic, in words."""


@dataclass(frozen=True)
class Memory:
    """Estimated bytes."""

    states: list[Part]
    """On each GPU all the time: weights, gradients, optimizer, communication buffers."""
    backward: list[Part]
    """In addition, at the peak of the backward pass."""
    update: Part
    """In addition to the states in the optimizer's update."""
    loading: float
    """CPU memory of a node while the weights are loaded."""
    host: float
    """CPU memory of a node in training."""
    checkpoint: float
    """On disk, of one checkpoint."""
    checkpoints: int
    """On disk at a time: those that are kept and the one that is being written; without those of
    checkpoint.keep_every_steps.
    """

    @property
    def peak(self) -> float:
        """Of one GPU."""
        return sum(part.size for part in self.states) + max(
            sum(part.size for part in self.backward), self.update.size
        )


def estimate_memory(
    config: Config,
    skeleton: nn.Module,
    counts: Counts,
    quantized: int,
    ds_config: dict[str, Any],
    ranks: int,
    local_ranks: int,
) -> Memory:
    """The memory of a run with bf16, fp16 or fp32 weights and AdamW.

    Args:
        skeleton: the model on the meta device, with requires_grad as in training.
        counts: numbers of its parameters.
        quantized: how many of them are kept in nf4.
        ds_config: merged, with no value "auto".
        local_ranks: of one node; each has a GPU.

    Raises:
        UserError: the ZeRO stage is not a number.
    """
    stage = zero_stage(ds_config)
    zero = ds_config.get("zero_optimization", {})
    on_cpu = {
        name: (zero.get(f"offload_{name}") or {}).get("device", "none") != "none"
        for name in ("param", "optimizer")
    }
    trained, total = counts
    share = trained / ranks if stage >= 1 else trained

    width = _weight_bytes(ds_config)
    held = width * (total - quantized) + NF4_BYTES * quantized
    weights = held / (ranks if stage == 3 else 1)
    summed = 4 if ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32" else width
    if stage < 2 and summed != width:
        summed += width  # its BF16_Optimizer keeps the 16-bit gradients next to their sum
    gradients = summed * trained / (ranks if stage >= 2 else 1)
    updated = MOMENTS + (MASTER if stage or width < 4 else 0)
    optimizer = updated * share
    by = f" / {ranks} ranks" if ranks > 1 else ""
    states = [
        Part("weights", weights, f"{held / total:.3g} bytes x all{by if stage == 3 else ''}"),
        Part("gradients", gradients, f"{summed} bytes x trained{by if stage >= 2 else ''}"),
        Part("optimizer", optimizer, f"{updated} bytes x trained{by if stage >= 1 else ''}"),
    ]
    # ZeRO 2 sums 16-bit gradients in fp32 on the GPU, also with offload
    sums_moved = on_cpu["optimizer"] and not (stage == 2 and summed != width)
    moved = (on_cpu["param"], sums_moved, on_cpu["optimizer"])
    host = sum(part.size for part, gone in zip(states, moved, strict=True) if gone)
    if on_cpu["optimizer"]:
        host += MASTER * share  # the fp32 gradients that CPU Adam reads, beside their sums
    if on_cpu["optimizer"] and stage < 3:
        host += width * share  # updated weights, pinned, on their way back to the GPU
    states = [part for part, gone in zip(states, moved, strict=True) if not gone]
    if stage >= 2:
        states.append(_buffers(skeleton, zero, stage, width))

    backward = _activations(config, skeleton, width)
    if config.checkpoint.async_save:
        host += updated * share + (width * total / local_ranks if stage < 3 else 0)
    update = _update(trained, share, zero, stage, on_cpu["optimizer"])
    # under ZeRO 3 the first rank alone reads the files
    loading = width * total * (local_ranks if stage < 3 else 1)
    saved = total if config.model.from_config else trained  # else frozen ones are in their files
    checkpoint = width * saved + updated * trained
    checkpoints = config.checkpoint.keep_last + config.checkpoint.keep_best + 1
    return Memory(states, backward, update, loading, local_ranks * host, checkpoint, checkpoints)


def _update(trained: int, share: float, zero: dict[str, Any], stage: int, on_cpu: bool) -> Part:
    """The temporaries of the update: a square root in torch's AdamW; under ZeRO 3 a copy of the
    gradients, sub-group by sub-group; under ZeRO 0 and 1 the bucket of the all-reduce that precedes
    it (MEMORY_OPT_ALLREDUCE_SIZE).
    """
    if on_cpu:
        return Part("update", 0, "on the CPU")
    if stage == 3:
        return Part("update", 8 * min(share, zero.get("sub_group_size", 1e9)), "of a sub-group")
    bucket = min(trained, 5e8) if stage < 2 else 0
    return Part("update", 4 * max(share, bucket), "AdamW's temporaries, or an all-reduce")


def _weight_bytes(ds_config: dict[str, Any]) -> int:
    halves = any(ds_config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    return 2 if halves else 4


def layer_bytes(skeleton: nn.Module) -> tuple[float, float]:
    """Bytes per token that one layer keeps for its backward pass in 16 bits, and those of the
    gradients that exist at a time there.

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
    h, q, k, f, e = layer_widths(skeleton)
    return 16 * h + 6 * q + 4 * k + 8 * f + (4 * h * e if e > 1 else 0), 6 * f


def _activations(config: Config, skeleton: nn.Module, width: int) -> list[Part]:
    """What a GPU holds of one micro-batch in the backward pass.

    With checkpointing, a layer keeps its input alone, and one layer at a time is recomputed
    (Korthikanti et al., section 5). The loss is done before any layer's backward pass begins, so
    the larger of the two counts. Every token is taken to be supervised.
    """
    model = config.model
    text = text_config_of(skeleton.config)
    tokens = config.data.micro_batch_tokens
    layers = int(text.num_hidden_layers)
    hidden = hidden_size(skeleton)
    sizes = layer_bytes(skeleton)
    kept, gradients = (width / 2 * tokens * size for size in sizes)
    loss = _loss(config, skeleton, width)
    inputs = width * layers * hidden * tokens
    if not model.activation_checkpointing:
        one_layer = Part("one layer", gradients, f"its gradients, {tokens:,} tokens")
        saved = [Part("activations", layers * kept, f"of {layers} layers, {tokens:,} tokens")]
    else:
        how = f"recomputed, and its gradients, {tokens:,} tokens"
        one_layer = Part("one layer", kept + gradients, how)
        how = f"{layers} layers x {width} bytes x {hidden:,} x {tokens:,} tokens"
        saved = [Part("layer inputs", inputs, how)]
    return [*saved, max(one_layer, loss, key=lambda part: part.size)]


def _loss(config: Config, skeleton: nn.Module, width: int) -> Part:
    """Logits, and input and gradient of the output head. The loss over chunks computes all
    gradients at once: it sums those of the head in fp32.
    """
    tokens = config.data.micro_batch_tokens
    vocabulary = int(text_config_of(skeleton.config).vocab_size)
    chunk = config.model.loss_chunk_tokens
    logits = min(tokens, chunk or tokens)
    head = skeleton.get_output_embeddings()
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad) if chunk else 0
    states = 2 * width * hidden_size(skeleton) * tokens
    return Part(
        "logits",
        LOSS_BYTES * logits * vocabulary + states + (4 + width) * trained,
        f"{LOSS_BYTES} bytes x {logits:,} tokens x {vocabulary:,}, and the head's gradients",
    )


def _buffers(skeleton: nn.Module, zero: dict[str, Any], stage: int, width: int) -> Part:
    """What ZeRO 2 and 3 of DeepSpeed 0.19.8 need beside the model states: buckets of gradients,
    copied to communication_data_type, fp32, where a gradient larger than a bucket is on its own;
    and under ZeRO 3 the gathered weights.
    """
    trained = [p.numel() for p in skeleton.parameters() if p.requires_grad]
    largest = max(trained, default=0)
    bucket = min(zero.get("reduce_bucket_size", 5e8), sum(trained))
    reduced = (width + 4) * max(bucket, largest)
    if stage == 2:
        buckets = 2 if zero.get("overlap_comm") else 1
        size = width * bucket * buckets + reduced
        return Part("buffers", size, f"{buckets} gradient buckets, and one in fp32")
    live = sum(p.numel() for p in skeleton.parameters())
    live = min(zero.get("stage3_max_live_parameters", 1e9), live)
    # reduce_scatter_coalesced flattens the fp32 copies into another one
    size = width * (live + bucket) + reduced + 4 * max(bucket, largest)
    return Part("buffers", size, f"{live / 1e6:,.0f} M gathered weights, gradients in fp32")


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
    try:
        size = getattr(text, name, None)
    except RuntimeError:  # configs with sizes per layer refuse access to the global one
        size = [getattr(layer, name, None) for layer in text.per_layer_config]
    sizes = size if isinstance(size, (list, tuple)) else [size]  # some configs have a list
    numbers = [n for n in sizes if isinstance(n, (int, float))]
    return sum(numbers) / len(numbers) if numbers else None


def count_quantized(model: nn.Module) -> int:
    """The weights that model.quantization concerns: of the linear layers but the output head."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return sum(m.weight.numel() for m in linear)
