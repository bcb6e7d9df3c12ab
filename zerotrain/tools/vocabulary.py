"""New tokens: ids for them in a tokenizer, and rows in a model's embeddings and output head."""

from collections.abc import Sequence

import torch
from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from zerotrain.model.hub import summarize
from zerotrain.runtime.errors import UserError

PAD_TO_MULTIPLE_OF = 64  # number of rows, a multiple that is fast in matrix products


def add_tokens(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], special: bool
) -> list[str]:
    """Add the tokens that the tokenizer does not have yet, and return those, in their order. Each
    is one token wherever it occurs in a text.

    Args:
        special: whether they are marks, which decoding can leave out, rather than text.

    Raises:
        UserError: a token is empty or has white space at an end, which tokenizers strip.
    """
    for token in tokens:
        if not token or token != token.strip():
            raise UserError(f"--tokens: {token!r} is empty, or has white space at an end")
    known = tokenizer.get_vocab()
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    added = [AddedToken(token, special=special, normalized=False) for token in new]
    tokenizer.add_tokens(added, special_tokens=special)
    return new


def resize_vocabulary(model: PreTrainedModel, old_ids: int, new_ids: int) -> int:
    """Give a model rows for token ids [0, new_ids), padded to a multiple, and never fewer than it
    has; returns their number.

    Rows of new ids, and of the padding that is added, get the mean of the rows of the old ids, in
    embeddings and output head: a new token then is about as likely as the mean one, instead of more
    likely than all of them (https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Other rows
    stay as they are, and tied weights stay tied.

    Args:
        old_ids: ids of the tokenizer that the model was trained with. Models often have more rows.

    Raises:
        UserError: the embeddings cannot be resized.
    """
    old_rows = model.get_input_embeddings().weight.shape[0]
    old_ids = min(old_ids, old_rows)
    rows = -(-max(old_rows, new_ids) // PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF
    try:
        # Its own mean_resizing draws from a distribution around the mean of all rows, also of those
        # that no token has used.
        model.resize_token_embeddings(rows, mean_resizing=False)
    except Exception as error:  # each model's own
        raise UserError(
            f"the embeddings of {type(model).__name__} cannot be resized: {summarize(error)}"
        ) from error
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tensors = [embeddings.weight]
    if head is not None:
        tensors += [] if head.weight is embeddings.weight else [head.weight]
        tensors += [] if getattr(head, "bias", None) is None else [head.bias]
    for tensor in tensors:
        _fill_with_mean(tensor.data, old_ids, slice(old_ids, new_ids))
        _fill_with_mean(tensor.data, old_ids, slice(old_rows, rows))
    return rows


def _fill_with_mean(rows: torch.Tensor, count: int, where: slice) -> None:
    """Set rows[where] to the mean of the first `count`, float [rows] or [rows, width]."""
    rows[where] = rows[:count].mean(0, dtype=torch.float32).to(rows.dtype)
