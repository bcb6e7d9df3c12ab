"""Checks that a mistake is refused in one line, and that the line's cures work."""

import re

import pytest

from zerotrain.rows.readers import BadRow
from zerotrain.runtime.errors import UserError


def refused(named, work, mistake, *cures):
    """Check that `work(mistake)` is refused, and that each of the cures makes it work. Return the
    line.

    Args:
        named: text that the line must have: the cure in its words. " ... " stands for any text.
        cures: what a user gives in place of the mistake who does as the line says.
    """
    with pytest.raises((BadRow, UserError)) as caught:
        work(mistake)
    line = str(caught.value)
    assert re.search(".*".join(map(re.escape, named.split(" ... "))), line), line
    assert "\n" not in line
    for cure in cures:
        work(cure)
    return line
