"""End marks: the tokens that end answers in the training data and so teach the model to stop."""

import contextlib
import re

import numpy as np
import pyarrow as pa
import xxhash
from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import DataConfig
from zerotrain.rows.sources import BadRow, JsonObject
from zerotrain.rows.turns import locate
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.progress import print_line


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


WRITTEN_LAST = (
    "{% if not add_generation_prompt and messages[-1]['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}"
)
WRITTEN_ALWAYS = (
    "{% set ended = namespace(messages=[]) %}{% for m in messages %}{% set ended.messages = "
    "ended.messages + [dict(m, content=m['content'] ~ eos_token) if m['role'] == 'assistant' and "
    "m['content'] is string and m['content'] and not m['tool_calls'] else m] %}{% endfor %}"
    "{% set messages = ended.messages %}"
)


def end_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    """If the chat template ends answers with nothing (GLM, Alpaca), or only those within a row
    (Qwen1.5, Apertus), extend it to write the eos token there, also in the exported tokenizer.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or tokenizer.eos_token is None:
        return
    chat = [{"role": role, "content": f"({role})"} for role in ("user", "assistant") * 2]
    # as it is; with an end after the last answer; with an end after each answer
    for changed in (template, template.rstrip("\n") + WRITTEN_LAST, WRITTEN_ALWAYS + template):
        tokenizer.chat_template = changed
        with contextlib.suppress(BadRow, UserError):
            locate(chat, None, tokenizer, [1, 3])
            if changed != template:
                print_line("the chat template ends answers with no token: eos is added to it")
            return
    tokenizer.chat_template = template


def fit_template(template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Adapt one of data/chat_templates to a tokenizer: if it lacks the template's end mark, the eos
    token takes its place, since only a token can stop generation.
    """
    found = re.match(r"\{%- set end_mark = '([^']+)' -%\}", template)
    if not found or found[1] in tokenizer.get_vocab():
        return template
    return template.replace(f"'{found[1]}'", "eos_token", 1)
