"""Damaged and hostile files end in a UserError, and run no code.    pytest tests/test_fuzz.py

The same with more cases: python tests/fuzz.py --help
"""

import re
import sys

from conftest import run


def test_a_hundred_cases_of_each_target():
    command = [sys.executable, "tests/fuzz.py", "--cases", "100"]
    finished = run(command)
    assert finished.code == 0 and finished.output.endswith("no failures\n"), finished.output
    counts = re.findall(r"^(\w+): 100 cases, (\d+) accepted", finished.output, re.MULTILINE)
    # accepted ones are read to their end, and the others are cases of interest
    names = [name for name, _ in counts if name != "hostfile"]  # cluster/ may have been deleted
    assert names == ["config", "rows", "state", "shards", "metrics"]
    assert all(1 <= int(accepted) <= 90 for _, accepted in counts), finished.output
