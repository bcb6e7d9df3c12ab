"""Attention within packed examples, registered with transformers as PACKED_EXAMPLES.

On CUDA in 16 bits it is one call of torch's varlen kernel, elsewhere one call of
scaled_dot_product_attention per example. No score between two examples is computed.
"""

from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

PACKED_EXAMPLES = "packed_examples"
"""The implementation's name, a value of attn_implementation."""
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Options of varlen_attn for fewer keys than queries; torch 2.11 takes them without any."""

_lengths = WeakTensorKeyDictionary()
"""{position_ids: lengths}: computed by the first layer of a forward pass, used by all of them."""


def example_lengths(position_ids: torch.Tensor) -> list[int]:
    """Tokens of each example: one begins wherever int64 [1, tokens] does not count on, as in
    transformers' masks. Waits for the device.
    """
    begins = (position_ids[0].diff() != 1).nonzero().flatten() + 1
    return np.diff([0, *begins.tolist(), position_ids.shape[-1]]).tolist()


@torch.compiler.disable  # the lengths are values of a tensor
def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each example; with a mask, transformers' SDPA.

    Args:
        query: [1, heads, tokens, head size].
        key, value: the same, with as many heads or a divisor of it.
        attention_mask: what packed_mask has returned.
        position_ids: int64 [1, tokens]; None for one example.
        sliding_window: tokens that a token sees, with itself.

    Returns:
        [1, tokens, heads, head size], and None instead of the attention weights.
    """
    options |= {"dropout": dropout, "scaling": scaling}
    if attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if position_ids is None or len(query) > 1:
        lengths = [query.shape[2]]
    else:
        lengths = _lengths.get(position_ids)
        if lengths is None:
            lengths = _lengths[position_ids] = example_lengths(position_ids)
    head_sizes = {states.shape[-1] for states in (query, key, value)}
    if query.is_cuda and len(query) == 1 and not kernel_problem(head_sizes, query.dtype, dropout):
        return _varlen_attention(query, key, value, lengths, scaling, sliding_window), None
    outputs = []
    for states in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
        mask = None  # SDPA is causal without one
        if sliding_window and sliding_window < states[0].shape[2]:
            tokens = states[0].shape[2]
            seen = query.new_ones(tokens, tokens, dtype=torch.bool)
            mask = seen.tril().triu(1 - sliding_window)[None, None]
        outputs.append(sdpa_attention_forward(module, *states, mask, **options)[0])
    return torch.cat(outputs, dim=1), None


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Like packed_attention, with torch's kernel."""
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    ends = ends.to(query.device, non_blocking=True)
    output = varlen_attn(
        *(states[0].transpose(0, 1) for states in (query, key, value)),  # [tokens, heads, size]
        ends, ends, max(lengths), max(lengths),
        scale=scaling,
        # tokens before and after the query's own; -1: all of them
        window_size=(sliding_window - 1 if sliding_window else -1, 0),
        **GROUPED_HEADS,
    )  # fmt: skip
    return output[None]


def packed_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> torch.Tensor | None:
    """None for packed examples and whatever else is causal from the first token on. With padding, a
    cache, or a pattern of the model's own (then transformers sets use_vmap) the usual mask.
    """
    if attention_mask is None and q_length == kv_length and not use_vmap:
        return None
    options |= {"attention_mask": attention_mask, "use_vmap": use_vmap}
    return eager_mask(q_length=q_length, kv_length=kv_length, **options)


AttentionInterface.register(PACKED_EXAMPLES, packed_attention)
AttentionMaskInterface.register(PACKED_EXAMPLES, packed_mask)


def kernel_problem(head_sizes: set[int], dtype: torch.dtype, dropout: float) -> str | None:
    """Why torch's varlen kernel cannot do such attention on the current CUDA device; None if it
    can.

    Args:
        head_sizes: of queries, keys and values.
    """
    if torch.cuda.get_device_capability() < (8, 0):
        return "varlen attention needs compute capability 8.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return "varlen attention needs bf16 or fp16"
    if dropout:
        return "varlen attention has no dropout"
    if len(head_sizes) > 1 or max(head_sizes) > 256 or max(head_sizes) % 8:
        return "varlen attention needs one head size, a multiple of 8 up to 256"
    return None
