"""Forecasts of a step's time against published runs.    pytest tests/benchmarks/test_forecast.py"""

import csv

import numpy as np
import pytest
from harness.runs import stop_after_one_step

from benchmarks import forecast
from benchmarks.forecast import PUBLISHED, fit, held_out, read_runs, thirds
from zerotrain.tools.estimate import Rates


@pytest.fixture(scope="module")
def runs():
    return read_runs(str(PUBLISHED))


def test_the_constants_are_those_that_fit_the_published_runs(runs):
    found = fit(runs)
    stated = Rates(slowdown=forecast.DEEPSPEED_SLOWDOWN)
    assert vars(found) == pytest.approx(vars(stated), rel=0.01)


def test_runs_that_were_not_fitted_are_forecast_as_well_as_the_planner_says(runs):
    for folds, within in ((thirds(runs), 0.15), ([run.gpu for run in runs], 0.25)):
        errors = abs(held_out(runs, folds) - 1)
        assert np.quantile(errors, 0.9) < within + 0.005
        assert np.median(errors) <= 0.08 and np.mean(errors <= 0.2) >= 0.85
    kinds = [run.zero for run in runs]
    for kind, ratio in zip(kinds, held_out(runs, kinds), strict=True):
        assert "offload" not in kind or abs(ratio - 1) < 0.3, "with one other run of offload"


def test_a_table_has_a_line_per_run_and_the_verdicts_on_further_nodes(forks, runs, tmp_path):
    done = forks.script("benchmarks.forecast")
    assert done.code == 0, done.output
    *_, verdicts, errors = done.output.splitlines()
    assert done.output.count("-80gb, ZeRO") == sum(run.gpu_gib == 80 for run in runs)
    assert " 33 of 33 " in verdicts
    assert float(errors.partition("median error ")[2].split()[0]) < 5
    table = tmp_path / "runs.csv"
    for old, new in (("a100", "z80"), (",8,", ",eight,"), ("llama-7b", "")):
        table.write_text(PUBLISHED.read_text().replace(old, new))
        refused = forks.script("benchmarks.forecast", table)
        assert refused.code == 2 and len(refused.errors) == 1, refused.output


def test_a_run_has_a_forecast_and_a_line_of_the_table(forks, tiny_config, tmp_path):
    config = tiny_config(train__steps=3, train__epochs=None, train__precision="bf16")
    forks.finish(config, ranks=2, module="known_gpu")
    measured = forks.script("benchmarks.forecast", "--run", tmp_path / "run", code=0).output
    lines = measured[measured.index("source,model") :].splitlines()
    [row] = csv.DictReader(lines[:2])
    sizes = [row[name] for name in ("hidden", "layers", "heads", "kv_heads", "mlp_matrices")]
    assert sizes == ["32", "2", "4", "2", "3"] and float(row["tokens_per_s_per_gpu"]) > 0
    table = tmp_path / "runs.csv"
    table.write_text("\n".join(lines[:2]))
    assert forks.script("benchmarks.forecast", table, code=0).output.splitlines() == lines[3:]
    short = ("--output_dir", tmp_path / "short")
    stop_after_one_step(tmp_path / "short")
    assert not forks.finish(config, *short, module="known_gpu").errors
    assert forks.script("benchmarks.forecast", "--run", short[1]).code == 2
    on_cpu = ("--output_dir", tmp_path / "cpu")
    forks.finish(config, *on_cpu)
    refused = forks.script("benchmarks.forecast", "--run", on_cpu[1])
    assert refused.code == 2 and len(refused.errors) == 1, refused.output
    forks.script("benchmarks.forecast", "--run", on_cpu[1], "--gpu", "h200-141gb", code=0)
