"""Check a claim about your own config, on this machine.

    python -m scripts.prove epoch --config recipes/demo.yaml [--world 8] [--then 6] [--cut 0.4]
        [--epochs 1]
    python -m scripts.prove data --config recipes/demo.yaml
    python -m scripts.prove equivalence --config recipes/demo.yaml [--precision bf16]

epoch   Run every rank's loader over whole epochs and count the examples that it yields, identified
        by their tokens; once on one world size, and once interrupted and resumed on another. Each
        example must appear exactly once per epoch; in k epochs k times the `repeat` of its source,
        rounded down or up.
data    Read every row of all sources and compare it with its decoded tokens and loss mask. The
        content of each answer must be supervised, that of every other message must not be. In chats
        each answer must also begin after the generation prompt, and end as the chat template ends
        it. Rows of plain text, cut or split rows, and all rows under data.supervise: all are
        counted but not compared. It also lists the last tokens of answers.
equivalence
        Train a small copy of the model, with random weights, for a few steps on the first rows,
        with every file of ds_configs/ and that of the config, bucketed and packed, on several ranks
        and on one. Losses, gradient norms and weights must be those of a plain torch loop. What
        cannot run on this machine is listed with the reason.

Any flag of train.py may follow. Exit code: 0 proved, 1 refuted, 2 a mistake in the input.
"""

import argparse
import sys
from pathlib import Path

from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import Config
from zerotrain.runtime.errors import EXIT_FAILURE, UserError, exit_on_error
from zerotrain.tools.local_ranks import short_run

EQUIVALENCE_STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("claim", choices=["epoch", "data", "equivalence"])
    add = parser.add_argument_group("epoch").add_argument
    add("--world", type=int, default=8, help="world size")
    add("--then", type=int, default=6, help="world size after resuming")
    add("--cut", type=float, default=0.4, help="where to interrupt, as a fraction of the epochs")
    add("--epochs", type=int, default=1, help="how many, from the first")
    add = parser.add_argument_group("equivalence").add_argument
    add("--ranks", type=int, help="default: all GPUs, and at least 2")
    add("--work", type=Path, default=Path("runs/prove"), help="folder for what is written")
    add("--precision", choices=["fp32", "bf16"], default="fp32")
    add("--ds_configs", nargs="+", metavar="FILE", help="default: all")
    args, rest = parser.parse_known_args()
    if min(args.world, args.then, args.epochs, args.ranks or 1) < 1 or not 0 <= args.cut <= 1:
        raise UserError("--world, --then, --epochs and --ranks must be at least 1, --cut in [0, 1]")
    short = short_run(EQUIVALENCE_STEPS) if args.claim == "equivalence" else []
    config = parse_command_line([*rest, *short], prog="prove.py").config

    from zerotrain.tracking.console import quieten_libraries

    quieten_libraries(is_first=True)
    if args.claim == "data":
        proved = prove_data(config)
    elif args.claim == "equivalence":
        proved = prove_training(config, args)
    else:
        from zerotrain.tools.epoch_proof import prove_epochs
        from zerotrain.tools.open_plans import open_plans

        _, _, plan, _ = open_plans(config, args.world)
        proved = prove_epochs(plan, args.then, args.cut, args.epochs)
    print("proved" if proved else "REFUTED")
    sys.exit(0 if proved else EXIT_FAILURE)


def prove_training(config: Config, args: argparse.Namespace) -> bool:
    """Train some steps, and compare them with plain torch.

    Raises:
        UserError: nothing can run on this machine, or --work has files of the user.
    """
    import torch

    from zerotrain.tools.equivalence import prove_equivalence
    from zerotrain.tools.new_folder import own_folder

    ranks = args.ranks or torch.cuda.device_count() or 2
    files = args.ds_configs or sorted(
        {config.ds_config, *map(str, Path("ds_configs").glob("*.json"))}
    )
    return prove_equivalence(config, files, ranks, args.precision, own_folder(args.work))


def prove_data(config: Config) -> bool:
    """Compare the rows of the training and held-out sources with their masks.

    Raises:
        UserError: there is no row that can be compared.
    """
    from zerotrain.data.caches import open_caches, sets_of
    from zerotrain.model.tokenizer import load_tokenizer
    from zerotrain.rows.tokenize import make_caches
    from zerotrain.tools.row_proof import prove_rows

    make_caches(config)
    tokenizer = load_tokenizer(config.model)
    caches = open_caches(config, tokenizer)
    tokenizer.chat_template = caches[0].meta.chat_template
    counts = [
        prove_rows(given, tokenizer, rows, config)
        for given, rows in zip(sets_of(config), caches, strict=True)
    ]
    compared, problems = map(sum, zip(*counts, strict=True))
    if compared == 0:
        raise UserError(
            "no row could be compared: all are plain text, cut or split, or data.supervise is all; "
            "python -m scripts.inspect_data shows them with their masks"
        )
    return problems == 0


if __name__ == "__main__":
    exit_on_error(main)
