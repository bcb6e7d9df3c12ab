"""Ask a model the questions of chat rows and count the answers that match exactly.

    python scripts/exact_match.py MODEL_FOLDER data/sample/eval.jsonl [--show 3]

The last assistant turn of each row is the expected answer; the model answers with greedy decoding.
As for any other user of the model folder, its generation_config.json decides where an answer ends;
an answer that does not end is wrong.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zerotrain.config.schema import Source
from zerotrain.data.scorers import exact_match
from zerotrain.data.sources import parse_row, read_rows
from zerotrain.runtime.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_ROWS = 64
ROOM_TOKENS = 16  # allowed in addition to the longest expected answer


class Answer(NamedTuple):
    """A model's answer to one question."""

    expected: str
    said: str
    has_ended: bool
    """Whether the model ended it, within the tokens that it was allowed."""

    @property
    def is_right(self) -> bool:
        return self.has_ended and bool(exact_match("", self.expected, self.said))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--show", type=int, default=0, help="number of answers to print")
    args = parser.parse_args()
    for path in (args.model, args.rows):
        if not path.exists():
            raise UserError(f"no such file or folder: {path}")
    conversations = read_conversations(str(args.rows))

    # slow to import, so after the arguments are checked
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from zerotrain.model.hub import load_pretrained
    from zerotrain.tracking.console import quieten_libraries

    quieten_libraries(is_first=True)
    model = load_pretrained(AutoModelForCausalLM.from_pretrained, args.model)
    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, args.model)
    answers = ask(model, tokenizer, conversations)
    for turns, answer in list(zip(conversations, answers, strict=True))[: args.show]:
        print(f"asked:    {turns[-2]['content']}\nexpected: {answer.expected}")
        print(f"answered: {answer.said}\n")
    right = sum(answer.is_right for answer in answers)
    print(f"exact match: {right} of {len(answers)} = {right / len(answers):.1%}")
    endless = sum(not answer.has_ended for answer in answers)
    if endless:
        ends = model.generation_config.eos_token_id
        print(f"{endless} answers did not end (eos_token_id of generation_config.json: {ends})")


def read_conversations(file: str) -> list[list[dict]]:
    """The messages of each row of a file."""
    conversations = []
    for _, row in read_rows(Source(path=file)):
        turns = parse_row(row, {}).get("messages", [])
        if not turns or turns[-1].get("role") != "assistant":
            raise UserError(f"{file}:{row.place}: not messages that end with the assistant's")
        conversations.append(turns)
    return conversations


def ask(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", conversations: list[list[dict]]
) -> list[Answer]:
    """The model's answers in place of each conversation's last turn, which is the assistant's."""
    import torch

    tokenizer.padding_side = "left"  # generation continues on the right
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # the mask hides it
    ends = torch.tensor(model.generation_config.eos_token_id, device=model.device)
    answers = []
    for start in range(0, len(conversations), BATCH_ROWS):
        batch = conversations[start : start + BATCH_ROWS]
        expected = [turns[-1]["content"] for turns in batch]
        room = max(len(tokenizer(text)["input_ids"]) for text in expected) + ROOM_TOKENS
        encoded = tokenizer.apply_chat_template(
            [turns[:-1] for turns in batch],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        ).to(model.device)
        with torch.inference_mode():
            ids = model.generate(**encoded, do_sample=False, max_new_tokens=room)
        new = ids[:, encoded["input_ids"].shape[1] :]
        has_ended = torch.isin(new, ends).any(1).tolist()
        said = tokenizer.batch_decode(new, skip_special_tokens=True)
        answers += map(Answer, expected, said, has_ended)
    return answers
