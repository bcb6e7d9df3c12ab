"""What is measured of steps: phases, slow ranks, hangs, profiles.
pytest tests/tracking/test_steps.py"""

import gzip
import json
import re
import socket
import subprocess

import numpy as np
import pytest
import torch
from harness.runs import read_metrics

from zerotrain.runtime.machine import gpu_health
from zerotrain.tools.slow_ranks import SlowRanks, slow_ranks
from zerotrain.tracking.steps import PhaseTimer


@pytest.mark.parametrize("ranks, slow", [(2, 1), (64, 63)])
def test_only_a_rank_that_is_much_slower_is_slow(ranks, slow):
    rng = np.random.default_rng(0)

    def window(**times):
        by_rank = [
            {"compute_seconds": seconds, "work": 9.0, "data_seconds": 0.001}
            for seconds in rng.uniform(0.9, 1.1, ranks)
        ]
        for name, factor in times.items():
            by_rank[slow][name] *= factor
        return slow_ranks(by_rank, 1.0)

    for _ in range(200):
        assert window() == window(data_seconds=20) == window(work=0.1) == []
        assert window(compute_seconds=1.6, work=1.6) == []
        assert window(compute_seconds=1.6, work=0.1) == window(data_seconds=100) == [slow]


def test_a_lock_that_no_compiler_removes_ends_the_run(forks, tiny_config, tmp_path):
    lock = tmp_path / "run" / "lock"
    lock.parent.mkdir()
    options = {"TORCH_EXTENSIONS_DIR": str(lock.parent), "COMPILES_SECONDS": "900"}
    ended = forks.train(tiny_config(), code=1, module="slow_rank", **options)
    assert lock.exists()
    subprocess.run(ended.error.split("run: ")[1], shell=True, check=True)
    assert not lock.exists()


def test_phases_hangs_slow_hosts_and_profiles(forks, tiny_config, tmp_path):
    """Rank 1 comes late to its fourth step, and each of its forward passes takes 30 ms longer. A
    lock that is there while the engine is built is named.
    """
    config = tiny_config(train__steps=125)
    run = tmp_path / "run"
    run.mkdir()
    (run / "profile_now").touch()
    ranks = forks.start(config, ranks=2, module="slow_rank", TORCH_EXTENSIONS_DIR=str(run))
    here = socket.gethostname()
    late = rf"\[rank 1 @ {here}\] Timeout (.*\n)+?\[rank 1 @ {here}\].*in load_late"
    ranks.until(lambda: re.search(late, ranks.log.read_text()))
    (run / "go_on").touch()
    ranks.wait(0)
    slow, windows = SlowRanks(), read_metrics(run, "ranks")
    named = [slow.add(window["ranks"], window["step_seconds"]) for window in windows]
    assert named == [[], [], [1], [], []] and here in windows[0]["ranks"][1]["host"]
    assert f"{run}/lock: an operator is being compiled" in ranks.log.read_text()
    (first, second), *others = (record["ranks"] for record in windows)
    assert second["data_seconds"] > max(0.05, first["data_seconds"]) and len(others) == 4
    for step in read_metrics(run):
        phases = ("data", "forward", "head", "backward", "optimizer")
        parts = sum(step[f"{phase}_seconds"] for phase in phases)
        assert 0.5 * step["step_seconds"] < parts <= step["step_seconds"]
        assert step["tokens_per_s"] == pytest.approx(step["tokens"] / step["step_seconds"])

    [file] = (run / "profile").glob("*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::embedding", "ProfilerStep#1", "ProfilerStep#3"} <= names
    assert "ProfilerStep#4" not in names


def test_timers_on_this_device():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timer = PhaseTimer(device)
    timer.mark("step")
    for _ in range(2):
        torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        timer.mark("forward")
    assert 0 < timer.take()["forward_seconds"] < 10 and timer.take() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_health_of_a_gpu():
    health = gpu_health()
    assert 10 < health["temperature_celsius"] < 110 and health["sm_clock_mhz"] > 100
    assert health["power_watts"] > 10
