"""Packed examples: whether a model can be trained on them, and attention within each of them,
registered with transformers as PACKED_EXAMPLES.

On CUDA in 16 bits it is one call of torch's varlen kernel, elsewhere one call of
scaled_dot_product_attention per example. No score between two examples is computed.

With sequence parallelism a rank has a part of the sequence. Before attention the ranks exchange
parts of it for parts of the heads, and after it back: DeepSpeed-Ulysses (arXiv:2309.14509).
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from zerotrain.config.schema import Config
from zerotrain.model.architecture import heads_divide, text_config_of
from zerotrain.runtime.errors import UserError, describe

PACKED_EXAMPLES = "packed_examples"
"""The implementation's name, a value of attn_implementation."""
VARLEN = ("flash", "flex_attention")
"""Parts of the names of transformers' implementations that compute no scores between examples."""

_lengths = WeakTensorKeyDictionary()
"""{position_ids: lengths of the whole sequence's examples}: computed by the first layer of a
forward pass, used by all of them.
"""


def check_attention(name: str | None, skeleton: nn.Module) -> None:
    """Raise UserError if model.attn_implementation is unknown or its package is not installed.

    Args:
        skeleton: the model on the meta device, which gets this attention.
    """
    if name not in (None, PACKED_EXAMPLES):
        try:
            skeleton.set_attn_implementation(name)
        except (ImportError, ValueError) as error:
            raise UserError(f"model.attn_implementation: {describe(error)}") from error


def resolve_batching(
    config: Config, skeleton: nn.Module, device: str, precision: str, sequence: int = 1
) -> tuple[Config, str]:
    """The config with data.batching and model.attn_implementation decided, and the reason.

    Args:
        skeleton: the model on the meta device.
        device: cpu or cuda.
        sequence: ranks that share a sequence.

    Raises:
        UserError: packed is requested, but not possible for this model, or the ranks cannot share a
            sequence.
    """
    attention = config.model.attn_implementation
    batching = config.data.batching
    why = None
    if attention == PACKED_EXAMPLES:  # from the resolved config of a run
        attention = None
    problem = _packing_problem(skeleton, config.data.max_length)
    if sequence > 1:
        check_sequence(skeleton, sequence, problem or (attention and f"{attention} cannot"))
    if attention and not any(part in attention for part in VARLEN):
        problem = problem or f"{attention} computes scores between examples too"
    if batching == "packed" and problem:
        raise UserError(f"data.batching: packed is not possible: {problem}; use bucketed")
    if batching == "auto":
        if device == "cuda" and not attention:
            problem = problem or _kernel_problem(precision)
        batching, why = ("bucketed", problem) if problem else ("packed", "no padding")
    if (batching == "packed" and not attention) or sequence > 1:
        attention = PACKED_EXAMPLES
    resolved = replace(
        config,
        data=replace(config.data, batching=batching),
        model=replace(config.model, attn_implementation=attention),
    )
    return resolved, why or "as configured"


def _packing_problem(skeleton: nn.Module, max_length: int) -> str | None:
    """Why examples in one sequence would influence each other, or attention would not be that of
    the model; None if nothing says so. probes.check_packing tests what the real model does.
    """
    name = type(skeleton).__name__
    text = text_config_of(skeleton.config)
    if "position_ids" not in inspect.signature(skeleton.forward).parameters:
        return f"{name} takes no position_ids, so it cannot know where an example begins"
    layers = set(getattr(text, "layer_types", None) or [])
    if others := sorted(layers - {"full_attention", "sliding_attention"}):
        return f"{name} has {', '.join(others)} layers"
    rope = getattr(text, "rope_parameters", None) or {}
    limit = rope.get("original_max_position_embeddings", max_length)
    if rope.get("rope_type") == "longrope" and max_length > limit:
        return f"{name} encodes positions by the longest example, from {limit:,} tokens on"
    if getattr(skeleton, "_is_stateful", False):
        return f"{name} has a state"
    if not getattr(skeleton, "_supports_attention_backend", False):
        return f"{name} computes its attention itself"
    own = getattr(text, "attn_logit_softcapping", None) or hasattr(text, "keep_window_size")  # Doge
    if own or not skeleton._supports_sdpa:
        return f"{name} has attention with soft caps, sinks, biases or a mask of its own"
    for key, module in skeleton.named_modules():
        if key.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return f"{name} counts positions from the padding token's id"  # RoBERTa
    return None


def check_sequence(skeleton: nn.Module, sequence: int, problem: str | None) -> None:
    """Check that `sequence` ranks can share a sequence of the model.

    Raises:
        UserError: packed_attention cannot run in it, for the reason `problem`; or the heads cannot
            be divided.
    """
    if problem is None and not heads_divide(skeleton, sequence):
        problem = "its heads of keys and values cannot be divided"
    if problem is None and getattr(text_config_of(skeleton.config), "output_router_logits", False):
        problem = "the router loss is one of whole micro-batches"
    if problem:
        raise UserError(
            f"ds_config: sequence_parallel_size {sequence} is not possible: {problem}; set another "
            "one, or use another model"
        )


