"""Damaged and hostile files end in a UserError, and run no code.    pytest tests/test_fuzz.py

The same with more cases: python tests/fuzz.py --help
"""

import re
import sys

from conftest import run


def test_fifty_cases_of_each_target():
    finished = run([sys.executable, "tests/fuzz.py", "--cases", "50"])
    assert finished.code == 0, finished.output
    counts = dict(re.findall(r"^(\w+): 50 cases, (\d+) accepted", finished.output, re.MULTILINE))
    # accepted ones are read to their end, and the others are cases of interest
    assert {"config", "rows", "state", "shards", "metrics"} <= counts.keys()
    assert all(1 <= int(accepted) <= 45 for accepted in counts.values()), finished.output
