"""Damaged and hostile files end in a UserError, and run no code.    pytest tests/fuzz/test_fuzz.py

The same with more cases: python tests/fuzz/fuzz.py --help
"""

import re


def test_a_hundred_cases_of_each_target(forks):
    finished = forks.script("tests/fuzz/fuzz.py", "--cases", "100")
    assert finished.code == 0, finished.output
    counts = dict(re.findall(r"^(\w+): 100 cases, (\d+) accepted", finished.output, re.MULTILINE))
    # accepted ones are read to their end, and the others are cases of interest
    assert {"config", "rows", "state", "shards", "metrics"} <= counts.keys()
    assert all(1 <= int(accepted) <= 90 for accepted in counts.values()), finished.output
