"""Describe the examples of a cache: which tokens end answers, and a hash of the content."""

import numpy as np
import pyarrow as pa
import xxhash
from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import DataConfig
from zerotrain.data.cache import WEIGHTED
from zerotrain.rows.sources import JsonObject


def describe_examples(
    rows: pa.Table, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> JsonObject:
    """Return entries of a cache's meta.json.

    `masks` says what is supervised. `content` is a hash of tokens, masks and weights. `end_tokens`
    are the sorted ids of special and added tokens that end runs of supervised tokens. Tokens that
    also occur inside such runs are left out if any others remain.

    Args:
        rows: the examples, with input_ids list<int32> and loss_mask list<bool>.
    """
    content = xxhash.xxh3_64()
    is_last, is_inner = np.zeros((2, max(tokenizer.get_vocab().values()) + 1), bool)
    # One batch at a time: the examples may be larger than the memory.
    for batch in rows.to_batches():
        ids, mask = (
            batch[name].flatten().to_numpy(zero_copy_only=False)  # Arrow's booleans are bits.
            for name in ("input_ids", "loss_mask")
        )
        lengths = batch["length"].to_numpy()
        for values in (lengths, ids, mask):
            content.update(values)
        if rows.schema == WEIGHTED:
            content.update(batch["weights"].flatten().to_numpy())
        ends_run = mask & ~np.append(mask[1:], False)  # The first token is never a target.
        is_inner[ids[mask & ~ends_run]] = True
        ends_run[np.cumsum(lengths)[lengths >= config.max_length] - 1] = False  # Maybe cut.
        is_last[ids[ends_run]] = True
    ends = sorted(token for token in tokenizer.added_tokens_decoder if is_last[token])
    # With gpt-oss, <|end|> also follows the reasoning before an answer.
    ends = [token for token in ends if not is_inner[token]] or ends
    shown = tokenizer.convert_ids_to_tokens(ends) or "no token: generate() needs stop_strings"
    weighted = ", with weights" if rows.schema == WEIGHTED else ""
    return {
        "masks": f"data.supervise: {config.supervise}{weighted}, ending in {shown}",
        "end_tokens": ends,
        "content": content.hexdigest(),
    }
