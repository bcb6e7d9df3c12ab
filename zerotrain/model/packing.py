"""Packed examples: which models can be trained on them, and attention within each example.

The attention is registered with transformers as PACKED_EXAMPLES. The order of calls in one forward
pass of T tokens in E examples:

    with attend_within(batch, ...) as inputs:    the loader knows where examples end; nothing here
                                                 reads a value from the device, or waits for it
      engine(input_ids, **inputs)
        packed_mask()       once per kind of layer: returns Examples in place of a mask [T, T]
        packed_attention()  in each layer, with those Examples as its mask

On CUDA in 16 bits attention is one call of torch's varlen kernel if heads have at most 256 numbers
and no dropout. Elsewhere it is one call of scaled_dot_product_attention per example. No score
between two examples is computed.

With sequence parallelism a rank has a slice of each sequence. Before attention the ranks exchange
slices of the sequence for heads, and afterwards back: DeepSpeed-Ulysses (arXiv:2309.14509).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.sequence.layer import DistributedAttention
from torch import nn
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
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
ATTENTION_TYPES = """
    afmoe apertus arcee aria_text axk1 aya_vision beam bitnet cohere cohere2 cohere2_moe
    cohere2_vision ctrl cwm deepseek_v2 deepseek_v3 deepseek_vl diffllama dots1 ernie4_5
    ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu gemma gemma3 gemma3_text gemma4 gemma4_text
    gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox
    granite granitemoe granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax idefics3 internlm3 internvl iquestcoder jais2 jetmoe kimi_k25 kolibri1 laguna llama
    llava llava_next longcat_flash mellum minicpm3 minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mistral3 mixtral modernbert-decoder moshi moss_transcribe_diarize nanochat
    nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_audio
    qwen2_moe qwen3 qwen3_moe seed_oss smollm3 smolvlm solar_open starcoder2 voxtral youtu
"""
"""Values of model_type whose examples are packed, and in which attention alone mixes tokens."""
MIXER_TYPES = """
    bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe
    lfm3 mamba mamba2 nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next zamba
    zamba2
