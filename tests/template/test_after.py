"""The commands of docs/after.md that need another environment work on an export.

LM_EVAL_PYTHON=~/lm_eval/bin/python TRL_PYTHON=~/trl/bin/python pytest tests/template/test_after.py
"""

import os
import re
from pathlib import Path

import pytest
from harness.processes import run
from harness.repository import REPO
from pages import commands_in

PAGE = (REPO / "docs" / "after.md").read_text()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("tool", "result"), [("lm_eval", r"\|exact_match\|"), ("trl", "'loss'")])
def test_a_tool_reads_an_export_as_the_page_says(forks, tmp_path, tool, result):
    python = os.environ.get(f"{tool.upper()}_PYTHON")
    if not python:
        pytest.skip(f"{tool.upper()}_PYTHON does not name the python of an environment")
    (tmp_path / "data").symlink_to(REPO / "data")
    mine = tmp_path / "runs" / "mine"
    flags = ("--train.steps", 2, "--eval.every_steps", 0, "--tracking.wandb", "disabled")
    forks.finish("recipes/demo.yaml", "--output_dir", mine, *flags)
    forks.script("scripts.export", mine, mine / "model", code=0)
    command = next(command for command in commands_in(PAGE) if f"\n~/{tool}/bin" in command)
    command = command.replace(f"~/{tool}/bin", str(Path(python).parent)).replace("50", "4")
    done = run(["bash", "-euo", "pipefail", "-c", command], timeout=1200, cwd=tmp_path)
    assert done.code == 0 and re.search(result, done.output), done.output
