"""Count the answers of a model that equal the expected answers of chat rows.

    python -m scripts.exact_match MODEL_FOLDER data/sample/eval.jsonl [--show 3]

The last assistant message of each row is the expected answer. The model decodes greedily. Its
generation_config.json decides where an answer ends, as in a server. An answer without an end is
wrong.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.config.schema import DataConfig, Source
from zerotrain.data.questions import exact_match
from zerotrain.rows.messages import canonical_row
from zerotrain.rows.sources import BadRow, parse_row, read_rows
from zerotrain.runtime.errors import UserError, exit_on_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_ROWS = 64
EXTRA_TOKENS = 16  # An answer may exceed the longest expected one by as many.


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("rows", type=Path, help="file with chat rows")
    parser.add_argument("--show", type=int, default=0, help="number of answers to print (0)")
    args = parser.parse_args()
    if not Path(args.model).is_dir():
        raise UserError(f"{args.model} is not a model folder; give MODEL_FOLDER, then ROWS")
    config = DataConfig(train_sources=[str(args.rows)])
    conversations = []
    source = Source(path=str(args.rows), format="messages")
    for row in read_rows(source):
        try:
            turns = canonical_row(parse_row(row, {}), source, config)["messages"]
        except BadRow as error:
            raise UserError(f"{row.file}:{row.place}: {error}") from None
        if len(turns) < 2 or turns[-1]["role"] != "assistant":
            raise UserError(
                f"{row.file}:{row.place}: the row is not a chat that ends with an answer"
            )
        conversations.append(turns)
    if not conversations:
        raise UserError(f"{args.rows} has no rows; give a file with chats")

    # These imports are slow, so mistakes in the arguments are reported first.
    from transformers import AutoConfig, AutoTokenizer

    from zerotrain.model.architecture import auto_class
    from zerotrain.model.hub import load_pretrained
    from zerotrain.tracking.console import quieten_libraries

    quieten_libraries(is_first=True)
    model_config = load_pretrained(AutoConfig.from_pretrained, args.model)
    model = load_pretrained(auto_class(model_config).from_pretrained, args.model)
    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, args.model)
    ends = model.generation_config.eos_token_id
    if ends is None:
        raise UserError(
            f"{args.model}/generation_config.json: set eos_token_id, which ends answers"
        )
    right = endless = 0
    for start in range(0, len(conversations), BATCH_ROWS):
        batch = conversations[start : start + BATCH_ROWS]
        for i, (answer, has_ended) in enumerate(generate(model, tokenizer, batch), start):
            *_, question, expected = conversations[i]
            right += has_ended and exact_match("", expected["content"], answer) == 1
            endless += not has_ended
            if i < args.show:
                print(f"question: {question['content']}\nexpected: {expected['content']}")
                print(f"answer:   {answer}\n")
    print(f"exact match: {right} of {len(conversations)} = {right / len(conversations):.1%}")
    if endless:
        print(f"{endless} answers did not end (eos_token_id of generation_config.json: {ends})")


def generate(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", batch: list[list[dict]]
) -> list[tuple[str, bool]]:
    """Return (answer, whether it ended) for each conversation without its last message."""
    import torch

    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # Any token: it is masked.
    ends = torch.tensor(model.generation_config.eos_token_id, device=model.device)
    longest = max(len(tokenizer(turns[-1]["content"])["input_ids"]) for turns in batch)
    encoded = tokenizer.apply_chat_template(
        [turns[:-1] for turns in batch],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    ).to(model.device)
    with torch.inference_mode():
        ids = model.generate(**encoded, do_sample=False, max_new_tokens=longest + EXTRA_TOKENS)
    new = ids[:, encoded["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(new, skip_special_tokens=True)
    return list(zip(answers, torch.isin(new, ends).any(1).tolist(), strict=True))


if __name__ == "__main__":
    exit_on_error(main)
