"""Packed examples: whether a model can be trained on them, and attention within each of them,
registered with transformers as PACKED_EXAMPLES.

The order of calls in one forward pass of T tokens in E examples:

    with attend_within(batch, ...) as inputs:    the loader knows where examples end; nothing here
                                                 reads a value from the device, or waits for it
      engine(input_ids, **inputs)
        packed_mask()       once per kind of layer: returns Examples in place of a mask [T, T]
        packed_attention()  in each layer, with those Examples as its mask

On CUDA in 16 bits attention is one call of torch's varlen kernel, elsewhere one call of
scaled_dot_product_attention per example. No score between two examples is computed.

With sequence parallelism a rank has a part of the sequence. Before attention the ranks exchange
parts of it for parts of the heads, and after it back: DeepSpeed-Ulysses (arXiv:2309.14509).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from zerotrain.config.schema import Config
from zerotrain.data.loader import MicroBatch
from zerotrain.model.architecture import heads_divide
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.machine import Machine

PACKED_EXAMPLES = "packed_examples"
"""The implementation's name, a value of attn_implementation."""
VARLEN = ("flash", "flex_attention")
"""Parts of the names of transformers' implementations that compute no scores between examples."""


def resolve_batching(
    config: Config, skeleton: nn.Module, machine: Machine, sequence: int = 1
) -> tuple[Config, str]:
    """Decide data.batching and model.attn_implementation.

    Args:
        config: with a precision other than auto.
        skeleton: the model on the meta device.
        machine: the machine that the run is resolved for.
        sequence: ranks that share a sequence.

    Returns:
        The config with both keys set, and the reason for the batching.

    Raises:
        UserError: the config asks for packed examples or for shared sequences, and the model or
            its attention cannot have them.
    """
    attention = config.model.attn_implementation
    batching = config.data.batching
    why = "as configured"
    if attention == PACKED_EXAMPLES:  # from the resolved config of a run
        attention = None
    problem = _packing_problem(skeleton, config.data.max_length)
    if sequence > 1:
        # Bucketed sequences are split like packed ones: a slice has positions instead of a mask.
        if attention:
            problem = f"model.attn_implementation {attention} cannot split one"
        elif not heads_divide(skeleton, sequence):
            problem = "its heads of keys and values cannot be divided"
        elif getattr(skeleton.config.get_text_config(), "output_router_logits", False):
            problem = "the router loss needs whole micro-batches"
        if problem:
            raise UserError(
                f"ds_config: sequence_parallel_size {sequence} is not possible: {problem}; remove "
                "it, or use a different model"
            )
    elif attention and not any(name in attention for name in VARLEN):
        problem = problem or f"{attention} computes scores between examples too"
    if batching == "packed" and problem:
        raise UserError(f"data.batching: packed is not possible: {problem}; use bucketed")
    if batching == "auto":
        has_kernel = machine.has_varlen and config.train.precision != "fp32"
        if machine.device == "cuda" and not (attention or has_kernel):
            problem = problem or "varlen attention needs compute capability 8.0, and bf16 or fp16"
        batching, why = ("bucketed", problem) if problem else ("packed", "no padding")
    if batching == "packed" or sequence > 1:
        attention = attention or PACKED_EXAMPLES
    resolved = replace(
        config,
        data=replace(config.data, batching=batching),
        model=replace(config.model, attn_implementation=attention),
    )
    return resolved, why


def _packing_problem(skeleton: nn.Module, max_length: int) -> str | None:
    """Say why packed examples would not train like the same examples alone; None if the model's
    config and class give no reason. probes.check_packing then tests the loaded model.
    """
    name = type(skeleton).__name__
    text = skeleton.config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or [])
    if others := sorted(layers - {"full_attention", "sliding_attention"}):
        return f"{name} has {', '.join(others)} layers"
    if not getattr(skeleton, "_supports_attention_backend", False):
        return f"{name} computes its attention itself"
    if not skeleton._supports_sdpa:
        return f"{name} has attention with soft caps, sinks or biases"
    rope = getattr(text, "rope_parameters", None) or {}
    limit = rope.get("original_max_position_embeddings", max_length)
    if rope.get("rope_type") == "longrope" and max_length > limit:
        return f"{name} encodes positions by the longest example, from {limit:,} tokens on"
    return None


# --------------------------------------------------------------------------------------------------
# Attention


@dataclass(frozen=True)
class Examples:
    """Where the examples of a packed micro-batch lie: what layers get in place of a mask."""

    lengths: tuple[int, ...]
    """The number of tokens of each example, in order."""
    ends: torch.Tensor
    """int32 [1 + examples] on the device: 0, and where each example ends."""
    sequence_group: dist.ProcessGroup | None
    """The ranks that have the other parts of the sequence."""
    window: int = 0
    """Tokens that a token attends to, itself included; 0: all tokens of its example."""


