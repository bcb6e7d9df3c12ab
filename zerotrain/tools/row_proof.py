"""Compares rows of the sources with the decoded text of their examples, for the proof of data.

Tokens and masks are compared with the contents of the row and with what apply_chat_template makes
of its first messages, not with what zerotrain/data/turns.py knows of the template.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from zerotrain.data.messages import canonical_row
from zerotrain.data.sources import BadRow, parse_row, read_rows
from zerotrain.data.tokenize import TokenizedRows
from zerotrain.data.turns import FIXED_DATE, Template
from zerotrain.tools.data_report import END, PLAIN, Segment, segments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zerotrain.config.schema import Config, Source

MAX_NAMED = 5  # problems listed by file and line
COMPARED_CHARACTERS = 12  # of the text before an answer
AFTER = 20  # tokens after an answer in which its end mark is looked for
SHOWN = 20  # characters of a text in a problem
THOUGHTS = re.compile("think|channel", re.IGNORECASE)  # in marks that an answer may repeat
MARK = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\w+|.")


def supervised_answers(messages: list[dict[str, Any]], supervise: str) -> list[int]:
    """The indices of the messages that carry loss by data.supervise and their own weights."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = answers[-1:] if supervise == "last" else answers
    return [i for i in wanted if messages[i].get("weight") != 0]


def check_row(
    row: dict[str, Any], found: list[Segment], supervise: str, decoded: Callable[[str], str]
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
    supervised = supervised_answers(messages, supervise)
    text_of = {
        is_target: _squeeze("".join(text for kind, text in found if (kind != PLAIN) == is_target))
        for is_target in (True, False)
    }
    problems = []
    position = {True: 0, False: 0}
    for i, message in enumerate(messages):
        is_target = i in supervised
        if message["role"] == "assistant" and not is_target and supervise == "last":
            continue  # which templates may cut
        for key in ("reasoning_content", "thinking", "content"):
            # templates write a <think> block in their own way
            content = (message.get(key) or "").rpartition("</think>")[2]
            content = _squeeze(decoded(content))
            at = text_of[is_target].find(content, position[is_target])
            if at < 0:
                place = "supervised" if is_target else "unsupervised"
                problems.append(f"{key} of message {i + 1} ({message['role']}) is not {place}")
            else:
                position[is_target] = at + len(content)
    return problems


def check_runs(
    row: dict[str, Any],
    ids: np.ndarray,
    mask: np.ndarray,
    supervise: str,
    decode: Callable[[np.ndarray], str],
    render: Callable[..., str],
) -> tuple[int, list[str]]:
    """How many supervised answers were compared with what the template writes around them, and
    what is wrong: each must begin after the generation prompt and end as the template ends it. An
    example in which they are joined, or divided by generation marks, is not compared.

    Args:
        ids: int [tokens].
        mask: bool [tokens].
        render: maps messages, and whether to add the generation prompt, to a text as decoded.
    """
    messages = [{k: v for k, v in m.items() if k != "weight"} for m in row["messages"]]
    wanted = supervised_answers(row["messages"], supervise)
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), append=np.int8(0))) + 1
    if len(edges) != 2 * len(wanted):
        return 0, []
    problems = []
    for i, start, end in zip(wanted, edges[::2], edges[1::2], strict=True):
        before, text, after = (
            decode(part) for part in (ids[:start], ids[start:end], ids[end : end + AFTER])
        )
        asked, prompt, whole = (
            render(messages[: i + more], prompts)
            for more, prompts in ((0, False), (0, True), (1, False))
        )
        blank = not decode(ids[start : start + 1]).strip()
        if blank and prompt[-1:].isspace() and not before[-1:].isspace():
            problems.append(f"message {i + 1}: white space of its header is supervised")
        if not decode(ids[end - 1 : end]).strip():
            problems.append(f"message {i + 1}: white space after its end is supervised")
        before, text, after, asked, prompt, whole = map(
            _squeeze, (before, text, after, asked, prompt, whole)
        )
        _, found, lacking = prompt.rpartition(before[-COMPARED_CHARACTERS:])
        mark = MARK.match(lacking)
        is_header = mark and text.startswith(mark[0]) and not THOUGHTS.search(mark[0])
        if not found or is_header:
            problems.append(
                f"message {i + 1} is supervised from {text[:SHOWN]!r} on, but the generation "
                f"prompt ends with {prompt[-SHOWN:]!r}"
            )
        _, found, lacking = whole.rpartition(text)
        mark = MARK.match(lacking)
        # within a row some templates end answers as they end the user's turns
        marks = re.search(r"(<[^<>]*>)*$", text)[0]
        is_whole = not (mark and after.startswith(mark[0])) if found else asked.endswith(marks)
        if not is_whole or not (found or marks):
            problems.append(
                f"message {i + 1} is supervised up to {text[-SHOWN:]!r}, but the template ends it "
                f"with {whole[-SHOWN:]!r}"
            )
    return len(wanted), problems


