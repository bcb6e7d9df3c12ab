"""Checkpoints survive interrupted saves, full disks, damaged files and other world sizes.

Ranks are forked (tests/fork_server.py).    pytest tests/test_checkpoints.py
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from conftest import is_saving, read_metrics, save_tiny_llama, strategy

from checkpoint.export import export_checkpoint
from checkpoint.find import checkpoint_problem, find_checkpoint
from checkpoint.run_folder import list_complete
from config.schema import CheckpointConfig
from runtime.errors import UserError


def curve(run_folder):
    steps = read_metrics(run_folder)
    return [s["step"] for s in steps], [[s["loss"], s["grad_norm"], s["lr"]] for s in steps]


def names(run_folder):
    return sorted(p.name for p in (run_folder / "checkpoints").iterdir())


# --------------------------------------------------------------------------------------------------
# Another world size


@pytest.fixture(scope="module")
def uninterrupted():
    return {}


@pytest.fixture
def follow(forks, tiny_config, tmp_path, uninterrupted):
    """Trains one step with each (strategy, ranks), resuming in between, and with the last one to
    the end; compares the curve with that of an uninterrupted run.
    """

    def run(legs, precision="fp32", rtol=1e-5):
        config = tiny_config(train__precision=precision, train__epochs=None, train__steps=6)
        if precision not in uninterrupted:
            whole = forks.train(config, "--output_dir", tmp_path / "whole", ranks=2)
            assert whole.code == 0, whole.output
            uninterrupted[precision] = curve(tmp_path / "whole")
        run_folder = tmp_path / "run"
        run_folder.mkdir()
        for step, (name, ranks) in enumerate(legs, start=1):
            if step < len(legs):
                (run_folder / "stop").touch()  # seen after the first step
            finished = forks.train(config, "--ds_config", strategy(tmp_path, name), ranks=ranks)
            assert finished.code == 0, finished.output
            assert ("stopped, saved: step" in finished.output) == (step < len(legs))
            changed = step > 1 and legs[step - 2] != (name, ranks)
            assert (f" for {ranks} ranks; needs" in finished.output) == changed
            assert ("converted in" in finished.output) == changed
            assert step == len(legs) or names(run_folder)[-1] == f"step_{step:08d}"
        steps, values = curve(run_folder)
        assert steps == uninterrupted[precision][0] == [1, 2, 3, 4, 5, 6]
        np.testing.assert_allclose(values, uninterrupted[precision][1], rtol=rtol)

    return run


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero2_offload"])
def test_ranks_1_2_3_1_reproduce_the_uninterrupted_curve(follow, name):
    """Two parameter groups, with and without weight decay; no size is divisible by 3 ranks."""
    follow([(name, 1), (name, 2), (name, 3), (name, 1)])


def test_another_stage_and_offload_on_another_number_of_ranks(follow):
    follow([("zero0", 1), ("zero3_offload", 2), ("zero2", 3), ("zero0", 2)])


def test_another_stage_in_bf16(follow):
    """Four optimizer wrappers of DeepSpeed, each with its own layout of the fp32 weights."""
    follow([("zero1", 2), ("zero0", 1), ("zero1", 1), ("zero3_offload", 2)], "bf16", rtol=1e-3)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_killed_conversion_continues_and_its_disk_space_is_checked(forks, tiny_config, tmp_path):
    from checkpoint.convert import FILE_BYTES

    config = tiny_config(train__epochs=None, train__steps=3)
    folder = tmp_path / "run" / "checkpoints"
    folder.parent.mkdir()
    (folder.parent / "stop").touch()
    assert forks.train(config).code == 0
    disk = tmp_path / "small" / "checkpoints"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", disk], check=True)
    try:
        flags = "--output_dir", disk.parent, "--checkpoint.resume", folder / "step_00000001"
        refused = forks.train(config, *flags, ranks=2)
        assert refused.code == 2 and len(refused.errors) == 1, refused.output
        assert re.search(r"for 2 ranks takes [\d,]+ bytes in .*make room", refused.errors[0])
        assert not list(disk.rglob("*.pt"))
    finally:
        subprocess.run(["umount", disk], check=True)

    def there():
        return len(list(folder.glob("step_00000001.universal.*/zero/*")))

    def interrupt(number):
        """Signal both ranks during the conversion of 20 parameters; finished ones remain."""
        before = there()
        run = forks.start(config, ranks=2)
        run.until(lambda: there() > before, 150)
        for rank in (0, 1):
            run.kill(rank, number)
        finished = run.wait()
        assert before < there() < 20, finished.output
        assert "MiB of disk" in finished.output and "converted in" not in finished.output
        for file in folder.glob("step_00000001.universal.*/zero/*/fp32.pt"):
            elements = torch.load(file)["param"].numel()
            assert file.stat().st_size <= 4 * elements + FILE_BYTES, "no larger than announced"
        return finished.code

    assert interrupt(signal.SIGKILL) == -signal.SIGKILL
    assert interrupt(signal.SIGTERM) == 128 + signal.SIGTERM
    kept = there()
    other = folder / "step_00000001.universal.0123456789abcdef" / "zero" / "model.norm.weight"
    other.mkdir(parents=True)
    finished = forks.train(config, ranks=2)
    assert finished.code == 0, finished.output
    assert f"{kept} of 20 parameters had been converted before" in finished.output
    assert names(tmp_path / "run") == ["step_00000001", "step_00000003"], "it is removed after use"
    assert [step["step"] for step in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_weights_only_starts_any_run_of_the_same_model(forks, tiny_config, tmp_path):
    """The curve equals that of a run from the exported weights."""
    first = tiny_config(name="first.yaml", train__epochs=None, train__steps=2)
    flags = "--output_dir", tmp_path / "first", "--train.precision", "bf16"
    finished = forks.train(first, *flags, "--ds_config", strategy(tmp_path, "zero2"), ranks=2)
    assert finished.code == 0, finished.output
    checkpoint = tmp_path / "first" / "checkpoints" / "step_00000002"
    export_checkpoint(checkpoint, tmp_path / "exported", "float32")

    settings = {"train__learning_rate": 1e-3, "train__epochs": None, "train__steps": 3}
    plain = tiny_config(name="plain.yaml", model=tmp_path / "exported", **settings)
    assert forks.train(plain, "--output_dir", tmp_path / "plain").code == 0
    config = tiny_config(
        checkpoint={"resume": str(checkpoint), "weights_only": True}, **settings
    )  # fmt: skip
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "stop").touch()
    finished = forks.train(config, "--ds_config", strategy(tmp_path, "zero3"), ranks=3)
    assert finished.code == 0, finished.output
    assert f"starting with the weights of {checkpoint}: step 2\n" in finished.output
    # it resumes from its own checkpoint
    again = forks.train(config, "--ds_config", strategy(tmp_path, "zero0"))
    assert again.code == 0, again.output
    assert f"resuming from {run_folder}/checkpoints/step_00000001: step 1\n" in again.output
    np.testing.assert_allclose(curve(run_folder)[1], curve(tmp_path / "plain")[1], rtol=1e-5)
    evals = [
        read_metrics(path, "eval")[0]["eval_loss"] for path in (run_folder, tmp_path / "plain")
    ]
    assert evals[0] == pytest.approx(evals[1], rel=1e-6)


def test_what_cannot_be_converted_is_refused_in_one_line(
    forks, tiny_config, tmp_path, sample_tokenizer
):
    sgd = {
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
    }
    (tmp_path / "sgd.json").write_text(json.dumps(sgd))
    config = tiny_config(train__epochs=None, train__steps=2)
    first = "--output_dir", tmp_path / "first", "--ds_config", tmp_path / "sgd.json"
    finished = forks.train(config, *first, module="sgd_anyway")
    assert finished.code == 0, finished.output
    checkpoint = tmp_path / "first" / "checkpoints" / "step_00000002"

    def refusal(*flags):
        finished = forks.train(config, "--checkpoint.resume", checkpoint, *flags)
        assert finished.code == 2 and len(finished.errors) == 1, finished.output
        return finished.errors[0]

    line = refusal("--train.precision", "bf16")
    assert "its precision is fp32, this run's bf16; resume with the same, or start a new" in line
    line = refusal()
    assert (
        "has ZeRO stage 0 with SGD, 1 shards, 20 trained parameters, this run has ZeRO stage"
        in line
    )
    assert f"--checkpoint.weights_only true --checkpoint.resume {checkpoint} and another" in line
    weights_only = "--checkpoint.weights_only", "true"
    line = refusal(*weights_only, "--output_dir", tmp_path / "first")
    assert "is in this output_dir, which would have two runs" in line
    wider = save_tiny_llama(tmp_path / "wider", sample_tokenizer, 0.0, intermediate_size=96)
    line = refusal(*weights_only, "--model.name_or_path", wider)
    assert "is of another model: model.layers.0.mlp.gate_proj.weight is (64, 32), in this" in line


# --------------------------------------------------------------------------------------------------
# Interrupted saves


@pytest.mark.timeout(400)
def test_killed_again_and_again_while_saving(forks, tiny_config, tmp_path, tiny_model_with_dropout):
    """The run saves after every step; ranks are killed at a random moment around a save, blocking
    and asynchronous saves alternate.    KILLS=100 pytest tests/test_checkpoints.py -k again
    """
    kills = int(os.environ.get("KILLS", "5"))
    steps = max(50, kills + kills // 2)  # each attempt completes at least one
    config = tiny_config(
        model=tiny_model_with_dropout, data__micro_batch_tokens=300,
        train__epochs=None, train__steps=steps, eval__every_steps=20,
        checkpoint={"every_steps": 1},
    )  # fmt: skip
    whole = forks.train(config, "--output_dir", tmp_path / "whole", ranks=2)
    assert whole.code == 0, whole.output
    run_folder, chance, drafts = tmp_path / "run", random.Random(7), 0
    for attempt in range(kills):
        began = time.time()
        is_async = str(attempt % 2 == 1).lower()
        run = forks.start(config, "--checkpoint.async_save", is_async, ranks=2)
        run.until(lambda since=began: is_saving(run_folder / "checkpoints", since))
        time.sleep(chance.uniform(0, 2 / kills))
        victim = chance.randrange(2)
        run.kill(victim)
        time.sleep(0.01)
        drafts += any(n.endswith((".tmp", ".old")) for n in names(run_folder))
        run.kill(1 - victim)
        run.wait()
        for complete in list_complete(run_folder / "checkpoints"):
            assert checkpoint_problem(complete, checksums=True) is None
    assert drafts >= kills / 5, "too few kills happened during a save"
    finished = forks.train(config, ranks=2)
    assert finished.code == 0, finished.output
    assert curve(run_folder) == curve(tmp_path / "whole"), "each step once, bit for bit"
    assert names(run_folder)[-2:] == [f"step_{step:08d}" for step in (steps - 1, steps)]


@pytest.mark.parametrize(
    "name, precision", [("zero0", "fp32"), ("zero2_offload", "fp32"), ("zero3", "bf16")]
)
def test_an_asynchronous_save_has_the_state_of_its_step(
    forks, tiny_config, tmp_path, name, precision
):
    """Its copies are delayed (tests/slow_copies.py) until the next update is due."""
    config = tiny_config(
        ds_config=str(strategy(tmp_path, name)), train__precision=precision,
        train__epochs=None, train__steps=3, checkpoint={"every_steps": 1, "keep_last": 3},
    )  # fmt: skip
    folders = [tmp_path / name for name in ("blocking", "asynchronous")]
    for folder, is_async in zip(folders, ("false", "true"), strict=True):
        flags = ("--output_dir", folder, "--checkpoint.async_save", is_async)
        finished = forks.train(config, *flags, ranks=2, module="slow_copies")
        assert finished.code == 0, finished.output
    for step in names(folders[0]):
        shards = sorted((folders[0] / "checkpoints" / step).rglob("*.pt"))
        assert len(shards) >= 3
        for path in shards:
            other = folders[1] / path.relative_to(folders[0])
            pairs = [tensors_in(torch.load(f, weights_only=False)) for f in (path, other)]
            for ours, theirs in zip(*pairs, strict=True):
                assert torch.equal(ours, theirs), f"{step}/{path.name}"


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, dict | list | tuple)
    return [tensor for item in items for tensor in tensors_in(item)] if nested else []


# --------------------------------------------------------------------------------------------------
# Full disks


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
@pytest.mark.parametrize("answer", ["stop", "continue"])
def test_a_full_disk_costs_no_older_checkpoint(forks, tiny_config, tmp_path, answer):
    disk = tmp_path / "run" / "checkpoints"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=True)
    try:
        config = tiny_config(
            checkpoint={"every_steps": 2, "keep_last": 3, "on_failed_save": answer}
        )  # fmt: skip
        finished = forks.train(config, ranks=2)
        kept = list_complete(disk)
        assert kept and all(checkpoint_problem(path, True) is None for path in kept)
        assert sorted(disk.iterdir()) == kept, "nothing half-written"
        lines = finished.output.splitlines()
        line = next(line for line in lines if "checkpoint of step" in line)
        assert "it needs" in line and "bytes, the disk has" in line
        if answer == "stop":
            assert finished.code == 2 and line.startswith("error: "), finished.output
            assert "older checkpoints are complete" in line
        else:
            assert finished.code == 0 and line.startswith("WARNING: "), finished.output
            assert read_metrics(tmp_path / "run")[-1]["step"] == 12
    finally:
        subprocess.run(["umount", disk], check=True)


# --------------------------------------------------------------------------------------------------
# Damaged checkpoints


def shorten(checkpoint):
    shard = next((checkpoint / "deepspeed").glob("*optim_states.pt"))
    os.truncate(shard, shard.stat().st_size // 2)


def flip(checkpoint):
    shard = next((checkpoint / "deepspeed").glob("*optim_states.pt"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def foreign(checkpoint):
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    (checkpoint / "COMPLETE").write_text("")
    (checkpoint / "mp_rank_00_model_states.pt").write_bytes(b"from elsewhere")


DAMAGE = {
    "truncated shard": (shorten, "optim_states.pt has "),
    "flipped byte": (flip, "is damaged: its checksum differs from the manifest's"),
    "missing RNG file": (lambda c: (c / "rng/rank_00000.pt").unlink(),
                         "rng/rank_00000.pt is missing"),
    "no shard": (lambda c: shutil.rmtree(c / "deepspeed"), "states.pt is missing"),
    "no COMPLETE": (lambda c: (c / "COMPLETE").unlink(),
                    "it has no COMPLETE: the save was interrupted"),
    "foreign": (foreign, "its manifest or trainer state cannot be read (No such file"),
}  # fmt: skip


def test_damaged_checkpoints_are_skipped_and_never_restart_at_step_0(forks, tiny_config, tmp_path):
    """The newest is damaged in different ways; a stale `latest` file is ignored."""
    settings = {"every_steps": 2, "verify": "checksums"}
    config = tiny_config(train__epochs=None, train__steps=4, checkpoint=settings)
    assert (finished := forks.train(config)).code == 0, finished.output
    intact, run_folder = tmp_path / "intact", tmp_path / "run"
    run_folder.rename(intact)
    folder = run_folder / "checkpoints"
    older, newest = folder / "step_00000002", folder / "step_00000004"
    for case, (damage, line) in DAMAGE.items():
        shutil.rmtree(run_folder, ignore_errors=True)
        shutil.copytree(intact, run_folder)
        damage(newest)
        (folder / "latest").write_text("")
        found, skipped = find_checkpoint(CheckpointConfig(**settings), folder)
        assert found == older and len(skipped) == 1, case
        assert skipped[0].startswith(f"skipping {newest}: ") and line in skipped[0]
        if case != "flipped byte":
            continue
        finished = forks.train(config)
        assert finished.code == 0, finished.output
        assert f"skipping {newest}: " in finished.output and line in finished.output
        assert f"resuming from {older}: step 2\n" in finished.output
        assert curve(run_folder) == curve(intact)

    def refusal(*flags):
        finished = forks.train(config, *flags)
        assert finished.code == 2 and len(finished.errors) == 1, finished.output
        return finished.errors[0]

    shutil.rmtree(run_folder)
    shutil.copytree(intact, run_folder)
    assert "has the later step_00000004" in refusal("--checkpoint.resume", older)
    for checkpoint in (older, newest):
        shorten(checkpoint)
    assert "no usable checkpoint in" in refusal()
    assert "bytes instead of" in refusal("--checkpoint.resume", newest)
    (tmp_path / "a_file").write_text("")
    assert "output_dir: cannot write" in refusal("--output_dir", tmp_path / "a_file")


# --------------------------------------------------------------------------------------------------
# Locking, save_now and retention


def test_two_runs_cannot_share_a_folder_and_a_dead_one_releases_it(forks, tiny_config, tmp_path):
    config = tiny_config(train__epochs=None, train__steps=5000)
    metrics = tmp_path / "run" / "metrics.jsonl"
    run = forks.start(config, ranks=2)
    run.until(lambda: metrics.exists() and metrics.stat().st_size)
    second = forks.train(config, ranks=2)
    assert second.code == 2, second.output
    assert f"output_dir {tmp_path}/run is in use by another run (process {run.pids[0]} on" in (
        second.output
    )
    run.kill(0)
    run.kill(1)
    run.wait()
    assert (tmp_path / "run" / "run.lock").exists()
    again = forks.start(config, ranks=2)  # starts immediately: the lock's process has ended
    again.until(lambda: metrics.stat().st_size and "step " in again.log.read_text(), 20)
    (tmp_path / "run" / "save_now").touch()
    again.until(lambda: list_complete(tmp_path / "run" / "checkpoints"))
    assert not (tmp_path / "run" / "save_now").exists()
    again.kill(1, signal.SIGTERM)
    assert again.wait().code == 75
    assert not (tmp_path / "run" / "run.lock").exists()


def test_what_is_kept(forks, tiny_config, tmp_path):
    config = tiny_config(
        train__epochs=None, train__steps=9, eval__every_steps=2, train__learning_rate=0.05,
        checkpoint={"every_steps": 1, "keep_last": 2, "keep_every_steps": 5, "keep_best": 1},
    )  # fmt: skip
    assert (finished := forks.train(config)).code == 0, finished.output
    evals = {e["step"]: e["eval_loss"] for e in read_metrics(tmp_path / "run", "eval")}
    best = min((s for s in evals if s > 0), key=evals.get)
    kept = {5, best, 8, 9}
    assert names(tmp_path / "run") == [f"step_{step:08d}" for step in sorted(kept)]


def test_a_checkpoint_of_another_format_is_refused_by_a_line_that_names_it(tmp_path):
    """Format 1 had one flat trainer_state.json."""
    checkpoint = tmp_path / "step_00000004"
    checkpoint.mkdir()
    (checkpoint / "COMPLETE").touch()
    (checkpoint / "manifest.json").write_text('{"made_by": {"save_id": "a"}, "files": {}}')
    (checkpoint / "trainer_state.json").write_text('{"plan_hash": "x", "global_step": 4}')
    with pytest.raises(UserError) as refused:
        find_checkpoint(CheckpointConfig(), tmp_path)
    message = str(refused.value)
    assert "the checkpoint has format 1, and this version of the code reads format 2" in message
    assert len(message.splitlines()) == 1