def _kernel_problem(precision: str) -> str | None:
    """Why torch's varlen kernel cannot run on the current CUDA device."""
    if torch.cuda.get_device_capability() < (8, 0):
        return "varlen attention needs compute capability 8.0"
    return "varlen attention needs bf16 or fp16" if precision == "fp32" else None


@torch.compiler.disable  # the lengths are values of a tensor
def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor | None = None,
    sliding_window: int | None = None,
    sequence_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each example; with a mask of four dimensions, transformers' SDPA.

    Args:
        query: [examples, heads, tokens, head size]; one row where examples are packed.
        key, value: the same, with as many heads or a divisor of it.
        attention_mask: what packed_mask has returned.
        position_ids: int64 [1, tokens]. Some models give them to attention alone, others to the
            mask alone.
        sliding_window: not used: some models leave it out, and the mask has it.
        sequence_group: the ranks that have the other parts of the sequence.

    Returns:
        [examples, tokens, heads, head size], and None instead of the attention weights.
    """
    if attention_mask is not None and attention_mask.dim() > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if sequence_group is not None:
        query, key, value = (_exchange(x, sequence_group) for x in (query, key, value))
    window, *lengths = [0, query.shape[2]] if attention_mask is None else attention_mask.tolist()
    if sequence_group is not None:
        lengths = [query.shape[2]]  # the mask is of this rank's part
    if position_ids is not None and len(query) == 1:
        if position_ids not in _lengths:
            _lengths[position_ids] = _example_lengths(position_ids, sequence_group)
        lengths = _lengths[position_ids]
    if len(query) == 1 and _has_kernel(query, value) and not options.get("dropout"):
        output = _varlen_attention(query, key, value, lengths, options, window)
    else:
        outputs = []
        for states in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
            mask = None  # SDPA is causal without one
            tokens = states[0].shape[2]
            if 0 < window < tokens:
                seen = query.new_ones(tokens, tokens, dtype=torch.bool)
                mask = seen.tril().triu(1 - window)[None, None]
            outputs.append(sdpa_attention_forward(module, *states, mask, **options)[0])
        output = torch.cat(outputs, dim=1)
    if sequence_group is not None:
        output = _exchange(output, sequence_group)
    return output, None


def _exchange(states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Give each rank of the group its part of dimension 1, whole in dimension 2, from states of
    which each rank has a part of dimension 2, whole in dimension 1.
    """
    parts = states.unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()
    received = _AllToAll.apply(parts, group)  # a part of dimension 2 from each rank
    return received.movedim(0, 2).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """Exchange the parts along dimension 0 with the other ranks; its gradient is the same."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(gradients.contiguous(), ctx.group), None


def _example_lengths(position_ids: torch.Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """Tokens of each example: one begins wherever int64 [1, tokens] does not count on, as in
    transformers' masks. Waits for the device.
    """
    if group is not None:
        parts = [torch.empty_like(position_ids) for _ in range(group.size())]
        dist.all_gather(parts, position_ids.contiguous(), group=group)
        position_ids = torch.cat(parts, dim=1)
    return _lengths_between(position_ids[0].diff() != 1, position_ids.shape[-1])


def _lengths_between(begins: torch.Tensor, tokens: int) -> list[int]:
    """Lengths of examples, from bool [tokens - 1]: whether one begins at each token but the first.
    Waits for the device.
    """
    starts = begins.nonzero().flatten() + 1
    return np.diff([0, *starts.tolist(), tokens]).tolist()


def _has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's varlen kernel takes such states: one head size, a multiple of 8."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= 256
    )


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    options: dict[str, Any],
    window: int,
) -> torch.Tensor:
    """Like packed_attention, with torch's kernel."""
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    ends = ends.to(query.device, non_blocking=True)
    output = varlen_attn(
        *(x.squeeze(0).transpose(0, 1) for x in (query, key, value)),  # [tokens, heads, size]
        ends, ends, max(lengths), max(lengths),
        scale=options.get("scaling"),
        # tokens before and after the query's own; -1: all of them
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=True,
    )  # fmt: skip
    return output[None]


@torch.compiler.disable  # the lengths are values of a tensor
def packed_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    device: torch.device,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    local_size: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """What packed_attention needs of the mask of whole rows: int64 [1 + examples], on the CPU: the
    sliding window, 0 for none, and the length of each packed example. With padding, a cache, or a
    pattern of the model's own (then transformers sets use_vmap), or where a token sees the next
    one, the usual mask.

    Args:
        mask_function: whether query i sees key j, of (batch, head, i, j).
        local_size: the sliding window.
    """
    if attention_mask is None and q_length == kv_length and not use_vmap:
        after = torch.arange(1, q_length, device=device)
        if not mask_function(0, 0, after - 1, after).any():
            begins = ~mask_function(0, 0, after, after - 1)
            return torch.tensor([local_size or 0, *_lengths_between(begins, q_length)])
    options |= {"attention_mask": attention_mask, "use_vmap": use_vmap, "device": device}
    options |= {"mask_function": mask_function, "local_size": local_size}
    return eager_mask(q_length=q_length, kv_length=kv_length, **options)


AttentionInterface.register(PACKED_EXAMPLES, packed_attention)
AttentionMaskInterface.register(PACKED_EXAMPLES, packed_mask)
