"""Cross entropy summed over supervised tokens, perhaps weighted, with logits for their positions
only, chunk by chunk; and the router loss of a mixture of experts.

The order of calls in one micro-batch of S positions, n of which predict a target; hidden size h:

    SupervisedLoss(engine, batch)
      engine(input_ids)              all layers, on [rows, S]: hidden states [rows, S, h]
        select()    before the head  keeps the n states that predict a target, [n, h]; the head gets
                                     one position of zeros, [1, 1, h], in their place
        head                         logits of the zeros; under ZeRO-3 its weights are gathered now
        compute()   after the head   _ChunkedLoss: loss and gradients of the n states, chunk by
                                     chunk, by head.forward; the head's output is zeros [1, 1, V]
      loss + logits.sum()            adds 0: DeepSpeed needs a loss with the graph of its output
    engine.backward(loss)            _ChunkedLoss passes on the gradients that it has computed

So full logits [n, V] over the vocabulary V never exist. ZeRO-3 gathers the head's weights once per
micro-batch, and they are used there; calling the head for each chunk would gather them again.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy
from torch import nn

from zerotrain.data.loader import MicroBatch
from zerotrain.model.hub import summarize
from zerotrain.model.packing import attend_within
from zerotrain.model.probes import compute_logits
from zerotrain.runtime.errors import UserError
from zerotrain.training.router_loss import RouterLoss

CHUNK_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Most targets whose logits exist at the same time. Each chunk reads and writes the sum of the
head's gradients, so on a GPU larger chunks cost less.
"""
CHUNK_LOGITS = 2**28
"""Most logits that exist at the same time: with their gradients 3 GiB."""
LOGIT_FUNCTIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "final_logit_softcapping": lambda logits, cap: torch.tanh(logits / cap) * cap,  # Gemma
    "logits_scaling": torch.div,  # Granite
    "logit_scale": torch.mul,  # Cohere
    "lm_head_multiplier": torch.mul,  # Falcon-H1
}
"""The functions that models apply to the logits of their output head, by the config key of the
number.
"""


class MicroLoss(NamedTuple):
    """Losses of one micro-batch, float32 scalars."""

    cross_entropy: torch.Tensor
    """Sum of -log p(target), times the target's weight if the batch has weights."""
    router: torch.Tensor
    """Router loss of the experts, without its coefficient, times the number of real tokens. 0 if
    the model's config does not ask for it.
    """


