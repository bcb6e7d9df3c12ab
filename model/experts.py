"""Mixtures of experts: how evenly the router spreads tokens, and experts as single modules.

transformers 5 packs the experts of a layer into three-dimensional parameters. They have a gradient
on every rank, zero for an expert without tokens, and ZeRO-3 gathers them for the layer at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from data.loader import MicroBatch
from model.leaf import gather_at_once
from runtime.errors import UserError


class ExpertLoad:
    """Counts the tokens of each expert in the micro-batches of a step, without padding."""

    def __init__(self, model: nn.Module) -> None:
        """Count in the packed experts of each layer; of other models, in nothing."""
        self._layers = [m for m in model.modules() if hasattr(m, "_is_expert_parallel")]
        self._is_counted = False  # anything in this step
        self._weights: torch.Tensor | None = None  # int64 [examples x length]: 0 for padding
        for layer in self._layers:
            layer.expert_load, layer.forward = self, MethodType(_counted, layer)

    @contextmanager
    def counting(self, batch: MicroBatch) -> Iterator[None]:
        """Count in the forward pass within, unless it is of an evaluation or of filler; not when
        activation checkpointing repeats it.
        """
        if self._layers and torch.is_grad_enabled():
            if not self._is_counted:
                for layer in self._layers:  # int64, masked ones last
                    layer.expert_counts = batch.input_ids.new_zeros(layer.num_experts + 1)
                self._is_counted = True
            mask = batch.attention_mask
            real = torch.ones_like(batch.input_ids) if mask is None else mask.long()
            self._weights = real.flatten() if len(batch.targets) else None
        try:
            yield
        finally:
            self._weights = None

    def count(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        """Count what the packed experts of a layer are called with."""
        if self._weights is None:
            return
        # experts(hidden states, chosen experts [tokens, k], weights), by different names
        tensors = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        chosen = next(v for v in tensors if not v.is_floating_point())
        weights = self._weights[:, None].expand(-1, chosen.shape[-1])
        layer.expert_counts.scatter_add_(0, chosen.reshape(-1).long(), weights.reshape(-1))

    def metrics(self) -> dict[str, float]:
        """Balance over the step's tokens on all ranks, then start the next step; {} without
        experts. Called by all ranks.

        Returns:
            expert_load_max, the tokens of the busiest expert of any layer over the mean of its
            layer, 1 if balanced; experts_unused, the number of experts without a token, over all
            layers.
        """
        if not self._is_counted:
            return {}
        self._is_counted = False
        counts = torch.cat([layer.expert_counts for layer in self._layers])
        dist.all_reduce(counts)
        of_layers = [
            of_one[:-1] for of_one in counts.split([m.num_experts + 1 for m in self._layers])
        ]
        busiest = torch.stack([row.max() * len(row) / row.sum() for row in of_layers])
        unused = torch.stack([(row == 0).sum() for row in of_layers])
        return {"expert_load_max": busiest.max().item(), "experts_unused": int(unused.sum())}


def _counted(layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In place of the forward method of packed experts. torch.compile makes one graph of this for
    all layers, and one per layer where modules have hooks, which have numbers.
    """
    layer.expert_load.count(layer, args, kwargs)
    return type(layer).forward(layer, *args, **kwargs)


def fit_experts(model: nn.Module, stage: int) -> None:
    """Make experts that are single modules, as in code that comes with a model, fit for ZeRO: ranks
    choose different ones, but have to gather and to reduce the same parameters.

    Under ZeRO-3 they are gathered for the layer at once. Otherwise the layer's output depends on
    all of them, so that an expert without tokens has a gradient of zero.

    Raises:
        UserError: stage 2, which puts gradients into buckets in the order in which they arrive,
            another one on each rank, and would add up those of different experts.
    """
    for module in model.modules():
        if not isinstance(getattr(module, "experts", None), nn.ModuleList):
            continue
        if stage == 2:
            raise UserError(
                f"ds_config: {type(module).__name__} of this model has experts that are modules of "
                "their own, which ZeRO stage 2 does not train right; use stage 1 or 3"
            )
        if stage == 3:
            gather_at_once(module)
        else:
            module.register_forward_hook(_depend_on_all)


def _depend_on_all(module: nn.Module, _args: tuple, out: Any) -> Any:
    trained = [p for p in module.experts.parameters() if p.requires_grad]
    zero = sum(p.view(-1)[0] for p in trained) * 0
    return (out[0] + zero, *out[1:]) if isinstance(out, tuple) else out + zero
