"""Short forward passes that check a model's attention, and a frozen output head, before training.
They test its behaviour, so they also work for code that comes with a model.

All ranks take part, since ZeRO-3 gathers weights in the forward pass.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from model.architecture import not_causal
from model.load import end_tokens
from model.packed_attention import own_attention
from runtime.errors import UserError

# Limits for changes of logits, relative to their range.
# check_causal: encoders with random weights have 1e-3 to 5e-3, trained ones more; decoders 0.
PROBE_TOKENS, SEEN_AHEAD = 24, 3e-4
# check_packing: leaks observed are 0.01 to 0.7. The same kernels on the same shapes agree exactly,
# except in mixtures of experts; on other shapes they differ by rounding.
LEAK = {True: 1e-4, False: 1e-2}  # fp32 or not
SHIFT = {True: 1e-3, False: 5e-2}
# check_end_tokens: tokens with the same row of the output head have the same logits. Rows that were
# never trained may differ, but are so small that their logits do not.
SAME_TOKEN = 1e-3


def ordinary_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids without special tokens, which mean padding or images in some models."""
    return sorted(set(range(len(tokenizer))) - set(tokenizer.added_tokens_decoder))


def check_causal(forward: nn.Module, tokens: Sequence[int], device: torch.device) -> None:
    """Refuse a model whose tokens attend to later ones: an encoder (BERT, XLNet), or a decoder that
    is not configured as one.

    Two inputs have the same first half and different second halves; their logits over the first
    half must not differ. They are in one batch, so that the same kernels run on both. A third input
    repeats the first one and shows the noise of kernels with a non-deterministic order of addition.

    Args:
        forward: the engine (or the model) to call.
        tokens: ids to draw inputs from.

    Raises:
        UserError: the logits differ, or are not finite.
    """
    before, behind, other = draw(tokens, device, *[PROBE_TOKENS // 2] * 3)
    ids = torch.cat([before.expand(3, -1), torch.cat([behind, other, behind])], 1)
    halves = _logits(forward, ids)[:, : before.shape[1]]  # [3, half, vocabulary]
    if not halves.isfinite().all():
        raise UserError(
            "model.name_or_path: its logits on ordinary tokens are not finite: the weights are "
            "damaged, or too large for train.precision fp16"
        )
    # the mean over positions: rounding may change a router's choice at one of them
    _, leak, noise = (halves - halves[0]).abs().amax(-1).mean(-1) / _range(halves)
    if leak > SEEN_AHEAD + 10 * noise:
        raise not_causal(getattr(forward, "module", forward))


def check_packing(forward: nn.Module, tokens: Sequence[int], device: torch.device) -> None:
    """Refuse a model whose packed examples differ from the same examples alone: some silently
    ignore position_ids (in transformers 5.23 Falcon in its masks, BioGPT in its embeddings).

    One example is run after two different other ones, and alone as in a bucketed micro-batch, with
    the model's own attention and positions.

    Args:
        forward: the engine (or the model) to call.
        tokens: ids to draw examples from.

    Raises:
        UserError: the logits of the example depend on what precedes it, or are others alone.
    """
    first, other, probe = draw(tokens, device, 12, 12, 15)
    positions = torch.cat([torch.arange(12), torch.arange(15)]).unsqueeze(0).to(device)
    behind, behind_other = (
        _logits(forward, torch.cat([before, probe], 1), position_ids=positions)[:, -15:]
        for before in (first, other)
    )
    with own_attention(getattr(forward, "module", forward)):
        alone = _logits(forward, probe)
    leak = float((behind - behind_other).abs().max() / _range(alone))
    # other kernels: the mean over positions, for the reason in check_causal
    shift = float((behind - alone).abs().amax(-1).mean() / _range(alone))
    exact = is_exact(forward)
    if not (leak < LEAK[exact] and shift < SHIFT[exact]):
        name = type(getattr(forward, "module", forward)).__name__
        raise UserError(
            f"data.batching: packed examples of {name} differ from the same examples alone (logits "
            f"change by {leak:.1e} of their range with the example before, and by {shift:.1e} from "
            "those alone); use bucketed"
        )


def check_end_tokens(
    forward: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    trained: Sequence[int] | None,
    device: torch.device,
) -> None:
    """Refuse to train a model with a frozen output head that cannot tell a token that ends answers
    from another one: new tokens have the same row of the head until they are trained, and so have
    unused ones of base models. Such a model would never stop.

    Args:
        forward: the engine (or the model) to call.
        trained: ids that end answers in the training data; None for the tokenizer's eos.

    Raises:
        UserError: names the two tokens, and the head.
    """
    model = getattr(forward, "module", forward)
    head = model.get_output_embeddings()
    if any(p.requires_grad for p in head.parameters()):
        return
    [ids] = draw(ordinary_tokens(tokenizer), device, PROBE_TOKENS)
    [logits] = _logits(forward, ids)  # [tokens, vocabulary]
    spread = (logits - logits.median()).abs().median()  # some models mask logits with -3e38
    for end in end_tokens(tokenizer, trained):
        distance = (logits - logits[:, end, None]).abs().amax(0) / spread
        distance[end] = torch.inf
        other = int(distance.argmin())
        if distance[other] < SAME_TOKEN:
            end_token, like = tokenizer.convert_ids_to_tokens([end, other])
            name = next(name for name, module in model.named_modules() if module is head)
            raise UserError(
                f"model.name_or_path: the output head is frozen, and cannot tell {end_token!r}, "
                f"which ends answers, from {like or f'the unused id {other}'!r}: the model would "
                f"never learn to stop; train {name} and the embeddings as well, with "
                "model.lora.modules_to_save or model.trainable"
            )


def draw(tokens: Sequence[int], device: torch.device, *lengths: int) -> list[torch.Tensor]:
    """int64 [1, length] each, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.as_tensor(tokens)
    return [ids[torch.randint(len(ids), (1, n), generator=generator)].to(device) for n in lengths]


@torch.no_grad()
def _logits(forward: nn.Module, ids: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    """float32 [1, length, vocabulary], in evaluation mode."""
    was_training = forward.training
    forward.eval()
    try:
        return forward(input_ids=ids, use_cache=False, **options).logits.float()
    finally:
        forward.train(was_training)


def _range(logits: torch.Tensor) -> torch.Tensor:
    return (logits - logits.mean()).abs().max()


def is_exact(forward: nn.Module) -> bool:
    return next(forward.parameters()).dtype == torch.float32
