"""Questions for the model: what precedes the last answer of an example, and that answer; and how
what the model answers is scored.
"""

from typing import NamedTuple

import numpy as np

from zerotrain.data.cache import TokenizedRows
from zerotrain.runtime.errors import UserError


class Question(NamedTuple):
    """An example without its last answer. Since loss masks begin where the chat template's
    generation prompt ends, the prompt is what the template gives for the turns before the answer.
    """

    prompt: np.ndarray
    """int64 [tokens]."""
    expected: np.ndarray
    """int64 [tokens], the last run of supervised tokens, with its end token."""


def choose_questions(name: str, data: TokenizedRows, max_length: int, count: int) -> list[Question]:
    """Of at most `count` examples, evenly spaced, and always the same ones. Left out are plain
    text, which has no prompt, and examples that are pieces of a row or may lack its end.

    Args:
        name: of the set, for the error.
        max_length: data.max_length; an example that long may have been cut.

    Raises:
        UserError: no example is left.
    """
    is_first_piece = np.diff(data.column("row"), prepend=-1) != 0
    is_whole = is_first_piece & (data.lengths < max_length)
    # Of plain text every token but the first is supervised.
    usable = np.flatnonzero(is_whole & (data.supervised < data.lengths - 1))
    if not len(usable):
        raise UserError(
            f"eval.generate: no example of the set {name} is a question with a whole answer; set "
            "it to 0, or raise data.max_length"
        )
    chosen = usable[np.linspace(0, len(usable) - 1, min(count, len(usable))).astype(int)]
    questions = []
    for ids, mask in data.fetch(chosen):
        edges = np.flatnonzero(np.diff(mask, append=0))
        start, end = edges[-2:] + 1  # mask[0] is False, so that edges come in pairs
        questions.append(Question(ids[:start], ids[start:end]))
    return questions


def exact_match(prompt: str, expected: str, answer: str) -> float:
    """1 if the answer is the expected one, apart from white space around it; edit this to score
    answers otherwise. Higher is better.

    Args:
        prompt: with the marks of the chat template; the answers are without their end token.
    """
    return float(answer.strip() == expected.strip())
