"""Find the tokens that end answers, and extend chat templates that write none.

Without such a token after its answers, a model does not learn to stop.
"""

import numpy as np
import pyarrow as pa
import xxhash
from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import DataConfig
from zerotrain.rows.sources import JsonObject


def describe_examples(
    rows: pa.Table, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> JsonObject:
    """Entries of a cache's meta.json: `masks`, a description for the start-up table; `content`, a
    hash of tokens and masks; and `end_tokens`, the sorted ids of the special and added tokens that
    end runs of supervised tokens, except ones that are within such runs too, if there are others.

    Args:
        rows: the examples, with input_ids list<int32> and loss_mask list<bool>.
    """
    content = xxhash.xxh3_64()
    is_last, is_inner = np.zeros((2, max(tokenizer.get_vocab().values()) + 1), bool)
    # a batch at a time: the examples may be larger than the memory
    for batch in rows.to_batches():
        ids, mask = (
            batch[name].flatten().to_numpy(zero_copy_only=False)  # Arrow's booleans are bits
            for name in ("input_ids", "loss_mask")
        )
        lengths = batch["length"].to_numpy()
        for values in (lengths, ids, mask):
            content.update(values)
        ends_run = mask & ~np.append(mask[1:], False)  # the first token of an example is no target
        is_inner[ids[mask & ~ends_run]] = True
        ends_run[np.cumsum(lengths)[lengths >= config.max_length] - 1] = False  # may have been cut
        is_last[ids[ends_run]] = True
    ends = sorted(token for token in tokenizer.added_tokens_decoder if is_last[token])
    # with gpt-oss, <|end|> also follows the reasoning before an answer
    ends = [token for token in ends if not is_inner[token]] or ends
    shown = tokenizer.convert_ids_to_tokens(ends) or "no token: generate() needs stop_strings"
    return {
        "masks": f"data.supervise: {config.supervise}, ending in {shown}",
        "end_tokens": ends,
        "content": content.hexdigest(),
    }
