"""Count the answers of a model that match those of chat rows exactly.

    python -m scripts.exact_match MODEL_FOLDER data/sample/eval.jsonl [--show 3]

The last assistant turn of each row is the expected answer; the model answers with greedy decoding.
As for any other user of the model folder, its generation_config.json decides where an answer ends;
an answer that does not end is wrong.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zerotrain.config.schema import DataConfig, Source
from zerotrain.data.messages import canonical_row
from zerotrain.data.questions import exact_match
from zerotrain.data.sources import BadRow, parse_row, read_rows
from zerotrain.runtime.errors import UserError, exit_on_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EXTRA_TOKENS = 16  # generated beyond the expected answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--show", type=int, default=0, help="number of answers to print")
    args = parser.parse_args()
    if not Path(args.model).is_dir():
        raise UserError(f"{args.model} is not the folder of a model, which comes before the rows")
    config = DataConfig(train_sources=[str(args.rows)])
    conversations = []
    source = Source(path=str(args.rows), format="messages")
    for row in read_rows(source):
        try:
            turns = canonical_row(parse_row(row, {}), source, config)["messages"]
        except BadRow as error:
            raise UserError(f"{row.file}:{row.place}: {error}") from None
        if len(turns) < 2 or turns[-1]["role"] != "assistant":
            raise UserError(f"{row.file}:{row.place}: not a chat that ends with an answer")
        conversations.append(turns)
    if not conversations:
        raise UserError(f"{args.rows}: no rows")

    # slow to import, so after the arguments are checked
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from zerotrain.model.hub import load_pretrained
    from zerotrain.tracking.console import quieten_libraries

    quieten_libraries(is_first=True)
    model = load_pretrained(AutoModelForCausalLM.from_pretrained, args.model)
    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, args.model)
    ends = model.generation_config.eos_token_id
    if ends is None:
        raise UserError(f"{args.model}: generation_config.json needs eos_token_id to end answers")
    right = endless = 0
    for i, (*asked, expected) in enumerate(conversations):
        answer, has_ended = generate(model, tokenizer, asked, expected["content"])
        right += has_ended and exact_match("", expected["content"], answer) == 1
        endless += not has_ended
        if i < args.show:
            print(f"question: {asked[-1]['content']}\nexpected: {expected['content']}")
            print(f"answer:   {answer}\n")
    print(f"exact match: {right} of {len(conversations)} = {right / len(conversations):.1%}")
    if endless:
        print(f"{endless} answers did not end (eos_token_id of generation_config.json: {ends})")


def generate(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", asked: list[dict], expected: str
) -> tuple[str, bool]:
    """The answer to a conversation, and whether the model ended it. One at a time, as in training:
    without padding, an answer does not depend on the others.
    """
    encoded = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    longest = len(tokenizer(expected)["input_ids"]) + EXTRA_TOKENS
    ids = model.generate(**encoded, do_sample=False, max_new_tokens=longest)
    new = ids[0, encoded["input_ids"].shape[1] :].tolist()
    has_ended = new[-1] in np.atleast_1d(model.generation_config.eos_token_id)
    return tokenizer.decode(new, skip_special_tokens=True), has_ended


if __name__ == "__main__":
    exit_on_error(main)
