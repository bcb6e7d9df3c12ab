"""Attention within packed examples, registered with transformers as PACKED_EXAMPLES.

On CUDA in 16 bits it is one call of torch's varlen kernel, elsewhere one call of
scaled_dot_product_attention per example. No score between two examples is computed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

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
EAGER_ONLY = ("softcap", "s_aux")
"""Options for soft caps and attention sinks, which only a model's eager attention has."""
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Options of varlen_attn for fewer keys than queries; torch 2.11 takes them without any."""


@dataclass(frozen=True)
class Bounds:
    """Where the examples of a micro-batch begin and end."""

    lengths: list[int]
    """Tokens of each example."""
    offsets: torch.Tensor
    """int32 [examples + 1], on the device of the tokens: 0 and the end of each example."""

    @classmethod
    def of(cls, position_ids: torch.Tensor) -> "Bounds":
        """An example begins wherever int64 [batch, tokens] does not count on, as in transformers'
        masks. Waits for the device.

        Raises:
            ValueError: the examples of a batch begin at different places.
        """
        begins = position_ids.diff(dim=-1) != 1  # [batch, tokens - 1], from the second token on
        if len(begins) > 1 and not torch.equal(begins.all(0), begins.any(0)):
            raise ValueError("packed examples must be concatenated into one sequence")
        starts = [0, *(begins[0].nonzero().flatten() + 1).tolist(), position_ids.shape[-1]]
        lengths = np.diff(starts).tolist()
        offsets = torch.tensor(starts, dtype=torch.int32)
        return cls(lengths, offsets.to(position_ids.device, non_blocking=True))


class AttentionCall(NamedTuple):
    """What a layer passes to its attention function."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attention_mask: torch.Tensor | None
    dropout: float
    options: dict[str, Any]


_bounds = WeakTensorKeyDictionary()
"""{position_ids: Bounds}: computed by the first layer of a forward pass, used by all of them."""


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor | None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each example; with a mask, the model's own attention.

    Args:
        module: the layer that calls.
        query: [batch, heads, tokens, head size].
        key, value: the same, with as many heads or a divisor of it.
        attention_mask: what packed_mask has returned.
        position_ids: int64 [1, tokens]; None for one example.
        options: scaling, sliding_window (tokens) and whatever else the layer tells its attention.

    Returns:
        [batch, tokens, heads, head size], and None instead of the attention weights.
    """
    attend = _attention_of(module, options)
    if attention_mask is not None:
        return attend(module, query, key, value, attention_mask, dropout=dropout, **options)
    if position_ids is None:
        position_ids = torch.arange(query.shape[2], device=query.device)[None]
    if (bounds := _bounds.get(position_ids)) is None:
        bounds = _bounds[position_ids] = Bounds.of(position_ids)
    if query.is_cuda and len(query) == 1:
        call = AttentionCall(query, key, value, None, dropout, options)
        if not kernel_problem(call, query.dtype):
            return _varlen_attention(query, key, value, bounds, **options), None
    outputs = []
    for states in zip(*(x.split(bounds.lengths, dim=2) for x in (query, key, value)), strict=True):
        tokens = states[0].shape[2]
        window = options.get("sliding_window") or tokens
        # SDPA is causal without a mask, and then has its fast kernels; eager attention is not.
        needs_mask = window < tokens or attend is not sdpa_attention_forward
        mask = _causal_mask(states[0], window) if needs_mask else None
        outputs.append(attend(module, *states, mask, dropout=dropout, **options)[0])
    return torch.cat(outputs, dim=1), None


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
    # a bias, not booleans: eager attention and SDPA both add it to the scores
    return eager_mask(q_length=q_length, kv_length=kv_length, **options)


AttentionInterface.register(PACKED_EXAMPLES, packed_attention)
AttentionMaskInterface.register(PACKED_EXAMPLES, packed_mask)


@contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """With the implementation that transformers chooses for a model, if it has packed_attention."""
    if model.config._attn_implementation != PACKED_EXAMPLES:
        yield
        return
    model.set_attn_implementation(None)
    try:
        yield
    finally:
        model.set_attn_implementation(PACKED_EXAMPLES)


def _attention_of(module: nn.Module, options: dict[str, Any]) -> Callable:
    """SDPA, or the eager attention in the layer's file if that alone has what the layer needs."""
    if all(options.get(name) is None for name in EAGER_ONLY):
        return sdpa_attention_forward
    return sys.modules[type(module).__module__].eager_attention_forward


def _causal_mask(query: torch.Tensor, window: int) -> torch.Tensor:
    """A bias, [1, 1, tokens, tokens]: 0 for a token and the `window` - 1 before it."""
    tokens = query.shape[2]
    seen = query.new_ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window)
    lowest = torch.finfo(query.dtype).min
    return query.new_zeros(tokens, tokens).masked_fill(~seen, lowest)[None, None]


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """Like packed_attention, with torch's kernel: [1, tokens, heads, head size]."""
    longest = max(bounds.lengths)
    output = varlen_attn(
        *(states[0].transpose(0, 1) for states in (query, key, value)),  # [tokens, heads, size]
        bounds.offsets,
        bounds.offsets,
        longest,
        longest,
        scale=scaling,
        # tokens before and after the query's own; -1: all of them
        window_size=(sliding_window - 1 if sliding_window else -1, 0),
        **GROUPED_HEADS,
    )
    return output[None]


def kernel_problem(call: AttentionCall, dtype: torch.dtype) -> str | None:
    """Why torch's varlen kernel cannot do a call on the current CUDA device; None if it can."""
    if problem := _device_problem():
        return problem
    if dtype not in (torch.bfloat16, torch.float16):
        return "varlen attention needs bf16 or fp16"
    if call.dropout or any(call.options.get(name) is not None for name in EAGER_ONLY):
        return "varlen attention has no dropout, soft caps and sinks"
    sizes = {states.shape[-1] for states in (call.query, call.key, call.value)}
    if len(sizes) > 1 or max(sizes) > 256 or max(sizes) % 8:
        return "varlen attention needs one head size, a multiple of 8 up to 256"
    return None


@cache
def _device_problem() -> str | None:
    if "window_size" not in signature(varlen_attn).parameters:
        return "varlen attention needs torch 2.11"
    if torch.cuda.get_device_capability() < (8, 0):
        return "varlen attention needs compute capability 8.0"
    return None
