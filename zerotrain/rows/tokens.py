"""Read rows that are tokens already: ids, and labels or masks that say which ones are supervised.

Such rows come from other trainers: {input_ids, labels} of transformers, {input_ids, loss_mask}, the
caches of TRL and axolotl. They are checked and used as they are.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from zerotrain.rows.readers import BadRow, JsonObject

IGNORED = -100  # the label of a token that is not supervised
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
# Moves labels that name the next token, which end with -100 or with a token that input_ids lacks.
UNSHIFT = (
    "jq -c 'if .labels[-1] == -100 then .labels = [-100] + .labels[:-1] else .input_ids += "
    ".labels[-1:] | .labels = [-100] + .labels end' OLD.jsonl > NEW.jsonl"
)


def read_tokens(
    row: JsonObject, tokenizer: PreTrainedTokenizerBase, supervise: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a row, int32 [tokens], and which are supervised, bool [tokens].

    A token is supervised if the labels and all masks of the row say so. Padding is removed.

    Args:
        row: a row of the format tokens, from canonical_row.
        supervise: data.supervise: `answers`, or `all` for rows with neither labels nor masks.

    Raises:
        BadRow: ids, labels and masks contradict each other, or one has an impossible value.
    """
    lists = {key: _integers(key, value) for key, value in row.items()}
    ids = lists.get("input_ids", [])
    if len(ids) < 2:
        raise BadRow("too short", "it has fewer than 2 tokens, and the first is never supervised")
    vocabulary = _vocabulary_size(tokenizer)
    if wrong := ids[(ids < 0) | (ids >= vocabulary)].tolist():
        raise BadRow(
            "not in the vocabulary",
            f"input_ids has {wrong[0]}, but tokenizer {tokenizer.name_or_path} has the ids 0 to "
            f"{vocabulary - 1:,}; set model.tokenizer to the tokenizer that made the rows",
        )
    # Rows of one text may have these keys as well: axolotl numbers the tokens of every row.
    of_one_text = {
        "position_ids": np.arange(len(ids)),
        "token_type_ids": np.zeros(len(ids)),
        "seq_lengths": [len(ids)],
        "seq_start_id": [0],
    }
    for key, values in of_one_text.items():
        if key in lists and not np.array_equal(lists.pop(key), values):
            raise BadRow(
                "packed",
                f"{key} divides it into several texts, whose boundaries would be lost; write a row "
                "for each (TRL: packing=False), and data.batching packs them",
            )
    for key, values in lists.items():
        if len(values) != len(ids):
            raise BadRow(
                "unequal lengths",
                f"{key} has {len(values):,} values, but input_ids has {len(ids):,}; it must have "
                "one for each token",
            )
        if key not in ("input_ids", "labels") and not np.isin(values, (0, 1)).all():
            raise BadRow("wrong type", f"{key} has other values than 0 and 1; write these alone")
    mask = _supervised(lists, supervise)
    # Padding is where attention_mask is 0 at an end of the row.
    is_real = lists.get("attention_mask", np.ones(len(ids))) == 1
    first, last = (is_real.argmax(), len(ids) - is_real[::-1].argmax())
    is_wrong = ~is_real & mask
    is_wrong[first:last] |= ~is_real[first:last]
    if is_wrong.any():
        raise BadRow(
            "padding",
            f"attention_mask is 0 at token {is_wrong.argmax() + 1}, which is supervised or between "
            "other tokens; remove such tokens, or give padding at the end the label -100",
        )
    return ids[first:last].astype(np.int32), mask[first:last]


def _integers(key: str, value: Any) -> np.ndarray:
    """Return a list of numbers as an array; masks may have booleans."""
    try:
        values = pa.array(value)  # numpy would give each string the size of the longest
        is_list = isinstance(value, list) and not values.null_count
    except (pa.ArrowException, TypeError, OverflowError):  # no list, mixed types, over 64 bits
        is_list = False
    is_mask = is_list and key.endswith(("mask", "masks")) and pa.types.is_boolean(values.type)
    if not is_list or not (is_mask or pa.types.is_integer(values.type)):
        raise BadRow("wrong type", f"{key} is not a list of integers, one for each token")
    return values.to_numpy(zero_copy_only=False).astype(np.int64)


def _supervised(lists: dict[str, np.ndarray], supervise: str) -> np.ndarray:
    """Return which tokens the labels and all masks say are supervised, bool [tokens]."""
    ids, labels = lists["input_ids"], lists.get("labels")
    masks = [lists[key] == 1 for key in MASKS if key in lists]
    if labels is not None:
        masks.append(labels != IGNORED)
        is_wrong = masks[-1] & (labels != ids)
        if is_wrong.any():
            is_shifted = (labels[:-1] == ids[1:]) | (labels[:-1] == IGNORED)
            at = is_wrong.argmax()
            raise BadRow(
                "wrong label",
                f"its labels are shifted: each must repeat its own token, not the next: {UNSHIFT}"
                if is_shifted.all()
                else f"the label of token {at + 1} is {labels[at]}; it must be the token's id, "
                f"{ids[at]}, or {IGNORED}, which is not supervised",
            )
    if masks and supervise != "answers":
        raise BadRow(
            "two rules for what is supervised",
            f"its labels or masks say what is supervised, not data.supervise: {supervise}; set it "
            "to answers",
        )
    if not masks and supervise != "all":
        raise BadRow(
            "nothing supervised",
            "nothing says which tokens are supervised; add labels or loss_mask, or set "
            "data.supervise: all to train on every token",
        )
    return np.logical_and.reduce([np.ones(len(ids), bool), *masks])


@lru_cache(maxsize=8)  # get_vocab makes a dictionary of all tokens
def _vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values()) + 1
