"""An estimate of a run's memory, from its config and the architecture alone.

Activations are measured: the model without weights runs once on torch's meta device, and each
tensor that autograd saves is counted. A model that needs values, such as the number of tokens of
each expert, gets a rule of thumb, and the estimate says so. The rest is arithmetic. The estimate
leaves out CUDA's context, NCCL's buffers and fragmentation in the allocator. Keep a tenth of a GPU
free for them.
"""

import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from zerotrain.config.ds_config import group_sizes, offload_devices, secondary_ranks, zero_stage
from zerotrain.model.architecture import hidden_size, sizes_of, text_modules
from zerotrain.model.hub import summarize
from zerotrain.model.packing import has_sdpa
from zerotrain.training.loss import chunk_size
from zerotrain.training.setup import Setup

USED_SHARE = 0.9  # A run fits if it needs at most this share of a GPU's memory.
MOMENTS = 8  # bytes per trained parameter: AdamW's two moments in fp32
MASTER = 4  # bytes per trained parameter: ZeRO keeps an fp32 copy even of fp32 weights
NF4_BYTES = 4.127 / 8  # 4 bits, and scales of blocks of 64 in 8 bits (arXiv:2305.14314, section 3)
CPU_LOSS_BYTES = 12  # per logit in the backward pass: fp32 log-probabilities and two gradients
MEASURED_TOKENS = 1024
TYPICAL_BYTES = 34
"""Bytes per token and hidden size that a layer keeps in 16 bits (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.1), for models that cannot run on the meta device.
"""
EMPTY_ATTENTION = "empty_attention"
"""A value of attn_implementation: attention that computes nothing."""


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
        heads = _mean_size(skeleton, "num_attention_heads") or 0
        head_dim = _mean_size(skeleton, "head_dim") or (self.hidden // heads if heads else 0)
        self.queries = heads * head_dim
        self.keys = (_mean_size(skeleton, "num_key_value_heads") or heads) * head_dim
        self.experts = _mean_size(skeleton, "num_experts_per_tok") or 1
        names = ("moe_intermediate_size", "intermediate_size", "n_inner")
        inner = next(
            (size for name in names if (size := _mean_size(skeleton, name))), 4 * self.hidden
        )
        self.inner = inner * self.experts
        """Feed-forward width of all experts that a token visits."""


def weight_bytes(ds_config: dict[str, Any]) -> int:
    """Return the bytes of a weight: 2 in bf16 and fp16, 4 in fp32."""
    return 2 if ds_config["bf16"]["enabled"] or ds_config["fp16"]["enabled"] else 4


@cache  # A forecast asks for the same sizes again and again, and each answer visits all layers.
def _mean_size(skeleton: PreTrainedModel, name: str) -> float | None:
    """Return a size of the architecture, as a mean if layers differ; None if it is missing."""
    sizes = sizes_of(skeleton.config.get_text_config(), name)
    return sum(sizes) / len(sizes) if sizes else None


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a run with micro-batches of data.micro_batch_tokens needs."""

    states: dict[str, float]
    """What a GPU holds all the time: weights, gradients, optimizer, buffers of communication."""
    kept: float
    """Activations that the forward pass keeps on a GPU without activation checkpointing."""
    inputs: float
    """Activations that it keeps with activation checkpointing: the input of each layer, and what is
    computed outside of layers.
    """
    activations: float
    """`inputs` if the run has activation checkpointing, else `kept`."""
    loss: float
    """What the loss needs beside states and activations, or then the gradients of the output head
    and the embeddings; with ZeRO 3's gathered weights.
    """
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
    caveat: str
    """How the activations were found, if a run may need more or less."""

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
    buffers = _buffers(setup, sizes)
    tokens = setup.config.data.micro_batch_tokens // sizes.sequence
    saved = _kept_activations(setup, sizes, tokens)
    inputs = sizes.weight_bytes * sizes.layers * sizes.hidden * tokens + saved.outside
    recomputes = setup.config.model.activation_checkpointing
    cpu, nvme = _node_memory(setup, sizes, states)
    readers = 1 if sizes.stage == 3 else setup.machine.local_ranks  # read files at the same time
    return MemoryEstimate(
        states=states.on_device | {"buffers": buffers.held},
        kept=saved.kept,
        inputs=inputs,
        activations=inputs if recomputes else saved.kept,
        loss=max(_loss(setup, sizes, tokens), buffers.reduced_outside) + buffers.gathered,
        # Three gradients as large as the largest activation, such as a gated product's.
        layer=3 * saved.largest
        + saved.layer * recomputes
        + buffers.gathered
        + buffers.reduced_in_layer,
        update=_update(setup, sizes, states),
        cpu=cpu,
        loading=readers * sizes.weight_bytes * setup.architecture.counts.total,
        nvme=nvme,
        caveat=saved.caveat,
    )


# --------------------------------------------------------------------------------------------------
# Activations


class Saved(NamedTuple):
    """What autograd saves in a forward pass beside the weights, in bytes."""

    kept: float
    """All tensors."""
    outside: float
    """The tensors that no layer keeps."""
    layer: float
    """The tensors of the layer that keeps most."""
    largest: float
    """The largest tensor."""
    caveat: str = ""
    """As in MemoryEstimate."""


class _EmptyAttention(torch.autograd.Function):
    """Saves what torch's attention kernels save: their inputs, the output, and a sum in fp32 per
    head and token.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        query, _, value, *_ = inputs
        rows, heads, tokens, _ = query.shape
        output = query.new_empty(rows, tokens, heads, value.shape[-1])
        ctx.save_for_backward(*inputs, output, query[..., 0].float())
        return output


def _empty_attention(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_mask: None,
    is_masked: bool,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Stand in for torch's kernels, which save a mask in the type of the states. With a mask they
    need as many heads of keys and values as of queries.
    """
    if not is_masked:
        return _EmptyAttention.apply(query, key, value), None
    rows, heads, tokens, _ = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    mask = query.new_empty(rows, 1, tokens, tokens)
    return _EmptyAttention.apply(query, key, value, mask), None


class _Packed:
    """A tensor that autograd has saved. It lives as long as the graph."""

    def __init__(self, tensor: torch.Tensor, size: float) -> None:
        self.tensor, self.size = tensor, size


class _CudaDropout(torch.overrides.TorchFunctionMode):
    """Saves dropout's mask as on CUDA, a byte per element. On other devices the mask has the type
    of the states.
    """

    def __torch_function__(
        self, function: Callable, _types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function is F.dropout:
            given = inspect.signature(F.dropout).bind(*args, **kwargs or {})
            given.apply_defaults()
            return torch.native_dropout(*(given.arguments[n] for n in ("input", "p", "training")))[
                0
            ]
        return function(*args, **kwargs or {})


def _kept_activations(setup: Setup, sizes: RunSizes, tokens: int) -> Saved:
    """Return what the forward pass keeps without activation checkpointing."""
    model = setup.config.model
    skeleton = setup.architecture.skeleton
    is_padded = setup.config.data.batching == "bucketed"
    # Attention in other implementations keeps what its own operations keep.
    has_kernel = has_sdpa(skeleton) and model.attn_implementation != "eager"
    masks = is_padded if has_kernel else None
    row = partial(
        measure_saved, skeleton, sizes.weight_bytes, masks, model.compile, sizes.tensor, sizes.stage
    )
    found = row(MEASURED_TOKENS)
    kept, outside, layer, largest = (size / MEASURED_TOKENS for size in found[:4])
    if is_padded:  # Masks, or scores, grow with the square of a row's length.
        growth = row(2 * MEASURED_TOKENS).kept / (2 * MEASURED_TOKENS) - kept
        growth *= min(tokens, setup.config.data.max_length) / MEASURED_TOKENS - 1
        kept, layer = kept + growth, layer + growth / sizes.layers
    return Saved(*(tokens * size for size in (kept, outside, layer, largest)), found.caveat)


@cache
def measure_saved(
    skeleton: PreTrainedModel,
    weight_bytes: int,
    is_masked: bool | None,
    compiled: bool,
    ranks: int,
    stage: int,
    length: int,
) -> Saved:
    """Run a model up to its output head, and measure what autograd saves beside the weights.

    Args:
        skeleton: the model on the meta device.
        weight_bytes: 2 for 16 bits, 4 for fp32.
        is_masked: whether attention kernels get masks; None for the model's own attention.
        compiled: whether blocks are compiled.
        ranks: of a tensor-parallel group.
        stage: of ZeRO.
        length: tokens of the only row.

    Returns:
        A rule of thumb, with a caveat, if the model cannot run without values.
    """
    model = deepcopy(skeleton).to(torch.bfloat16 if weight_bytes == 2 else torch.float32)
    for module in model.modules():
        if stage == 3 and isinstance(module, nn.Linear):
            # ZeRO 3's linear function saves its input even if the weight is frozen.
            module.weight.requires_grad_(True)
    if is_masked is not None:
        attention = torch.compiler.disable(partial(_empty_attention, is_masked=is_masked))
        AttentionInterface.register(EMPTY_ATTENTION, attention)
        AttentionMaskInterface.register(EMPTY_ATTENTION, lambda **_: None)
        model.set_attn_implementation(EMPTY_ATTENTION)
    caveat = ""
    packed, marks = WeakSet(), []  # what graphs have saved; its bytes before and after each layer
    hidden, layers = hidden_size(model), model.config.get_text_config().num_hidden_layers
    pieces = ranks
    weights = {weight.untyped_storage() for weight in model.parameters()}

    def save(activation: torch.Tensor) -> _Packed:
        is_hidden = activation.shape[-1:] == (hidden,)
        size = activation.untyped_storage().nbytes() / (1 if is_hidden else pieces)
        each = _Packed(activation, size)
        packed.add(each)
        return each

    def sizes() -> list[float]:
        """Return the bytes of each storage that autograd keeps now. It keeps nothing of a graph
        that the forward pass has dropped, such as the graph of DoRA's norms.
        """
        by_storage = {each.tensor.untyped_storage(): each.size for each in packed}
        return [size for storage, size in by_storage.items() if storage not in weights]

    def divide(ranks: int, *_: Any) -> None:
        """Each rank of a tensor-parallel group has whole hidden states and mixers, and a piece of
        all other activations.
        """
        nonlocal pieces
        pieces = ranks

    def mark(*_: Any) -> None:
        marks.append(sum(sizes()))

    for module in text_modules(model):
        if isinstance(module, GradientCheckpointingLayer):
            if compiled:  # Inductor's choice of what to save, without its code for a device.
                module.compile(dynamic=True, backend="aot_eager_decomp_partition")
            else:  # In a compiled block, hooks would be compiled too.
                module.register_forward_pre_hook(mark)
                module.register_forward_hook(mark)
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            caveat = "measured with mixers without kernels, which keep more than those with kernels"
            if ranks > 1:
                module.register_forward_pre_hook(partial(divide, 1))
                module.register_forward_hook(partial(divide, ranks))
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, args: (args[0][:, :1].clone(), *args[1:]))
    for device in ("cpu", "meta"):  # Some mixers read a value of the mask, others multiply by it.
        packed.clear()
        marks.clear()
        mask = torch.ones(1, length, dtype=torch.int64, device=device)
        try:
            with saved_tensors_hooks(save, lambda each: each.tensor), _CudaDropout():
                output = model(input_ids=ids, attention_mask=mask, use_cache=False)
            break
        except Exception as error:  # a model's own code can raise anything
            problem = summarize(error)
    else:
        caveat = (
            f"estimated by a rule of thumb, {TYPICAL_BYTES} bytes per token, layer and hidden "
            f"size, because {type(model).__name__} needs values to run: {problem}"
        )
        layer = TYPICAL_BYTES / 2 * weight_bytes * hidden * length
        return Saved(layers * layer, 0, layer, layer, caveat)
    found = sizes()
    kept = sum(found)
    del output  # until here it has kept the graph
    inside = marks[-1] - marks[0] if marks else kept
    layer = max((after - before for before, after in pairwise(marks)), default=inside / layers)
    return Saved(kept, kept - inside, layer, max(found, default=0), caveat)


# --------------------------------------------------------------------------------------------------
# Weights, loss and update


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
    linear = _linear_weights(skeleton)
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


@cache  # To walk through a model takes longer than all other formulas.
def _parameters(skeleton: PreTrainedModel) -> list[nn.Parameter]:
    return list(skeleton.parameters())


@cache
def _linear_weights(skeleton: PreTrainedModel) -> set[nn.Parameter]:
    return {m.weight for m in skeleton.modules() if isinstance(m, nn.Linear)}


@cache
def _trained_sizes(skeleton: PreTrainedModel) -> list[list[int]]:
    """Return the numbers of elements of trained parameters: first of those outside of layers, then
    of each layer's.
    """
    layers = [m for m in skeleton.modules() if isinstance(m, GradientCheckpointingLayer)]
    groups = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
    inside = {p for group in groups for p in group}
    outside = [p for p in _parameters(skeleton) if p.requires_grad and p not in inside]
    return [[p.numel() for p in group] for group in (outside, *groups)]


def _loss(setup: Setup, sizes: RunSizes, tokens: int) -> float:
    """Bytes of the logits, and of input and gradient of the output head. The loss over chunks sums
    the head's gradient in fp32. Adapters on the head need the logits of all tokens at a time.
    """
    skeleton = setup.architecture.skeleton
    vocabulary = int(skeleton.config.get_text_config().vocab_size)
    head = skeleton.get_output_embeddings()
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    inputs = 2 * sizes.weight_bytes * sizes.hidden * tokens
    # On CUDA a kernel keeps the logits and their gradient, without a copy in fp32.
    on_cuda = setup.machine.device == "cuda"
    per_logit = 2 * sizes.weight_bytes if on_cuda else CPU_LOSS_BYTES
    chunk = tokens if any(head.children()) else chunk_size(setup.machine.device, vocabulary)
    logits = min(tokens, chunk)
    return per_logit * logits * vocabulary + inputs + (4 + sizes.weight_bytes) * trained


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


class _Buffers(NamedTuple):
    """Bytes that ZeRO 2 and 3 of DeepSpeed 0.19.8 need beside the model states."""

    held: float
    """During the whole run."""
    gathered: float
    """For gathered weights, from the forward pass to the end of the backward pass. On one rank they
    are the partitions.
    """
    reduced_outside: float
    """For gradients of weights outside of layers. No layer's activations exist beside them."""
    reduced_in_layer: float
    """For gradients in the backward pass of layers."""


def _buffers(setup: Setup, sizes: RunSizes) -> _Buffers:
    """Return the buffers of communication.

    Gradients are reduced in buckets; a gradient larger than a bucket is reduced on its own. Those
    in 16 bits are copied to communication_data_type, fp32. ZeRO 3 reduces the gradients of a layer
    when it has all of them.
    """
    if sizes.stage < 2:
        return _Buffers(0, 0, 0, 0)
    zero = setup.ds_config["zero_optimization"]
    width = sizes.weight_bytes
    skeleton = setup.architecture.skeleton
    outside, *layers = _trained_sizes(skeleton)
    bucket = min(zero.get("reduce_bucket_size", 5e8), sum(map(sum, (outside, *layers))))
    # reduce_scatter_coalesced of ZeRO 3 flattens the gradients.
    copied = (4 if width < 4 else 0) + (4 if sizes.stage == 3 else 0)

    def reduced(numels: list[int], at_once: float) -> float:
        return width * max(bucket, at_once) + copied * max(bucket, *numels, 0)

    alone = reduced(outside, max(outside, default=0))
    if sizes.stage == 2:
        filled = width * bucket * (2 if zero.get("overlap_comm") else 1)
        of_layers = max((reduced(layer, max(layer, default=0)) for layer in layers), default=alone)
        return _Buffers(0, 0, filled + alone, filled + of_layers)
    live = min(
        zero.get("stage3_max_live_parameters", 1e9), sum(p.numel() for p in _parameters(skeleton))
    )
    gathered = live * (setup.machine.ranks > sizes.tensor)
    of_layers = max((reduced(layer, sum(layer)) for layer in layers), default=alone)
    return _Buffers(width * bucket, width * gathered, alone, of_layers)


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
