"""Which texts are secrets, and how they are kept out of what is printed."""

import re
from collections.abc import Callable, Mapping

SECRET_NAME = re.compile(
    r"(.*_)?(API_?)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|PASSPHRASE|CREDENTIALS?)|.*_PWD", re.I
)
SECRET_IN_URI = re.compile(r"(?<=://)[^\s/]+(?=@)")
"""user:password of a URI, or a token in its place."""
SHORTEST_SECRET = 6  # characters; to replace shorter values would garble a text


def is_secret(name: str, value: str) -> bool:
    """Whether a variable is a secret, by its name, or holds one: a URI with a password."""
    return bool(SECRET_NAME.fullmatch(name) or SECRET_IN_URI.search(value))


def secret_in_command(command: str) -> str | None:
    """The name of an option or variable of a command line to which a secret is given, `a URI` if
    one has a password, None if there is neither. A value with a `$` is not there to be read.
    """
    for name, value in re.findall(r"(\w+)=(\S+)", command):
        if SECRET_NAME.fullmatch(name) and "$" not in value:
            return name
    uris = (match[0] for match in SECRET_IN_URI.finditer(command))
    return next(("a URI" for login in uris if ":" in login and "$" not in login), None)


def redactor(*environments: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces, in a text, the values of secrets of `environments` and what URIs
    have before @.
    """
    named = [n_v for environment in environments for n_v in environment.items()]
    secrets = {v for n, v in named if SECRET_NAME.fullmatch(n) and len(v) >= SHORTEST_SECRET}
    longest_first = map(re.escape, sorted(secrets, key=len, reverse=True))
    pattern = re.compile("|".join([*longest_first, SECRET_IN_URI.pattern]))
    return lambda text: pattern.sub("***", text)
