"""Checkpoints survive interrupted saves, full disks, damaged files and other layouts.

Ranks are forked (tests/harness/fork_server.py).    pytest tests/checkpoint/test_checkpoints.py
"""

import json
import os
import random
import re
import shutil
import time
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.cures import refused
from harness.inputs import flip, strategy, weighted, write_rows
from harness.processes import NEEDS_ROOT, mounted
from harness.runs import (
    assert_each_step_once,
    checkpoints,
    curve,
    dropout_seeds,
    is_saving,
    read_metrics,
)

from zerotrain.checkpoint.manifest import inspect
from zerotrain.checkpoint.run_folder import checkpoint_name, list_complete
from zerotrain.runtime.errors import UserError
from zerotrain.tools.saved import checkpoint_problem, choose_checkpoint


def names(run_folder):
    return sorted(p.name for p in (run_folder / "checkpoints").iterdir())


# --------------------------------------------------------------------------------------------------
# Another layout


CHAINS = {
    "fp32": [("zero1", 1), ("zero2", 2), ("zero3", 3), ("zero0", 2), ("ulysses", 4),
             ("zero3_offload", 1)],
    "bf16": [("zero1", 2), ("zero0", 1), ("zero2_offload", 3), ("ulysses", 2), ("zero3", 2)],
}  # fmt: skip


@pytest.mark.parametrize("precision", CHAINS)
def test_other_world_sizes_stages_and_offload_continue_the_curve(
    forks, tiny_config, tmp_path, chat_rows, precision
):
    """The run takes one step with each layout, and the rest with the last. It has two parameter
    groups, with and without weight decay. No parameter's size is divisible by 3 ranks. In fp32
    rows and messages have weights.
    """
    chats = weighted(chat_rows) if precision == "fp32" else chat_rows
    rows = write_rows(tmp_path / "rows.jsonl", chats)
    config = tiny_config(train__precision=precision, train__steps=7, data__train_sources=[rows])
    forks.finish(config, "--output_dir", tmp_path / "whole", ranks=2)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    seeds = []
    for step, (name, ranks) in enumerate(CHAINS[precision], start=1):
        if step < len(CHAINS[precision]):
            (run_folder / "stop").touch()  # seen after the first step
        finished = forks.finish(config, "--ds_config", strategy(tmp_path, name), ranks=ranks)
        assert ("resuming from" in finished.output) == (step > 1)
        seeds.append(dropout_seeds(checkpoints(run_folder)[-1]))
        if step > 1 and ranks == len(seeds[-2]):
            assert seeds.pop() == seeds[-1], "they continue"
    assert len({*chain(*seeds)}) == len([*chain(*seeds)]), "other ranks get other random numbers"
    tolerance = 1e-5 if precision == "fp32" else 1e-3
    expected = curve(tmp_path / "whole")
    assert len(expected) == 7
    np.testing.assert_allclose(curve(run_folder), expected, rtol=tolerance)


