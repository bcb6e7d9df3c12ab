"""Applies what the message of a mistake tells its reader to do."""

import json
import re

import pytest
import yaml

from zerotrain.rows.readers import BadRow
from zerotrain.runtime.errors import UserError


def try_cures(case, run):
    """Make a mistake, and run each cure that its message names.

    Args:
        case: `MISTAKE -> CURE -> CURE ...`, each a mapping of dotted keys to values, as in YAML. A
            cure changes the mistake; null removes a key. The message has to name each key and text
            of a cure. If there are none, they are taken from the words of the message.
        run: called with the keys and values.

    Returns:
        The mistake, and its error.
    """
    mistake, *cures = (yaml.safe_load(f"{{{part}}}") for part in case.split("->"))
    with pytest.raises(UserError) as refused:
        run(mistake)
    message, key = str(refused.value), refused.value.key
    assert "\n" not in message
    if not cures:
        cures += [{key: None}] * ("remove it" in message)
        cures += [{key: "auto"}] * ('set it to "auto"' in message)
        for other, value in re.findall(r"but (.*?) makes it (.*?);", message):
            cures += [{key: json.loads(value)}]
            cures += [{other: mistake[key]}] * other.startswith("train.")
        for meant in re.findall(r"did you mean ([\w.]+)\?", message):
            cures += [{key: None, meant: mistake[key]}]
    assert cures, message
    for cure in cures:
        for name, value in cure.items():
            assert name in mistake or name.rpartition(".")[2] in message, message
            assert not isinstance(value, str) or value in f"{message} {mistake}", message
        removed = {name for name in cure if name in mistake and cure[name] is None}
        run({name: v for name, v in {**mistake, **cure}.items() if name not in removed})
    return mistake, refused.value


def refused(named, work, mistake, *cures):
    """Check that `work(mistake)` is refused, and that each of the cures makes it work. Return the
    line.

    Args:
        named: text that the line must have: the cure in its words. " ... " stands for any text.
        cures: inputs in place of the mistake, as the line says.
    """
    with pytest.raises((BadRow, UserError)) as caught:
        work(mistake)
    line = str(caught.value)
    assert re.search(".*".join(map(re.escape, named.split(" ... "))), line), line
    assert "\n" not in line
    for cure in cures:
        work(cure)
    return line
