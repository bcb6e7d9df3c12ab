"""What is measured of steps: parts, slow ranks, hangs, profiles.    pytest tests/test_steps.py"""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import environment, read_metrics

from checkpoint.run_folder import profile_folder
from config.schema import ProfileConfig
from runtime.gpu import open_gpu
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


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for names and quotas")


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


def named(folder):
    """What is said of the rank that is slow."""
    events = [e for e in read_metrics(folder, "event") if e["name"] == "slow_rank"]
    windows = read_metrics(folder, "ranks")
    assert events[0]["ranks"] in [w["slow_ranks"] for w in windows]
    return events[0]["text"].split(":")[0]


@needs_root
def test_a_host_with_a_quota_is_named(forks, tiny_config, tmp_path):
    """Two hosts by name, with one rank each."""
    disks = {tmp_path / name: 1 for name in ("disk_1", "disk_2", "at")}
    for folder in disks:
        folder.mkdir()
    at = disks.popitem()[0]
    config = tiny_config(
        ds_config="ds_configs/zero1.json", train__epochs=None, train__steps=100_000,
        train__global_batch_size=2, train__warmup_examples=0, data__eval_sources=None,
        tracking__rank_window_steps=8,
    )  # fmt: skip
    log = tmp_path / "run" / "metrics.jsonl"
    ranks = forks.start(config, disks=disks, at=at)
    ranks.until(lambda: log.exists() and log.stat().st_size)
    with slowed_down(ranks, 1, 0.08):
        ranks.until(lambda: '"slow_rank"' in log.read_text())
        ranks.kill(0)
    ranks.wait()
    assert named(tmp_path / "run") == "rank 1 @ node-2 (local rank 0) is slow"


def test_under_zero_3_a_slow_matrix_is_not_hidden_by_gathers(forks, tiny_config, tmp_path):
    """The other rank waits for it in its own forward pass."""
    config = tiny_config(
        ds_config="ds_configs/zero3.json", train__epochs=None, train__steps=15,
        data__eval_sources=None, tracking__rank_window_steps=5,
    )  # fmt: skip
    finished = forks.train(config, ranks=2, module="slow_layer")
    assert finished.code == 0 and "rank 1 @ " in finished.output, finished.output
    assert named(tmp_path / "run").startswith("rank 1 @ ")
    waited = np.mean([s["forward_seconds"] for s in read_metrics(tmp_path / "run")])  # rank 0
    assert waited > 0.03
    for window in read_metrics(tmp_path / "run", "ranks"):
        assert window["own_seconds"][0] + 0.02 < window["own_seconds"][1] > 0.04


def test_a_healthy_job_names_nobody(forks, tiny_config, tmp_path):
    config = tiny_config(
        train__epochs=None, train__steps=200, train__global_batch_size=4, train__warmup_examples=0,
        data__micro_batch_tokens=256, data__eval_sources=None,
        tracking__peak_tflops_per_s=0.5, profile={"start": 3, "steps": 2, "ranks": [1]},
    )  # fmt: skip
    finished = forks.train(config, ranks=2)
    assert finished.code == 0, finished.output
    run = tmp_path / "run"
    windows = read_metrics(run, "ranks")
    assert [w["step"] for w in windows] == [50, 100, 150, 200]
    assert not any(w["slow_ranks"] for w in windows)
    events = [(e["step"], e["name"]) for e in read_metrics(run, "event")]
    assert events == [(4, "profile")], "no slow rank, no hang"

    steps = read_metrics(run)
    for step in steps:
        parts = sum(step[f"{n}_seconds"] for n in ("data", "forward", "backward", "optimizer"))
        assert 0.5 * step["step_seconds"] < parts < step["step_seconds"]
        assert step["mfu"] == pytest.approx(step["model_flops_per_s"] / (2 * 0.5e12))
    for w in windows:  # of rank 0: the forward pass and little else
        of_window = steps[w["step"] - 50 : w["step"]]
        forward, backward, whole = (
            np.mean([s[f"{part}_seconds"] for s in of_window])
            for part in ("forward", "backward", "step")
        )
        assert forward < w["own_seconds"][0] < whole - backward / 2
    assert np.diff([0] + [s["tokens_total"] for s in steps]).tolist() == [
        s["tokens"] for s in steps
    ]

    folder = profile_folder(run, 3)
    assert sorted(f.name for f in folder.iterdir()) == ["rank_1.json.gz", "rank_1.txt"]
    trace = json.loads(gzip.decompress((folder / "rank_1.json.gz").read_bytes()))
    passes = [event for event in trace["traceEvents"] if event.get("name") == "aten::embedding"]
    assert len(passes) == sum(step["micro_steps"] for step in steps[2:4])
    assert "aten::mm" in (folder / "rank_1.txt").read_text()


# --------------------------------------------------------------------------------------------------
# Hangs


def test_who_has_not_come():
    def answers(*collectives):
        return {r: Answer(c, 9.0, "") for r, c in enumerate(collectives) if c is not None}

    assert ranks_behind(answers({"a": 4, "b": 2}, {"a": 4, "b": 2}), 2) == []
    assert ranks_behind(answers({"a": 4, "b": 2}, {"a": 4, "b": 1}), 2) == [1]
    assert ranks_behind(answers({"a": 3}, None, {"a": 4}), 4) == [0, 1, 3]
    assert ranks_behind(answers({"a": 4, "b": 2}, {"a": 4, "c": 7}), 2) == [], "other groups"


