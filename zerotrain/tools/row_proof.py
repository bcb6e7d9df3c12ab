"""Compare rows of the sources with the decoded text of their examples, for `prove.py data`.

Tokens and masks are compared with the contents of the row, and with the text that the chat template
writes for its first messages. The proof does not use how zerotrain/rows/turns.py locates answers.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import Config, Source
from zerotrain.data.cache import TokenizedRows
from zerotrain.rows.sources import BadRow
from zerotrain.rows.turns import FIXED_DATE, Template, with_arguments_as_text
from zerotrain.tools.verify import canonical_rows, supervised_answers

MAX_NAMED = 5  # As many problems are listed by file and line.
COMPARED_CHARACTERS = 12  # The end of the text before an answer has as many.
SHOWN = 20  # A problem shows as many characters of a text.
THOUGHTS = re.compile("think|channel", re.IGNORECASE)
"""Part of the tags of thinking blocks, which may stand in a generation prompt and in an answer."""
MARK = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\w+|.")


def check_contents(
    messages: list[dict[str, Any]],
    answers: list[int],
    texts: list[str],
    supervise: str,
    decoded: Callable[[str], str],
) -> list[str]:
    """Return what is wrong with the mask of a row. Each answer must be in the supervised text, and
    every other content in the unsupervised text, in the row's order.

    Args:
        answers: result of supervised_answers.
        texts: the decoded example, in pieces that are alternately unsupervised and supervised.
        decoded: tokenizes a text and decodes it again.
    """
    unsupervised, supervised = ("".join(texts[first::2]) for first in (0, 1))
    left = {True: _squeeze(supervised), False: _squeeze(unsupervised)}
    problems = []
    for i, message in enumerate(messages):
        is_target = i in answers
        if message["role"] == "assistant" and not is_target and supervise == "last":
            continue  # Templates may cut earlier answers.
        for key in ("reasoning_content", "content"):
            # Each template writes a <think> block in its own way.
            content = (message.get(key) or "").rpartition("</think>")[2]
            content = _squeeze(decoded(content))
            at = left[is_target].find(content)
            if at < 0:
                place = "supervised" if is_target else "unsupervised"
                problems.append(f"{key} of message {i + 1} ({message['role']}) is not {place}")
            else:
                left[is_target] = left[is_target][at + len(content) :]
    return problems


def check_answers(
    messages: list[dict[str, Any]],
    answers: list[int],
    texts: list[str],
    first_tokens: list[str],
    last_tokens: list[str],
    render: Callable[..., str],
) -> list[str]:
    """Return what is wrong with the ends of answers. Each answer must start after the generation
    prompt, and end as the template ends it.

    Args:
        answers, texts: as in check_contents, with one supervised text for each answer.
        first_tokens, last_tokens: first and last token of each answer, decoded.
        render: writes messages, and on request the generation prompt, as decoded text.
    """
    problems = []
    for n, (i, first, last) in enumerate(zip(answers, first_tokens, last_tokens, strict=True)):
        before = "".join(texts[: 2 * n + 1])
        text, after = texts[2 * n + 1 : 2 * n + 3]
        asked = render(messages[:i], False)
        prompt = render(messages[:i], True)
        whole = render(messages[: i + 1], False)
        if not first.strip() and prompt[-1:].isspace() and not before[-1:].isspace():
            problems.append(f"message {i + 1}: white space of its header is supervised")
        if not last.strip():
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
        # Inside a row, some templates end answers as they end the user's messages.
        marks = re.search(r"(<[^<>]*>)*$", text)[0]
        is_whole = not (mark and after.startswith(mark[0])) if found else asked.endswith(marks)
        if not is_whole or not (found or marks):
            problems.append(
                f"message {i + 1} is supervised up to {text[-SHOWN:]!r}, but the template ends it "
                f"with {whole[-SHOWN:]!r}"
            )
    return problems


def check_tokens(row: dict[str, Any], ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """Return what differs between a row of tokens and its example."""
    count = len(row["input_ids"])
    kept = [i for i in range(count) if row.get("attention_mask", [1] * count)[i]]
    masks = [row[key] for key in ("loss_mask", "completion_mask", "assistant_masks") if key in row]
    masks.append([label != -100 for label in row.get("labels", row["input_ids"])])
    problems = []
    if ids.tolist() != [row["input_ids"][i] for i in kept]:
        problems.append("its tokens differ from the row's")
    # The first token of an example is only context.
    elif mask[1:].tolist() != [all(values[i] for values in masks) for i in kept[1:]]:
        problems.append("its mask is not what the labels and masks of the row say")
    return problems


def _squeeze(text: str) -> str:
    """Remove white space, because templates and tokenizers add and drop it."""
    return "".join(text.split())


def prove_rows(
    sources: list[Source],
    tokenizer: PreTrainedTokenizerBase,
    data: TokenizedRows,
    config: Config,
) -> tuple[int, int]:
    """Compare every row that became one whole example, and print the result.

    Rows of plain text, cut or split rows, and all rows with data.supervise: all are counted but not
    compared. Ends of answers are not compared where two answers are joined.

    Returns:
        The numbers of compared rows and of problems.
    """
    row_of = data.column("row")
    rows = compared = compared_answers = 0
    ends = Counter()
    problems = []
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)

    def decoded(text: str) -> str:
        return decode(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def written(tools: Any, messages: list[dict[str, Any]], prompt: bool) -> str:
        template = FIXED_DATE + tokenizer.get_chat_template(tools=tools)
        text, _ = Template(tokenizer, template, json.dumps(tools)).render(messages, prompt)
        return decode(tokenizer.encode(text, add_special_tokens=False))

    for rows, (place, row) in enumerate(canonical_rows(sources, data, config), start=1):
        first, last = np.searchsorted(row_of, [rows - 1, rows])
        is_whole = last - first == 1 and data.lengths[first] < config.data.max_length
        if not is_whole or row.get("prompt") == "" or config.data.supervise == "all":
            continue
        compared += 1
        [(ids, mask)] = data.fetch(np.array([first]))
        if "input_ids" in row:
            problems += [f"{place}: {problem}" for problem in check_tokens(row, ids, mask)]
            continue
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
        first_tokens = [*map(decode, ids[edges[::2]])]
        last_tokens = [*map(decode, ids[edges[1::2] - 1])]
        ends.update(last_tokens)
        # A key with a null counts as missing, whatever the reader has made of it.
        row = json.loads(
            json.dumps(row),
            object_hook=lambda found: {k: v for k, v in found.items() if v is not None},
        )
        messages = row.get("messages") or [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        if "messages" not in row:
            text, eos = row["prompt"] + row["completion"], tokenizer.eos_token_id
            whole = [token for token in tokenizer.encode(text) if token != eos]
            # Some decoders lose a space at the edge of two tokens.
            if text not in decode(ids) and decode(ids) != decode([*whole, eos]):
                problems.append(f"{place}: the example is not its prompt, its completion and eos")
        answers = supervised_answers(messages, config.data.supervise)
        texts = [*map(decode, np.split(ids, edges))]
        wrong = check_contents(messages, answers, texts, config.data.supervise, decoded)
        if "messages" in row and not wrong and len(answers) == len(last_tokens):
            render = partial(written, row.get("tools"))
            messages = [{k: v for k, v in m.items() if k != "weight"} for m in messages]
            whole = []
            for form in (messages, with_arguments_as_text(messages)):
                with contextlib.suppress(BadRow):
                    whole.append(render(form, False))
            if decode(ids) not in whole:
                problems.append(f"{place}: the example differs from the rendered row without nulls")
            with contextlib.suppress(BadRow):  # The template may reject the first messages alone.
                wrong = check_answers(messages, answers, texts, first_tokens, last_tokens, render)
                compared_answers += len(answers)
        problems += [f"{place}: {problem}" for problem in wrong]
    listed = ", ".join(f"{text!r} {n:,} times" for text, n in ends.most_common(MAX_NAMED))
    print(
        ", ".join(data.meta.sources),
        f"{rows:,} rows, {compared:,} compared with their text",
        f"{compared_answers:,} answers, compared with what the chat template writes around them",
        f"last tokens of answers: {listed}",
        *problems[:MAX_NAMED],
        f"{len(problems):,} problems",
        sep="\n  ",
    )
    return compared, len(problems)