def _squeeze(text: str) -> str:
    """Remove white space: templates trim and re-indent, tokenizers add and drop spaces."""
    return "".join(text.split())


def prove_rows(
    sources: list["Source"],
    tokenizer: "PreTrainedTokenizerBase",
    data: TokenizedRows,
    config: "Config",
) -> tuple[int, int]:
    """Compare every row that became one whole example, and print what was found. Rows of plain
    text, cut or split rows, and all rows under data.supervise: all are counted but not compared.

    Returns:
        How many rows were compared, and how many problems were found.
    """
    row_of = data.column("row")
    rows = 0
    compared = 0
    compared_answers = 0
    end_marks = Counter()
    problems = []

    def decode(ids: Any) -> str:
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def decoded(text: str) -> str:
        return decode(
            tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        )

    def written(tools: Any, messages: list[dict[str, Any]], prompt: bool) -> str:
        template = FIXED_DATE + tokenizer.get_chat_template(tools=tools)
        text, _ = Template(tokenizer, template, json.dumps(tools)).render(messages, prompt)
        return decode(tokenizer(text, add_special_tokens=False).input_ids)

    for number, (place, row) in enumerate(canonical_rows(sources, data, config)):
        rows += 1
        first, last = np.searchsorted(row_of, [number, number + 1])
        if last - first != 1 or data.lengths[first] >= config.data.max_length or "text" in row:
            continue
        ids, masks = data.fetch(np.array([first]))
        found = segments(ids[0].tolist(), masks[0].tolist(), tokenizer)
        end_marks.update(text for kind, text in found if kind == END)
        if config.data.supervise != "all":
            compared += 1
            wrong = check_row(row, found, config.data.supervise, decoded)
            if "messages" in row and not wrong:
                render = partial(written, row.get("tools"))
                with contextlib.suppress(BadRow):  # the template refuses the beginning of the row
                    answers, wrong = check_runs(
                        row, ids[0], masks[0], config.data.supervise, decode, render
                    )
                    compared_answers += answers
            problems += [f"{place}: {problem}" for problem in wrong]
    print(f"  {rows:,} rows, {compared:,} compared with their text")
    print(
        f"  {compared_answers:,} answers, compared with what the chat template writes around them"
    )
    print("  end marks: " + ", ".join(f"{t!r} {n:,} times" for t, n in end_marks.most_common()))
    for problem in problems[:MAX_NAMED]:
        print(f"  {problem}")
    print(f"  {len(problems):,} problems")
    return compared, len(problems)


def canonical_rows(
    sources: Sequence["Source"], data: TokenizedRows, config: "Config"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(FILE:LINE, row) of all rows of the sources that `data` were tokenized from; a row that
    cannot be used is empty.
    """
    for source, kind in zip(sources, data.meta["formats"], strict=True):
        for raw in read_rows(source):
            row = {}
            with contextlib.suppress(BadRow):
                parsed = parse_row(raw, source.columns, config.data.ignore_keys)
                row = canonical_row(parsed, replace(source, format=kind), config.data)
            yield f"{raw.file}:{raw.place}", row
