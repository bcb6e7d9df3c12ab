"""The benchmarks at toy size on CPU: they run, and their figures are consistent."""

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPO, environment


def bench(script, *args):
    return subprocess.run(
        [sys.executable, f"benchmarks/{script}", *map(str, args)],
        cwd=REPO, env=environment(), capture_output=True, text=True, timeout=590,
    )  # fmt: skip


@pytest.mark.launch
def test_a_check_of_a_gpu_passes_at_toy_size_and_is_not_repeated(tmp_path):
    checks = "dense_1.5b_8k_zero1,against_trainer_1"
    toy = ["--toy", "--out", tmp_path, "--only", checks]
    done = bench("gpu.py", *toy)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert ",".join(results) == f"environment,{checks}"
    figures = results["dense_1.5b_8k_zero1"]["figures"][""]
    assert figures["tokens_per_s"] > 0 and figures["planned_memory_gib"] > 0
    of_matmul = results["environment"]["figures"][""]["tflops_per_s"]
    assert figures["share_of_matmul"] * of_matmul == pytest.approx(figures["model_tflops_per_s"])
    ours, *theirs = results["against_trainer_1"]["figures"].values()
    assert len(theirs) == 2
    for other in theirs:
        ratio = ours["tokens_per_s"] / other["tokens_per_s"]
        assert other["train_py_over_this"] == pytest.approx(ratio)
    again = bench("gpu.py", *toy, "--continue")
    assert again.returncode == 0 and "missed" in again.stdout  # the table alone
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert bench("gpu.py", "--out", tmp_path, "--only", "nothing").returncode == 2


@pytest.mark.launch
def test_trainer_has_the_same_work(tmp_path):
    small = ["--rows", 48, "--global_batch_size", 16, "--hidden_size", 32, "--layers", 1]
    once = ["--ranks", 1, "--repeats", 1, "--strategies", "random", "--json", tmp_path / "runs"]
    done = bench("against_trainer.py", *small, *once)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, trainer = (runs[0] for runs in json.loads((tmp_path / "runs").read_text()).values())
    assert ours["steps"] == trainer["steps"] == 3
    assert ours["padding_efficiency"] > trainer["padding_efficiency"]


def test_the_plan_is_measured_beside_its_peers(tmp_path):
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(10, 500, 2000))
    done = bench("plan.py", tmp_path / "lengths.npy", "--worlds", 2, "--micro_batch_tokens", 1024)
    assert done.returncode == 0, done.stderr
    lines = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    efficiency = {line[2].strip(): float(line[3]) for line in lines}
    assert len(efficiency) == 5 and efficiency["packed"] == max(efficiency.values())
    assert 0.5 < efficiency["bucketed"] < 1
