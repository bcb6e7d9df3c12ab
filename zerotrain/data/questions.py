"""Questions for an evaluation: the prompt and the last answer of examples, and the score of a
model's answer.
"""

from typing import NamedTuple

import numpy as np

from zerotrain.data.cache import TokenizedRows
from zerotrain.runtime.errors import UserError


class Question(NamedTuple):
    """An example, split before its last answer.

    A loss mask begins where the generation prompt of the chat template ends. So the prompt is what
    a server would send for the turns before the answer.
    """

    prompt: np.ndarray
    """int64 [tokens]."""
    expected: np.ndarray
    """int64 [tokens], the last run of supervised tokens, with its end-of-turn token."""


def choose_questions(name: str, data: TokenizedRows, max_length: int, count: int) -> list[Question]:
    """Return at most `count` questions, from evenly spaced examples, always the same ones.

    Plain text is left out, because it has no prompt. So are examples that are pieces of a row or
    may lack its end.

    Args:
        name: name of the held-out set, for the error.
        max_length: data.max_length; an example of this length may have been cut.

    Raises:
        UserError: no example is left.
    """
    is_first_piece = np.diff(data.column("row"), prepend=-1) != 0
    is_whole = is_first_piece & (data.lengths < max_length)
    # In plain text every token but the first is supervised.
    usable = np.flatnonzero(is_whole & (data.supervised < data.lengths - 1))
    if not len(usable):
        raise UserError(
            f"eval.generate: no example of the held-out set {name} is a question with a whole "
            "answer; set eval.generate to 0, or raise data.max_length"
        )
    chosen = usable[np.linspace(0, len(usable) - 1, min(count, len(usable))).astype(int)]
    questions = []
    for ids, mask in data.fetch(chosen):
        # The runs of supervised tokens start and end here. mask[0] is 0, so each has both.
        edges = np.flatnonzero(np.diff(mask, append=0))
        start, end = edges[-2:] + 1
        questions.append(Question(ids[:start], ids[start:end]))
    return questions


def exact_match(prompt: str, expected: str, answer: str) -> float:
    """Return 1 if the answer is the expected one, apart from white space around it, else 0.

    Edit this function to score answers differently. Higher is better.

    Args:
        prompt: the text before the answer, with the special tokens of the chat template.
        expected: the answer of the row, without its end-of-turn token.
        answer: the answer of the model, without its end-of-turn token.
    """
    return float(answer.strip() == expected.strip())
