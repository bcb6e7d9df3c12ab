"""Inspect the data before training: rows, lengths, supervised tokens, and the step plan.

    python -m scripts.inspect_data --config recipes/demo.yaml [--show 3] [--ranks 8 64 512]

Prints counts, length quantiles, tokens, truncation and the supervised share. The first examples
follow, with supervised text and special tokens in color on a terminal, else in brackets.
FORCE_COLOR and NO_COLOR override that. The last table has padding and balance of the steps planned
for several world sizes. Any flag of train.py may follow.
"""

import argparse

from zerotrain.config.parse import parse_command_line
from zerotrain.runtime.errors import UserError, exit_on_error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--show", type=int, default=3, metavar="N", help="number of examples to print (3)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[8, 64, 512],
        help="world sizes to plan for (8 64 512)",
    )
    args, rest = parser.parse_known_args()
    if min(args.ranks) < 1 or args.show < 0:
        raise UserError("--ranks needs numbers of at least 1, --show at least 0")
    asked = parse_command_line(rest, prog="inspect_data.py").config

    from zerotrain.config.schema import HELD_OUT
    from zerotrain.runtime.progress import show_rows
    from zerotrain.tools.data_report import print_counts, print_examples, print_plans
    from zerotrain.tools.open_plans import open_plans
    from zerotrain.tracking.console import quieten_libraries
    from zerotrain.tracking.startup import data_rows

    quieten_libraries(is_first=True)
    config, tokenizer, plan, eval_plans = open_plans(asked, args.ranks[0])
    show_rows(data_rows(config.data, plan, eval_plans))
    print_counts("training examples", plan.data)
    for name, eval_plan in eval_plans.items():
        kind = "held-out examples"
        print_counts(kind if name == HELD_OUT else f"{kind}: {name}", eval_plan.data)
    print_examples(plan, tokenizer, args.show)
    on_cpu = " (data.batching auto, resolved for CPU)" if asked.data.batching == "auto" else ""
    print_plans(plan, args.ranks, config.data.batching + on_cpu)


if __name__ == "__main__":
    exit_on_error(main)
