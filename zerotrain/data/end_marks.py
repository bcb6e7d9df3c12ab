"""End marks: the tokens that end answers in the training data and so teach the model to stop."""

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from zerotrain.data.render import mask_method
from zerotrain.data.turns import ANSWER, DATE, USER, asks_for_date, chat_template
from zerotrain.runtime.errors import UserError, listed

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from zerotrain.config.schema import DataConfig

ROWS_AT_ONCE = 500
SHOWN_MARKS = 4
# Such as `<|im_start|>`, in the source of a template
MARK = re.compile(r"<\|[^|<>\s'{}]+\|>")


def describe_masks(
    rows: "Dataset", tokenizer: "PreTrainedTokenizerBase", config: "DataConfig", chat: bool
) -> dict[str, Any]:
    """Entries of a cache's meta.json: `end_tokens`, the sorted ids of the tokens that end
    supervised turns, and `masks`, a description of how answers are found and what ends them.

    Args:
        rows: the examples, with input_ids list<int32> and loss_mask list<bool>.
        chat: whether the chat template rendered any of them.

    Raises:
        UserError: nothing in the data would teach the model to stop.
    """
    ends, cut = _end_tokens(rows, tokenizer, config.max_length)
    method = [mask_method(tokenizer, config.supervise)] if chat else []
    if ends:
        shown = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(ends)))
        method.append(f"answers end in {shown}")
    elif cut:
        method.append("no end mark, as every row is truncated at data.max_length")
    else:
        method.append(_end_text(tokenizer, chat))
    if chat:
        template = str(tokenizer.get_chat_template())
        if asks_for_date(template):
            method.append(f"the date in the template is always {DATE:%Y-%m-%d}")
        vocabulary = tokenizer.get_vocab()
        others = [m for m in dict.fromkeys(MARK.findall(template)) if m not in vocabulary]
        if others:
            shown = listed(others, SHOWN_MARKS)
            method.append(
                f"marks that the tokenizer does not have as tokens, so plain text: {shown}"
            )
    return {"masks": "; ".join(method), "end_tokens": ends}


def _end_tokens(
    rows: "Dataset", tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> tuple[list[int], bool]:
    """Special and added tokens that are the last of a run of supervised tokens; and whether every
    example has the maximum length, so that it may have been truncated before its end.

    A token that is within runs too is none of them if there are others: gpt-oss ends earlier
    answers with the <|end|> that follows the reasoning before its last one.
    """
    last_tokens, inner_tokens, cut = set(), set(), True
    for batch in rows.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
        ids, mask = batch["input_ids"].combine_chunks(), batch["loss_mask"].combine_chunks()
        lengths = ids.value_lengths().to_numpy()
        flags = mask.flatten().to_numpy(zero_copy_only=False)
        last_of_row = np.cumsum(lengths) - 1
        is_end = flags & ~np.append(flags[1:], False)
        inner_tokens.update(np.unique(ids.flatten().to_numpy()[flags & ~is_end]).tolist())
        whole = lengths < max_length
        is_end[last_of_row] = flags[last_of_row] & whole
        cut = cut and not whole.any()
        last_tokens.update(np.unique(ids.flatten().to_numpy()[is_end]).tolist())
    ends = last_tokens & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return sorted(ends - inner_tokens or ends), cut


def _end_text(tokenizer: "PreTrainedTokenizerBase", chat: bool) -> str:
    """Describe what ends answers if no token does.

    Raises:
        UserError: nothing ends answers.
    """
    name = tokenizer.name_or_path
    if not chat:
        raise UserError(
            f"tokenizer {name} has no eos token, so nothing would teach the model where an answer "
            "ends; set eos_token in its tokenizer_config.json to one of its tokens"
        )
    end = written_end(tokenizer).strip()
    marks = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    is_token = not marks.isdisjoint(tokenizer(end, add_special_tokens=False)["input_ids"])
    if end and not is_token:
        return f"answers end in {end!r}, which is not a token: generate() needs it in stop_strings"
    if end:
        raise UserError(
            f"the chat template's generation marks leave out the end mark {end!r}, so nothing "
            "would teach the model to stop; put it before {% endgeneration %} in a copy of the "
            "template, and set model.chat_template to the copy"
        )
    raise UserError(
        f"the chat template of tokenizer {name} writes no end mark after an answer, so nothing "
        "would teach the model to stop; write {{ eos_token }} there in a copy of the template, and "
        "set model.chat_template to the copy"
    )


def written_end(tokenizer: "PreTrainedTokenizerBase") -> str:
    """What the chat template writes after the last assistant turn; "" if it refuses a row of one
    question and one answer.
    """
    return (chat_template(tokenizer, None).constants([USER, ANSWER]) or [""])[-1]


def fit_template(template: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Adapt one of data/chat_templates to a tokenizer: if it lacks the template's end mark, the eos
    token takes its place, since only a token can stop generation.
    """
    found = re.match(r"\{%- set end_mark = '([^']+)' -%\}", template)
    if not found or found[1] in tokenizer.get_vocab():
        return template
    return template.replace(f"'{found[1]}'", "eos_token", 1)
