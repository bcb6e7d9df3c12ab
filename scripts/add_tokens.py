"""Write a copy of a model that has further tokens, e.g. the marks of a chat template.

    python scripts/add_tokens.py MODEL OUT --tokens '<|im_start|>' '<|im_end|>' [--special]
        [--chat_template chatml] [--pad_to_multiple_of 64] [--tokenizer FOLDER] [--revision COMMIT]

MODEL is a folder or a hub id. The rows of the new tokens, in embeddings and output head, are the
mean of the old ones, and the number of rows is padded to a multiple. Rows of old tokens stay as
they are. OUT has weights, config, generation config and tokenizer. The whole model is held in
memory, in its own precision. For a tokenizer to which tokens have been added elsewhere:
--tokenizer, without --tokens.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.errors import UserError, exit_on_error, some
from runtime.files import new_folder
from runtime.host_memory import available_memory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", nargs="+", default=[], metavar="TOKEN")
    parser.add_argument("--special", action="store_true", help="marks, which decoding leaves out")
    parser.add_argument("--pad_to_multiple_of", type=int, default=64, metavar="ROWS")
    parser.add_argument("--chat_template", help="Jinja file, or a name as in model.chat_template")
    parser.add_argument("--tokenizer", help="the model's tokenizer with tokens already added")
    parser.add_argument("--revision", help="branch, tag or commit of MODEL on the hub")
    args = parser.parse_args()
    if args.pad_to_multiple_of < 1:
        raise UserError(f"--pad_to_multiple_of: {args.pad_to_multiple_of} is not positive")
    if args.out.exists():
        raise UserError(f"{args.out} exists; choose a new folder")

    # slow to import, so after the arguments are checked
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from model.hub import load_pretrained
    from model.load import set_chat_template
    from model.vocabulary import add_tokens, check_extends, count_ids, resize_vocabulary
    from tracking.console import quieten_libraries

    quieten_libraries(is_first=True)
    load = partial(load_pretrained, name=args.model, revision=args.revision)
    tokenizer = load(AutoTokenizer.from_pretrained)
    old_ids = count_ids(tokenizer)
    if args.tokenizer:
        larger = load_pretrained(AutoTokenizer.from_pretrained, args.tokenizer)
        check_extends(larger, tokenizer)
        tokenizer = larger
    new = add_tokens(tokenizer, args.tokens, args.special)
    if args.chat_template:
        set_chat_template(tokenizer, args.chat_template)

    new_ids = count_ids(tokenizer)
    old_rows = check_weights(args.model, args.revision, load)
    if not (new or args.tokenizer or args.chat_template) and new_ids <= old_rows:
        raise UserError(f"{args.model} has all of these tokens already: there is nothing to add")
    for token in dict.fromkeys(args.tokens):
        i = tokenizer.convert_tokens_to_ids(token)
        print(f"{token!r} {'gets' if token in new else 'exists already, with'} id {i:,}")
    model = load(AutoModelForCausalLM.from_pretrained, dtype="auto")
    rows = resize_vocabulary(model, old_ids, new_ids, args.pad_to_multiple_of)
    with new_folder(args.out) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    print(f"{args.model} -> {args.out}: {new_ids:,} token ids, {old_rows:,} -> {rows:,} rows")


def check_weights(name: str, revision: str | None, load: Callable[..., Any]) -> int:
    """Check, before weights are read, that the copy of a model would have all of them and that
    memory can hold them; return the number of rows of its embeddings.

    Args:
        load: calls a from_pretrained for the model.

    Raises:
        UserError: names the weights that are missing, contradict a tie or would be lost; or the
            memory.
    """
    from transformers import AutoModelForCausalLM

    from model.stored import check_ties
    from model.weights import NO_WEIGHTS

    skeleton = partial(
        AutoModelForCausalLM.from_pretrained, device_map="meta", output_loading_info=True
    )
    model, found = load(skeleton, dtype="auto")
    lost = sorted(key for key in found["unexpected_keys"] if not NO_WEIGHTS.search(key))
    for problem, keys in (
        ("has no weights for", sorted(found["missing_keys"])),
        ("has weights that its causal language model does not use, and a copy would lack", lost),
    ):
        if keys:
            raise UserError(f"{name} {problem} {some(keys)}")
    check_ties(name, revision, model)
    needed, (free, _) = sum(p.nbytes for p in model.parameters()), available_memory()
    if needed > free:
        raise UserError(
            f"{name} needs {needed / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are "
            "free; run this where there is more"
        )
    return model.get_input_embeddings().weight.shape[0]


if __name__ == "__main__":
    exit_on_error(main)
