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
from harness.inputs import write_tiny_config
from harness.runs import read_metrics

from zerotrain.runtime.machine import gpu_health
from zerotrain.tools.records import SlowRanks, slow_ranks
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


@pytest.fixture(scope="module")
def finished(forks, tmp_path_factory, chat_rows, tiny_model):
    """The run folder and the output of a run in which rank 1 is late for its fourth step, until its
    stack is reported, and 0.1 s slower in every forward pass.
    """
    folder = tmp_path_factory.mktemp("slow")
    run = folder / "run"
    run.mkdir()
    for name in ("profile_now", "lock"):
        (run / name).touch()
    config = write_tiny_config(folder, chat_rows, tiny_model, "config.yaml", train__steps=40)
    ranks = forks.start(config, ranks=2, module="slow_rank", TORCH_EXTENSIONS_DIR=str(run))
    prefix = re.escape(f"[rank 1 @ {socket.gethostname()}] ")
    ranks.until(
        lambda: re.search(rf"{prefix}Timeout (.*\n)+?{prefix}.*in load_late", ranks.log.read_text())
    )
    (run / "go_on").touch()
    return run, ranks.wait(0).output


def test_the_stack_of_a_hanging_rank_and_the_lock_of_a_compiler_are_reported(finished):
    run, output = finished  # The fixture has waited for the stack.
    assert f"{run}/lock: " in output


def test_phases_add_up_to_the_step(finished):
    for step in read_metrics(finished[0]):
        phases = ("data", "forward", "head", "backward", "optimizer")
        parts = sum(step[f"{phase}_seconds"] for phase in phases)
        assert 0.5 * step["step_seconds"] < parts <= step["step_seconds"]
        assert step["tokens_per_s"] == pytest.approx(step["tokens"] / step["step_seconds"])


def test_a_slow_host_is_named_once(finished):
    slow, windows = SlowRanks(), read_metrics(finished[0], "ranks")
    named = [slow.add(window["ranks"], window["step_seconds"]) for window in windows]
    assert named == [[], [], [1], []]
    first, second = windows[0]["ranks"]
    assert socket.gethostname() in second["host"]
    assert second["data_seconds"] > max(0.05, first["data_seconds"])


def test_a_requested_profile_has_three_steps(finished):
    [file] = (finished[0] / "profile").glob("*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::embedding", "ProfilerStep#1", "ProfilerStep#3"} <= names
    assert "ProfilerStep#4" not in names


def test_phases_are_timed_on_this_device():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timer = PhaseTimer(device)
    timer.mark("step")
    for _ in range(2):
        torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        timer.mark("forward")
    assert 0 < timer.take()["forward_seconds"] < 10 and timer.take() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_health_of_a_gpu_is_plausible():
    health = gpu_health()
    assert 10 < health["temperature_celsius"] < 110 and health["sm_clock_mhz"] > 100
    assert health["power_watts"] > 10