def chunk_size(device: str, vocabulary: int) -> int:
    """Return how many targets have logits at the same time, on cpu or cuda."""
    return min(CHUNK_TOKENS[device], CHUNK_LOGITS // vocabulary)


class SupervisedLoss:
    """Cross entropy of a causal language model, summed over the targets of a micro-batch."""

    def __init__(
        self,
        model: nn.Module,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Call it after deepspeed.initialize, since tensor parallelism replaces the head.

        Args:
            model: the Hugging Face model itself, not the engine around it.
            sequence_group: the ranks that get the other slices of a micro-batch.
        """
        self.router_loss = RouterLoss(model)
        self.by_source: torch.Tensor | None = None
        """float64 [sources]. If it is set, the cross entropy of each source is added to it."""
        self._model = model
        self._head = model.get_output_embeddings()
        self._sequence_group = sequence_group
        self._backend = "auto"
        self._takes_full_logits = False

    def check(self, engine: nn.Module) -> str | None:
        """Feed constant logits through the model to see what it does after its head. If that is
        not in LOGIT_FUNCTIONS, take full logits from now on. All ranks call it.

        Returns:
            Why the loss needs full logits, or has no fast kernel on CUDA; None if neither.

        Raises:
            UserError: the head gets other states than one of each token, as ProphetNet's does.
        """
        # Scales and soft caps change a 2. The ids do not matter, since their logits are replaced.
        ids = torch.zeros(1, 20, dtype=torch.int64)
        taken = []

        def constant(_head: nn.Module, args: tuple, logits: torch.Tensor) -> torch.Tensor:
            taken.append(args[0].shape[:-1])
            return torch.full_like(logits, 2)

        with self._head.register_forward_hook(constant):
            final = compute_logits(engine, ids)
        if taken not in ([], [ids.shape]):
            raise UserError(
                f"model.name_or_path: {type(self._model).__name__} cannot be trained: its output "
                "head does not get one state of each token; use another model"
            )
        dtype = next(self._head.parameters()).dtype
        expected = self._finish(torch.full_like(final, 2, dtype=dtype)).float()
        is_known = torch.allclose(final, expected, rtol=1e-5)
        self._takes_full_logits = not is_known or any(self._head.children())
        problem = None
        if final.is_cuda:
            try:
                self._sum_cross_entropy(final[0], ids[0].to(final.device), ids[0])
            except Exception as error:  # a compiler's errors have many types
                self._backend = "torch"
                problem = f"Triton needs gcc and Python's headers (python3-dev): {summarize(error)}"
        if self._takes_full_logits:
            problem = (
                f"{type(self._model).__name__} changes the logits of its output head, or has "
                "adapters on it"
            )
        return problem

    def __call__(
        self,
        engine: nn.Module,
        batch: MicroBatch,
        at_head: Callable[[], None] = lambda: None,
    ) -> MicroLoss:
        """Compute the losses of a micro-batch, with a graph even if it has no target.

        Args:
            engine: the engine (or the model) to call.
            batch: on any device.
            at_head: called after the layers, before the output head's logits and loss.
        """
        batch = batch.to(engine.device)
        hidden = []
        losses = []

        def select(_head: nn.Module, args: tuple) -> tuple:
            hidden.append(args[0].flatten(0, 1).index_select(0, batch.positions))  # [n, h]
            # By the zeros' gradient ZeRO-3 knows that the backward pass of the head is done.
            size = (1, 1, hidden[0].shape[-1])
            return (hidden[0].new_zeros(size, requires_grad=torch.is_grad_enabled()), *args[1:])

        def compute(head: nn.Module, args: tuple, logits: torch.Tensor) -> torch.Tensor:
            # Weights are arguments because autograd only asks for gradients of arguments. There
            # are none in an evaluation: the function then knows that it needs no gradient.
            weights = [p for p in head.parameters() if torch.is_grad_enabled() and p.requires_grad]
            at_head()
            loss, zeros = _ChunkedLoss.apply(
                self._loss_of_chunk, chunk_size(logits.device.type, logits.shape[-1]),
                (batch.targets, *batch.of_targets),
                logits.detach(), *args[:1], *hidden, *weights,
            )  # fmt: skip
            losses.append(loss)
            return zeros

        with ExitStack() as stack:
            inputs = stack.enter_context(attend_within(batch, self._sequence_group))
            if not self._takes_full_logits:
                # With prepend, `compute` runs before ZeRO-3's hook that releases the weights.
                stack.enter_context(self._head.register_forward_pre_hook(select, prepend=True))
                stack.enter_context(self._head.register_forward_hook(compute, prepend=True))
            out = engine(input_ids=batch.input_ids, use_cache=False, **inputs)
        if losses:
            loss = losses[0] + out.logits.sum()  # adds 0, with the graph of the engine's output
        else:
            at_head()
            logits = out.logits.flatten(0, 1).index_select(0, batch.positions)
            loss = self._sum_cross_entropy(logits, batch.targets, *batch.of_targets)
        if not self.router_loss.coefficient:
            return MicroLoss(loss, torch.zeros_like(loss))
        return MicroLoss(loss, self.router_loss.add(out.router_logits, batch.is_real))

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the model's logits for the logits of its head."""
        config = self._model.config.get_text_config()
        for name, function in LOGIT_FUNCTIONS.items():
            value = getattr(config, name, None)
            logits = logits if value is None else function(logits, value)
        return logits

    def _loss_of_chunk(self, hidden: torch.Tensor, *of_targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of some positions from the head's input, [positions, h]."""
        logits = self._finish(self._head.forward(hidden[None]))
        return self._sum_cross_entropy(logits.squeeze(0), *of_targets)

    def _sum_cross_entropy(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        sources: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss of logits [positions, V], in fp32, and add it to `by_source`.

        On CUDA a kernel reads the logits once in each direction. On CPU torch's own functions take
        0.6 of the time of DeepSpeed's.
        """
        if logits.is_cuda:
            each = chunked_cross_entropy(logits, targets, reduction="none", backend=self._backend)
            total = each.sum()
        else:
            log_p = F.log_softmax(logits.float(), -1)
            each, total = (F.nll_loss(log_p, targets, reduction=kind) for kind in ("none", "sum"))
        if weights:
            each = each * weights[0]
            total = each.sum()
        if self.by_source is not None:
            self.by_source.index_add_(0, sources.long(), each.detach().double())
        return total


class _ChunkedLoss(torch.autograd.Function):
    """A loss summed over positions, with the logits of one chunk at a time.

    The forward pass computes the gradients chunk by chunk, as in Liger Kernel (arXiv:2410.10989).
    The backward pass multiplies them by the gradient of the loss. The gradients of the head's
    parameters are summed in fp32, whatever type the parameters have.

    Returns the loss, and zeros instead of the head's output. ZeRO-3's hook on that output gathers
    the weights before this function's backward pass, which waits for the gradients of both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[..., torch.Tensor],
        chunk_tokens: int,
        of_targets: tuple[torch.Tensor, ...],
        logits: torch.Tensor,
        head_input: torch.Tensor,
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden.new_zeros((), dtype=torch.float32)
        chunks = zip(*(x.split(chunk_tokens) for x in (hidden, *of_targets)), strict=True)
        if not any(ctx.needs_input_grad):  # in an evaluation
            return total + sum(loss_of(*chunk) for chunk in chunks), torch.zeros_like(logits)
        of_hidden = []
        of_weights = [torch.zeros_like(w, dtype=torch.float32) for w in weights]
        # In fp16 a chunk's gradient of the head may overflow, whatever the loss scale is.
        ctx.scale = 1.0
        if hidden.dtype == torch.float16:
            ctx.scale = _scale_of_chunks(hidden, chunk_tokens, *of_targets[2:])
        for part, *of_its_targets in chunks:  # [chunk, h] and [chunk]
            # Detached, so that the graph of a chunk, with its logits, is freed before the next.
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_of(part, *of_its_targets)
                scaled = loss * ctx.scale
            of_part, *others = torch.autograd.grad(scaled, (part, *weights), materialize_grads=True)
            total += loss.detach()
            of_hidden.append(of_part)
            for gradient, other in zip(of_weights, others, strict=True):
                gradient.add_(other)
        # In fp32, since in bf16 the gradient of the loss would be rounded too, by up to 0.4%.
        # Autograd frees what is saved after its use. Attributes would live as long as the loss.
        ctx.save_for_backward(torch.cat(of_hidden).float(), *of_weights)
        ctx.dtypes = [tensor.dtype for tensor in (hidden, *weights)]
        ctx.of_input = torch.zeros_like(head_input)
        return total, torch.zeros_like(logits)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_loss: torch.Tensor, _of_logits: torch.Tensor) -> tuple[Any, ...]:
        of_loss = of_loss / ctx.scale
        # In place, since nothing uses the gradients afterwards.
        scaled = [g.mul_(of_loss).to(d) for g, d in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return (None, None, None, None, ctx.of_input, *scaled)


def _scale_of_chunks(
    hidden: torch.Tensor, chunk_tokens: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a factor for the loss of chunks, a power of two, with which no gradient of a head in
    fp16 overflows. It is 1 unless one could, since small gradients lose bits.

    A logit's gradient is at most the target's weight. So a chunk's gradient of the head's matrix is
    at most the sum of the weighted inputs' magnitudes, and of its bias the sum of the weights.
    """
    largest = hidden.new_zeros((), dtype=torch.float32)
    for i in range(0, len(hidden), chunk_tokens):
        part = hidden[i : i + chunk_tokens].abs().clamp(min=1)
        if weights is not None:
            part = part * weights[i : i + chunk_tokens, None]
        largest = torch.maximum(largest, part.sum(0, dtype=torch.float32).amax())
    limit = torch.finfo(torch.float16).max / 2
    return torch.exp2((limit / largest).log2().floor().clamp(max=0))