def test_weights_only_and_what_cannot_be_resumed(forks, tiny_config, tmp_path):
    """A run with a different layout and precision starts with the weights, and resumes from its
    own checkpoints.
    """
    first = tiny_config(name="first.yaml", train__steps=2)
    flags = "--output_dir", tmp_path / "first", "--train.precision", "bf16"
    forks.finish(first, *flags, "--ds_config", strategy(tmp_path, "zero2"), ranks=2)
    checkpoint = tmp_path / "first" / "checkpoints" / "step_00000002"
    config = tiny_config(
        train__steps=3, train__learning_rate=1e-3, eval__every_steps=9,
        checkpoint__resume=checkpoint,
    )  # fmt: skip
    rows = tmp_path / "fewer.jsonl"
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    rows.write_text("".join(lines[:-1]))
    bf16 = "--train.precision", "bf16"
    repeated = json.dumps([{"path": str(tmp_path / "train.jsonl"), "repeat": 0.3}])
    for key, flags in (
        ("train.precision", ()),
        ("train.learning_rate", bf16),
        ("data.eval_fraction", ("--data.eval_sources", "[]", "--data.eval_fraction", "0.1")),
        # the rate differs too, and is not blamed
        ("data.train_sources", ("--data.train_sources", f"[{rows}]", *bf16)),
        ("data.train_sources", ("--data.train_sources", repeated, *bf16)),
    ):
        error = UserError(forks.refusal(config, *flags))
        assert (error.place, error.key) == (str(checkpoint), key)

    run_folder = tmp_path / "run"
    (run_folder / "stop").touch()
    named = re.search(r"in another output_dir \(from its weights: (.*?);", str(error))[1]
    flags = *named.split(), "--ds_config"
    stopped = forks.finish(config, *flags, strategy(tmp_path, "zero3"), ranks=3)
    assert f"stopped by {run_folder}/stop: step 1," in stopped.output
    again = forks.finish(config, *flags, strategy(tmp_path, "zero0"))
    assert f"resuming from {run_folder}/checkpoints/step_00000001: step 1\n" in again.output
    evals = [read_metrics(f, "eval")[i] for f, i in ((tmp_path / "first", -1), (run_folder, 0))]
    assert evals[0]["eval_loss"] == pytest.approx(evals[1]["eval_loss"], rel=5e-3)  # bf16


# --------------------------------------------------------------------------------------------------
# Interrupted saves


