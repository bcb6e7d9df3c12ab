"""Damaged and hostile files end in a UserError, and run no code.    pytest tests/fuzz/test_fuzz.py

fuzz.py says how to run more cases.
"""

import re


def test_a_hundred_cases_of_each_target(forks):
    finished = forks.script("fuzz.fuzz", 100, code=0)
    counts = dict(re.findall(r"^(\w+): 100 cases, (\d+) accepted", finished.output, re.MULTILINE))
    # accepted ones are read to their end, and the others are cases of interest
    assert {"config", "rows", "checkpoint", "metrics"} <= counts.keys()
    assert all(1 <= int(accepted) <= 90 for accepted in counts.values()), finished.output
