"""How the answers of a model are scored during training. Add a function here, and to SCORERS; then
eval.scorer can name it. A config names one of these and nothing else: it imports no code.
"""

from collections.abc import Callable, Sequence

from config.places import require
from config.schema import EvalConfig

Scorer = Callable[[str, str, str], float]
"""(prompt, expected answer, model's answer) -> a finite score, higher for better. The prompt has
the marks of the chat template; the answers are without their end token.
"""


def exact_match(prompt: str, expected: str, answer: str) -> float:
    """1 if the answer is the expected one, apart from white space around it."""
    return float(answer.strip() == expected.strip())


def contains(prompt: str, expected: str, answer: str) -> float:
    """1 if the expected answer occurs in the model's."""
    return float(expected.strip() in answer)


SCORERS: dict[str, Scorer] = {f.__name__: f for f in (exact_match, contains)}


def check_scorer(config: EvalConfig, argv: Sequence[str]) -> None:
    """Raise UserError if eval.scorer is not in SCORERS.

    Args:
        argv: the command line that the config came from, for messages.
    """
    problem = (
        f"{config.scorer} is not one of {', '.join(SCORERS)}, the functions in data/scorers.py"
    )
    require(argv, config.scorer in SCORERS, "eval.scorer", problem)
