"""Micro-batches of random tokens, and the router loss that a model must have on them."""

import numpy as np
import torch

from zerotrain.data.loader import MicroBatch

LENGTHS = (40, 7, 90)


def micro_batch(packed, lengths=LENGTHS):
    """Examples with ids below 320, packed or padded. Most tokens are targets."""
    rng = np.random.default_rng(0)
    examples = [rng.integers(2, 320, length) for length in lengths]
    if packed:
        ids = np.concatenate(examples)[None]
        positions = np.concatenate([np.arange(length) for length in lengths])[None]
        return MicroBatch.of(ids, (positions > 0) & (ids > 100), position_ids=positions)
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = mask.copy()
    ids[mask == 1] = np.concatenate(examples)
    is_target = (ids > 100) & (np.arange(max(lengths)) > 0)
    return MicroBatch.of(ids, is_target, attention_mask=mask)


def balance(router_logits, experts):
    """The router loss: experts x sum of (share of choices x mean probability), over the tokens of
    all layers. Equations 4 to 6 of Switch Transformers, extended to the two best experts.
    """
    probabilities = torch.cat([layer.softmax(-1) for layer in router_logits])
    chosen = torch.nn.functional.one_hot(probabilities.topk(2).indices, experts).sum(1).double()
    return experts * (chosen.mean(0) * probabilities.double().mean(0)).sum()
