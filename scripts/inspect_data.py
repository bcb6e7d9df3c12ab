"""Inspect the data before training: what was read, lengths, what is supervised, and the step plan.

    python scripts/inspect_data.py --config recipes/demo.yaml [--show 3] [--ranks 8,64,512]
        [--html out.html] [--plot out.png] [--color auto|always|never]

Prints counts, length quantiles, tokens, truncation and the supervised share; the first examples,
with supervised text and end marks in color (or in brackets); and padding and balance of the steps
planned for several world sizes. --html writes the counts and examples as a page, --plot draws the
lengths and the first micro-steps. Any flag of train.py may follow.
"""

import argparse
import html
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.check_sources import parse_with_sources
from runtime.errors import UserError, exit_on_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from data.data_plan import DataPlan
    from data.plan import StepPlan

QUANTILES = (0, 1, 10, 25, 50, 75, 90, 99, 99.9, 100)
PLANNED_STEPS = 50  # of the first epoch, for each number of ranks
PLOTTED_MICRO_STEPS = 200
SHOWN_TOKENS = 1000  # of an example, on the terminal
# Kind of segment -> its style on a terminal with colors, and its brackets on one without
STYLES = {
    "plain": ("", "", ""),
    "answer": ("green", "[[", "]]"),
    "end": ("bold magenta", "{{", "}}"),
}
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }}
h1 {{ font-size: 1.3rem }} h2 {{ font-size: 1rem; margin: 1.5rem 0 .3rem }}
td {{ padding: .1rem 1rem .1rem 0; vertical-align: top }}
td:first-child {{ white-space: nowrap; color: #666 }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; color: #666;
  padding: .8rem; border-radius: 6px; font: 13px/1.6 ui-monospace, monospace; margin: 0 }}
