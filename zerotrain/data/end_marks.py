"""End marks: the tokens that end answers in the training data and so teach the model to stop."""

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from zerotrain.runtime.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from zerotrain.config.schema import DataConfig

SUPERVISED = {
    "answers": "answers",
    "last": "of each row the last answer alone (data.supervise: last)",
    "all": "all tokens",
}


def describe_masks(
    rows: "Dataset", tokenizer: "PreTrainedTokenizerBase", config: "DataConfig", chat: bool
) -> dict[str, Any]:
    """Entries of a cache's meta.json: `end_tokens`, the sorted ids of the tokens that end
    supervised turns, and `masks`, a description for the start-up table.

    Args:
        rows: the examples, with input_ids list<int32> and loss_mask list<bool>.
        chat: whether the chat template rendered any of them.

    Raises:
        UserError: nothing in the data would teach the model to stop.
    """
    if not chat and tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path} has no eos token, so nothing would teach the "
            "model where an answer ends; set eos_token in its tokenizer_config.json"
        )
    ends = _end_tokens(rows, tokenizer, config.max_length)
    shown = tokenizer.convert_ids_to_tokens(ends) or "no token: generate() needs stop_strings"
    masks = f"{SUPERVISED[config.supervise]}, ending in {shown}"
    return {"masks": masks, "end_tokens": ends}


def _end_tokens(
    rows: "Dataset", tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> list[int]:
    """Special and added tokens that are the last supervised ones of rows that were not truncated.

    A token that is within answers too is none of them if there are others: with gpt-oss, <|end|>
    also follows the reasoning before an answer.
    """
    is_last, is_inner = np.zeros((2, max(tokenizer.get_vocab().values()) + 1), bool)
    for batch in rows.data.to_batches():
        ids, mask = (
            batch[name].flatten().to_numpy(zero_copy_only=False)
            for name in ("input_ids", "loss_mask")
        )
        supervised = ids[mask]
        last = np.cumsum(batch["supervised"].to_numpy()) - 1
        is_last[supervised[last[batch["length"].to_numpy() < max_length]]] = True
        is_inner[ids[:-1][mask[:-1] & mask[1:]]] = True  # the first token of a row is no target
    ends = {token for token in tokenizer.added_tokens_decoder if is_last[token]}
    inner_tokens = set(np.flatnonzero(is_inner).tolist())
    return sorted(ends - inner_tokens or ends)


def fit_template(template: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Adapt one of data/chat_templates to a tokenizer: if it lacks the template's end mark, the eos
    token takes its place, since only a token can stop generation.
    """
    found = re.match(r"\{%- set end_mark = '([^']+)' -%\}", template)
    if not found or found[1] in tokenizer.get_vocab():
        return template
    return template.replace(f"'{found[1]}'", "eos_token", 1)
