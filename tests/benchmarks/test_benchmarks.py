"""The benchmarks at toy size on CPU: they run, and their figures are consistent."""

import json

import numpy as np
import pytest
from harness.repository import REPO

from benchmarks.gpu import FAILED, report_page


@pytest.fixture
def bench(forks):
    """A function that runs a file of benchmarks/. It and the commands that it runs are forks."""
    forked = {"zerotrain.tools.local_ranks.subprocess": "__import__('forked_python')"}
    return lambda name, *args: forks.script(f"benchmarks.{name}", *args, patches=forked)


def test_checks_of_a_gpu_pass_at_toy_size_and_are_not_repeated(bench, tmp_path):
    names = ["resume", "profile", "against_trainer"]
    toy = ["--toy", "--out", tmp_path, "--only", *names]
    done = bench("gpu", *toy)
    assert done.code == 0, done.output
    results = json.loads((tmp_path / "toy_results.json").read_text())
    assert list(results) == ["environment", *names]
    figures = results["profile"][""]
    assert figures["tokens_per_s"] > 0 < figures["model_tflops_per_s"]
    assert "0 of 8 steps of the same run, 0 of 3 resumed" in results["resume"][""]["note"]
    assert "mm" in figures["note"]
    trainer = results["against_trainer"]["Trainer"]
    page = (tmp_path / "toy_results.md").read_text()
    verdict = "met" if trainer["train_py_over_this"] >= 1.15 else "MISSED"
    assert f"| 1.15 times: {verdict} |" in page and json.dumps(results, indent=1) in page
    again = bench("gpu", *toy)
    assert again.code == 0 and "not enough" not in again.output
    assert json.loads((tmp_path / "toy_results.json").read_text()) == results
    assert bench("gpu", "--out", tmp_path, "--only", "no").code == 2


def test_the_page_of_a_gpu_has_goals_causes_and_checks_that_were_not_run():
    cause = "train.py, exit code 1:\nTraceback\ntorch.OutOfMemoryError: no memory\n[W] the end"
    results = {
        "environment": {"": {"matmul_tflops_per_s": 800.0, "note": "NVIDIA H200, torch 2.11"}},
        "1.5b": {"": {"model_tflops_per_s": 520.0, "note": "nothing recomputed"}},
        "small": {"zero1": {"loss": 2.0}, "zero2": {"note": cause}, FAILED: {"note": "zero2"}},
        "8b_part_zero3": {"": {"model_tflops_per_s": 100.0, "note": "activations recomputed"}},
    }
    table, rest = report_page(results).split("Not run: ")
    rows = [row.split(" | ") for row in table.splitlines()[4:-1]]
    causes = ["zero1", "zero2: torch.OutOfMemoryError: no memory", "FAILED: zero2"]
    assert [row[0] for row in rows[2:5]] == [f"| small: {cause}" for cause in causes]
    assert "share_of_matmul 0.65" in rows[1][1] and rows[1][2] == "510 TFLOP/s: met"
    assert rows[5][2] == "" and rest.startswith("tests, compile_ahead, ")


def test_a_simulation_has_every_order(bench, tmp_path):
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(10, 500, 2000))
    small = ["--micro_batch_tokens", 1024, "--steps", 3]
    done = bench("simulate", tmp_path / "lengths.npy", "--ranks", 2, 16, *small)
    assert done.code == 0, done.output
    _, *rows = [line.split() for line in done.output.splitlines()]
    orders = {(ranks, order): float(cell) for ranks, order, cell in rows}
    assert len(orders) == 2 * 5
    for ranks in ("2", "16"):
        efficiency = {order: value for (of, order), value in orders.items() if of == ranks}
        assert 1 >= efficiency["packed"] == max(efficiency.values())
        assert efficiency["bucketed"] > efficiency["random"] > 0
    assert bench("simulate", "--ranks", 0).code == 2


def test_packed_and_bucketed_hybrids_have_the_same_loss(bench, tmp_path):
    np.save(tmp_path / "lengths.npy", [40, 9, 90])
    done = bench("hybrids", tmp_path / "lengths.npy", "--hidden", 32, "--tries", 1)
    assert done.code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()[-6:]]
    assert lines[:2] == [["bucketed", "270", "270"], ["packed", "139", "144"]]
    bucketed, packed, ratio = lines[3:]
    assert (bucketed[0], packed[0]) == ("bucketed", "packed")
    assert float(bucketed[2]) == pytest.approx(float(packed[2]), rel=1e-6)
    assert float(ratio[2]) == pytest.approx(float(bucketed[1]) / float(packed[1]), rel=0.5)


def test_model_states_are_as_estimated(bench, tmp_path):
    run = REPO / "benchmarks" / "llama_300m"
    small = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 2048}
    shape = json.loads((run / "config.json").read_text()) | small
    (tmp_path / "config.json").write_text(json.dumps(shape))
    options = ["--model.name_or_path", tmp_path, "--model.from_config=true"]
    folders = ["--output_dir", tmp_path / "run", "--data.cache_dir", tmp_path / "cache"]
    files = ["--config", run / "run.yaml", "--ds_config", "ds_configs/zero3.json"]
    done = bench("memory", *files, *options, *folders)
    assert done.code == 0, done.output
    [row] = [line.split("|")[1:-1] for line in done.output.splitlines() if line.startswith("|")]
    estimated, measured, ratio, *peak = map(float, row[1:])
    assert ratio == pytest.approx(1, abs=0.03) and min(estimated, measured, *peak) > 0
