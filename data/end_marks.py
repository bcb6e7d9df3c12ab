"""End marks: the tokens that end answers in the training data and so teach the model to stop."""

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from data.render import mask_method
from data.sources import BadRow
from data.turns import DATE, apply_template, asks_for_date, marks_generation
from runtime.errors import UserError, some

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from config.schema import DataConfig

ROWS_AT_ONCE = 500
SHOWN_MARKS = 4
# Such as `<|im_start|>`, in the source of a template
MARK = re.compile(r"<\|[^|<>\s'{}]+\|>")
ANSWER = "An answer."
WRITTEN_EOS = (
    "{% if not add_generation_prompt and messages[-1]['role'] == 'assistant' %}EOS{% endif %}"
)


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
            shown = some(others, SHOWN_MARKS)
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
    ends = last_tokens & _marks(tokenizer)
    return sorted(ends - inner_tokens or ends), cut


def _marks(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


def _end_text(tokenizer: "PreTrainedTokenizerBase", chat: bool) -> str:
    """Describe what ends answers if no token does.

    Raises:
        UserError: nothing ends answers.
    """
    if not chat:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path} has no eos token, so nothing would teach the "
            "model where an answer ends; set model.eos_token to one of its tokens"
        )
    end = (written_end(tokenizer) or "").strip()
    if end and not _has_mark(tokenizer, end):
        return f"answers end in {end!r}, which is not a token: generate() needs it in stop_strings"
    if end:
        raise UserError(
            f"the chat template's generation marks leave out the end mark {end!r}, so nothing "
            "would teach the model to stop; put it before {% endgeneration %} in a copy of the "
            "template, and set model.chat_template to the copy"
        )
    raise UserError(
        f"the chat template of tokenizer {tokenizer.name_or_path} writes no end mark after an "
        "answer, so nothing would teach the model to stop; set model.eos_token to one of the "
        "tokenizer's tokens, which is then written after the last turn"
    )


def _has_mark(tokenizer: "PreTrainedTokenizerBase", text: str) -> bool:
    return not _marks(tokenizer).isdisjoint(tokenizer(text, add_special_tokens=False)["input_ids"])


def written_end(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """What the chat template writes after the last assistant turn; None if it refuses a row of one
    question and one answer.
    """
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = apply_template(tokenizer, messages, None)
    except BadRow:
        return None
    return text.rpartition(ANSWER)[2]


# --------------------------------------------------------------------------------------------------
# Templates


def set_eos_token(tokenizer: "PreTrainedTokenizerBase", token: str) -> None:
    """Make `token` the end mark of answers, in chats if the template ends them with no token.

    Raises:
        UserError: the tokenizer does not have the token.
    """
    if token not in tokenizer.get_vocab():
        raise UserError(
            f"model.eos_token: {token!r} is not a token of tokenizer {tokenizer.name_or_path}"
        )
    tokenizer.add_special_tokens({"eos_token": token})
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return
    end = written_end(tokenizer)
    if end is not None and not _has_mark(tokenizer, end):
        eos = "{{ eos_token }}"
        if marks_generation(template):
            eos = "{% generation %}" + eos + "{% endgeneration %}"
        tokenizer.chat_template = template.removesuffix("\n") + WRITTEN_EOS.replace("EOS", eos)


def fit_template(template: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Adapt one of data/chat_templates to a tokenizer: if it lacks the template's end mark, the eos
    token takes its place, since only a token can stop generation.
    """
    found = re.match(r"\{%- set end_mark = '([^']+)' -%\}", template)
    if not found or found[1] in tokenizer.get_vocab():
        return template
    return template.replace(f"'{found[1]}'", "eos_token", 1)
