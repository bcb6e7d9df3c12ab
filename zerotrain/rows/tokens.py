"""Read rows that are tokens already: ids, and labels or masks that say which ones are supervised.

Such rows come from other trainers: {input_ids, labels} of transformers, {input_ids, loss_mask}, the
caches of TRL and axolotl. They are checked and used as they are.
"""

from functools import lru_cache

import numpy as np
from transformers import PreTrainedTokenizerBase

from zerotrain.rows.readers import BadRow, JsonObject

IGNORED = -100  # the label of a token that is not supervised
MASKS = {"loss_mask", "completion_mask", "assistant_masks", "attention_mask"}
# Shifts labels that name the next token. They end with -100, or with a token that input_ids lacks.
UNSHIFT = (
    "jq -c 'if .labels[-1] == -100 then .labels = [-100] + .labels[:-1] else .input_ids += "
    ".labels[-1:] | .labels = [-100] + .labels end' OLD.jsonl > NEW.jsonl"
)


def read_tokens(
    row: JsonObject, tokenizer: PreTrainedTokenizerBase, supervise: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a row, int32 [tokens], and their weights, [tokens]; 0: not supervised.

    The weight of a token is the product of its labels (0 or 1) and masks. Padding is removed.

    Args:
        row: a row of the format tokens, from canonical_row.
        supervise: data.supervise. It must be `answers`, or `all` if the row has ids alone.

    Raises:
        BadRow: ids, labels and masks contradict each other, or one has an impossible value.
    """
    lists = _checked_lists(row)
    ids = lists.pop("input_ids")
    vocabulary = _vocabulary_size(tokenizer)
    if wrong := ids[(ids < 0) | (ids >= vocabulary)].tolist():
        raise BadRow(
            "not in the vocabulary",
            f"input_ids has {wrong[0]}, but tokenizer {tokenizer.name_or_path} has the ids 0 to "
            f"{vocabulary - 1:,}; set model.tokenizer to the tokenizer that made the rows",
        )
    attention = lists.pop("attention_mask", np.ones(len(ids)))
    if "labels" in lists:
        lists["labels"] = _labeled(lists["labels"], ids)
    masks = [*lists.values()]
    if masks and supervise != "answers":
        raise BadRow(
            "other data.supervise",
            f"its labels or masks say what is supervised, but data.supervise is {supervise}; set "
            "it to answers",
        )
    if not masks and supervise != "all":
        raise BadRow(
            "nothing supervised",
            "nothing says which tokens are supervised; add labels or loss_mask, or set "
            "data.supervise: all to train on every token",
        )
    weights = np.prod(masks or [attention], axis=0)
    kept = np.flatnonzero(attention)
    if (np.diff(kept) > 1).any() or weights[attention == 0].any():
        raise BadRow(
            "padding",
            "attention_mask is 0 at supervised tokens or between others; remove such tokens, or "
            f"give padding at the end the label {IGNORED}",
        )
    return ids[kept].astype(np.int32), weights[kept]


def _checked_lists(row: JsonObject) -> dict[str, np.ndarray]:
    """Return the lists of a row that have a number for each token.

    Raises:
        BadRow: the row is packed, lengths differ, or a value is not a whole number or, in masks,
            not from 0 to 1.
    """
    lists = {"input_ids": np.array([], int)}
    for key, value in row.items():
        types = {*map(type, value)} if isinstance(value, list) else {None}
        numbers = {int, bool} if key == "attention_mask" else {int, bool, float}
        if not types <= (numbers if key in MASKS else {int}):
            raise BadRow(
                "wrong type",
                f"{key} is not a list of integers (loss masks: of numbers), one for each token",
            )
        lists[key] = np.array(value)
    tokens = len(lists["input_ids"])
    # A row of one text may have these keys, too: axolotl numbers the tokens of every row.
    of_one_text = {"position_ids": range(tokens), "seq_lengths": [tokens], "seq_start_id": [0]}
    for key, values in of_one_text.items():
        if not np.array_equal(lists.pop(key, values), values):
            raise BadRow(
                "packed",
                f"{key} divides it into several texts, whose boundaries would be lost; write a row "
                "for each (TRL: packing=False), and data.batching packs them",
            )
    for key, values in lists.items():
        if len(values) != tokens:
            raise BadRow(
                "unequal lengths",
                f"{key} has {len(values):,} values, but input_ids has {tokens:,}; write one for "
                "each token",
            )
        if key in MASKS and not ((values >= 0) & (values <= 1)).all():
            raise BadRow("wrong type", f"{key} has values below 0 or above 1; correct them")
    return lists


def _labeled(labels: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return which tokens have a label, bool [tokens].

    Raises:
        BadRow: a label is not the id of its token.
    """
    is_labeled = labels != IGNORED
    wrong = np.flatnonzero(is_labeled & (labels != ids))
    if not len(wrong):
        return is_labeled
    problem = (
        f"the label of token {wrong[0] + 1} is {labels[wrong[0]]}; it must be the token's id, "
        f"{ids[wrong[0]]}, or {IGNORED}, which is not supervised"
    )
    if ((labels == IGNORED) | (labels == np.append(ids[1:], labels[-1]))).all():
        problem = f"its labels are shifted: each must be its own token, not the next: {UNSHIFT}"
    raise BadRow("wrong label", problem)


@lru_cache(maxsize=8)  # get_vocab makes a dictionary of all tokens
def _vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id of a tokenizer plus one; added tokens count, too."""
    return max(tokenizer.get_vocab().values()) + 1