# transformers hands masks nothing from the call of the model, so packed_mask() looks here
_examples: ContextVar[Examples | None] = ContextVar("_examples", default=None)


@contextmanager
def attend_within(
    model: nn.Module, batch: MicroBatch, sequence_group: dist.ProcessGroup | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Make each example of the micro-batch attend to itself alone in the forward passes inside.

    Args:
        model: the Hugging Face model.
        sequence_group: the ranks that have the other parts of the sequence.

    Yields:
        The model's inputs beside input_ids.
    """
    inputs = {"attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
    inputs = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    examples = None
    if batch.ends is not None and model.config._attn_implementation == PACKED_EXAMPLES:
        examples = Examples(batch.lengths, batch.ends, sequence_group)
        # Without a mask transformers looks for examples in position_ids, and waits for the device.
        # Other implementations rely on that.
        inputs["attention_mask"] = torch.ones_like(batch.input_ids)
    token = _examples.set(examples)
    try:
        yield inputs
    finally:
        _examples.reset(token)


@torch.compiler.disable
def packed_mask(*, local_size: int | None = None, **options: Any) -> Examples | torch.Tensor:
    """transformers' hook for masks: inside attend_within its Examples, else the usual mask, float
    [rows, 1, queries, keys].

    Args:
        local_size: the sliding window of the layers that get the mask.
    """
    examples = _examples.get()
    if examples is None:
        return eager_mask(local_size=local_size, **options)
    return replace(examples, window=local_size or 0)


@torch.compiler.disable  # the lengths differ in every micro-batch
def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Examples | torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' hook for attention: causal within each of the Examples; with a usual mask, or
    none, transformers' own SDPA.

    Args:
        query: [rows, heads, tokens, head size]; one row where examples are packed.
        key, value: the same, with as many heads or a divisor of it.
        attention_mask: what packed_mask has returned.

    Returns:
        [rows, tokens, heads, head size], and None instead of the attention weights.
    """
    states = (query, key, value)
    if not isinstance(attention_mask, Examples):
        return sdpa_attention_forward(module, *states, attention_mask, **options)
    examples = attention_mask

    def attend(*states: torch.Tensor) -> torch.Tensor:  # of whole sequences
        if _has_kernel(*states) and not options.get("dropout"):
            return _varlen_attention(*states, examples, options.get("scaling"))
        # query, key and value of each example: [1, heads, its tokens, head size]
        parts = zip(*(x.split(examples.lengths, dim=2) for x in states), strict=True)
        outputs = [
            sdpa_attention_forward(module, *part, _window_mask(part[0], examples.window), **options)
            for part in parts
        ]
        return torch.cat([output for output, _ in outputs], dim=1)  # [1, tokens, heads, size]

    if examples.sequence_group is None:
        return attend(*states), None
    # DeepSpeed's layer takes and returns [rows, tokens, heads, head size]: from a part of the
    # tokens and all heads to all tokens and a part of the heads, and back
    exchange = DistributedAttention(
        lambda *whole: attend(*(x.transpose(1, 2) for x in whole)),
        examples.sequence_group,
        gather_idx=1,
    )
    return exchange(*(x.transpose(1, 2) for x in states), batch_dim_idx=0), None


def _window_mask(query: torch.Tensor, window: int) -> torch.Tensor | None:
    """bool [1, 1, tokens, tokens], true where a token attends to another one; None, with which SDPA
    is causal, if the window holds the whole example.
    """
    tokens = query.shape[2]
    if not 0 < window < tokens:
        return None
    return query.new_ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window)[None, None]


def _has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's varlen kernel takes such states: one head size, a multiple of 8."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and len(query) == 1
        and query.dtype in (torch.bfloat16, torch.float16)
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= 256
    )


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    examples: Examples,
    scale: float | None,
) -> torch.Tensor:
    """Like packed_attention, by one call of torch's kernel for all examples."""
    longest = max(examples.lengths)
    output = varlen_attn(
        *(x.squeeze(0).transpose(0, 1) for x in (query, key, value)),  # [tokens, heads, size]
        examples.ends, examples.ends, longest, longest,
        scale=scale,
        # tokens before and after the query's own; -1: all of them
        window_size=(examples.window - 1, 0),
        enable_gqa=True,
    )  # fmt: skip
    return output[None]


AttentionInterface.register(PACKED_EXAMPLES, packed_attention)
AttentionMaskInterface.register(PACKED_EXAMPLES, packed_mask)
