"""Print counts, examples and planned steps, for scripts/inspect_data.py."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from zerotrain.data.cache import TokenizedRows
from zerotrain.data.data_plan import DataPlan
from zerotrain.data.plan import Budget
from zerotrain.runtime.errors import printable
from zerotrain.runtime.progress import show_rows

QUANTILES = (0, 1, 10, 25, 50, 75, 90, 99, 99.9, 100)
PLANNED_STEPS = 50  # The first steps of an epoch are planned for each number of ranks.
MAX_TOKENS = 1000  # More tokens of an example are not printed.
# A kind of text has a style for terminals with colors, and brackets for others.
PLAIN = ("", "", "")
ANSWER = ("green", "[[", "]]")
SPECIAL = ("bold magenta", "{{", "}}")


def segments(
    ids: Sequence[int], mask: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[tuple[str, str, str], str]]:
    """Yield an example as (kind, text). PLAIN carries no loss. ANSWER carries loss, and so do the
    special tokens of SPECIAL, such as end-of-turn tokens.
    """
    special = {*tokenizer.all_special_ids}
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def kind_of(token: tuple[int, int]) -> tuple[str, str, str]:
        return (SPECIAL if token[0] in special else ANSWER) if token[1] else PLAIN

    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    start = 0
    for kind, group in groupby(zip(ids, mask, strict=True), kind_of):
        end = start + len([*group])
        # Decoded alone, a part would lose the space at its beginning.
        before = ids[max(0, start - 1) : start]
        yield kind, decode([*before, *ids[start:end]]).removeprefix(decode(before))
        start = end


def print_counts(name: str, data: TokenizedRows) -> None:
    """Print the rows of a cache, the treatment of long ones, token counts, and supervision."""
    meta = data.meta
    too_long = [f"{n:,} {text}" for text, n in meta.over_length.items()]
    lengths = np.percentile(data.lengths, QUANTILES)
    quantiles = [f"{q:g}%: {n:,.0f}" for q, n in zip(QUANTILES, lengths, strict=True)]
    tokens = data.lengths.sum()
    supervised = data.supervised.sum()
    rows = {
        "examples": f"{len(data):,}, of {meta.rows_read:,} rows of {', '.join(meta.sources)}",
        "format": ", ".join(dict.fromkeys(meta.formats)),
        "over max_length": ", ".join(too_long) or "none",
        "tokens": f"{tokens:,}, {tokens / len(data):,.1f} per example",
        "supervised": f"{supervised:,}, {supervised / tokens:.1%}; {meta.masks}",
        "length": "  ".join(quantiles),
    }
    print(f"\n{name}")
    show_rows(rows)


def print_examples(plan: DataPlan, tokenizer: PreTrainedTokenizerBase, count: int) -> None:
    """Print the first examples, with supervised text in color on a terminal, else in brackets."""
    console = Console(soft_wrap=True)
    has_color = console.color_system is not None and not console.no_color
    examples = np.arange(min(count, len(plan.data)))
    if not len(examples):
        return
    console.print("\ncarries loss: [[text]], {{special token}}", markup=False, highlight=False)
    for example, (ids, mask) in zip(examples, plan.data.fetch(examples), strict=True):
        place = f"{plan.data.place_of(example)}: {len(ids)} tokens, {mask.sum()} supervised"
        line = Text()
        for (style, before, after), text in segments(
            ids[:MAX_TOKENS].tolist(), mask[:MAX_TOKENS].tolist(), tokenizer
        ):
            visible = "\n".join(map(printable, text.split("\n")))
            line.append(visible if has_color else f"{before}{visible}{after}", style)
        if len(ids) > MAX_TOKENS:
            line.append(" ...")
        console.print(Text(f"\n{printable(place)}", "dim"), line, sep="\n")


def print_plans(plan: DataPlan, ranks: list[int], batching: str) -> None:
    """Print padding and balance for several world sizes."""
    steps = range(min(PLANNED_STEPS, plan.steps_per_epoch))
    print(f"\nplanned, {batching}, {len(steps)} steps of {plan.steps_per_epoch:,} per epoch")
    print("  ranks   examples/step  tokens/step  micro-steps  padding adds  efficiency")
    for world_size in ranks:
        budget = replace(plan.budget, world_size=world_size)
        plans = [replace(plan, budget=budget).step(k) for k in steps]
        if any(p.examples < world_size for p in plans):
            print(f"  {world_size:>5}  too many ranks: a step has fewer examples")
            continue
        tokens = sum(p.tokens for p in plans)
        padding = sum(p.padded_tokens for p in plans) / tokens - 1
        micro_steps = [
            [plan.data.lengths[examples] for examples in of_ranks]
            for step in plans
            for of_ranks in step.micro_batches
        ]
        examples = sum(p.examples for p in plans)
        print(
            f"  {world_size:>5}  {examples / len(plans):>14,.1f}  {tokens / len(plans):>11,.0f}  "
            f"{len(micro_steps) / len(plans):>11,.1f}  {padding:>12.1%}  "
            f"{efficiency(micro_steps, budget):>10.1%}"
        )


def efficiency(micro_steps: Sequence[Sequence[np.ndarray]], budget: Budget) -> float:
    """Return the compute that the examples need / the compute that all ranks spend, with padding
    and with the waits for the slowest rank of each micro-step.

    Args:
        micro_steps: for each micro-step and rank, the lengths of the examples.
    """
    costs = [[costs_of(lengths, budget) for lengths in of_ranks] for of_ranks in micro_steps]
    useful, padded = np.moveaxis(costs, -1, 0)  # [micro-steps, ranks]
    return useful.sum() / (budget.world_size * padded.max(axis=1).sum())


def costs_of(lengths: np.ndarray, budget: Budget) -> tuple[int, int]:
    """Return the cost (see Budget.cost) of examples of these lengths without and with padding."""
    lengths = lengths.astype(np.int64)
    held = lengths
    if not budget.packed:  # Each example is padded to the longest.
        held = np.full_like(lengths, budget.padded(lengths.max(initial=0)))
    return budget.cost(lengths).sum(), budget.cost(held).sum()
