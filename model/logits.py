"""Logits in chunks: what a model does to its logits behind the output head, and a loss over a
chunk of positions at a time.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

SAMPLE = 3  # positions on which a recording is tried


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor that depends on the logits."""

    index: int


class _Operation(NamedTuple):
    """A call of a torch function."""

    function: Callable
    arguments: tuple[tuple, dict[str, Any]]
    """Positional and keyword ones."""
    outputs: list[int]
    """Slots of the tensors that it returns."""


class LogitsRecorder(TorchFunctionMode):
    """Records the torch functions that are called on the output head's logits, or on what comes of
    them, while it is active: soft caps, scales, masks, a shorter vocabulary, a change of type.
    """

    def __init__(self, constants: Iterable[torch.Tensor]) -> None:
        """Args:
        constants: tensors that may be combined with logits: the model's buffers. Any other one
            could be a parameter, or depend on the input.
        """
        super().__init__()
        self._constants = {tensor.untyped_storage().data_ptr() for tensor in constants}
        self._tensors: list[torch.Tensor] = []  # kept, so that no other one gets the same id
        self._slots: dict[int, int] = {}
        self._operations: list[_Operation] = []
        self._is_complete = True

    def start(self, logits: torch.Tensor) -> None:
        """Record from here on.

        Args:
            logits: the output head's, [1, positions, vocabulary], of more than SAMPLE positions.
        """
        if self._tensors:  # a second call of the head
            self._is_complete = False
            return
        self._add(logits)
        self._sample = logits[:, :SAMPLE].clone()  # the model may change logits in place
        self.vocabulary_size = logits.shape[-1]
        self.__enter__()

    def stop(self, final: torch.Tensor) -> None:
        """Stop recording.

        Args:
            final: the logits that the model returns, [1, positions, vocabulary].
        """
        if not self._tensors:
            self._is_complete = False
            return
        self.__exit__(None, None, None)
        self._final = final

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        arguments = tree_map(self._slot, (args, kwargs or {}))
        leaves = tree_leaves(arguments)
        if any(isinstance(leaf, _Slot) for leaf in leaves):
            self._is_complete &= all(
                leaf.untyped_storage().data_ptr() in self._constants for leaf in _tensors(leaves)
            )
            outputs = [self._add(leaf) for leaf in _tensors(result)]
            self._operations.append(_Operation(function, arguments, outputs))
        return result

    def _slot(self, value: Any) -> Any:
        known = isinstance(value, torch.Tensor) and id(value) in self._slots
        return _Slot(self._slots[id(value)]) if known else value

    def _add(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._slots:  # an operation in place returns its argument
            self._slots[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        return self._slots[id(tensor)]

    def replay(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function that does to the head's logits of any positions what the model does, both
        [1, positions, vocabulary]; None if what was recorded is not enough for that.
        """
        if not self._is_complete or id(self._final) not in self._slots:
            return None
        operations, last = self._operations, self._slots[id(self._final)]

        def repeat(logits: torch.Tensor) -> torch.Tensor:
            values = {0: logits}

            def value_of(leaf: Any) -> Any:
                return values[leaf.index] if isinstance(leaf, _Slot) else leaf

            for function, arguments, outputs in operations:
                args, kwargs = tree_map(value_of, arguments)
                values.update(zip(outputs, _tensors(function(*args, **kwargs)), strict=True))
            return values[last]

        # Functions of each logit alone give the same on some of the positions; others differ, or
        # fail with any exception.
        with suppress(Exception), torch.no_grad():
            ours, its = repeat(self._sample), self._final[:, :SAMPLE]
            if ours.shape == its.shape and torch.allclose(ours.float(), its.float(), rtol=1e-5):
                return repeat
        return None


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def chunked_loss(
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: nn.Module,
    chunk_tokens: int,
    vocabulary_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss summed over targets, with the logits of one chunk of positions at a time.

    In training, the gradients are computed chunk by chunk in the forward pass, as in Liger Kernel
    (arXiv:2410.10989), and only multiplied by that of the loss in the backward pass. Those of the
    head's parameters are summed in fp32, whatever their type. DeepSpeed's
    vocab_parallel_linear_cross_entropy needs no logits either, but computes the head's product
    twice, and knows neither soft caps nor LoRA on the head.

    Args:
        loss_of: the head and what follows it: its input, [n, hidden size], and int64 targets, [n],
            -> the sum of their losses, float32.
        hidden: the head's input, [targets, hidden size].
        targets: int64 [targets].
        head: the module whose parameters loss_of uses.
        vocabulary_size: of the stand-in.

    Returns:
        The loss, a float32 scalar whose backward pass can run once, and zeros [1, 1, vocabulary] to
        stand in for the head's output: see join.
    """
    stand_in = hidden.new_zeros(1, 1, vocabulary_size)
    if torch.is_grad_enabled():
        weights = [p for p in head.parameters() if p.requires_grad]
        return _ChunkedLoss.apply(loss_of, targets, chunk_tokens, stand_in, hidden, *weights)
    parts = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    return torch.stack([loss_of(*part) for part in parts]).sum(), stand_in


def join(loss: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    """The loss, with a gradient of zeros for what has become of the stand-in. DeepSpeed's hooks on
    the head's output, which gather its weight and reduce its gradient, run on that way.
    """
    return _Join.apply(loss, stand_in)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
        ctx.zeros = torch.zeros_like(stand_in)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, of_loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return of_loss, ctx.zeros


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        targets: torch.Tensor,
        chunk_tokens: int,
        stand_in: torch.Tensor,
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden.new_zeros((), dtype=torch.float32)
        of_hidden = torch.empty_like(hidden)
        of_weights = [
            torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights
        ]
        chunks = (tensor.split(chunk_tokens) for tensor in (hidden, targets, of_hidden))
        for part, its_targets, of_part in zip(*chunks, strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_of(part, its_targets)
            of_input, *others = torch.autograd.grad(loss, (part, *weights), materialize_grads=True)
            total += loss.detach()
            of_part.copy_(of_input)
            for gradient, other in zip(of_weights, others, strict=True):
                gradient.add_(other)
        ctx.gradients = (of_hidden, *of_weights)
        ctx.dtypes = [tensor.dtype for tensor in (hidden, *weights)]
        return total, stand_in.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_loss: torch.Tensor, _of_stand_in: torch.Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        # In fp32 at least: in bf16 of_loss itself would be rounded, by up to .4 %.
        wide = (g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients)
        scaled = (g.mul_(of_loss).to(d) for g, d in zip(wide, ctx.dtypes, strict=True))
        return (None, None, None, None, *scaled)
