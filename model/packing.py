"""Decide whether examples are packed, and with which attention implementation."""

import copy
import inspect
import itertools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig

from config.schema import Config
from model.architecture import _size, meta_model, text_config_of
from model.load import DTYPES
from model.packed_attention import PACKED_EXAMPLES, AttentionCall, kernel_problem
from runtime.errors import UserError

VARLEN = ("flash", "flex_attention")
"""Parts of the names of transformers' implementations that compute no scores between examples."""


def resolve_batching(
    config: Config, model_config: PretrainedConfig, device: torch.device, precision: str
) -> tuple[Config, str]:
    """The config with data.batching and model.attn_implementation decided, and the reason.

    Packed examples get packed_attention, unless the model cannot use it or another implementation
    is configured. With a dense mask the result is right too, but costs more than padding, so auto
    chooses bucketed then.

    Raises:
        UserError: packed is requested, but not possible for this model.
    """
    attention, asked = config.model.attn_implementation, config.data.batching
    if attention == PACKED_EXAMPLES:  # from the resolved config of a run
        attention = None
    if device.type == "cpu" and attention == "flex_attention":
        raise UserError("model.attn_implementation: flex_attention has no backward pass on CPU")
    # a copy: the calls are recorded by changing the config
    skeleton = meta_model(copy.deepcopy(model_config), config.model.trust_remote_code)
    problem = _packing_problem(skeleton, config.data.micro_batch_tokens)
    if asked == "packed" and problem:
        raise UserError(f"data.batching: packed is not possible: {problem}; use bucketed")
    calls, mask = _attention_calls(skeleton)
    unusable = _attention_problem(skeleton, calls, mask)
    is_varlen = attention is not None and any(part in attention for part in VARLEN)
    if problem:
        chosen, why = "bucketed", problem
    elif is_varlen:
        chosen, why = "packed", f"{attention} has a kernel for packed examples"
    elif attention:
        chosen, why = "bucketed", f"{attention} computes scores between packed examples too"
    elif unusable:
        chosen, why = "bucketed", f"packing needs a dense mask: {unusable}"
    elif device.type == "cuda" and (slow := _kernel_problem(calls, DTYPES[precision])):
        chosen, why = "bucketed", slow
    else:
        chosen, why = "packed", "no padding, no scores between examples"
    if asked != "auto":
        chosen, why = asked, "as configured"
    if chosen == "packed" and attention is None and not unusable:
        attention = PACKED_EXAMPLES
    resolved = replace(
        config,
        data=replace(config.data, batching=chosen),
        model=replace(config.model, attn_implementation=attention),
    )
    return resolved, why


@torch.no_grad()
def _attention_calls(skeleton: nn.Module) -> tuple[list[AttentionCall], torch.Tensor]:
    """How the layers of a model on the meta device call their attention, as far as a forward pass
    succeeds there, and the mask of that pass. The model is of no use afterwards.
    """
    calls: list[AttentionCall] = []

    def record(
        _module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        calls.append(AttentionCall(query, key, value, attention_mask, dropout, options))
        return value.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("recorder", record)
    skeleton.config._attn_implementation = "recorder"
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    mask = torch.zeros(1, 1, 4, 4, device="meta")  # without one transformers reads the positions
    # Experts sort tokens by values, which do not exist here. Any exception is possible.
    with suppress(Exception), torch.device("meta"):
        skeleton.train()(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    return calls, mask


def _attention_problem(
    skeleton: nn.Module, calls: list[AttentionCall], mask: torch.Tensor
) -> str | None:
    """Why packed_attention would not do what the layers of a model do, as far as _attention_calls
    and its config show; else None. probes.check_packing tests what it does.
    """
    name, text = type(skeleton).__name__, text_config_of(skeleton.config)
    if not calls:
        return f"{name} computes its attention itself"
    types = getattr(text, "layer_types", None)
    if others := set(types or ()) - {"full_attention", "sliding_attention"}:
        return f"{name} has {', '.join(sorted(others))}"
    has_window = getattr(text, "sliding_window", None) is not None
    windows = (t == "sliding_attention" for t in types) if types else itertools.repeat(has_window)
    for call, slides in zip(calls, windows, strict=False):  # calls may end at the first experts
        if call.options.get("position_ids") is None:
            return f"{name} does not tell its attention the positions"
        if slides != (call.options.get("sliding_window") is not None):
            return f"{name} does not tell its attention the sliding window"
        if call.attention_mask is not mask or call.options.get("position_bias") is not None:
            return f"{name} has attention with a mask or a bias of its own"
    return None


def _kernel_problem(calls: list[AttentionCall], dtype: torch.dtype) -> str | None:
    """Why torch's varlen kernel cannot do all of these calls; None if it can."""
    return next((problem for call in calls if (problem := kernel_problem(call, dtype))), None)


def _packing_problem(skeleton: nn.Module, packed_tokens: int) -> str | None:
    """Why examples cannot be packed for this architecture, as far as its code shows; else None."""
    name = type(skeleton).__name__
    if "position_ids" not in inspect.signature(skeleton.forward).parameters:
        return f"{name} takes no position_ids, so it cannot know where an example begins"
    text = text_config_of(skeleton.config)
    layers = set(getattr(text, "layer_types", None) or [])
    others = sorted(t for t in layers if "linear" in t or not t.endswith("attention"))
    if others or getattr(skeleton, "_is_stateful", False):
        kind = f"{', '.join(others)} layers" if others else "a state"
        return f"{name} has {kind}, which would carry over from one example into the next"
    positions = int(_size(text, "max_position_embeddings") or 0)
    # Positions restart in every example, but some models (GPT-Neo) have masks of a fixed size.
    if 0 < positions < packed_tokens and (
        _takes_length(skeleton, positions) and not _takes_length(skeleton, packed_tokens)
    ):
        return (
            f"{name} takes at most {positions:,} tokens at a time, and data.micro_batch_tokens is "
            f"{packed_tokens:,}"
        )
    return None


@torch.no_grad()
def _takes_length(skeleton: nn.Module, length: int) -> bool:
    """Whether a forward pass over `length` tokens succeeds for a model on the meta device."""
    try:
        with torch.device("meta"):
            ids = torch.zeros(1, length, dtype=torch.int64)
            mask = torch.zeros(1, 1, length, length)  # else transformers reads the positions
            skeleton(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    except Exception:  # shapes that do not fit can raise anything
        return False
    return True
