"""The branches for CUDA, on tensors without values.    pytest tests/model/test_fake_cuda.py"""

import json
import shutil
import subprocess
import sys

import pytest
from harness import fake_cuda
from harness.processes import environment
from harness.repository import REPO

LAYERS = 3
CASES = {  # tensors copied to the device; calls of the varlen kernel
    "packed, torch 2.11": (5, LAYERS),
    "packed, torch 2.12": (5, LAYERS),
    "packed, torch 2.13": (5, LAYERS),
    "packed fp32": (5, 0),
    "bucketed": (4, 0),
    "bucketed fp32": (4, 0),
    "packed, recomputed": (5, 2 * LAYERS),
    "packed, window": (5, LAYERS),
    "packed, experts": (5, LAYERS),
    "bucketed, experts": (4, 0),
}


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """What was counted in a micro-step of each case, in a process of its own."""
    library = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    fake_cuda.build(library)
    env = environment() | {"FAKE_CUDA": str(library)}
    env["PYTHONPATH"] += f":{REPO / 'tests'}"
    command = [sys.executable, REPO / "tests" / "mains" / "on_fake_cuda.py"]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("g++") is None, reason="fake CUDA needs g++")
@pytest.mark.parametrize("name", CASES)
def test_a_micro_step_waits_for_nothing_and_copies_the_batch_alone(counts, name):
    """Each tensor of the batch once, from the loader's line, and nothing in a layer. What
    transformers leaves out for tensors without values, in masks of padding, is in test_waits.py.
    """
    copies, calls = CASES[name]
    found = counts[name]
    assert found["waits"] == found["on_cpu"] == {}
    [(place, copied)] = found["copies"].items()
    assert "zerotrain/data/loader.py" in place and copied == copies
    assert found["gradients"] == ["cuda:0"]
    assert found["varlen_calls"] == calls
