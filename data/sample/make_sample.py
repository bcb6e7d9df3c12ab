"""Writes the sample: rows, tokenizer and model config for the demo and the tests, with the same
bytes every time.

    python data/sample/make_sample.py [FOLDER]

The task: add the same number several times, step by step. Each row is a chat of two turns,

    user       Start at 17 and add 3, 4 times.
    assistant  17+3=20, 3 left. 20+3=23, 2 left. 23+3=26, 1 left. 26+3=29, 0 left. Answer: 29

so that every step depends on the previous one, and a model that has not learned to carry or to
count makes a mistake somewhere. The number of steps is log-normal: most rows are short, a few are
several times as long. No sum is over 99 and no count over 9: numbers with another digit would be
too rare to be learned in a few minutes.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

DRAWN_ROWS = 20_000
EVAL_ROWS = 200
SEED = 0
MAX_STEPS = 9
VOCAB_SIZE = 384
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


def make_row(rng: random.Random) -> dict:
    """One chat row: {"messages": [user turn, assistant turn]}."""
    addend = rng.randint(2, 9)
    count = min(1 + int(rng.lognormvariate(0.6, 0.75)), MAX_STEPS, (99 - 10) // addend)
    value = start = rng.randint(10, 99 - count * addend)
    steps = []
    for left in reversed(range(count)):
        steps.append(f"{value}+{addend}={value + addend}, {left} left.")
        value += addend
    question = f"Start at {start} and add {addend}, {count} times."
    answer = " ".join([*steps, f"Answer: {value}"])
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def train_tokenizer(rows: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained on the rows. It encodes any text, since the alphabet is all bytes;
    every digit is a token of its own, which helps arithmetic.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END, *(f"<|{role}|>" for role in ROLES)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    messages = (message for row in rows for message in json.loads(row)["messages"])
    tokenizer.train_from_iterator((text for m in messages for text in m.values()), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
    folder = folder.parent if folder.suffix == ".py" else folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    drawn = [json.dumps(make_row(rng)) for _ in range(DRAWN_ROWS)]
    unique = list(dict.fromkeys(drawn))  # held-out rows must not be in train.jsonl
    held_out = set(rng.sample(unique, EVAL_ROWS))
    train = [row for row in unique if row not in held_out]
    for name, rows in (("train", train), ("eval", [row for row in unique if row in held_out])):
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")

    tokenizer = train_tokenizer(train)
    LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    print(
        f"{folder}: {len(train):,} training rows, {len(held_out):,} held-out rows, "
        f"{len(tokenizer)} tokens"
    )


if __name__ == "__main__":
    main()
