"""A check for silent data corruption: run a micro-step twice, and compare its gradients.

The first pass is a micro-step of zero gradients: hooks take a checksum of each gradient, and give
DeepSpeed zeros in its place. ZeRO gathers, reduces and releases as in any other micro-step. The
second pass has the same random numbers, and its gradients are accumulated.
"""

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from zerotrain.data.loader import StepBatch
from zerotrain.runtime.errors import RunFailed, first_of
from zerotrain.runtime.ranks import Ranks
from zerotrain.runtime.seeding import rng_state, set_rng_state


def micro_steps(
    batch: StepBatch, replay_every: int | None, model: nn.Module, ranks: Ranks
) -> Iterator[tuple[int, bool, AbstractContextManager]]:
    """Yield the micro-steps of a step: index, whether it is the last, and a context for its
    backward pass. In a step that is replayed, the first micro-step comes twice. All ranks call it.

    Raises:
        RunFailed: on all ranks, if the gradients of a rank differ. The message names each such rank
            and its host.
    """
    step, count = batch.global_step + 1, len(batch.micro_batches)
    is_replayed = replay_every is not None and (step == 1 or step % replay_every == 0)
    if is_replayed:
        expected, found = [], []
        state = rng_state()
        yield 0, False, _watch_gradients(model, expected, keep=False)
        set_rng_state(state)
        yield 0, count == 1, _watch_gradients(model, found, keep=True)
        own = f"rank {ranks.rank} @ {socket.gethostname()}" if sum(expected) != sum(found) else ""
        if differing := list(filter(None, ranks.gather_json(own))):
            raise RunFailed(
                f"train.replay_every: step {step:,} was not taken: gradients differed when the "
                f"first micro-batch ran again on {first_of(differing)}; a processor or memory "
                "fails there, unless an operation is not deterministic. Take that host out of the "
                "job, and start the same command: it resumes from the last checkpoint"
            )
    for i in range(int(is_replayed), count):
        yield i, i == count - 1, nullcontext()


@contextmanager
def _watch_gradients(model: nn.Module, sums: list[torch.Tensor], keep: bool) -> Iterator[None]:
    """Return a context in which a backward pass appends a checksum of each parameter's gradient.

    Args:
        keep: whether to accumulate the gradients instead of zeros.
    """

    def watch(gradient: torch.Tensor) -> torch.Tensor | None:
        # A flipped bit changes a sum of integers, which is the same in any order.
        sums.append(gradient.flatten().view(torch.int16).sum())
        return None if keep else torch.zeros_like(gradient)

    # Not in the forward pass, where the loss asks for gradients of the head chunk by chunk.
    hooks = [p.register_hook(watch) for p in model.parameters() if p.requires_grad]
    yield
    for hook in hooks:
        hook.remove()
