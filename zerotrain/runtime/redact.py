"""Which texts are secrets, and how they are kept out of what is printed."""

import re
from collections.abc import Callable, Mapping

SECRET_NAME = re.compile(
    r"(.*[_-])?KEY|.*(APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|PASSPHRASE|CREDENTIALS?)|.*_PWD",
    re.IGNORECASE,
)
SECRET_IN_URI = r"(?<=://)[^\s/]+(?=@)"
"""user:password of a URI, or a token in its place."""
SECRET_TEXT = re.compile(
    rf"{SECRET_IN_URI}|(?<=[Bb]earer )\S+|(?<=[Bb]asic )[\w+/=]{{8,}}"
    r"|\b(?:hf_|npm_|gsk_|sk[-_]|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza)[\w-]{8,}"
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
)
"""What is a secret wherever it is: in a URI or a header, or by how its issuer begins it."""
WORDS = "key|token|secret|pass|password|passwd|passphrase|credentials?|signature|sig|authorization"
NAMED_SECRET = re.compile(
    rf"""((?:[\w-]*(?:{WORDS})["']?\s*[=:]|--?[\w-]*(?:{WORDS})\s)\s*["']?)"""
    r"""(?:(?:bearer|basic|token)\s+)?[^\s&"',;]+""",
    re.IGNORECASE,
)
"""`name=value`, `name: value` and `--name value`, where the name says that it is a secret."""
MIN_SECRET = 6  # characters; to replace shorter values would garble a text


def redactor(*environments: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces secrets in a text, also the values of those of `environments`."""
    named = [item for environment in environments for item in environment.items()]
    values = {v for n, v in named if SECRET_NAME.fullmatch(n) and len(v) >= MIN_SECRET}
    longest_first = map(re.escape, sorted(values, key=len, reverse=True))
    pattern = re.compile("|".join([*longest_first, SECRET_TEXT.pattern]))
    return lambda text: NAMED_SECRET.sub(r"\1***", pattern.sub("***", text))