"""
"""The same with mixers, which zerotrain/model/mixers.py keeps apart. For each type of both lists a
test compares packed examples with single ones. All other types are bucketed.
"""


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
    if attention == PACKED_EXAMPLES:  # from the resolved config of a run
        attention = None
    batching = config.data.batching
    why = "as configured"
    problem = _packing_problem(skeleton, config.data.max_length, sequence)
    if attention:
        problem = f"model.attn_implementation is {attention}"
    if sequence > 1:
        # Bucketed sequences are split like packed ones: a slice has positions instead of a mask.
        if not heads_divide(skeleton, sequence):
            problem = "its heads of keys and values cannot be divided"
        if problem:
            raise UserError(
                f"ds_config: sequence_parallel_size {sequence} cannot be: {problem}; remove it"
            )
    if batching == "packed" and problem:
        raise UserError(f"data.batching: packed is not possible: {problem}; use bucketed")
    if batching == "auto":
        has_kernel = machine.has_varlen and config.train.precision != "fp32"
        if machine.device == "cuda" and not has_kernel:
            problem = problem or "varlen attention needs compute capability 8.0, and bf16 or fp16"
        batching, why = ("bucketed", problem) if problem else ("packed", "no padding")
    if batching == "packed" or sequence > 1:
        attention = PACKED_EXAMPLES
    resolved = replace(
        config,
        data=replace(config.data, batching=batching),
        model=replace(config.model, attn_implementation=attention),
    )
    return resolved, why


def _packing_problem(skeleton: nn.Module, max_length: int, sequence: int) -> str | None:
    """Say why packed examples would not train like the same examples alone; None if they do.
    probes.check_packing then tests the loaded model.
    """
    for kind in (skeleton.config.model_type, skeleton.config.get_text_config().model_type):
        if kind not in (ATTENTION_TYPES + MIXER_TYPES).split():
            return f"packed examples have not been tested with models of type {kind}"
        if sequence > 1 and kind in MIXER_TYPES.split():
            return f"the mixers of {kind} need whole sequences"
    rope = getattr(skeleton.config.get_text_config(), "rope_parameters", None) or {}
    limit = rope.get("original_max_position_embeddings", max_length)
    if rope.get("rope_type") == "longrope" and max_length > limit:
        return f"{kind} encodes positions by the longest example, from {limit:,} tokens on"
    return None


def has_sdpa(model: nn.Module) -> bool:
    """Return whether a model's attention can be torch's kernels."""
    return model._supports_sdpa


# --------------------------------------------------------------------------------------------------
# Attention

NEWER_KERNELS = {9: "FA3", 10: "FA4"}
"""Compute capability: the FlashAttention that was written for it (Hopper, Blackwell)."""


def activate_kernel() -> None:
    """Have torch's varlen attention use FlashAttention 3 or 4, if the GPU has one of them and its
    package is installed.
    """
    # KeyError: another GPU. RuntimeError: a package without the kernels.
    with suppress(ImportError, KeyError, RuntimeError):
        activate_flash_attention_impl(NEWER_KERNELS[torch.cuda.get_device_capability()[0]])


def kernel_line(has_kernel: Iterable[bool]) -> str:
    """Return the name of the varlen kernel, and how many layers have it.

    Args:
        has_kernel: for each layer.
    """
    name = current_flash_attention_impl() or "FA2"
    layers = [*has_kernel]
    if all(layers):
        return name
    return (
        f"{name} in {sum(layers)} of {len(layers)} layers; the others have dropout or more than "
        "256 numbers per head, and are slower: one scaled_dot_product_attention per example"
    )


@dataclass  # Frozen, it would make torch 2.11 compile again for each number of examples.
class Examples:
    """The bounds of a packed micro-batch's examples, which layers get instead of a mask."""

    lengths: tuple[int, ...]
    """The number of tokens of each example, in order."""
    ends: torch.Tensor
    """int32 [1 + examples] on the device: 0, then the end of each example."""
    sequence_group: dist.ProcessGroup | None
    """The ranks that have the other slices of the sequence."""
    window: int = 0
    """Attention window in tokens, own position included; 0 for the whole example."""
    has_kernel: dict[nn.Module, bool] = field(default_factory=dict)
    """Whether torch's varlen kernel computed a layer, for each attention layer so far."""

    def __getitem__(self, part: Any) -> "Examples":
        """Layers that share keys and values (Gemma 4 E4B) take all queries of their mask."""
        return self


# transformers passes nothing from the call of the model to packed_mask, which therefore reads this.
current_examples: ContextVar[Examples | None] = ContextVar("current_examples", default=None)


