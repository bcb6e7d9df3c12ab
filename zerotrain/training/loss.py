"""Cross entropy summed over supervised tokens, with logits for only those positions, a chunk at a
time; and the router loss of a mixture of experts.

The order of calls in one micro-batch of S positions, of which n predict a target, hidden size h:

    SupervisedLoss(engine, batch)
      engine(input_ids)               all layers on [rows, S]: hidden states [rows, S, h]
        _before_head                  keeps their n states [n, h]; the head gets zeros [1, 1, h]
        head                          logits of the zeros; under ZeRO 3 its weights are gathered now
        _after_head                   _ChunkedLoss: loss and gradients of the n states, chunk by
                                      chunk, by calling head.forward; the head returns zeros
      loss + logits.sum()             adds 0; joins the loss to the output that DeepSpeed hooks
    engine.backward(loss)             _ChunkedLoss hands on the gradients that it has computed

So the logits [n, vocabulary] never exist as a whole, and the weights are used where they are.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy
from torch import nn

from zerotrain.data.loader import MicroBatch
from zerotrain.model.probes import compute_logits, draw

LOGIT_FUNCTIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "final_logit_softcapping": lambda logits, cap: torch.tanh(logits / cap) * cap,  # Gemma
    "logits_scaling": torch.div,  # Granite
    "logit_scale": torch.mul,  # Cohere
    "lm_head_multiplier": torch.mul,  # Falcon-H1
}
"""What models do to the logits of their output head, by the config key of the number."""


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

    Hooks on the output head select the positions that predict a target, and compute the loss there,
    where ZeRO-3 has gathered the head's weights, with the logits of one chunk of positions at a
    time. The order matters: these hooks run before those of ZeRO-3, which release the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk_tokens: int = 0,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Register the hooks; to be called after deepspeed.initialize, since tensor parallelism
        replaces the head.

        Args:
            model: the Hugging Face model itself, not the engine around it.
            chunk_tokens: targets per chunk; 0: all at once.
            sequence_group: the ranks that get the other parts of a micro-batch.
        """
        self.router_coefficient = _router_coefficient(model)
        """Coefficient of the router loss in the training loss."""
        config = model.config.get_text_config()
        values = {name: getattr(config, name, None) for name in LOGIT_FUNCTIONS}
        self._functions = [
            (LOGIT_FUNCTIONS[name], value) for name, value in values.items() if value is not None
        ]
        self._model = model
        self._head = model.get_output_embeddings()
        self._chunk_tokens = chunk_tokens
        self._sequence_group = sequence_group
        self._takes_whole_logits = False
        # of the current call
        self._batch: MicroBatch | None = None
        self._hidden: torch.Tensor | None = None
        self._loss: torch.Tensor | None = None
        self._head.register_forward_pre_hook(self._before_head, prepend=True)
        self._head.register_forward_hook(self._after_head, prepend=True)

    def check(self, engine: nn.Module, tokens: Sequence[int], device: torch.device) -> str | None:
        """Compare what the model makes of its head's logits with LOGIT_FUNCTIONS; if it is
        something else, take whole logits from now on. To be called by all ranks.

        Args:
            tokens: ids to draw inputs from.

        Returns:
            Why the loss needs whole logits; None if it does not.
        """
        of_head: list[torch.Tensor] = []
        hook = self._head.register_forward_hook(
            lambda _head, _args, logits: of_head.append(self._finish(logits).float())
        )
        [ids] = draw(tokens, device, 20)
        final = compute_logits(engine, ids)
        hook.remove()
        name = type(self._model).__name__
        if list(self._head.children()):
            problem = f"the output head of {name} has adapters"
        elif [logits.shape for logits in of_head] == [final.shape] and torch.allclose(
            of_head[0], final, rtol=1e-5
        ):
            return None
        else:
            problem = f"what {name} does to its logits is not in LOGIT_FUNCTIONS"
        self._takes_whole_logits = True
        return problem

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model returns for these logits of its head."""
        for function, value in self._functions:
            logits = function(logits, value)
        return logits

    def _loss_of_chunk(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of a few positions, from the head's input, [n, hidden size]."""
        logits = self._finish(self._head.forward(hidden[None]))
        return _sum_cross_entropy(logits.squeeze(0), targets)

    def _before_head(self, _head: nn.Module, args: tuple) -> tuple | None:
        if self._batch is None:  # outside of __call__, e.g. in generation
            return None
        self._hidden = args[0].flatten(0, 1).index_select(0, self._batch.positions)
        # The head runs on a position of zeros. Its input needs a gradient, by which ZeRO-3 knows
        # that the backward pass of the head is done.
        size = (1, 1, self._hidden.shape[-1])
        return (self._hidden.new_zeros(size, requires_grad=torch.is_grad_enabled()), *args[1:])

    def _after_head(
        self, head: nn.Module, args: tuple, logits: torch.Tensor
    ) -> torch.Tensor | None:
        if self._hidden is None:
            return None
        hidden = self._hidden
        self._hidden = None
        targets = self._batch.targets
        weights = [p for p in head.parameters() if p.requires_grad]
        self._loss, zeros = _ChunkedLoss.apply(
            self._loss_of_chunk, self._chunk_tokens or max(1, len(targets)), targets,
            logits.detach(), args[0], hidden, *weights,
        )  # fmt: skip
        return zeros

    def __call__(self, engine: nn.Module, batch: MicroBatch) -> MicroLoss:
        """The losses, with a graph even if the micro-batch has no target.

        Args:
            engine: the engine (or the model) to call.
        """
        # transformers recognizes packed examples by their positions, but only without a mask and
        # without a cache; with either of them, examples silently attend to each other.
        if batch.position_ids is None:
            separation = {"attention_mask": batch.attention_mask}
        else:
            separation = {"position_ids": batch.position_ids}
        if self._sequence_group is not None:  # for packed_attention
            separation["sequence_group"] = self._sequence_group
        self._batch = None if self._takes_whole_logits else batch
        try:
            out = engine(input_ids=batch.input_ids, use_cache=False, **separation)
            # The logits are those of the zeros: 0, but DeepSpeed prepares its backward pass by
            # hooks on the model's output.
            loss = None if self._loss is None else self._loss + out.logits.sum()
        finally:
            self._batch = self._hidden = self._loss = None
        if loss is None:
            selected = out.logits.flatten(0, 1).index_select(0, batch.positions)
            loss = _sum_cross_entropy(selected, batch.targets)
        router = getattr(out, "aux_loss", None)
        if self.router_coefficient == 0 or not isinstance(router, torch.Tensor):
            return MicroLoss(loss, None)
        return MicroLoss(loss, router.float() * _real_tokens(batch))


