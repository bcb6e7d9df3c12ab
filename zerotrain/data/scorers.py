"""How an answer of the model is scored during training: edit this to score it otherwise."""


def exact_match(prompt: str, expected: str, answer: str) -> float:
    """1 if the answer is the expected one, apart from white space around it; higher is better.

    Args:
        prompt: with the marks of the chat template; the answers are without their end token.
    """
    return float(answer.strip() == expected.strip())