def test_a_rank_that_waits_or_is_stopped_is_named_while_the_others_wait(
    forks, tiny_config, tmp_path
):
    config = tiny_config(
        train__epochs=None, train__steps=12, distributed={"warn_seconds": 2},
    )  # fmt: skip
    # as under launch.sh: the ranks' answers are signed
    ranks = forks.start(config, ranks=2, module="late_batches", LAUNCH_SECRET="of this job")
    log = tmp_path / "run" / "metrics.jsonl"

    def hangs():
        return [e for e in read_metrics(tmp_path / "run", "event") if e["name"] == "hang"]

    ranks.until(lambda: log.exists() and hangs())
    waits, host = hangs()[0], hangs()[0]["text"].split(" @ ")[1].split()[0]
    assert waits["ranks"] == [1] and waits["step"] == 3, waits
    named = f"not come: rank 1 @ {host} (local rank 1): at tests/late_batches.py:"
    assert named in waits["text"] and " wait_for, in " not in waits["text"], waits
    assert "waiting for them: 1 at " in waits["text"] and "all_reduce" in waits["text"], waits

    (tmp_path / "run" / "profile_now").touch()
    (tmp_path / "run" / "go_on").touch()
    ranks.until(lambda: '"step": 5' in log.read_text() and "continues after" in log.read_text())
    ranks.kill(1, signal.SIGSTOP)
    ranks.until(lambda: "does not answer" in log.read_text())
    stopped = next(e for e in hangs() if "does not answer" in e["text"])
    assert stopped["ranks"] == [1] and "rank 1 @ " in stopped["text"], stopped
    ranks.kill(1, signal.SIGCONT)
    finished = ranks.wait()
    assert finished.code == 0, finished.output
    assert finished.output.count("nothing has moved for") >= 2, finished.output
    assert (profile_folder(tmp_path / "run", 5) / "rank_0.txt").is_file(), "asked for in step 4"
    assert not (tmp_path / "run" / "profile_now").exists()


# --------------------------------------------------------------------------------------------------
# Memory, GPUs


NVML = r"""
#include <string.h>
typedef void *device;
enum { SUCCESS, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlDeviceGetHandleByUUID(const char *uuid, device *gpu) {
  *gpu = (device)7;
  return strcmp(uuid, "GPU-1-2") ? NOT_FOUND : SUCCESS;
}
int nvmlDeviceGetTemperature(device gpu, int sensor, unsigned *celsius) {
  *celsius = sensor == 0 && gpu == (device)7 ? 91 : 0;
  return SUCCESS;
}
int nvmlDeviceGetClockInfo(device gpu, int clock, unsigned *mhz) {
  *mhz = clock == 1 ? 1005 : 0; /* NVML_CLOCK_SM */
  return SUCCESS;
}
int nvmlDeviceGetPowerUsage(device gpu, unsigned *milliwatts) {
  *milliwatts = 350500;
  return SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device gpu, unsigned long long *reasons) {
  *reasons = 0x40 | 0x4; /* HwThermalSlowdown, and SwPowerCap, which is usual under load */
  return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(device gpu, int kind, int since, unsigned long long *count) {
  return NOT_SUPPORTED;
}
"""
"""Functions of nvml.h, for the library that a driver brings."""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler (apt install gcc)")
def test_the_health_of_a_gpu_is_read_through_nvml(tmp_path):
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    script = """
import json
from runtime.gpu import open_gpu, read_health
print(json.dumps([open_gpu("9-9"), read_health(open_gpu("1-2"))]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**environment(), "LD_LIBRARY_PATH": str(tmp_path)},
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    health = {
        "temperature_celsius": 91, "sm_clock_mhz": 1005, "power_watts": 350.5,
        "throttle": ["heat"], "ecc_errors": None,
    }  # fmt: skip
    assert json.loads(done.stdout) == [None, health]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_there_is_no_health_and_no_memory_snapshot(tmp_path):
    assert open_gpu("1-2") is None
    profiler = StepProfiler(ProfileConfig(), str(tmp_path), 0, on_cuda=False)
    profiler.step_begins(1)
    assert profiler.step_ended(1) is None
    profiler.ran_out_of_memory()
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_held_the_memory_of_a_gpu_is_written(tmp_path):
    profiler = StepProfiler(ProfileConfig(start=1, steps=1), str(tmp_path), 0, on_cuda=True)
    profiler.step_begins(1)
    held = torch.ones(1 << 20, device="cuda")
    try:
        torch.empty(1 << 50, device="cuda")
    except torch.OutOfMemoryError:
        profiler.ran_out_of_memory()
    folder = profile_folder(tmp_path, None)
    assert (folder / "rank_0.pickle").stat().st_size > 0 and held.sum() == 1 << 20
    assert "CUDA memory summary" in (folder / "rank_0.txt").read_text()
    assert "rank 0" in profiler.step_ended(1)
    assert "cuda" in (profile_folder(tmp_path, 1) / "rank_0.txt").read_text().lower()
