"""What scripts/inspect_data.py prints: counts, examples and planned steps."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from zerotrain.data.data_plan import DataPlan
from zerotrain.data.plan import StepPlan
from zerotrain.runtime.errors import printable

QUANTILES = (0, 1, 10, 25, 50, 75, 90, 99, 99.9, 100)
PLANNED_STEPS = 50  # of the first epoch, for each number of ranks
MAX_TOKENS = 1000  # of an example
PLAIN = "plain"
ANSWER = "answer"
END = "end"
# Kind of segment -> its style on a terminal with colors, and its brackets on one without
STYLES = {PLAIN: ("", "", ""), ANSWER: ("green", "[[", "]]"), END: ("bold magenta", "{{", "}}")}


class Segment(NamedTuple):
    """A part of an example: PLAIN carries no loss, ANSWER does, and so does END, the special tokens
    at the end of a supervised part.
    """

    kind: str
    text: str


def segments(
    ids: Sequence[int], mask: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> list[Segment]:
    """Decode an example."""
    special = {*tokenizer.all_special_ids}
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    kinds = [ANSWER if supervised else PLAIN for supervised in mask]
    follows = PLAIN
    for i in reversed(range(len(ids))):
        if kinds[i] == ANSWER and ids[i] in special and follows != ANSWER:
            kinds[i] = END
        follows = kinds[i]
    found = []
    for kind, group in groupby(zip(kinds, ids, strict=True), key=lambda pair: pair[0]):
        part = [token for _, token in group]
        found.append(Segment(kind, tokenizer.decode(part, clean_up_tokenization_spaces=False)))
    return found


def print_counts(name: str, plan: DataPlan) -> None:
    """What was read, how long rows were handled, token counts, and what is supervised."""
    data = plan.data
    meta = plan.data.meta
    became = [f"{n:,} {text}" for text, n in meta["over_length"].items()]
    became += [f"{n:,} left out ({reason})" for reason, n in meta["rejected"].items()]
    lengths = np.percentile(data.lengths, QUANTILES)
    quantiles = [f"{q:g}%: {n:,.0f}" for q, n in zip(QUANTILES, lengths, strict=True)]
    sources = ", ".join(meta["sources"])
    tokens = int(data.lengths.sum())
    supervised = int(data.supervised.sum())
    rows = {
        "examples": f"{len(data):,}, of {meta['rows_read']:,} rows read from {sources}",
        "format": ", ".join(dict.fromkeys(meta["formats"])),
        "over max_length, bad": ", ".join(became) or "none",
        "tokens": f"{tokens:,}, {tokens / len(data):,.1f} per example",
        "supervised": f"{supervised:,}, {supervised / tokens:.1%}; {meta['masks']}",
        "length": "  ".join(quantiles),
    }
    print(f"\n{name}")
    for key, text in rows.items():
        print(f"  {key:<20}  {printable(text)}")


def print_examples(
    plan: DataPlan, tokenizer: PreTrainedTokenizerBase, count: int, color: bool | None
) -> None:
    """The first examples, decoded, with supervised text in color or in brackets.

    Args:
        color: None decides by the terminal.
    """
    console = Console(force_terminal=color, no_color=color is False or None, soft_wrap=True)
    has_color = console.color_system is not None and not console.no_color
    examples = np.arange(min(count, len(plan.data)))
    if not len(examples):
        return
    console.print("\ncarries loss: [[text]], {{end mark}}", markup=False, highlight=False)
    for example, ids, mask in zip(examples.tolist(), *plan.data.fetch(examples), strict=True):
        place = f"{plan.data.place_of(example)}: {len(ids)} tokens, {mask.sum()} supervised"
        line = Text()
        for kind, text in segments(
            ids[:MAX_TOKENS].tolist(), mask[:MAX_TOKENS].tolist(), tokenizer
        ):
            style, before, after = STYLES[kind]
            visible = "\n".join(map(printable, text.split("\n")))
            line.append(visible if has_color else f"{before}{visible}{after}", style)
        if len(ids) > MAX_TOKENS:
            line.append(" ...")
        console.print(Text(f"\n{printable(place)}", "dim"), line, sep="\n")


def print_plans(plan: DataPlan, ranks: list[int], batching: str) -> None:
    """Padding and balance for several world sizes."""
    steps = range(min(PLANNED_STEPS, plan.steps_per_epoch))
    print(f"\nplanned, {batching}, {len(steps)} steps of {plan.steps_per_epoch:,} per epoch")
    print("  ranks   examples/step  tokens/step  micro-steps  padding adds  efficiency")
    for world_size in ranks:
        on_ranks = replace(plan, budget=replace(plan.budget, world_size=world_size))
        plans = [on_ranks.step(k) for k in steps]
        if any(p.examples < world_size for p in plans):
            print(f"  {world_size:>5}  too many ranks: a step has fewer examples")
            continue
        tokens = sum(p.tokens for p in plans)
        padding = sum(p.padded_tokens for p in plans) / tokens - 1
        useful, elapsed = np.sum([costs(p, on_ranks) for p in plans], axis=0)
        efficiency = useful / elapsed
        micro_steps = sum(len(p.micro_batches) for p in plans) / len(plans)
        examples = sum(p.examples for p in plans) / len(plans)
        print(
            f"  {world_size:>5}  {examples:>14,.1f}  {tokens / len(plans):>11,.0f}  "
            f"{micro_steps:>11,.1f}  {padding:>12.1%}  {efficiency:>10.1%}"
        )


def costs(step: StepPlan, plan: DataPlan) -> tuple[int, int]:
    """Cost of a step's examples without padding, see Budget.cost; and with padding and the time in
    which ranks wait for the slowest.
    """
    budget = plan.budget
    useful = 0
    elapsed = 0
    for of_ranks in step.micro_batches:
        lengths = [plan.data.lengths[examples].astype(np.int64) for examples in of_ranks]
        useful += sum(int(budget.cost(each).sum()) for each in lengths)
        padded = [budget.padded(each) for each in lengths]
        if not budget.packed:  # to the longest
            padded = [np.full(len(each), each.max(initial=0)) for each in padded]
        elapsed += budget.world_size * max(int(budget.cost(each).sum()) for each in padded)
    return useful, elapsed
