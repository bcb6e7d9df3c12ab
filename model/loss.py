"""Cross entropy summed over supervised tokens, with logits for only those positions, and the router
loss of a mixture of experts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from data.loader import MicroBatch
from model.experts import ExpertLoad


class MicroLoss(NamedTuple):
    """Losses of one micro-batch: float32 scalars with an autograd graph."""

    cross_entropy: torch.Tensor
    """Sum of -log p(target)."""
    router: torch.Tensor | None
    """Load-balancing loss of the experts, without its coefficient, times the number of tokens
    (without padding) that it is a mean over; None if the model's config does not ask for it.
    """


class SupervisedLoss:
    """Cross entropy of a causal language model, summed over the targets of a micro-batch.

    A hook on the output head selects the positions that predict a target from the head's input:
    no logits are computed for prompts and padding, and whatever a model does to its logits
    (soft-capping, scaling) still applies. The hook only changes the head's input, so it does not
    depend on the architecture and works with ZeRO-3's partitioned weights.
    """

    def __init__(self, model: nn.Module) -> None:
        """Register the hook.

        Args:
            model: the Hugging Face model itself, not the engine around it.

        Raises:
            ValueError: the model has no output head to hook.
        """
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(
                f"{type(model).__name__} has no output embeddings: not a causal language model"
            )
        self.expert_load = ExpertLoad(model)
        self.router_coefficient = _router_coefficient(model)
        """Coefficient of the router loss in the training loss."""
        self._positions: torch.Tensor | None = None  # int64 [targets], into examples x length
        head.register_forward_pre_hook(self._select)

    def _select(
        self, _head: nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        if self._positions is None:
            return None  # all logits outside of __call__, e.g. in generation
        hidden, *rest = inputs
        picked = hidden.flatten(0, 1).index_select(0, self._positions)
        return (picked.unsqueeze(0), *rest)  # [1, targets, hidden size]

    def __call__(self, forward: nn.Module, batch: MicroBatch) -> MicroLoss:
        """The losses, with a graph even if the micro-batch has no target.

        Args:
            forward: the engine (or the model) to call.
        """
        # transformers recognizes packed examples by their positions, but only without a mask and
        # without a cache; with either of them, examples silently attend to each other.
        if batch.position_ids is None:
            separation = {"attention_mask": batch.attention_mask}
        else:
            separation = {"position_ids": batch.position_ids}
        self._positions = batch.positions
        try:
            with self.expert_load.counting(batch):
                out = forward(input_ids=batch.input_ids, use_cache=False, **separation)
        finally:
            self._positions = None
        logits = out.logits  # [1, targets, vocabulary]
        if logits.shape[:2] != (1, len(batch.targets)):
            raise RuntimeError(
                "the logits did not come from the model's output head: cannot select positions"
            )
        cross_entropy = F.cross_entropy(logits[0].float(), batch.targets, reduction="sum")
        router = getattr(out, "aux_loss", None)
        if self.router_coefficient == 0 or not isinstance(router, torch.Tensor):
            return MicroLoss(cross_entropy, None)
        return MicroLoss(cross_entropy, router.float() * _real_tokens(batch))


def _router_coefficient(model: nn.Module) -> float:
    """transformers' coefficient of a model's router loss; 0 if the config asks for none."""
    text = model.config.get_text_config()
    if not getattr(text, "output_router_logits", False):
        return 0.0
    value = getattr(model, "router_aux_loss_coef", getattr(text, "router_aux_loss_coef", 0.0))
    return float(value or 0.0)


def _real_tokens(batch: MicroBatch) -> torch.Tensor | int:
    """Number of tokens without padding; 0 for filler, which unlike any example has no target."""
    if len(batch.targets) == 0:
        return 0
    return batch.input_ids.numel() if batch.attention_mask is None else batch.attention_mask.sum()
