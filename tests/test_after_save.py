"""checkpoint.after_save: copies of checkpoints elsewhere, and back.

pytest tests/test_after_save.py
"""

import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest
from conftest import determined, logged, read_metrics

from zerotrain.checkpoint import after_save as module
from zerotrain.checkpoint.after_save import TAIL_BYTES, AfterSave
from zerotrain.checkpoint.find import checkpoint_problem
from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.nodes import Nodes
from zerotrain.config.parse import parse_command_line
from zerotrain.runtime.errors import UserError

RSYNC = 'rsync -a "$CHECKPOINT" '
"""And a folder: copies the checkpoint into it."""


@pytest.fixture
def after_save(tmp_path):
    """A function that makes an AfterSave of node-2 of two, which holds the lock of tmp_path."""
    ranks = SimpleNamespace(stop=SimpleNamespace(signal=None))
    nodes = Nodes(ranks, {"node-1": [0], "node-2": [1]}, "node-2", RunLock(tmp_path))
    made = []

    def make(command):
        made.append(AfterSave(command, nodes))
        return made[-1]

    with nodes.lock:
        yield make
        for each in made:
            each.stop()


def until(happened, seconds=60):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def step(folder, number):
    return folder / "checkpoints" / f"step_{number:08d}"


# --------------------------------------------------------------------------------------------------
# The command


def test_a_failing_command_is_one_line_without_secrets(after_save, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RCLONE_CONFIG_PASS", "hunter2hunter2")
    told = tmp_path / "told"
    command = after_save(
        f'echo "$STEP $NODE_RANK $CHECKPOINT $OUTPUT_DIR" > {told}; yes x | head -c 2000000; '
        'printf "\\033[31mred\\n"; echo "pass $RCLONE_CONFIG_PASS at s3://me:word@host"; exit 3'
    )
    command.start(step(tmp_path, 30))
    until(lambda: not command.in_use)
    assert told.read_text() == f"30 1 {step(tmp_path, 30)} {tmp_path}\n"
    line, rest = capsys.readouterr().out.split("\n")
    assert line.startswith("WARNING: node-2: step_00000030 ") and "exit code 3" in line
    assert line.endswith("x [31mred pass *** at s3://***@host") and not rest
    assert len(line) < TAIL_BYTES + 200


def test_it_is_ended_with_everything_that_it_has_started(after_save, tmp_path, capsys, monkeypatch):
    """Also what ignores SIGTERM and what runs in the background."""
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 1.0)
    pids = tmp_path / "pids"
    command = after_save(
        f"sh -c 'trap \"\" TERM; echo $$ >> {pids}; while :; do sleep .1; done' & "
        f"echo $$ >> {pids}; sleep 100; true"
    )
    command.start(step(tmp_path, 1))
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    until(lambda: not command.in_use)
    assert "checkpoint.after_save failed: stopped" in capsys.readouterr().out
    for pid in map(int, pids.read_text().split()):
        until(lambda p=pid: not psutil.pid_exists(p))


def test_mistakes_in_the_command_are_found_before_the_run(tiny_config):
    mistakes = [
        " ",
        'rclone copy "$CHECKPOINT',
        "AWS_SECRET_ACCESS_KEY=abc aws s3 cp x s3://b",
        "rsync -a $CHECKPOINT rsync://me:word@host/x",
    ]
    for command in mistakes:
        config = tiny_config(checkpoint={"after_save": command})
        with pytest.raises(UserError, match=r"checkpoint\.after_save: "):
            parse_command_line(["--config", str(config)])
    good = 'KEY=$KEY rclone copy "$CHECKPOINT" "r:$(basename "$CHECKPOINT")" && curl s3://me@host/x'
    config = tiny_config(checkpoint={"after_save": good})
    assert parse_command_line(["--config", str(config)]).config.checkpoint.after_save == good


# --------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.skipif(not shutil.which("rsync"), reason="apt install rsync")
def test_a_run_whose_machine_is_lost_continues_from_the_copies(
    forks, tiny_config, tmp_path, tiny_model_with_dropout
):
    """Training does not wait for slow copies, and no checkpoint is removed under one. A copy that
    was killed in the middle is passed over, whatever it has already.
    """
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = (  # that of step 4 is killed when it has copied COMPLETE and most files
        """[ $STEP != 1 ] || until grep -q '"save".* "step": 4,' "$OUTPUT_DIR"/metrics.jsonl; do """
        f"sleep .1; done; [ $STEP != 4 ] || {{ {RSYNC} --exclude rank_00000.pt {elsewhere}; "
        f"kill -9 $$; }}; {RSYNC} {elsewhere}"
    )
    config = tiny_config(
        model=tiny_model_with_dropout, train__epochs=None, train__steps=6,
        checkpoint={"every_steps": 1, "keep_last": 1, "after_save": command},
    )  # fmt: skip
    plain = "--checkpoint.after_save", "null"
    whole = forks.train(config, "--output_dir", tmp_path / "whole", *plain)
    assert whole.code == 0, whole.output
    first = forks.train(config, "--train.steps", 4)
    assert first.code == 0, first.output
    folder = tmp_path / "run"
    assert "waiting for checkpoint.after_save" in first.output
    assert "WARNING: step_00000004 is complete, but checkpoint.after_save failed" in first.output
    assert len(read_metrics(folder, "save")) == len(read_metrics(folder)) == 4
    copies = sorted(elsewhere.iterdir())
    assert [path.name for path in copies] == ["step_00000001", "step_00000004"]
    assert checkpoint_problem(copies[0], checksums=True) is None
    assert (copies[1] / "COMPLETE").exists()

    shutil.rmtree(folder)  # the machine is lost
    subprocess.run(
        ["rsync", "-a", "--mkpath", f"{elsewhere}/", folder / "checkpoints/"], check=True
    )
    again = forks.train(config, *plain)
    assert again.code == 0, again.output
    assert f"skipping {step(folder, 4)}" in again.output
    assert f"resuming from {step(folder, 1)}: step 1" in again.output
    assert determined(folder) == determined(tmp_path / "whole")[1:]


@pytest.mark.skipif(not shutil.which("rsync"), reason="apt install rsync")
def test_a_preempted_run_waits_as_long_as_it_may(forks, tiny_config, tmp_path):
    config = tiny_config(
        train__epochs=None, train__steps=5000, distributed={"preempt_grace_seconds": 60},
        checkpoint={"after_save": f"sleep 2; {RSYNC} {tmp_path}"},
    )  # fmt: skip
    run = forks.start(config)
    run.until(lambda: logged(tmp_path / "run"))
    run.kill(0, signal.SIGTERM)
    finished = run.wait()
    assert finished.code == 75, finished.output
    [copy] = tmp_path.glob("step_*")
    assert copy.name == f"step_{len(read_metrics(tmp_path / 'run')):08d}"
    assert checkpoint_problem(copy, checksums=True) is None
