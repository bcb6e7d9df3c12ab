"""The scripts of benchmarks/ from the command line.    pytest tests/test_benchmark_plan.py"""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPO, environment

from data.plan import Budget, Contents, plan_step
from runtime.errors import UserError

SCRIPT = REPO / "benchmarks" / "plan.py"
T0_ROWS = 55_185
T0_QUANTILES = np.concatenate([np.linspace(0, 0.9, 31), 1 - np.geomspace(0.1, 1e-5, 25)[1:], [1]])
T0_LENGTHS = [
    9, 26, 32, 36, 41, 46, 51, 55, 60, 64, 68, 72, 77, 83, 90, 97, 108, 122, 140, 160, 181, 202,
    229, 257, 288, 333, 415, 506, 533, 554, 568, 588, 722, 1243, 1492, 1932, 2243, 2559, 2995, 3218,
    3579, 4113, 4680, 5070, 5303, 5447, 5591, 6388, 6484, 6541, 6548, 6556, 6556, 6558, 6560, 6566,
]  # fmt: skip
"""Tokens at each of the quantiles, for the T0/P3 examples measured in benchmarks/README.md."""
KEYS = {
    "efficiency", "padding_efficiency", "imbalance", "deff", "deff_stderr", "dropped",
    "duplicated", "steps", "plan_ms_per_step", "global_batch_size", "micro_steps_mean",
    "largest_micro_batch_tokens",
}  # fmt: skip
SMALL = ("--world", 2, "--micro_batch_tokens", 1024)