@pytest.mark.timeout(400)
def test_killed_again_and_again_while_saving(forks, tiny_config, tmp_path, tiny_model_with_dropout):
    """The run saves after every step. Both ranks are killed at a random moment around a save.
    Blocking and asynchronous saves alternate.    KILLS=100 pytest test_checkpoints.py -k again
    """
    kills = int(os.environ.get("KILLS", "4"))
    steps = max(40, kills + kills // 2)  # each attempt completes at least one
    config = tiny_config(
        model=tiny_model_with_dropout, data__micro_batch_tokens=300,
        train__steps=steps, eval__every_steps=20,
        checkpoint={"every_steps": 1},
    )  # fmt: skip
    once = "--checkpoint.every_steps", steps  # saves take longer than steps
    forks.finish(config, "--output_dir", tmp_path / "whole", *once, ranks=2)
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
        drafts += any(name.endswith(".tmp") for name in names(run_folder))
        run.kill(1 - victim)
        run.wait()
        for complete in list_complete(run_folder / "checkpoints"):
            assert checkpoint_problem(complete) is None
    assert drafts >= kills / 5, "too few kills happened during a save"
    forks.finish(config, "--checkpoint.async_save", "true", ranks=2)
    assert curve(run_folder) == curve(tmp_path / "whole"), "each step once, bit for bit"
    assert names(run_folder)[-2:] == [f"step_{step:08d}" for step in (steps - 1, steps)]
    # An asynchronous save has the state of its own step.
    last = f"checkpoints/step_{steps:08d}/shards/rank_00001.pt"
    shards = [torch.load(f / last, weights_only=True) for f in (run_folder, tmp_path / "whole")]
    ours, expected = (shard["parts"] for shard in shards)
    assert all({"fp32", "exp_avg", "exp_avg_sq"} == set(tensors) for _, tensors in ours.values())
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


# --------------------------------------------------------------------------------------------------
# Disks


@NEEDS_ROOT
def test_a_full_disk_costs_no_older_checkpoint(forks, tiny_config, tmp_path):
    """A failed save counts as failed in the output, the metrics and the exit code."""
    disk = tmp_path / "run" / "checkpoints"
    disk.mkdir(parents=True)
    with mounted(disk, "-t", "tmpfs", "-o", "size=1m", "none"):
        config = tiny_config(
            train__steps=5000,
            checkpoint={"every_steps": 2, "keep_last": 9},
        )  # fmt: skip
        failed = forks.train(config, ranks=2, code=1)
        kept = list_complete(disk)
        assert "No space left on device" in failed.error
        assert f"last checkpoint: {kept[-1]}" in failed.output
        assert kept and all(checkpoint_problem(path) is None for path in kept)
        assert sorted(disk.iterdir()) == kept, "nothing half-written"

        saves = [record["step"] for record in read_metrics(tmp_path / "run", "save")]
        assert saves == [int(path.name.removeprefix("step_")) for path in kept]


def test_which_checkpoints_are_kept(forks, tiny_config, tmp_path):
    """The learning rate rises until the loss rises too, so the best checkpoint is an early one."""
    config = tiny_config(
        train__steps=9, eval__every_steps=2, train__learning_rate=0.25,
        train__warmup_examples=120,
        checkpoint={"every_steps": 1, "keep_last": 2, "keep_best": True},
    )  # fmt: skip
    output = forks.finish(config).output
    evals = {e["step"]: e["eval_loss"] for e in read_metrics(tmp_path / "run", "eval")}
    best = min((s for s in evals if s > 0), key=evals.get)
    assert best < 8, evals
    kept = {best, 8, 9}
    assert names(tmp_path / "run") == [f"step_{step:08d}" for step in sorted(kept)]
    # The last line is the command that exports the best checkpoint.
    command = output.splitlines()[-1].split("python -m ")[1].split()
    assert Path(command[1]) == checkpoints(tmp_path / "run")[0]
    assert forks.script(*command).code == 0 and Path(command[2], "model.safetensors").exists()
    flags = ["--checkpoint.keep_best", "false", "--output_dir", tmp_path / "again"]
    said = forks.finish(config, *flags).output.splitlines()[-1]
    assert f"{evals[best]:.4f}" in said and "keep_best" in said and "export" not in said
    chosen = choose_checkpoint(tmp_path / "run", best=True)
    assert chosen.name == checkpoint_name(best)
    shutil.rmtree(chosen)
    named = "cannot be used: ... ; checkpoint.keep_best: true keeps the best checkpoint"
    refused(named, partial(choose_checkpoint, best=True), tmp_path / "run")
    unreadable = tmp_path / ("x" * 300)  # also for root
    refused("cannot be read: File name too long", choose_checkpoint, unreadable)
    assert "cannot be read" in inspect(unreadable)[1]["COMPLETE"]


# --------------------------------------------------------------------------------------------------
# Damaged checkpoints


def shorten(checkpoint):
    shard = checkpoint / "shards/rank_00000.pt"
    os.truncate(shard, shard.stat().st_size // 2)


def link(checkpoint):
    file = checkpoint / "model/config.json"
    file.rename(checkpoint.parent / "elsewhere.json")
    file.symlink_to(checkpoint.parent / "elsewhere.json")


DAMAGE = {
    "truncated shard": (shorten, "shards/rank_00000.pt"),
    "no shard": (lambda c: shutil.rmtree(c / "shards"), "shards/rank_00000.pt"),
    "symbolic link": (link, "model/config.json"),
    "FIFO": (lambda c: ((c / "manifest.json").unlink(), os.mkfifo(c / "manifest.json")),
             "manifest.json"),
}  # fmt: skip


def test_damaged_checkpoints_are_skipped_and_never_restart_at_step_0(forks, tiny_config, tmp_path):
    """The newest checkpoint is damaged in several ways. A stale `latest` file is ignored."""
    config = tiny_config(train__steps=4, checkpoint={"every_steps": 2})
    forks.finish(config)
    intact, run_folder = tmp_path / "intact", tmp_path / "run"
    run_folder.rename(intact)
    folder = run_folder / "checkpoints"
    older, newest = folder / "step_00000002", folder / "step_00000004"
    for case, (damage, file) in DAMAGE.items():
        shutil.rmtree(run_folder, ignore_errors=True)
        shutil.copytree(intact, run_folder)
        damage(newest)
        (folder / "latest").write_text("")
        output = forks.finish(config, "--dry_run").output
        assert re.search(f"^skipping {newest}: {file} ", output, re.MULTILINE), case
        assert f"resuming from {older}: step 2" in output

    shutil.rmtree(run_folder)
    shutil.copytree(intact, run_folder)
    resume = "--checkpoint.resume"
    elsewhere = "--output_dir", tmp_path / "new"
    for flags, key, cure in (
        ((resume, older), "checkpoint.resume", (resume, older, *elsewhere)),
        ((resume, newest), "checkpoint.resume", ()),
        (("--train.seed", 43), "train.seed", ()),
        ((*elsewhere, resume, folder), None, elsewhere),
    ):
        assert UserError(forks.refusal(config, *flags)).key == key
        forks.finish(config, "--dry_run", *cure)
    for checkpoint in (older, newest):
        shorten(checkpoint)
    line = forks.refusal(config)
    assert "restore one, set checkpoint.resume to another, or start at step 0: in another" in line
    for cure in (elsewhere, (resume, intact / "checkpoints" / older.name)):
        forks.finish(config, "--dry_run", *cure)
    shutil.copytree(intact, run_folder, dirs_exist_ok=True)
    forks.finish(config, "--dry_run")


@pytest.mark.parametrize("ranks, name", [(2, "zero2"), (3, "zero3")])
def test_checkpoints_with_a_flipped_bit_are_skipped(forks, tiny_config, tmp_path, ranks, name):
    """The bit is in a shard of either rank or in another file. The run uses an older checkpoint, in
    the same layout and in a different one.
    """
    config = tiny_config(
        train__steps=5,
        checkpoint={"every_steps": 1, "keep_last": 9}, ds_config=strategy(tmp_path, "zero2"),
    )  # fmt: skip
    forks.finish(config, ranks=2)
    checkpoints = tmp_path / "run" / "checkpoints"
    expected = curve(tmp_path / "run")
    for step, file in (
        (5, "shards/rank_00000.pt"), (4, "shards/rank_00001.pt"), (3, "trainer_state.json"),
        (2, "model/tokenizer.json"),
    ):  # fmt: skip
        checkpoint = checkpoints / f"step_{step:08d}"
        flip(checkpoint / file)
        assert f"{file} is damaged" in checkpoint_problem(checkpoint)
    finished = forks.finish(config, "--ds_config", strategy(tmp_path, name), ranks=ranks)
    assert finished.output.count("skipping ") == 4, finished.output
    assert f"resuming from {checkpoints / 'step_00000001'}: step 1" in finished.output
    np.testing.assert_allclose(curve(tmp_path / "run"), expected, rtol=1e-5)


@NEEDS_ROOT
def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    forks, tiny_config, tmp_path
):
    """The checkpoint is a mount point, which cannot be renamed."""
    config = tiny_config(train__steps=4)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    for _ in range(2):
        (run_folder / "stop").touch()  # seen after a step
        forks.finish(config)
    busy = run_folder / "checkpoints" / "step_00000001"
    keep = "--checkpoint.keep_last", 1, "--checkpoint.every_steps", 1
    with mounted(busy, "--bind", busy):
        finished = forks.finish(config, *keep)
    assert finished.output.count(f"WARNING: {busy} cannot be removed") == 2, finished.output
    assert names(run_folder) == [f"step_{step:08d}" for step in (1, 2, 4)]


def test_a_run_folder_that_is_out_of_reach_for_two_seconds_is_waited_for(
    forks, tiny_config, tmp_path
):
    config = tiny_config(train__steps=100_000, checkpoint={"every_steps": 50})
    run_folder = tmp_path / "run"
    checkpoints = run_folder / "checkpoints"
    run = forks.start(config, ranks=2)
    # between two saves, because a save that has begun needs its folder
    run.until(lambda: list_complete(checkpoints) and read_metrics(run_folder, "save"))
    run_folder.rename(tmp_path / "away")
    time.sleep(2)
    (tmp_path / "away").rename(run_folder)
    before = list_complete(checkpoints)[-1]
    run.until(lambda: list_complete(checkpoints)[-1] > before)
    (run_folder / "stop").touch()
    run.wait(0)
    assert_each_step_once(run_folder)
    assert checkpoint_problem(list_complete(checkpoints)[-1]) is None
