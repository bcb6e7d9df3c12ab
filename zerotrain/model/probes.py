"""Short forward passes that check a model's attention and a frozen output head before training.

They test behavior, so they also work for code that comes with a model. All ranks take part, since
ZeRO-3 gathers weights in the forward pass.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from zerotrain.data.loader import MicroBatch
from zerotrain.model.hub import summarize
from zerotrain.model.packing import attend_within, current_examples
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.seeding import rng_state, set_rng_state

PROBE_TOKENS = 12

# Limits for changes of logits, relative to their range.
# In check_causal decoders change by 0, encoders with random weights by 1e-3 to 5e-3, trained
# encoders by more.
SEEN_AHEAD = 3e-4
# In check_packing wrong positions change logits by 0.01 to 0.7, a different kernel by rounding.
FAR_32_BITS = 1e-3
FAR_16_BITS = 5e-2
# In check_end_tokens, tokens with the same row of the output head have the same logits. Rows that
# were never trained may differ, but are so small that their logits hardly differ.
SAME_TOKEN = 1e-3


def ordinary_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids without special tokens, which some models take for padding or images."""
    return sorted(set(range(len(tokenizer))) - set(tokenizer.added_tokens_decoder))


def check_causal(forward: nn.Module, tokens: Sequence[int]) -> None:
    """Refuse a model whose tokens attend to later tokens: an encoder (BERT, XLNet), or a decoder
    that its config makes an encoder.

    Two inputs have the same first half and different second halves. Their logits over the first
    half must not differ. They share a batch, so that the same kernels run on both. A third input
    repeats the first and shows the noise of kernels that add in a random order.

    Args:
        forward: the engine (or the model) to call.
        tokens: ids to draw inputs from.

    Raises:
        UserError: the logits differ.
    """
    before, after, other = draw(tokens, 3)
    ids = torch.stack([torch.cat([before, second]) for second in (after, other, after)])
    halves = compute_logits(forward, ids)[:, :PROBE_TOKENS]  # [3, half, vocabulary]
    leak, noise = (_change(half, halves[0]) for half in halves[1:])
    if leak > SEEN_AHEAD + 10 * noise:
        raise UserError(
            f"model.name_or_path: {_name(forward)} is not causal as configured: its tokens attend "
            "to the tokens that they have to predict; if it can be a decoder (BERT-like models), "
            'set "is_decoder": true in its config.json'
        )


def check_packing(forward: nn.Module, tokens: Sequence[int]) -> None:
    """Refuse a model whose packed examples differ from the same examples alone.

    An example follows two different ones in turn: its logits may not change at all. With experts
    they may by rounding, since kernels round by the number of an expert's tokens.

    Some models silently ignore position_ids (in transformers 5.23 Falcon in its masks, BioGPT in
    its embeddings). Others do not pass their masks on to attention. So the logits must also be
    close to those of the example alone, which the model computes with its eager attention and its
    own positions.

    Args:
        forward: the engine (or the model) to call.
        tokens: ids to draw examples from.

    Raises:
        UserError: the logits differ.
    """
    model = getattr(forward, "module", forward)
    *firsts, probe = draw(tokens, 3)
    positions = np.tile(np.arange(PROBE_TOKENS), 2)[None]
    packed = []
    for first in firsts:
        ids = torch.cat([first, probe])[None].numpy()
        batch = MicroBatch.of(ids, positions < 0, position_ids=positions)
        with attend_within(batch.to(forward.device)) as inputs:
            logits = compute_logits(forward, batch.input_ids, **inputs)
        packed.append(logits[:, PROBE_TOKENS:])
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")  # which every model has, also its audio tower
    alone = compute_logits(forward, probe[None])
    model.set_attn_implementation(own)
    leak, difference = (_change(logits, packed[0]) for logits in (packed[1], alone))
    dtype = next(model.parameters()).dtype
    has_experts = any("Expert" in type(module).__name__ for module in model.modules())
    rounding = 8 * torch.finfo(dtype).eps * has_experts
    limit = FAR_32_BITS if dtype == torch.float32 else FAR_16_BITS
    if not (leak <= rounding and difference < limit):
        raise UserError(
            f"data.batching: packed examples of {_name(forward)} differ from the same examples "
            f"alone (logits change by {max(leak, difference):.1e} of their range); use bucketed, "
            "without sequence_parallel_size of ds_config"
        )


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def layers_with_kernel(forward: nn.Module, tokens: Sequence[int]) -> list[bool]:
    """Return for each attention layer whether it computes packed examples with torch's varlen
    kernel in training, where it may have dropout. Random numbers stay as they are.
    """
    ids = draw(tokens, 1).numpy()
    batch = MicroBatch.of(ids, ids < 0, position_ids=np.arange(PROBE_TOKENS)[None])
    batch = batch.to(forward.device)
    state = rng_state()
    with attend_within(batch) as inputs:
        forward(input_ids=batch.input_ids, use_cache=False, **inputs)
        layers = [*current_examples.get().has_kernel.values()]
    set_rng_state(state)
    return layers