@contextmanager
def attend_within(
    batch: MicroBatch, sequence_group: dist.ProcessGroup | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Restrict attention to each example of a micro-batch, in the forward passes inside `with`.

    Args:
        sequence_group: the ranks that have the other slices of the sequence.

    Yields:
        The model's inputs apart from input_ids.
    """
    examples, mask = None, batch.attention_mask
    if batch.ends is not None:
        examples = Examples(batch.lengths, batch.ends, sequence_group)
        # Without a mask transformers would look for examples in position_ids, and wait for the
        # device.
        mask = torch.ones_like(batch.input_ids)
    inputs = {"attention_mask": mask, "position_ids": batch.position_ids}
    token = current_examples.set(examples)
    try:
        yield {name: tensor for name, tensor in inputs.items() if tensor is not None}
    finally:
        current_examples.reset(token)


@torch.compiler.disable
def packed_mask(*, local_size: int | None = None, **options: Any) -> Examples | torch.Tensor:
    """Return the Examples of attend_within, or outside of it the usual mask.

    transformers calls it for each kind of layer. The usual mask is float [rows, 1, queries, keys].

    Args:
        local_size: the sliding window of the layers that get the mask.
    """
    examples = current_examples.get()
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
    """Compute causal attention within each of the Examples. transformers calls it in each layer.

    Args:
        query: [rows, heads, tokens, head size]; one row if examples are packed.
        key, value: the same shape; their number of heads divides the query's.
        attention_mask: the result of packed_mask. A usual mask, or None, goes to transformers' own
            SDPA.

    Returns:
        [rows, tokens, heads, head size], and None instead of the attention weights.
    """
    states = (query, key, value)
    if not isinstance(attention_mask, Examples):
        return sdpa_attention_forward(module, *states, attention_mask, **options)
    examples = attention_mask

    def attend(*states: torch.Tensor) -> torch.Tensor:
        """Attention over whole sequences."""
        examples.has_kernel[module] = has_kernel(*states) and not options.get("dropout")
        if examples.has_kernel[module]:
            return varlen_attention(*states, examples, options.get("scaling"))
        # query, key and value of each example: [1, heads, its tokens, head size]
        parts = zip(*(x.split(examples.lengths, dim=2) for x in states), strict=True)
        outputs = [
            sdpa_attention_forward(module, *part, _window_mask(part[0], examples.window), **options)
            for part in parts
        ]
        return torch.cat([output for output, _ in outputs], dim=1)  # [1, tokens, heads, size]

    if examples.sequence_group is None:
        return attend(*states), None
    # DeepSpeed's layer takes and returns [rows, tokens, heads, head size]. It exchanges a slice of
    # the tokens with all heads for all tokens with some heads, and back.
    exchange = DistributedAttention(
        lambda *whole: attend(*(x.transpose(1, 2) for x in whole)),
        examples.sequence_group,
        gather_idx=1,
    )
    return exchange(*(x.transpose(1, 2) for x in states), batch_dim_idx=0), None


def _window_mask(query: torch.Tensor, window: int) -> torch.Tensor | None:
    """Return SDPA's mask of a sliding window, bool [1, 1, queries, keys], true where a query
    attends. None, with which SDPA is causal, if the window holds the whole example.
    """
    tokens = query.shape[2]
    if not 0 < window < tokens:
        return None
    return query.new_ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window)[None, None]


def has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether varlen_attention takes such states, whose head sizes may differ."""
    return (
        query.is_cuda
        and query.shape[0] == 1
        and query.dtype in (torch.bfloat16, torch.float16)
        and max(query.shape[-1], value.shape[-1]) <= 256
    )


def varlen_options(kernel: Callable) -> dict[str, bool]:
    """Return the options of torch's kernel that depend on torch: 2.11 always groups heads."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


VARLEN_OPTIONS = varlen_options(varlen_attn)  # once, because each layer would take 24 us


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    examples: Examples,
    scale: float | None,
) -> torch.Tensor:
    """Compute packed_attention with one call of torch's kernel for all examples.

    The kernel has one head size, a multiple of 8. Zeros after the heads of queries and keys change
    no score. Those after the heads of values are cut off.
    """
    own, wide = query.shape[-1], value.shape[-1]
    size = -(-max(own, wide) // 8) * 8
    longest = max(examples.lengths)
    states = (
        x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in (query, key, value)
    )
    output = varlen_attn(
        *(x.squeeze(0).transpose(0, 1) for x in states),  # [tokens, heads, size]
        examples.ends, examples.ends, longest, longest,
        scale=own**-0.5 if scale is None else scale,
        # The numbers of tokens before and after the query's own; -1 means all of them.
        window_size=(examples.window - 1, 0),
        **VARLEN_OPTIONS,
    )  # fmt: skip
    return output[None, ..., :wide]


AttentionInterface.register(PACKED_EXAMPLES, packed_attention)
AttentionMaskInterface.register(PACKED_EXAMPLES, packed_mask)