def bench(*args, cwd=REPO, script=SCRIPT):
    """Exit code, stdout, stderr."""
    done = subprocess.run(
        [sys.executable, script, *map(str, args)],
        cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def report(*args, cwd=REPO):
    code, out, err = bench(*args, "--json", cwd=cwd)
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_plan", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def lengths_file(tmp_path):
    """Enough for over 20 steps at SMALL, so nothing is bootstrapped; at most 900 tokens."""
    path = tmp_path / "lengths.npy"
    lengths = np.random.default_rng(1).lognormal(4, 1, 2503).clip(2, 900).astype(np.int32)
    np.save(path, lengths)
    return path


def by_hand(lengths, mode, window, batch, world, k):
    """efficiency, padding efficiency and imbalance, counted example by example."""
    contents = Contents(lengths, 0, batch, window=window)
    budget = Budget(world, 1024, linear_cost=k, packed=mode == "packed")
    useful = computed = waited = tokens = padded = 0
    plans = []
    for step in range(contents.steps_per_epoch):
        plans.append(plan_step(contents.rows(0, step), lengths, lengths, budget))
        for ranks in plans[-1].micro_batches:
            slowest = 0
            for group in ranks:
                real = [int(lengths[row]) for row in group]
                sizes = real if mode == "packed" else [max(real, default=0)] * len(real)
                cost = sum(k * size + size * size for size in sizes)
                useful += sum(k * size + size * size for size in real)
                computed, tokens, padded = computed + cost, tokens + sum(real), padded + sum(sizes)
                slowest = max(slowest, cost)
            waited += world * slowest
    assert useful == sum(plan.useful_cost for plan in plans)
    assert computed == sum(plan.held_cost for plan in plans)
    assert waited == sum(plan.waited_cost for plan in plans)
    return [useful / waited, tokens / padded, waited / computed]


@pytest.mark.parametrize("mode, window", [("bucketed", 1), ("bucketed", 4), ("packed", 1)])
def test_figures_agree_with_a_count_by_hand(lengths_file, tmp_path, mode, window):
    k = 5000
    found = report(
        lengths_file.name, *SMALL, "--mode", mode, "--window", window, "--linear_cost", k,
        cwd=tmp_path,
    )  # fmt: skip
    assert found.keys() >= KEYS and not found["bootstrapped"] and found["rows"] == 2503
    expected = by_hand(np.load(lengths_file), mode, window, found["global_batch_size"], 2, k)
    names = ("efficiency", "padding_efficiency", "imbalance")
    assert [found[name] for name in names] == pytest.approx(expected, rel=1e-9)
    assert found["dropped"] == found["duplicated"] == 0
    assert found["steps_dealt"] == found["steps"] == -(-2503 // found["global_batch_size"])
    assert found["largest_micro_batch_tokens"] <= 1024
    assert found["deff"] < 1.2 and found["deff_stderr"] < 0.1 and found["plan_ms_per_step"] > 0
    assert 3 < found["micro_steps_mean"] < 4.5  # the global batch was calibrated for 4


def test_the_table_has_ours_and_the_peers(lengths_file):
    runs = {
        (run["planner"], run.get("window")): run for run in report(lengths_file, *SMALL)["runs"]
    }
    peers = [("hf_batch_rebalance", None), ("hf_group_by_length", None), ("random", None)]
    ours = [("packed", 1), ("bucketed", 1), ("bucketed", 4)]
    assert runs.keys() == {*ours, *peers}
    assert all(run.keys() >= KEYS for run in runs.values())
    assert runs["random", None]["efficiency"] < 0.5 < runs["bucketed", 1]["efficiency"]
    for name in peers:
        assert abs(runs[name]["global_batch_size"] - runs["bucketed", 1]["global_batch_size"]) <= 4
    # its last round is filled with examples from the start
    batch = runs["random", None]["global_batch_size"] // 4
    assert runs["random", None]["duplicated"] == -2503 % batch
    assert runs["hf_group_by_length", None]["deff"] > 5


def test_one_peer_by_name(lengths_file, benchmark, monkeypatch, capsys):
    flags = [*SMALL, "--peer", "random", "--global_batch_size", 80, "--json"]
    monkeypatch.setattr(sys, "argv", ["plan.py", str(lengths_file), *map(str, flags)])
    benchmark.main()  # in this process, because importing torch takes seconds
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= KEYS and found["planner"] == "random"
    assert found["global_batch_size"] == 80 and found["dropped"] == 0


@pytest.mark.parametrize("rows", [48, 49, 59, 7])
def test_a_stream_is_sharded_as_by_accelerate(benchmark, rows):
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    world, batch = 3, 4
    sharded = benchmark.shard(list(range(rows)), batch, world)
    for rank in range(world):
        batches = BatchSampler(range(rows), batch, drop_last=False)
        assert sharded[:, rank].tolist() == list(BatchSamplerShard(batches, world, rank))


def test_a_long_epoch_is_sampled(lengths_file):
    found = report(lengths_file, *SMALL, "--mode", "packed", "--rows", "6e6")
    assert found["rows"] == 6_000_000 and found["bootstrapped"]
    assert found["dropped"] is found["duplicated"] is None
    assert found["steps_dealt"] == 30 < found["steps"]
    assert found["extra_memory_mb"] < 50 and 0.8 < found["deff"] < 1.2


def test_the_curve_gains_with_the_window(lengths_file):
    curve = report(lengths_file, *SMALL, "--curve", "--rows", 600)
    found = {(run["window"], run["micro_steps"]): run["efficiency"] for run in curve["runs"]}
    assert len(found) == 20
    assert found[1, 4] < found[1, 8] and found[1, 4] < found[16, 4]


def test_text_files_are_measured_and_long_ones_truncated(tmp_path):
    (tmp_path / "deep").mkdir()
    for i in range(40):
        (tmp_path / "deep" / f"{i}.txt").write_text("é" * (4 * i + 1))  # i + 1 tokens
    code, out, err = bench(
        "--from_text", tmp_path / "**" / "*.txt", "--mode", "packed", "--json", "--world", 1,
        "--micro_batch_tokens", 30, "--rows", 200, "--global_batch_size", 5,
    )  # fmt: skip
    assert code == 0 and json.loads(out)["rows_given"] == 40
    assert err.startswith("note: 10 of 40 examples are truncated") and err.count("\n") == 1


def test_a_mistake_is_one_line(lengths_file, tmp_path, benchmark, monkeypatch):
    for name, array in {
        "square": np.ones((2, 2), np.int32),
        "float": np.ones(3),
        "zero": np.array([3, 0, 2]),
        "none": np.zeros(0, np.int32),
    }.items():
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "text.npy").write_text("3 4 5")
    mistakes = {
        "No such file": ["missing.npy"],
        "not a .npy": ["text.npy"],
        "square.npy must be": ["square.npy"],
        "float.npy must be": ["float.npy"],
        "under 1, at index 1": ["zero.npy"],
        "none.npy must be": ["none.npy"],
        "only one of --mode, --peer": [lengths_file, "--mode", "packed", "--peer", "random"],
        "invalid whole number": [lengths_file, "--world", "0"],
        "unrecognized": [lengths_file, "--wrold", "8"],
        "either LENGTHS.npy or --from_text": [],
        "no text": ["--from_text", "nothing/*.txt"],
        "peers plan whole epochs": [lengths_file, "--rows", "1e8"],
    }
    monkeypatch.chdir(tmp_path)
    for words, args in mistakes.items():
        monkeypatch.setattr(sys, "argv", ["plan.py", *map(str, args)])
        with pytest.raises(UserError) as mistake:
            benchmark.main()
        assert words in str(mistake.value) and "\n" not in str(mistake.value)
    for args in (["missing.npy"], [lengths_file, "--wrold", 8], ["zero.npy", "--json"]):
        code, out, err = bench(*args, cwd=tmp_path)
        assert code == 2 and not out
        assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "mode, window, world, efficiency",
    [
        ("packed", 1, 8, 0.995),
        ("packed", 1, 64, 0.994),
        ("bucketed", 1, 8, 0.895),  # below .92, which needs a window or more micro-steps
        ("bucketed", 4, 8, 0.92),
        ("bucketed", 1, 64, 0.95),
    ],
)
def test_targets_on_real_lengths(tmp_path, mode, window, world, efficiency):
    """Lengths have the distribution of real ones, in particular their long tail."""
    ranks = (np.arange(T0_ROWS) + 0.5) / T0_ROWS
    lengths = np.interp(ranks, T0_QUANTILES, T0_LENGTHS).round().astype(np.int32)
    np.save(tmp_path / "t0.npy", np.random.default_rng(0).permutation(lengths))
    found = report(tmp_path / "t0.npy", "--mode", mode, "--window", window, "--world", world)
    assert found["efficiency"] >= efficiency
    assert found["deff"] <= 1.2
    assert found["dropped"] == found["duplicated"] == 0


@pytest.mark.launch
def test_all_feeds_train_in_one_run():
    feeds = ["packed", "bucketed", "bucketed_window_4", "group_by_length", "random"]
    sizes = ["--global_batch_size", 8, "--micro_batch_tokens", 600, "--max_length", 256]
    script = REPO / "benchmarks" / "throughput.py"
    code, out, err = bench(*sizes, "--steps", 1, "--feeds", ",".join(feeds), script=script)
    assert code == 0, err
    found = json.loads(out[out.index("{") :])
    assert list(found["tokens_per_s"]) == feeds and list(found["packed_over"]) == feeds[1:]
    padding = found["padding_efficiency"]
    assert padding["packed"] == 1 > padding["bucketed"] > padding["random"]
