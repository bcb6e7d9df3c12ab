"""Compares rows of the sources with the decoded text of their examples, for `prove.py data`.

Only tokens and masks are read here, not what zerotrain/data/turns.py knows of the template.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from zerotrain.data.tokenize import TokenizedRows
from zerotrain.tools.data_report import END, PLAIN, Segment, segments
from zerotrain.tools.open_plans import canonical_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zerotrain.config.schema import Config, Source

MAX_NAMED = 5  # problems listed by file and line


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
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    supervised = answers[-1:] if supervise == "last" else answers
    text_of = {
        is_target: _squeeze("".join(text for kind, text in found if (kind != PLAIN) == is_target))
        for is_target in (True, False)
    }
    problems = []
    position = {True: 0, False: 0}
    for i, message in enumerate(messages):
        is_target = i in supervised and message.get("weight") != 0
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
    row_of = np.asarray(data.rows["row"][:])
    rows = 0
    compared = 0
    end_marks = Counter()
    problems = []

    def decoded(text: str) -> str:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)

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
            for problem in check_row(row, found, config.data.supervise, decoded):
                problems.append(f"{place}: {problem}")
    print(f"  {rows:,} rows, {compared:,} compared with their text")
    print("  end marks: " + ", ".join(f"{t!r} {n:,} times" for t, n in end_marks.most_common()))
    for problem in problems[:MAX_NAMED]:
        print(f"  {problem}")
    print(f"  {len(problems):,} problems")
    return compared, len(problems)
