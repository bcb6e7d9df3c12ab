"""Train a small byte-level BPE tokenizer with a chat template that marks the assistant's tokens.

    python -m zerotrain.tools.train_tokenizer OUT_FOLDER --vocab_size 4096 --files rows.jsonl

For models trained from random weights; pretrained models have their own. Any text can be encoded
(the alphabet is all bytes), and every digit is a token of its own, which helps arithmetic.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from zerotrain.config.schema import Source
from zerotrain.data.sources import BadRow, parse_row, read_rows
from zerotrain.runtime.errors import UserError, exit_on_error

END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("system", "user", "assistant", "tool")

# The {% generation %} block covers what the assistant generates: its text and its end mark.
CHAT_TEMPLATE = """{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + '<|end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` tokens, including special ones. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, *(f"<|{role}|>" for role in ROLES)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a value, at any depth; keys do not count."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_in(inner)


def texts_of(file: str) -> Iterator[str]:
    """Every string in the rows of a file.

    Raises:
        UserError: a row cannot be read.
    """
    for place, row in read_rows(Source(path=file)):
        try:
            yield from strings_in(parse_row(row, {}))
        except BadRow as error:
            raise UserError(f"{place}:{row.place}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--files", nargs="+", required=True)
    parser.add_argument("--vocab_size", type=int, default=4096)
    args = parser.parse_args()
    texts = (text for file in args.files for text in texts_of(file))
    tokenizer = train_tokenizer(texts, args.vocab_size)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {len(tokenizer):,} tokens")


if __name__ == "__main__":
    exit_on_error(main)
