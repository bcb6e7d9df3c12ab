"""Ask a model the questions of chat rows and count the answers that match exactly.

    python scripts/exact_match.py MODEL_FOLDER data/sample/eval.jsonl [--show 3]

The last assistant turn of each row is the expected answer; the model answers with greedy decoding.
As for any other user of the model folder, its generation_config.json decides where an answer ends;
an answer that does not end is wrong.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.schema import Source
from data.scorers import exact_match
from data.sources import parse_row, read_rows
from runtime.errors import UserError, exit_on_error

if TYPE_CHECKING:
    import torch
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


def ask(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", conversations: list[list[dict]]
) -> list[Answer]:
    """The model's answers in place of each conversation's last turn, which is the assistant's."""
    import torch

    tokenizer.padding_side = "left"  # generation continues on the right
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # the attention mask hides it
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
        said = tokenizer.batch_decode(new, skip_special_tokens=True)
        ended = has_end(new, model.generation_config.eos_token_id, room)
        answers += map(Answer, expected, said, ended)
    return answers


def has_end(new: "torch.Tensor", ends: int | list[int] | None, room: int) -> list[bool]:
    """Which of the generated answers, int64 [answers, length], contain an end token."""
    if new.shape[1] < room:  # generation stops early only when all have ended
        return [True] * len(new)
    wanted = set(ends) if isinstance(ends, list) else {ends}
    return [not wanted.isdisjoint(row) for row in new.tolist()]


def read_conversations(file: str) -> list[list[dict]]:
    """The messages of each row of a file."""
    conversations = []
    for place, row in read_rows(Source(path=file)):
        try:
            messages = parse_row(row, {})["messages"]
            if messages[-1]["role"] != "assistant":
                raise ValueError("the last turn is not the assistant's")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            problem = f"not a chat row that ends with an assistant turn ({error!r})"
            raise UserError(f"{place}:{row.place}: {problem}") from error
        conversations.append(messages)
    return conversations


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("rows")
    parser.add_argument("--show", type=int, default=0, help="number of answers to print")
    args = parser.parse_args()
    for path in (args.model, Path(args.rows)):
        if not path.exists():
            raise UserError(f"no such file or folder: {path}")
    conversations = read_conversations(args.rows)

    # slow to import, so after the arguments are checked
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from model.hub import load_pretrained
    from tracking.console import quieten_libraries

    quieten_libraries(is_first=True)

    model = load_pretrained(AutoModelForCausalLM.from_pretrained, args.model)
    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, args.model)
    answers = ask(model, tokenizer, conversations)
    for conversation, answer in list(zip(conversations, answers, strict=True))[: args.show]:
        print(f"asked:    {conversation[-2]['content']}\nexpected: {answer.expected}\n"
              f"said:     {answer.said}\n")  # fmt: skip
    right = sum(answer.is_right for answer in answers)
    print(f"exact match: {right} of {len(answers)} = {right / len(answers):.1%}")
    if endless := sum(not answer.has_ended for answer in answers):
        ends = model.generation_config.eos_token_id
        print(f"{endless} answers did not end (eos_token_id of generation_config.json: {ends})")


if __name__ == "__main__":
    exit_on_error(main)
