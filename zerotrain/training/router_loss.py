"""The router loss of a mixture of experts, the same on any ranks and in any micro-batches.

It is transformers' load_balancing_loss_func. With E experts, of which a token chooses k per layer:

    loss = E * sum over experts e of f_e * P_e

    f_e    tokens that choose expert e, as a share of the tokens of all layers; all f_e sum to k
    P_e    the router's probability of e, as a mean over the tokens of all layers

Only P_e has a gradient. transformers takes both from a micro-batch, so the loss of a step depends
on how the step is cut. Here f_e comes from the last step whose update was applied, and all ranks
know it. The loss is then linear in the probabilities: its sum over micro-batches is exact. In the
first step each f_e is k / E, so the loss is k and has no gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zerotrain.model.probes import call_plainly, draw
from zerotrain.runtime.errors import UserError

# Names of the same values in models and configs of transformers.
COEFFICIENT = ("router_aux_loss_coef", "aux_loss_coef")
EXPERTS = ("num_experts", "num_local_experts")
TOP_K = ("num_experts_per_tok",)
# Largest relative difference from the model's own loss, whose probabilities may have 16 bits.
TOLERANCE = 0.02


class RouterLoss:
    """The router loss of a model, and the tally of what its routers choose."""

    def __init__(self, model: nn.Module) -> None:
        """Read the model's config. Without output_router_logits there is no router loss."""
        text = model.config.get_text_config()
        is_on = getattr(text, "output_router_logits", False)
        self.coefficient = float(_first(COEFFICIENT, model, text)) if is_on else 0.0
        """Coefficient of the router loss in the training loss; 0 if there is none."""
        self.experts = int(_first(EXPERTS, model, text)) if self.coefficient else 0
        self._top_k = int(_first(TOP_K, model, text))
        self.begin()

    def begin(self, counts: Sequence[int] = ()) -> None:
        """Begin a step, or an evaluation, with an empty tally.

        Args:
            counts: choices of each expert in the last step whose update was applied; empty if
                there is none, as if all were chosen equally often.

        Raises:
            UserError: the counts are not of this model's experts.
        """
        counts = counts or [1] * self.experts
        if self.experts and (len(counts) != self.experts or not any(counts)):
            raise UserError(
                f"trainer_state.json: progress.expert_counts: {len(counts)} numbers with sum "
                f"{sum(counts)} are not the counts of {self.experts} experts; use another "
                "checkpoint"
            )
        total = sum(counts)
        excess = [self.experts * count / total - 1 for count in counts[: self.experts]]
        self._weights = self._top_k * torch.tensor(excess)
        self.tally = torch.zeros(2, self.experts, dtype=torch.float64)
        """For each expert, how often it was chosen, and the sum of its probabilities, over the real
        tokens of all layers of this rank's micro-batches since `begin`.
        """

    def add(self, router_logits: Sequence[torch.Tensor], is_real: torch.Tensor) -> torch.Tensor:
        """Tally a micro-batch, and return its router loss times the number of its real tokens.

        Args:
            router_logits: of each layer, [examples * length, experts].
            is_real: bool [examples, length].
        """
        self.tally, self._weights = (x.to(is_real.device) for x in (self.tally, self._weights))
        real = is_real.reshape(-1, 1).float()
        mass = torch.zeros_like(self._weights)
        for logits in router_logits:
            probabilities = logits.flatten(0, -2).softmax(-1, dtype=torch.float32)
            mass = mass + (probabilities * real).sum(0)
            chosen = probabilities.topk(self._top_k).indices
            chosen = torch.zeros_like(probabilities).scatter_(1, chosen, real.expand_as(chosen))
            self.tally[0] += chosen.sum(0, dtype=torch.float64)
        self.tally[1] += mass.detach()
        # The weights are exactly 0, and so is the gradient, if all f_e are equal.
        return self._top_k * real.sum() + self._weights @ mass / len(router_logits)

    def of_tally(self, tally: torch.Tensor) -> float:
        """Return the router loss of tallied tokens with their own f_e.

        Args:
            tally: float64 [2, experts], perhaps a sum over ranks.
        """
        chosen, mass = tally
        return float(self.experts * self._top_k**2 * (chosen @ mass) / chosen.sum() ** 2)

    def check(self, engine: nn.Module, tokens: Sequence[int]) -> None:
        """Compare with the router loss that the model itself computes. All ranks call it.

        Args:
            engine: the engine (or the model) to call.
            tokens: ids to draw an input from.

        Raises:
            UserError: the model computes another router loss, or none.
        """
        if not self.coefficient:
            return
        out = call_plainly(engine, ids := draw(tokens, 2))
        own, logits = getattr(out, "aux_loss", None), getattr(out, "router_logits", None) or ()
        found = 0.0
        if isinstance(own, torch.Tensor) and all(x.shape[-1] == self.experts for x in logits):
            self.begin()
            self.add(logits, torch.ones_like(ids, dtype=torch.bool, device=own.device))
            found = self.of_tally(self.tally) / float(own)
        if not abs(found - 1) < TOLERANCE:  # NaN
            name = type(getattr(engine, "module", engine)).__name__
            raise UserError(
                f"model.name_or_path: {name} computes no router loss that is known here; set "
                "output_router_logits to false in its config.json, and train without one"
            )


def _first(names: Sequence[str], *owners: Any) -> float:
    """Return the first value that is there and not 0; otherwise 0."""
    found = (getattr(owner, name, None) for owner in owners for name in names)
    return next(filter(None, found), 0)
