"""Compares rows of the sources with the decoded text of their examples, for `prove.py data`.

Only tokens and masks are read here, not what zerotrain/data/turns.py knows of the template.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zerotrain.data import sources
from zerotrain.data.messages import canonical_row
from zerotrain.data.options import RenderOptions
from zerotrain.data.render import SPLIT, fit, render
from zerotrain.data.sources import BadRow
from zerotrain.data.tokenize import TokenizedRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zerotrain.config.schema import Config, Source

MAX_NAMED = 5  # problems listed by file and line
PLAIN, ANSWER, END = "plain", "answer", "end"


class Segment(NamedTuple):
    """A stretch of an example: PLAIN carries no loss, ANSWER does, and so does END, the special
    tokens at the end of a supervised stretch.
    """

    kind: str
    text: str


def segments(
    ids: Sequence[int], mask: Sequence[bool], tokenizer: "PreTrainedTokenizerBase"
) -> list[Segment]:
    """Decode an example."""
    special = {*tokenizer.all_special_ids}
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    kinds = [ANSWER if supervised else PLAIN for supervised in mask]
    is_end = False
    for i in reversed(range(len(ids))):
        is_last = i + 1 == len(ids) or kinds[i + 1] == PLAIN
        is_end = kinds[i] == ANSWER and ids[i] in special and (is_end or is_last)
        kinds[i] = END if is_end else kinds[i]
    found = []
    for kind, group in groupby(zip(kinds, ids, strict=True), key=lambda pair: pair[0]):
        part = [token for _, token in group]
        found.append(Segment(kind, tokenizer.decode(part, clean_up_tokenization_spaces=False)))
    return found


def check_row(
    row: dict[str, Any], pieces: list[Segment], supervise: str, decoded: Callable[[str], str]
) -> list[str]:
    """What is wrong with the mask of a canonical row: each answer must be within the supervised
    text, every other content outside of it, in the row's order.

    Args:
        decoded: maps a text to what it is after tokenizing and decoding.
    """
    messages = row.get("messages")
    if messages is None:
        texts = {"prompt": "user", "completion": "assistant"}
        messages = [{"role": role, "content": row[key]} for key, role in texts.items()]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = answers[-1:] if supervise == "last" else answers
    where = {True: "", False: ""}
    for kind, text in pieces:
        where[kind != PLAIN] += _squeeze(text)
    problems, reached = [], {True: 0, False: 0}
    for i, message in enumerate(messages):
        is_wanted = i in wanted and message.get("weight") != 0
        if message["role"] == "assistant" and not is_wanted and supervise == "last":
            continue  # which templates may cut
        for key in ("reasoning_content", "thinking", "content"):
            own = _squeeze(decoded(_without_tags(message.get(key) or "")))
            at = where[is_wanted].find(own, reached[is_wanted])
            if at < 0:
                place = "supervised" if is_wanted else "unsupervised"
                problems.append(f"{key} of message {i + 1} ({message['role']}) is not {place}")
            else:
                reached[is_wanted] = at + len(own)
    return problems


def _without_tags(text: str) -> str:
    """The text after a <think> block, which templates write in their own way."""
    return text.rpartition("</think>")[2]


def _squeeze(text: str) -> str:
    """Remove white space: templates trim and re-indent, tokenizers add and drop spaces."""
    return "".join(text.split())


def prove_rows(
    given: list["Source"],
    tokenizer: "PreTrainedTokenizerBase",
    cache: TokenizedRows,
    config: "Config",
) -> bool:
    """Check every row of these sources, and print what was found."""
    row_of = np.asarray(cache.rows["row"][:])
    counts, ends, problems = Counter({"rows": 0}), Counter(), []

    def decoded(text: str) -> str:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    for number, (place, row, options) in enumerate(_rows(given, cache, config)):
        counts["rows"] += 1
        first, last = np.searchsorted(row_of, [number, number + 1]).tolist()
        stored = cache.fetch(np.arange(first, last)) if first < last else ([], [])
        try:
            rendered = render(row, tokenizer, options)
            examples = fit(rendered.ids, rendered.mask, options)
            canonical = canonical_row(row, options)
        except BadRow as error:
            counts[f"refused: {error.reason}"] += 1
            examples, canonical = [], {}
        kept = [(ids, mask) for ids, mask, outcome in examples if outcome <= SPLIT]
        if kept != [(i.tolist(), m.tolist()) for i, m in zip(*stored, strict=True)]:
            problems.append(f"{place}: data.cache_dir has other examples of it")
        if len(kept) != 1 or len(kept[0][0]) >= options.max_length or "text" in canonical:
            continue
        pieces = segments(*kept[0], tokenizer)
        ends.update(text for kind, text in pieces if kind == END)
        if options.supervise != "all":
            counts["compared with their text"] += 1
            found = check_row(canonical, pieces, options.supervise, decoded)
            problems += [f"{place}: {problem}" for problem in found]
    print("  " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    print("  end marks: " + ", ".join(f"{text!r} {n:,} times" for text, n in ends.most_common()))
    for problem in problems[:MAX_NAMED]:
        print(f"  {problem}")
    print(f"  {len(problems):,} problems")
    return not problems and counts["rows"] > 0


def _rows(
    given: list["Source"], cache: TokenizedRows, config: "Config"
) -> Iterator[tuple[str, Any, RenderOptions]]:
    """(FILE:LINE, parsed row, options) of all rows; a row that cannot be parsed is an empty one."""
    for source, kind in zip(given, cache.meta["formats"], strict=True):
        options = replace(RenderOptions.of(config.data), format=kind, columns=source.columns)
        for name, raw in sources.read_rows(source):
            try:
                row = sources.parse_row(raw, options.columns, options.ignore_keys)
            except BadRow:
                row = {}
            yield f"{name}:{raw.place}", row, options
