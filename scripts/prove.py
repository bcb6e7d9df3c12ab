"""Prove a claim for your own config, on this machine.

    python -m scripts.prove epoch --config recipes/demo.yaml [--world 8] [--then 6] [--cut 0.4]
        [--epochs 1]
    python -m scripts.prove data --config recipes/demo.yaml
    python -m scripts.prove equivalence --config recipes/demo.yaml [--precision bf16]
    python -m scripts.prove golden [--renew]

epoch   Run every rank's loader over whole epochs and count the examples by their tokens. This
        happens twice: on one world size, and interrupted and resumed on another. Each example must
        come once per epoch, or in k epochs k times the `repeat` of its source, rounded up or down.
data    Compare every row of all sources with its decoded tokens and loss mask. The content of every
        answer must be supervised; the content of other messages must not. In chats each answer must
        also start after the generation prompt, and end as the chat template ends it. Rows of plain
        text, cut or split rows, and all rows with data.supervise: all are counted but not compared.
        The last tokens of answers are listed.
equivalence
        Train a small copy of the model with random weights, for a few steps on the first rows. Each
        file of ds_configs/ runs bucketed and packed, on several ranks and on one. Losses, gradient
        norms and weights must equal a plain torch loop's. The output lists what this machine cannot
        run, with the reason.
golden  Train small copies of three recipes for 20 steps on a CPU, in fp32 and bf16. Each loss must
        be as in zerotrain/tools/golden.json. The output says which moved, and which packages have
        another version than when they were stored. --renew stores the losses of this machine.

Any flag of train.py may follow, but none after golden. Exit code: 0 proved, 1 refuted, 2 a mistake
in the input.
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
    parser.add_argument("claim", choices=["epoch", "data", "equivalence", "golden"])
    add = parser.add_argument_group("epoch").add_argument
    add("--world", type=int, default=8, help="world size (8)")
    add("--then", type=int, default=6, help="world size after resuming (6)")
    add("--cut", type=float, default=0.4, help="interruption, as a fraction of the epochs (0.4)")
    add("--epochs", type=int, default=1, help="number of epochs (1)")
    add = parser.add_argument_group("equivalence").add_argument
    add("--ranks", type=int, help="number of ranks (all GPUs, or 2 CPU ranks)")
    add(
        "--work",
        type=Path,
        default=Path("runs/prove"),
        help="folder for models and runs (runs/prove)",
    )
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="(fp32)")
    add("--ds_configs", nargs="+", metavar="FILE", help="DeepSpeed configs (all)")
    add = parser.add_argument_group("golden").add_argument
    add("--renew", action="store_true", help="store the losses of this machine")
    args, rest = parser.parse_known_args()
    if min(args.world, args.then, args.epochs, args.ranks or 1) < 1 or not 0 <= args.cut <= 1:
        raise UserError(
            "--world, --then, --epochs and --ranks must be at least 1, --cut from 0 to 1"
        )
    prove = prove_losses if args.claim == "golden" else prove_for_config
    proved = prove(args, rest)
    print("proved" if proved else "REFUTED")
    sys.exit(0 if proved else EXIT_FAILURE)


def prove_for_config(args: argparse.Namespace, flags: list[str]) -> bool:
    """Prove a claim for the config that `flags` of train.py describe."""
    short = short_run(EQUIVALENCE_STEPS) if args.claim == "equivalence" else []
    config = parse_command_line([*flags, *short], prog="prove.py").config

    from zerotrain.tracking.console import quieten_libraries

    quieten_libraries(is_first=True)
    if args.claim == "data":
        return prove_data(config)
    if args.claim == "equivalence":
        return prove_training(config, args)

    from zerotrain.tools.epoch_proof import prove_epochs
    from zerotrain.tools.open_plans import open_plans

    _, _, plan, _ = open_plans(config, args.world)
    return prove_epochs(plan, args.then, args.cut, args.epochs)


def prove_losses(args: argparse.Namespace, flags: list[str]) -> bool:
    """Compare the losses of small copies with golden.json, and return whether they agree; or store
    them there, and exit.

    Raises:
        UserError: there are flags of train.py, or --work has the user's files.
    """
    if flags:
        raise UserError(f"golden trains its own configs; leave out {' '.join(flags)}")

    from zerotrain.tools.golden import GOLDEN, compare, store, train_copies
    from zerotrain.tools.new_folder import own_folder
    from zerotrain.tracking.console import quieten_libraries

    quieten_libraries(is_first=True)
    losses = train_copies(own_folder(args.work))
    if args.renew:
        store(losses)
        print(f"{GOLDEN} has the losses of this machine; look at `git diff`")
        sys.exit(0)
    return compare(losses)


def prove_training(config: Config, args: argparse.Namespace) -> bool:
    """Train some steps and compare them with plain torch. Return whether they are equal.

    Raises:
        UserError: nothing can run on this machine, or --work has the user's files.
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
    """Compare the rows of all sources with their masks. Return whether they agree.

    Raises:
        UserError: no row can be compared.
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
        for given, rows in zip(sets_of(config).values(), caches, strict=True)
    ]
    compared, problems = map(sum, zip(*counts, strict=True))
    if compared == 0:
        raise UserError(
            "no row could be compared: all are plain text, cut, split or in a token cache, or "
            "data.supervise is all; python -m scripts.inspect_data shows them with their masks"
        )
    return problems == 0


if __name__ == "__main__":
    exit_on_error(main)
