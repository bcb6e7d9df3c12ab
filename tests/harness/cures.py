"""Applies what the message of a mistake tells its reader to do."""

import json
import re

import yaml


def read_case(line):
    """Return the mistake of a line `MISTAKE -> CURE -> CURE ...`, and the cures that its message
    names. Each is a mapping of dotted keys to values, as in YAML.
    """
    mistake, *cures = (yaml.safe_load(f"{{{part}}}") for part in line.split("->"))
    return mistake, cures


def cured(error, mistake, cures=()):
    """Yield the mapping that each cure makes of a mistake.

    Args:
        error: its message has to name each key and text of a cure.
        cures: new values; null removes a key. If there are none, they are taken from the words of
            the message.
    """
    message, key = str(error), error.key
    found = list(cures)
    if not cures:
        found += [{key: None}] * ("remove it" in message)
        found += [{key: "auto"}] * ('set it to "auto"' in message)
        for other, value in re.findall(r"but (.*?) makes it (.*?);", message):
            found += [{key: json.loads(value)}]
            found += [{other: mistake[key]}] * other.startswith("train.")
        for meant in re.findall(r"did you mean ([\w.]+)\?", message):
            found += [{key: None, meant: mistake[key]}]
    assert found, message
    for cure in found:
        for name, value in cure.items():
            assert name in mistake or name.rpartition(".")[2] in message, message
            assert not isinstance(value, str) or value in f"{message} {mistake}", message
        removed = {name for name in cure if name in mistake and cure[name] is None}
        yield {name: v for name, v in {**mistake, **cure}.items() if name not in removed}
