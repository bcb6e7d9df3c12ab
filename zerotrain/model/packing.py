"""Decide whether examples are packed, and with which attention implementation."""

import copy
import inspect
import itertools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from zerotrain.config.schema import Config
from zerotrain.model.architecture import text_config_of
from zerotrain.model.load import DTYPES
from zerotrain.model.packed_attention import PACKED_EXAMPLES, kernel_problem
from zerotrain.runtime.errors import UserError

VARLEN = ("flash", "flex_attention")
"""Parts of the names of transformers' implementations that compute no scores between examples."""


def resolve_batching(
    config: Config, skeleton: nn.Module, device: torch.device, precision: str
) -> tuple[Config, str]:
    """The config with data.batching and model.attn_implementation decided, and the reason.

    Args:
        skeleton: the model on the meta device.

    Raises:
        UserError: packed is requested, but not possible for this model.
    """
    attention, asked = config.model.attn_implementation, config.data.batching
    if attention == PACKED_EXAMPLES:  # from the resolved config of a run
        attention = None
    if device.type == "cpu" and attention == "flex_attention":
        raise UserError("model.attn_implementation: flex_attention has no backward pass on CPU")
    calls, of_attention = _attention_calls(copy.deepcopy(skeleton))
    if attention:
        has_kernel = any(part in attention for part in VARLEN)
        of_attention = None if has_kernel else f"{attention} computes scores between examples too"
    problem = _state_problem(skeleton) or of_attention
    if asked == "packed" and problem:
        raise UserError(f"data.batching: packed is not possible: {problem}; use bucketed")
    if device.type == "cuda" and not attention:
        slow = (kernel_problem(sizes, DTYPES[precision], dropout) for sizes, dropout in calls)
        problem = problem or next(filter(None, slow), None)
    if asked == "auto":
        chosen, why = "bucketed" if problem else "packed", problem or "no padding"
    else:
        chosen, why = asked, "as configured"
    if chosen == "packed" and not attention:
        attention = PACKED_EXAMPLES
    resolved = replace(
        config,
        data=replace(config.data, batching=chosen),
        model=replace(config.model, attn_implementation=attention),
    )
    return resolved, why


def _state_problem(skeleton: nn.Module) -> str | None:
    """Why examples in one sequence would influence each other outside of attention; else None."""
    name = type(skeleton).__name__
    if "position_ids" not in inspect.signature(skeleton.forward).parameters:
        return f"{name} takes no position_ids, so it cannot know where an example begins"
    layers = set(getattr(text_config_of(skeleton.config), "layer_types", None) or [])
    if others := sorted(layers - {"full_attention", "sliding_attention"}):
        return f"{name} has {', '.join(others)} layers"
    return f"{name} has a state" if getattr(skeleton, "_is_stateful", False) else None


@torch.no_grad()
def _attention_calls(skeleton: nn.Module) -> tuple[list[tuple[set[int], float]], str | None]:
    """(head sizes, dropout) of each layer's attention, as far as a forward pass succeeds on the
    meta device; and why packed_attention would not do what the layers do, else None. The model is
    of no use afterwards. probes.check_packing tests what the real model does.
    """
    name, text = type(skeleton).__name__, text_config_of(skeleton.config)
    types = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    # of each layer; a forward pass may end at the first experts
    slides = (
        (kind == "sliding_attention" for kind in types) if types else itertools.repeat(bool(window))
    )
    mask = torch.zeros(1, 1, 4, 4, device="meta")  # without one transformers reads the positions
    calls: list[tuple[set[int], float]] = []
    problems: list[str] = []

    def record(
        _module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        calls.append(({states.shape[-1] for states in (query, key, value)}, dropout))
        if options.get("position_ids") is None:
            problems.append(f"{name} does not tell its attention the positions")
        if next(slides, None) != (options.get("sliding_window") is not None):
            problems.append(f"{name} does not tell its attention the sliding window")
        if attention_mask is not mask or options.get("position_bias") is not None:
            problems.append(f"{name} has attention with a mask or a bias of its own")
        if any(options.get(key) is not None for key in ("softcap", "s_aux")):
            problems.append(f"{name} has attention with soft caps or sinks")
        return value.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("recorder", record)
    skeleton.config._attn_implementation = "recorder"
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    # Experts sort tokens by values, which do not exist here. Any exception is possible.
    with suppress(Exception), torch.device("meta"):
        skeleton.train()(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    if not calls:
        problems.append(f"{name} computes its attention itself")
    return calls, problems[0] if problems else None