def _sum_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of logits [n, vocabulary], in fp32. On CUDA by a kernel that reads the logits once in each
    direction; on CPU torch's own takes .6 of its time.
    """
    if logits.is_cuda:
        return chunked_cross_entropy(logits, targets, reduction="sum")
    return F.cross_entropy(logits.float(), targets, reduction="sum")


class _ChunkedLoss(torch.autograd.Function):
    """A loss summed over positions, with the logits of one chunk at a time.

    The gradients are computed chunk by chunk in the forward pass, as in Liger Kernel
    (arXiv:2410.10989), and multiplied by that of the loss in the backward pass. Those of the head's
    parameters are summed in fp32, whatever their type.

    Returns the loss, and zeros in place of the head's output: ZeRO-3's hook on that output gathers
    the weights before this function's backward pass, which waits for the gradients of both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        chunk_tokens: int,
        targets: torch.Tensor,
        logits: torch.Tensor,
        head_input: torch.Tensor,
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden.new_zeros((), dtype=torch.float32)
        chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
        if not any(ctx.needs_input_grad):
            return total + sum(loss_of(*chunk) for chunk in chunks), torch.zeros_like(logits)
        of_hidden = []
        of_weights = [torch.zeros_like(w, dtype=torch.float32) for w in weights]
        for part, its_targets in chunks:
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_of(part, its_targets)
            of_part, *others = torch.autograd.grad(loss, (part, *weights), materialize_grads=True)
            total += loss.detach()
            of_hidden.append(of_part)
            for gradient, other in zip(of_weights, others, strict=True):
                gradient.add_(other)
        # In fp32, since in bf16 the gradient of the loss itself would be rounded, by up to .4 %.
        ctx.gradients = [torch.cat(of_hidden).float(), *of_weights]
        ctx.dtypes = [tensor.dtype for tensor in (hidden, *weights)]
        ctx.of_input = torch.zeros_like(head_input)
        return total, torch.zeros_like(logits)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_loss: torch.Tensor, _of_logits: torch.Tensor) -> tuple[Any, ...]:
        scaled = [g.mul_(of_loss).to(d) for g, d in zip(ctx.gradients, ctx.dtypes, strict=True)]
        return (None, None, None, None, ctx.of_input, *scaled)


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