def check_end_tokens(
    forward: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    trained: Sequence[int],
) -> None:
    """Refuse a model with a frozen output head that cannot tell a token that ends answers from some
    other token. New tokens have equal rows in the head until they are trained; so have unused
    tokens of base models. Such a model would never learn to stop.

    Args:
        forward: the engine (or the model) to call.
        trained: ids that end answers in the training data.

    Raises:
        UserError: names the two tokens, and the head.
    """
    head = getattr(forward, "module", forward).get_output_embeddings()
    if any(p.requires_grad for p in head.parameters()):
        return
    ids = draw(ordinary_tokens(tokenizer), 2).view(1, -1)
    [logits] = compute_logits(forward, ids)  # [tokens, vocabulary]
    spread = (logits - logits.median()).abs().median()  # some models mask logits with -3e38
    for end in trained:
        distance = (logits - logits[:, end, None]).abs().amax(0) / spread
        distance[end] = torch.inf
        if distance.min() < SAME_TOKEN:
            raise UserError(
                "model.name_or_path: the output head is frozen, and cannot tell "
                f"{tokenizer.convert_ids_to_tokens(end)!r}, which ends answers, from the token of "
                f"id {int(distance.argmin())}: the model would never learn to stop; train the "
                "output head and the embeddings, too, with model.lora.modules_to_save or "
                "model.trainable"
            )


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def check_answers(forward: nn.Module, tokens: Sequence[int]) -> None:
    """Refuse a model that cannot write an answer token by token, as eval.generate does.

    Args:
        forward: the engine (or the model) to call.
        tokens: ids to draw a prompt from.

    Raises:
        UserError: the model has no method for it, or fails, as the decoders of BART do.
    """
    model = getattr(forward, "module", forward)
    ids = draw(tokens, 1).to(forward.device)
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": 2, "min_new_tokens": 2}
    was_training = forward.training
    forward.eval()
    try:
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"eval.generate: {_name(forward)} cannot write answers: {summarize(error)}; set it to 0"
        ) from error
    finally:
        forward.train(was_training)


def draw(tokens: Sequence[int], examples: int) -> torch.Tensor:
    """Return random tokens, int64 [examples, PROBE_TOKENS], the same on every rank."""
    size = examples, PROBE_TOKENS
    choice = torch.randint(len(tokens), size, generator=torch.Generator().manual_seed(0))
    return torch.as_tensor(tokens)[choice]


def compute_logits(forward: nn.Module, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the logits of `call_plainly`, float32 [examples, length, vocabulary]."""
    return call_plainly(forward, ids, **options).logits.float()


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # Graphs for these few tokens would never run again.
def call_plainly(forward: nn.Module, ids: torch.Tensor, **options: Any) -> Any:
    """Return the model's output in evaluation mode.

    Args:
        ids: int64 [examples, length], on any device.

    Raises:
        UserError: the model needs other inputs, or fails on packed examples.
    """
    was_training = forward.training
    forward.eval()
    try:
        return forward(input_ids=ids.to(forward.device), use_cache=False, **options)
    # X-MOD needs a language, other models an encoder. Doge computes with its mask.
    except (AttributeError, TypeError, ValueError) as error:
        what = "packed examples (use data.batching: bucketed)" if options else "tokens alone"
        raise UserError(
            f"model.name_or_path: {_name(forward)} cannot be trained on {what}: {summarize(error)}"
        ) from error
    finally:
        forward.train(was_training)


def _name(forward: nn.Module) -> str:
    return type(getattr(forward, "module", forward)).__name__


def _change(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference at a position, relative to the range of the logits, as the mean
    over positions: rounding may change a router's choice at a single position.
    """
    spread = (expected - expected.mean()).abs().max()
    return float((logits - expected).abs().amax(-1).mean() / spread)
