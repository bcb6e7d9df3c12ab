"""A plain torch loop, with which the trainer is compared: one process, one row at a time.

It shares with the trainer only the rows' tokens, the choice of each step's rows, and the choice of
the parameters with weight decay.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from transformers import PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from zerotrain.config.schema import Config
from zerotrain.data.cache import TokenizedRows
from zerotrain.data.caches import open_caches
from zerotrain.data.epoch_order import EpochOrder
from zerotrain.model.architecture import auto_class
from zerotrain.model.load import load_model_config
from zerotrain.rows.tokenize import make_caches
from zerotrain.training.optimizer import is_decayed

Row = tuple[torch.Tensor, torch.Tensor]
"""Token ids, int64 [1, tokens], and their weights in the loss, float32 [1, tokens]."""


class PlainRun(NamedTuple):
    """The measurements of a plain loop."""

    losses: list[float]
    """Nats per supervised token, by step."""
    router_losses: list[float]
    """Router loss without its coefficient, by step; empty if the model has none."""
    grad_norms: list[float]
    """Norm before clipping, by step."""
    learning_rates: list[float]
    eval_losses: tuple[float, float]
    """Loss on all eval_sources before the first and after the last step; NaN without any."""
    weights: dict[str, nn.Parameter]
    """Weights after the last step, by name, fp32."""
    peaks: dict[str, torch.Tensor]
    """Largest magnitude of the gradient of each element, by name of a trained parameter."""


def train_plainly(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    eps: float = 1e-8,
    dtype: torch.dtype | None = None,
) -> PlainRun:
    """Train in fp32 on the CPU with AdamW and a linear schedule.

    Args:
        prepare: edits the model and returns it. With nn.Module.double, the loop runs in float64.
        eps: eps of AdamW.
        dtype: a step computes with weights rounded to this type, as in mixed precision.
    """
    train = config.train
    make_caches(config)
    rows, *eval_sets = map(read_rows, open_caches(config, tokenizer))
    # Every supervised token of a held-out row counts once, whatever its weight.
    held_out = [(ids, (weights > 0).float()) for ids, weights in chain(*eval_sets)]
    model = auto_class(load_model_config(config.model)).from_pretrained(
        config.model.name_or_path,
        dtype=torch.float32,
        trust_remote_code=config.model.trust_remote_code,
    )
    model = prepare(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    peaks = {name: torch.zeros_like(p) for name, p in trained.items()}
    groups = [
        {"params": [p], "weight_decay": train.weight_decay if is_decayed(name, p) else 0.0}
        for name, p in trained.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=train.adam_betas, eps=eps)
    lengths = np.array([ids.shape[1] for ids, _ in rows])
    order = EpochOrder(lengths, train.seed, train.global_batch_size, train.global_batch_tokens)
    per_epoch = order.steps_per_epoch
    steps = train.steps or train.epochs * per_epoch
    warmup = -(-train.warmup_examples // train.global_batch_size)
    losses, norms, rates = [], [], []
    router_loss = PlainRouterLoss(model)
    before = mean_loss(model, held_out)
    for k in range(steps):
        chosen = order.examples(*divmod(k, per_epoch))
        optimizer.zero_grad()
        router_loss.begin(lengths[chosen].sum())
        with rounded(model, dtype):
            losses.append(mean_loss(model, [rows[i] for i in chosen], router_loss))
        # fp64: torch's own fp32 norm is off by 1e-3 on CPU for some million elements.
        gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
        for name, gradient in gradients.items():
            peaks[name] = torch.maximum(peaks[name], gradient.abs())
        norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
        norms.append(norm.item())
        clip_grads_with_norm_(trained.values(), train.gradient_clipping or math.inf, norm)
        # The rate rises from 1/warmup to 1, then falls to 1/(steps + 1 - warmup).
        factor = min((k + 1) / warmup, (steps - k) / (steps + 1 - warmup))
        rates.append(train.learning_rate * factor)
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        optimizer.step()
    evals = before, mean_loss(model, held_out)
    weights = dict(model.named_parameters())
    return PlainRun(losses, router_loss.values, norms, rates, evals, weights, peaks)


class PlainRouterLoss:
    """The router loss of whole steps, by transformers' formula, with the numbers of tokens per
    expert from the step before; in the first step all are equal.
    """

    def __init__(self, model: nn.Module) -> None:
        text = model.config.get_text_config()
        self.values: list[float] = []
        self.coefficient = 0.0
        if getattr(text, "output_router_logits", False):
            name = "aux_loss_coef" if hasattr(model, "aux_loss_coef") else "router_aux_loss_coef"
            self.coefficient = getattr(model, name, None) or getattr(text, name, 0.0)
            name = "num_experts_per_tok"
            self.top_k = getattr(model, name, None) or getattr(text, name)
            self.counts = torch.ones(1)

    def begin(self, tokens: int) -> None:
        """Begin a step of so many tokens."""
        if self.coefficient:
            self.tokens, self.last, self.counts = tokens, self.counts, torch.zeros(1)
            self.values.append(0.0)

    def __call__(self, out: ModelOutput) -> torch.Tensor | float:
        """Return a row's part of the step's router loss, times the coefficient."""
        if not self.coefficient:
            return 0.0
        each = torch.cat([logits.softmax(-1) for logits in out.router_logits])
        experts = each.shape[1]  # each: probabilities, [layers * tokens, experts]
        self.counts = self.counts + F.one_hot(each.topk(self.top_k).indices, experts).sum((0, 1))
        shares = self.top_k * self.last / self.last.expand(experts).sum()
        means = each.sum(0) / (len(out.router_logits) * self.tokens)
        loss = experts * (shares * means).sum()
        self.values[-1] += loss.item()
        return self.coefficient * loss


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """A context in which the model computes with its weights rounded to a type."""
    masters = [(p, p.data) for p in model.parameters()]
    for p, data in masters:
        p.data = data.to(dtype or data.dtype).to(data)
    yield
    for p, data in masters:
        p.data = data


def read_rows(cache: TokenizedRows) -> list[Row]:
    """Return all examples of a cache."""
    rows = []
    for i, (ids, mask) in enumerate(map(torch.from_numpy, cache.fetch(np.arange(len(cache))))):
        weights = mask.float()
        for given in cache.of_targets(np.array([i]))[1:]:  # none if all weights are 1
            weights[mask > 0] = torch.from_numpy(given)
        rows.append((ids[None], weights[None]))
    return rows


def mean_loss(
    model: nn.Module, rows: list[Row], router_loss: PlainRouterLoss | None = None
) -> float:
    """Return the mean cross entropy of supervised tokens, weighted. With a router loss, also
    accumulate the gradients of both.
    """
    weight = sum(weights[0, 1:].double().sum().item() for _, weights in rows)
    total = 0.0 if rows else float("nan")
    for ids, weights in rows:
        with torch.set_grad_enabled(router_loss is not None):
            out = model(input_ids=ids, use_cache=False)
            logits = out.logits[0, :-1]
            wanted = weights[0, 1:] > 0
            each = F.cross_entropy(logits[wanted], ids[0, 1:][wanted], reduction="none")
            loss = (each * weights[0, 1:][wanted]).sum() / weight
        if router_loss:
            (loss + router_loss(out)).backward()
        total += loss.item()
    return total
