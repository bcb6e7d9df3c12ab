"""A checkpoint of an earlier commit resumes bit for bit, or is refused with both versions.

earlier_commit.txt names the earliest commit whose checkpoints resume. CONTRIBUTING.md says when it
moves on.    pytest tests/template/test_earlier.py
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.inputs import rewrite
from harness.processes import environment, free_port
from harness.repository import REPO
from harness.runs import checkpoints, determined

from zerotrain.data.epoch_order import PLAN_VERSION

COMMIT = Path(__file__).with_name("earlier_commit.txt").read_text().strip()
HAS_COMMIT = subprocess.run(
    ["git", "cat-file", "-e", f"{COMMIT}^{{commit}}"], cwd=REPO, capture_output=True
)


@pytest.mark.launch
@pytest.mark.skipif(HAS_COMMIT.returncode != 0, reason="needs git's history: git fetch --unshallow")
def test_a_checkpoint_of_an_earlier_commit_resumes_bit_for_bit(forks, tiny_config, tmp_path):
    """The same checkpoint with another version's number is refused."""
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    archive = subprocess.run(
        ["git", "archive", COMMIT], cwd=REPO, capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "x"], cwd=earlier, input=archive, check=True)
    config = tiny_config(train__steps=6, checkpoint={"every_steps": 3, "keep_last": 2})
    forks.finish(config, "--output_dir", tmp_path / "whole")

    one_rank = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "PYTHONPATH": str(earlier),
    }  # fmt: skip
    command = [sys.executable, "train.py", "--config", config]
    process = subprocess.run(
        list(map(str, command)), cwd=earlier, env=environment() | one_rank, capture_output=True
    )
    assert process.returncode == 0, process.stderr.decode()
    run_folder = tmp_path / "run"
    first, last = checkpoints(run_folder)
    shutil.rmtree(last)
    finished = forks.finish(config)
    assert f"resuming from {first}: step 3\n" in finished.output
    assert determined(run_folder) == determined(tmp_path / "whole")

    for checkpoint in checkpoints(run_folder):
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        state["run"]["plan"]["version"] = 3
        rewrite(checkpoint, "trainer_state.json", json.dumps(state).encode())
    line = forks.refusal(config)
    assert "version 3" in line and f"has {PLAN_VERSION};" in line