.answer {{ background: #c9efd0; color: #0b3d18 }}
.end {{ background: #7a2a8c; color: #fff; border-radius: 3px; padding: 0 .2em }}
</style>
<h1>{title}</h1>
<table>{counts}</table>
<p>Carries loss: <span class="answer">supervised text</span> <span class="end">end mark</span>.
Everything else is context. ↵ is a line break in an end mark; control characters are shown as
pictures (␛).</p>
{rows}
</html>
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--show", type=int, default=3, metavar="N", help="first examples to print")
    parser.add_argument("--ranks", default="8,64,512", help="world sizes to plan for")
    parser.add_argument("--html", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto")
    args, rest = parser.parse_known_args()
    try:
        ranks = [int(n) for n in args.ranks.split(",")]
    except ValueError:
        ranks = []
    if not ranks or min(ranks) < 1:
        raise UserError(f"--ranks: {args.ranks!r} is not a list of numbers like 8,64")
    if args.show < 0:
        raise UserError(f"--show: {args.show} is negative")
    for name, file, suffix in (("--plot", args.plot, ".png"), ("--html", args.html, ".html")):
        if file and not file.resolve().parent.is_dir():
            raise UserError(f"{name}: no such folder: {file.parent}")
        if file and (file.suffix != suffix or file.is_dir()):
            raise UserError(f"{name}: {file} does not end in {suffix}")
    asked = parse_with_sources(rest, prog="inspect_data.py").config

    from config.schema import HELD_OUT
    from tracking.console import quieten_libraries
    from tracking.startup import open_plans

    quieten_libraries(is_first=True)
    config, tokenizer, plan, eval_plans = open_plans(asked, ranks[0])
    print_counts("training examples", plan)
    for name, eval_plan in eval_plans.items():
        print_counts("held-out examples" + f": {name}" * (name != HELD_OUT), eval_plan)
    print_examples(plan, tokenizer, args.show, args.color)
    on_cpu = " (data.batching auto, resolved for CPU)" if asked.data.batching == "auto" else ""
    print_plans(plan, ranks, config.data.batching + on_cpu)
    if args.html:
        args.html.write_text(page(plan, tokenizer, args.show), encoding="utf-8")
        print(f"\n{args.html}: the first {min(args.show, len(plan.data)):,} examples")
    if args.plot:
        draw(plan, args.plot)
        print(f"\n{args.plot}: lengths, and the first micro-steps on {ranks[0]} ranks")


def counts_of(plan: "DataPlan") -> dict[str, str]:
    """What was read, how long rows were handled, token counts, and what is supervised."""
    import numpy as np

    from data.render import OUTCOMES

    data, meta = plan.data, plan.data.meta
    became = [f"{meta[key]:,} {text}" for key, text in OUTCOMES.values() if meta[key]]
    became += [f"{n:,} left out ({reason})" for reason, n in meta["rejected"].items()]
    share = np.asarray(data.supervised) / np.asarray(data.lengths)
    return {
        "examples": f"{len(data):,}, of {meta['rows_read']:,} rows read from "
        f"{', '.join(meta['sources'])}",
        "format": ", ".join(dict.fromkeys(meta["formats"])),
        "over max_length, bad": ", ".join(became) or "none",
        **({"special tokens": meta["special_text"]} if meta["special_text"] else {}),
        **({"prompts": meta["prompts"]} if meta["prompts"] else {}),
        "tokens": f"{meta['tokens']:,}, {meta['tokens'] / len(data):,.1f} per example",
        "supervised": f"{meta['supervised_tokens']:,}, {share.mean():.1%} of an example (from "
        f"{share.min():.1%} to {share.max():.1%}){'; ' if meta['masks'] else ''}{meta['masks']}",
        "length": "  ".join(
            f"{q:g}%: {n:,.0f}"
            for q, n in zip(QUANTILES, np.percentile(data.lengths, QUANTILES), strict=True)
        ),
    }  # fmt: skip


def print_counts(name: str, plan: "DataPlan") -> None:
    """Print counts_of under a heading."""
    print(f"\n{name}")
    for key, text in counts_of(plan).items():
        print(f"  {key:<20}  {text}")


def first_examples(
    plan: "DataPlan", tokenizer: "PreTrainedTokenizerBase", count: int, most_tokens: int | None
) -> "Iterator[tuple[str, list[tuple[str, str]]]]":
    """For each of the first examples a heading, and its segments as (kind, text)."""
    import numpy as np

    from data.supervision import segments

    rows = np.arange(min(count, len(plan.data)))
    for row, ids, mask in zip(rows.tolist(), *plan.data.fetch(rows), strict=True) if count else ():
        place = f"{plan.data.place_of(row)}: {len(ids)} tokens, {mask.sum()} supervised"
        pieces = segments(ids[:most_tokens].tolist(), mask[:most_tokens].tolist(), tokenizer)
        found = [(kind, visible(text, kind)) for kind, text, _ in pieces]
        if most_tokens is not None and len(ids) > most_tokens:
            found.append(("plain", " ..."))
        yield place, found


def visible(text: str, kind: str) -> str:
    """`text` with control characters replaced by pictures, in an end mark line breaks too."""
    text = text.replace("\n", "↵") if kind == "end" else text
    return "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "␡" if c == "\x7f" else c
        for c in text
    )


def print_examples(
    plan: "DataPlan", tokenizer: "PreTrainedTokenizerBase", count: int, color: str
) -> None:
    """Print the first examples, decoded, with supervised text in color or in brackets."""
    from rich.console import Console
    from rich.text import Text

    console = Console(
        color_system={"auto": "auto", "always": "standard", "never": None}[color],
        force_terminal=True if color == "always" else None,
        no_color=False if color == "always" else None,
        soft_wrap=True,
    )
    has_color = console.color_system is not None and not console.no_color
    legend = [("answer", "supervised text"), ("plain", " "), ("end", "end mark")]
    for heading, pieces in [
        ("carries loss:", legend),
        *first_examples(plan, tokenizer, count, SHOWN_TOKENS),
    ]:
        line = Text()
        for kind, text in pieces:
            style, before, after = STYLES[kind]
            line.append(text if has_color else f"{before}{text}{after}", style)
        console.print(Text(f"\n{heading}", "dim"), line, sep=" " if pieces is legend else "\n")


def page(plan: "DataPlan", tokenizer: "PreTrainedTokenizerBase", count: int) -> str:
    """counts_of and the first examples as one self-contained HTML page."""
    counts = "\n".join(
        f"<tr><td>{html.escape(key)}</td><td>{html.escape(text)}</td></tr>"
        for key, text in counts_of(plan).items()
    )
    rows = []
    for heading, pieces in first_examples(plan, tokenizer, count, None):
        spans = "".join(f'<span class="{kind}">{html.escape(text)}</span>' for kind, text in pieces)
        rows.append(f"<h2>{html.escape(heading)}</h2>\n<pre>{spans}</pre>")
    title = html.escape(f"Training examples of {', '.join(plan.data.meta['sources'])}")
    return PAGE.format(title=title, counts=counts, rows="\n".join(rows))


def planned(plan: "DataPlan", world_size: int) -> "list[StepPlan]":
    """The plans of the first steps at this world size."""
    on_ranks = replace(plan, budget=replace(plan.budget, world_size=world_size))
    return [on_ranks.step(k) for k in range(min(PLANNED_STEPS, plan.steps_per_epoch))]


def print_plans(plan: "DataPlan", ranks: list[int], batching: str) -> None:
    """Print padding and balance for several world sizes."""
    steps = min(PLANNED_STEPS, plan.steps_per_epoch)
    print(f"\nplanned, {batching}, {steps} steps of {plan.steps_per_epoch:,} per epoch")
    print(
        "  ranks   examples/step  tokens/step  micro-steps  padding adds  waiting adds  efficiency"
    )
    for world_size in ranks:
        plans = planned(plan, world_size)
        if any(len(p.micro_batches[-1][-1]) == 0 and p.examples < world_size for p in plans):
            print(f"  {world_size:>5}  too many ranks: a step has fewer examples")
            continue
        count = len(plans)
        padding = sum(p.padded_tokens for p in plans) / sum(p.tokens for p in plans) - 1
        waiting = sum(p.waited_cost for p in plans) / sum(p.held_cost for p in plans) - 1
        useful = sum(p.useful_cost for p in plans) / sum(p.waited_cost for p in plans)
        print(
            f"  {world_size:>5}  {sum(p.examples for p in plans) / count:>14,.1f}  "
            f"{sum(p.tokens for p in plans) / count:>11,.0f}  "
            f"{sum(len(p.micro_batches) for p in plans) / count:>11,.1f}  "
            f"{padding:>12.1%}  {waiting:>12.1%}  {useful:>10.1%}"
        )


def draw(plan: "DataPlan", out: Path) -> None:
    """Draw a histogram of the lengths, and tokens per rank in the first micro-steps: real ones,
    padded ones, and those of the slowest rank, for which the others wait.
    """
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt

    lengths, budget = np.asarray(plan.data.lengths), plan.budget
    figure, (above, below) = plt.subplots(2, 1, figsize=(11, 8), layout="constrained")
    low, high = max(1, int(lengths.min())), int(lengths.max())
    wide = high > 20 * low
    bins = np.geomspace(low, high + 1, 60) if wide else np.linspace(low, high + 1, 60)
    above.hist(lengths, bins=bins, color="#4878a8")
    if wide:
        above.set_xscale("log")
    for q, style in ((50, "-"), (99, "--")):
        at = np.percentile(lengths, q)
        above.axvline(at, color="#333333", linestyle=style, linewidth=1, label=f"{q} %: {at:,.0f}")
    above.set(xlabel="tokens per example", ylabel="examples", title=f"{len(lengths):,} examples")
    above.legend(frameon=False)

    real, padded, slowest = [], [], []
    for k in range(plan.steps_per_epoch):
        for micro_step in plan.step(k).micro_batches:
            tokens = [int(lengths[rows].sum()) for rows in micro_step]
            held = tokens
            if not budget.packed:
                multiple = budget.pad_to_multiple_of
                held = [
                    len(r) * (-(-int(lengths[r].max(initial=0)) // multiple) * multiple)
                    for r in micro_step
                ]
            real.append(np.mean(tokens))
            padded.append(np.mean(held))
            slowest.append(max(held))
        if len(real) >= PLOTTED_MICRO_STEPS:
            break
    shown = min(len(real), PLOTTED_MICRO_STEPS)
    x = np.arange(shown)
    for values, color, label in (
        (slowest, "#e0e0e0", "on the fullest rank"),
        (padded, "#e08a4a", "with padding, mean over ranks"),
        (real, "#4878a8", "real, mean over ranks"),
    ):
        below.bar(x, values[:shown], width=1.0, color=color, label=label)
    below.axhline(budget.micro_batch_tokens, color="#333333", linewidth=1, label="budget")
    below.set(
        xlabel="micro-step",
        ylabel="tokens per rank",
        xlim=(-0.5, shown - 0.5),
        title=f"first {shown} micro-steps on {budget.world_size} ranks: "
        f"{sum(real[:shown]) / sum(slowest[:shown]):.1%} of the area is real tokens",
    )
    below.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    exit_on_error(main)
