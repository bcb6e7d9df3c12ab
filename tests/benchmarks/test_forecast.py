"""Forecasts of a step's time against published runs.    pytest tests/benchmarks/test_forecast.py"""

import re

import numpy as np
import pytest

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


def test_a_table_has_a_line_per_run_and_the_errors(forks, runs, tmp_path):
    done = forks.script("benchmarks.forecast", code=0)
    assert done.output.count("-80gb, ZeRO") == sum(run.gpu_gib == 80 for run in runs)
    assert float(re.search(r"median error (\S+)%", done.output)[1]) < 5
    table = tmp_path / "runs.csv"
    for old, new in (("a100", "z80"), (",8,", ",eight,"), ("llama-7b", "")):
        table.write_text(PUBLISHED.read_text().replace(old, new))
        assert forks.script("benchmarks.forecast", table, code=2).error
