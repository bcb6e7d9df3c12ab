"""What is measured of steps: parts, slow ranks, hangs, profiles.    pytest tests/test_steps.py"""

import gzip
import json
import signal
import statistics
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import read_metrics

from checkpoint.run_folder import profile_folder
from config.schema import ProfileConfig
from runtime.hang import Answer, ranks_behind
from tracking.profiler import StepProfiler
from tracking.stragglers import WINDOWS, Stragglers

# --------------------------------------------------------------------------------------------------
# Slow ranks


def windows_of(rng, ranks, windows, steps=50, noise=0.1, slow=None, factor=1.0):
    """Means and standard errors of the ranks' own seconds per step, window by window."""
    for _ in range(windows):
        own = rng.lognormal(-1, noise, (ranks, steps))
        if slow is not None:
            own[slow] *= factor
        yield own.mean(1).tolist(), (own.std(1, ddof=1) / steps**0.5).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("noise", [0.01, 0.3, 1.0])
def test_noise_names_nobody(ranks, noise):
    rng, stragglers = np.random.default_rng(0), Stragglers(ranks)
    for own, errors in windows_of(rng, ranks, 500, noise=noise):
        assert stragglers.update(own, errors, 1.2) == ([], [])


@pytest.mark.parametrize("ranks, slow", [(2, 0), (2, 1), (8, 5), (64, 63)])
def test_a_slow_rank_is_named_once_and_as_long_as_it_is_slow(ranks, slow):
    rng, stragglers = np.random.default_rng(0), Stragglers(ranks)
    found = [
        stragglers.update(*window, 1.2)
        for factor in (1, 1.4, 1, 1.4)
        for window in windows_of(rng, ranks, 6, slow=slow, factor=factor)
    ]
    by_then = [[]] * (WINDOWS - 1) + [[slow]] * (7 - WINDOWS)
    assert [named for named, _ in found] == 2 * ([[]] * 6 + by_then)
    assert [i for i, (_, new) in enumerate(found) if new] == [5 + WINDOWS, 17 + WINDOWS]


def test_what_is_slow_in_few_windows_or_hardly_matters_is_not_named():
    rng, stragglers = np.random.default_rng(0), Stragglers(4)
    for _ in range(20):  # a burst of two windows, again and again
        for factor in (1.5,) * (WINDOWS - 1) + (1,):
            for window in windows_of(rng, 4, 1, slow=2, factor=factor):
                assert stragglers.update(*window, 1.2) == ([], [])
    for window in windows_of(rng, 4, 20, slow=2, factor=3.0):
        assert stragglers.update(*window, 100.0) == ([], []), "under 3 % of the step"


@contextmanager
def slowed_down(forked, rank, share):
    """A rank's process gets this share of one core, by a quota of its control group."""
    group = Path("/sys/fs/cgroup/cpu", f"slow_rank_{forked.pids[rank]}")
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("20000")
        (group / "cpu.cfs_quota_us").write_text(str(int(20000 * share)))
        (group / "cgroup.procs").write_text(str(forked.pids[rank]))
    except OSError:
        pytest.skip("needs control groups (version 1) with cpu quotas")
    try:
        yield
    finally:
        forked.kill(rank)
        forked.until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_with_a_quota_is_named(forks, tiny_config, tmp_path, stage):
    config = tiny_config(
        ds_config=f"ds_configs/zero{stage}.json", train__epochs=None, train__steps=100_000,
        tracking__rank_window_steps=4, data__eval_sources=None,
    )  # fmt: skip
    log = tmp_path / "run" / "metrics.jsonl"
    ranks = forks.start(config, ranks=2)
    ranks.until(lambda: log.exists() and log.stat().st_size)
    with slowed_down(ranks, 1, 0.05):
        ranks.until(lambda: '"slow_rank"' in log.read_text())
        ranks.kill(0)
    ranks.wait()
    event = read_metrics(tmp_path / "run", "event")[0]
    host = read_metrics(tmp_path / "run", "ranks")[0]["hosts"][1]
    assert event["ranks"] == [1], event
    assert event["text"].startswith(f"rank 1 @ {host} (local rank 1) is slow: "), event
    assert read_metrics(tmp_path / "run", "ranks")[-1]["slow_ranks"] == [1]
