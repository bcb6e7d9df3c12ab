"""Write a copy of a model that has further tokens, e.g. the marks of a chat template.

    python scripts/add_tokens.py MODEL OUT --tokens '<|im_start|>' '<|im_end|>' [--special]
        [--chat_template chatml] [--revision COMMIT]

MODEL is a folder or a hub id. The rows of the new tokens, in embeddings and output head, are the
mean of the old ones, and the number of rows is padded to a multiple of 64. Rows of old tokens stay
as they are. OUT has weights, config, generation config and tokenizer. The whole model is held in
memory, in its own precision.
"""

import argparse
from pathlib import Path

from zerotrain.runtime.errors import UserError, exit_on_error, first_of
from zerotrain.tools.new_folder import new_folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", nargs="+", required=True, metavar="TOKEN")
    parser.add_argument("--special", action="store_true", help="marks, which decoding leaves out")
    parser.add_argument("--chat_template", help="Jinja file, or a name as in model.chat_template")
    parser.add_argument("--revision", help="branch, tag or commit of MODEL on the hub")
    args = parser.parse_args()
    if args.out.exists():
        raise UserError(f"{args.out} exists; choose a new folder")

    # slow to import, so after the arguments are checked
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from zerotrain.model.architecture import count_ids
    from zerotrain.model.hub import load_pretrained
    from zerotrain.model.load import check_report, set_chat_template
    from zerotrain.tools.vocabulary import add_tokens, resize_vocabulary
    from zerotrain.tracking.console import quieten_libraries

    quieten_libraries(is_first=True)
    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, args.model, revision=args.revision)
    old_ids = count_ids(tokenizer)
    new = add_tokens(tokenizer, args.tokens, args.special)
    if args.chat_template:
        set_chat_template(tokenizer, args.chat_template)

    load = AutoModelForCausalLM.from_pretrained
    model, report = load_pretrained(
        load, args.model, revision=args.revision, dtype="auto", output_loading_info=True
    )
    check_report(args.model, report)
    if lost := sorted(report["unexpected_keys"]):
        raise UserError(
            f"{args.model} has weights that its causal language model does not use, and a copy "
            f"would lack: {first_of(lost)}; use a text model of its family"
        )
    new_ids = count_ids(tokenizer)
    old_rows = model.get_input_embeddings().weight.shape[0]
    if not (new or args.chat_template) and new_ids <= old_rows:
        raise UserError(f"{args.model} has all of these tokens already: there is nothing to add")
    for token in dict.fromkeys(args.tokens):
        i = tokenizer.convert_tokens_to_ids(token)
        print(f"{token!r} {'gets' if token in new else 'exists already, with'} id {i:,}")
    rows = resize_vocabulary(model, old_ids, new_ids)
    with new_folder(args.out) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    print(f"{args.model} -> {args.out}: {new_ids:,} token ids, {old_rows:,} -> {rows:,} rows")


if __name__ == "__main__":
    exit_on_error(main)
