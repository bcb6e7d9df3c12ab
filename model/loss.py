"""Cross entropy summed over supervised tokens, with logits for only those positions, a chunk at a
time; and the router loss of a mixture of experts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy
from torch import nn

from data.loader import MicroBatch
from model.experts import ExpertLoad
from model.leaf import gather_at_once
from model.logits import LogitsRecorder, chunked_loss, join
from model.probes import draw, is_exact

# Largest relative difference of the loss over chunks: the order of sums in fp32; other kernels for
# other numbers of positions, which round each logit to 8 bits in bf16.
SAME_LOSS = {True: 1e-5, False: 1e-2}


class MicroLoss(NamedTuple):
    """Losses of one micro-batch: float32 scalars with an autograd graph."""

    cross_entropy: torch.Tensor
    """Sum of -log p(target)."""
    router: torch.Tensor | None
    """Load-balancing loss of the experts, without its coefficient, times the number of tokens
    (without padding) that it is a mean over; None if the model's config does not ask for it.
    """


class _Chunks(NamedTuple):
    """How the loss is computed over chunks."""

    tokens: int
    vocabulary_size: int
    """Of the head's logits; a model may use fewer."""
    behind_head: Callable[[torch.Tensor], torch.Tensor]
    """What the model does to the head's logits, [1, positions, vocabulary]."""


class SupervisedLoss:
    """Cross entropy of a causal language model, summed over the targets of a micro-batch.

    The forward method of the output head is replaced by one that selects the positions that predict
    a target: no logits are computed for prompts and padding. After use_chunks it computes the loss
    of these positions too, which the model then returns in place of its logits: only one chunk of
    logits exists at a time, and ZeRO-3 gathers the head once. Whatever the model does to its logits
    (soft caps, scaling) still applies.
    """

    def __init__(self, model: nn.Module) -> None:
        """Replace the method; to be called before deepspeed.initialize.

        Args:
            model: the Hugging Face model itself, not the engine around it.

        Raises:
            ValueError: the model has no output head.
        """
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(
                f"{type(model).__name__} has no output embeddings: not a causal language model"
            )
        self.expert_load = ExpertLoad(model)
        self.router_coefficient = _router_coefficient(model)
        """Coefficient of the router loss in the training loss."""
        self._model, self._head, self._logits_of_head = model, head, head.forward
        self._batch: MicroBatch | None = None  # of the current call
        self._loss: torch.Tensor | None = None  # of the current call, from head to model
        self._recorder: LogitsRecorder | None = None
        self._chunks: _Chunks | None = None
        head.forward = self._forward_head
        # before the hooks of ZeRO-3, which replace the output by a copy
        model.register_forward_hook(self._leave_model)
        self._is_shared = len(list(head.children())) > 0 and _shares_weights(model, head)
        if len(list(head.children())) > 0 and not self._is_shared:
            gather_at_once(head)  # LoRA on the head: not again for each chunk

    def use_chunks(
        self, forward: nn.Module, tokens: Sequence[int], device: torch.device, chunk_tokens: int
    ) -> str | None:
        """Compute the loss over chunks of this many targets from now on, if the model allows it.

        What the model does to its logits is recorded in a short forward pass. Then, on other
        tokens, the loss has to be the same both ways. To be called by all ranks, after
        deepspeed.initialize.

        Args:
            forward: the engine (or the model) to call.
            tokens: ids to draw inputs from.

        Returns:
            Why the loss still needs whole logits; None if it does not.
        """
        if self._is_shared:
            return "the output head shares weights that are trained, and has submodules"
        batches = [_all_targets(ids).to(device) for ids in draw(tokens, device, 20, 31)]
        recorder = self._recorder = LogitsRecorder(self._model.buffers())
        # behind the hooks of ZeRO-3, which replace the output by a copy
        hook = self._head.register_forward_hook(lambda _head, _inputs, out: recorder.start(out))
        was_training = forward.training
        forward.eval()
        try:
            with torch.no_grad():
                self(forward, batches[0])
                hook.remove()
                self._recorder = None
                if (behind_head := recorder.replay()) is None:
                    return "it does more to its logits than functions of each of them alone"
                whole = self(forward, batches[1]).cross_entropy
                self._chunks = _Chunks(7, recorder.vocabulary_size, behind_head)
                chunked = self(forward, batches[1]).cross_entropy
        finally:
            forward.train(was_training)
        difference = abs(float(chunked / whole) - 1)
        if not difference < SAME_LOSS[is_exact(forward)]:
            self._chunks = None
            return f"over chunks it differs by {difference:.1e}"
        self._chunks = self._chunks._replace(tokens=chunk_tokens)
        return None

    @staticmethod
    def _loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of some positions: cross entropy, summed in fp32 over int64 targets [n], of
        logits [n, vocabulary]. On CUDA a kernel reads the logits once in each direction.
        """
        return chunked_cross_entropy(logits, targets, reduction="sum")

    def _forward_head(self, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        """In place of the head's forward: the logits, [1, targets, vocabulary], or a stand-in."""
        if self._batch is None:  # outside of __call__, e.g. in generation
            return self._logits_of_head(hidden, *rest)
        picked = hidden.flatten(0, 1).index_select(0, self._batch.positions)[None]
        if self._chunks is None:
            return self._logits_of_head(picked, *rest)
        behind_head = self._chunks.behind_head

        def loss_of(part: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self._loss_of(behind_head(self._logits_of_head(part[None], *rest))[0], targets)

        self._loss, stand_in = chunked_loss(
            loss_of, picked[0], self._batch.targets, self._head, self._chunks.tokens,
            self._chunks.vocabulary_size,
        )  # fmt: skip
        return stand_in

    def _leave_model(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        if self._recorder is not None:
            self._recorder.stop(output.logits)
        if self._loss is not None:
            # a part of the output, because DeepSpeed prepares its backward pass by hooks on it
            output["logits"], self._loss = join(self._loss, output.logits), None

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
        self._batch = batch
        try:
            with self.expert_load.counting(batch):
                out = forward(input_ids=batch.input_ids, use_cache=False, **separation)
        finally:
            self._batch = None
        cross_entropy = out.logits  # [], or [1, targets, vocabulary]
        if cross_entropy.shape[:2] != ((1, len(batch.targets)) if self._chunks is None else ()):
            raise RuntimeError(
                "the logits did not come from the model's output head: cannot select positions"
            )
        if self._chunks is None:
            cross_entropy = self._loss_of(out.logits[0], batch.targets)
        router = getattr(out, "aux_loss", None)
        if self.router_coefficient == 0 or not isinstance(router, torch.Tensor):
            return MicroLoss(cross_entropy, None)
        return MicroLoss(cross_entropy, router.float() * _real_tokens(batch))


def _shares_weights(model: nn.Module, module: nn.Module) -> bool:
    """Whether a trained parameter of a module belongs to another part of the model too."""
    inside = set(module.modules())
    elsewhere = {id(p) for m in model.modules() if m not in inside for p in m.parameters(False)}
    return any(p.requires_grad and id(p) in elsewhere for p in module.parameters())


def _all_targets(ids: torch.Tensor) -> MicroBatch:
    """One example, int64 [1, length], of which every token but the first is a target."""
    is_target = np.arange(ids.shape[1])[None] > 0
    ids = ids.cpu().numpy()
    return MicroBatch.of(ids, is_target, attention_mask=np.ones_like(ids))


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
