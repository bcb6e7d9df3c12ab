"""checkpoint.after_save: copies of checkpoints elsewhere, and back.

pytest tests/test_after_save.py
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
from conftest import REPO, determined, free_port, logged, read_metrics

from checkpoint.after_save import SHOWN_CHARACTERS, AfterSave
from checkpoint.find import checkpoint_problem, inspect_checkpoint
from checkpoint.lock import RunLock
from checkpoint.nodes import Nodes
from config.parse import parse_command_line
from config.schema import CheckpointConfig
from runtime.errors import UserError

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount disks for nodes")
NEEDS_RSYNC = pytest.mark.skipif(not shutil.which("rsync"), reason="apt install rsync")
RSYNC = 'rsync -a "$CHECKPOINT" '
"""And a folder: copies the checkpoint into it."""


@pytest.fixture
def after_save(tmp_path):
    """A function that makes an AfterSave of node-2 of two, which holds the lock of tmp_path."""
    ranks = SimpleNamespace(stop=SimpleNamespace(signal=None))
    nodes = Nodes(ranks, {"node-1": [0], "node-2": [1]}, "node-2", RunLock(tmp_path))
    made = []

    def make(command, seconds=60):
        config = CheckpointConfig(after_save=command, after_save_timeout_seconds=seconds)
        made.append(AfterSave(config, nodes))
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
        f'echo "$STEP $NODE_RANK $CHECKPOINT $OUTPUT_DIR" > {told}; yes x | head -c 100000; '
        'printf "\\033[31mred\\n"; echo "pass $RCLONE_CONFIG_PASS at s3://me:word@host"; exit 3'
    )
    command.start(step(tmp_path, 30))
    until(lambda: not command.is_running)
    assert told.read_text() == f"30 1 {step(tmp_path, 30)} {tmp_path}\n"
    line, rest = capsys.readouterr().out.split("\n")
    assert re.match(
        r"WARNING: node-2: step_00000030 is complete, but checkpoint.after_save failed: "
        r"exit code 3 after [\d.]+ s; it said: x x ", line
    ), line  # fmt: skip
    assert line.endswith("x [31mred pass *** at s3://***@host") and not rest
    assert len(line) < SHOWN_CHARACTERS + 200


def test_one_at_a_time_the_newest_next_and_both_are_in_use(after_save, tmp_path, capsys):
    go, done = tmp_path / "go", tmp_path / "done"
    command = after_save(f"while ! [ -e {go} ]; do sleep .02; done; echo $STEP >> {done}")
    names = [f"step_{number:08d}" for number in range(4)]
    for number, in_use in enumerate([[0], [0, 1], [0, 2], [0, 3]]):
        began = time.monotonic()
        assert command.start(step(tmp_path, number)) == [names[i] for i in in_use]
        assert time.monotonic() - began < 1, "the run does not wait"
    go.touch()
    until(lambda: not command.is_running)
    assert done.read_text().split() == ["0", "3"]
    assert capsys.readouterr().out.splitlines() == [
        f"WARNING: node-2: checkpoint.after_save is not run for step_0000000{out}: it still runs "
        f"for step_00000000, and step_0000000{out + 1} is newer"
        for out in (1, 2)
    ]
    assert command.start(step(tmp_path, 4)) == ["step_00000004"], "and again after a pause"


@pytest.mark.parametrize("how", ["time limit", "end of the run"])
def test_it_is_ended_with_everything_that_it_has_started(after_save, tmp_path, capsys, how):
    """Also what ignores SIGTERM and what runs in the background."""
    pids = tmp_path / "pids"
    command = after_save(
        f"sh -c 'trap \"\" TERM; echo $$ >> {pids}; while :; do sleep .1; done' & "
        f"echo $$ >> {pids}; sleep 100; true",
        seconds=1 if how == "time limit" else 100,
    )
    command.start(step(tmp_path, 1))
    command.start(step(tmp_path, 2))
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    if how == "end of the run":
        command.stop()
    until(lambda: "failed: stopped" in capsys_all(capsys))
    if how == "end of the run":
        assert "step_00000002 is complete, but checkpoint.after_save failed: not run: the run is" \
            in capsys_all(capsys)  # fmt: skip
        assert "stopped, since the run is ending, after" in capsys_all(capsys)
    else:
        assert "stopped by checkpoint.after_save_timeout_seconds after" in capsys_all(capsys)
    for pid in list(map(int, pids.read_text().split()))[:2]:
        until(lambda p=pid: not alive(p))


def capsys_all(capsys):
    """What was printed until now, however often it is read."""
    capsys.said = getattr(capsys, "said", "") + capsys.readouterr().out
    return capsys.said


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_command_that_got_the_signal_of_a_preempted_run_is_run_again(after_save, tmp_path):
    ran = tmp_path / "ran"
    command = after_save(f"echo $$ >> {ran}; [ $(wc -l < {ran}) = 2 ] || sleep 100")
    command.start(step(tmp_path, 1))
    until(lambda: ran.exists() and ran.read_text().endswith("\n"))
    command._preemption.signal = signal.SIGTERM  # as PreemptionHandler does
    os.kill(int(ran.read_text()), signal.SIGTERM)
    until(lambda: command._interrupted)
    assert command.is_running, "so that the end of the run does not miss it"
    command.start_again()
    until(lambda: not command.is_running)
    assert len(ran.read_text().split()) == 2
    command.start_again()
    assert not command.is_running, "once"


def test_it_is_not_run_for_a_folder_that_another_run_has_taken_over(after_save, tmp_path, capsys):
    command = after_save(f"touch {tmp_path / 'ran'}")
    (tmp_path / "run.lock").unlink()
    command.start(step(tmp_path, 1))
    until(lambda: not command.is_running)
    assert "now belongs to another run" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


MISTAKES = {
    " ": "is empty; give a command",
    'rclone copy "$CHECKPOINT': "sh cannot read it: .*[Uu]nterminated",
    "AWS_SECRET_ACCESS_KEY=abc aws s3 cp x s3://b": "gives a secret to AWS_SECRET_ACCESS_KEY, and",
    "rsync -a $CHECKPOINT rsync://me:word@host/x": "gives a secret to a URI, and",
}


def test_mistakes_in_the_command_are_found_before_the_run(tiny_config):
    for command, line in MISTAKES.items():
        config = tiny_config(checkpoint={"after_save": command})
        with pytest.raises(UserError, match=rf"config.yaml:\d+: checkpoint.after_save: {line}"):
            parse_command_line(["--config", str(config)])
    good = 'KEY=$KEY rclone copy "$CHECKPOINT" "r:$(basename "$CHECKPOINT")" && curl s3://me@host/x'
    config = tiny_config(checkpoint={"after_save": good})
    assert parse_command_line(["--config", str(config)]).config.checkpoint.after_save == good


# --------------------------------------------------------------------------------------------------
# Runs


@NEEDS_RSYNC
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
        model=tiny_model_with_dropout, train__epochs=None, train__steps=6, eval__at_start=False,
        checkpoint={"every_steps": 1, "keep_last": 1, "after_save": command,
                    "after_save_timeout_seconds": 60},
    )  # fmt: skip
    plain = "--checkpoint.after_save", "null"
    whole = forks.train(config, "--output_dir", tmp_path / "whole", *plain)
    assert whole.code == 0, whole.output
    first = forks.train(config, "--train.steps", 4)
    assert first.code == 0, first.output
    folder = tmp_path / "run"
    assert "waiting for checkpoint.after_save" in first.output
    failed = "WARNING: step_00000004 is complete, but checkpoint.after_save failed: killed by "
    assert failed + "SIGKILL after" in first.output, first.output
    saves, steps = (len(read_metrics(folder, kind)) for kind in ("save", "train"))
    assert saves == steps == 4
    # step 1 was being copied while 2 to 4 became complete
    assert "is not run for step_00000002: it still runs for step_00000001" in first.output
    copies = sorted(elsewhere.iterdir())
    assert [path.name for path in copies] == ["step_00000001", "step_00000004"]
    assert checkpoint_problem(copies[0], checksums=True) is None
    assert (copies[1] / "COMPLETE").exists()

    shutil.rmtree(folder)  # the machine is lost
    subprocess.run(
        ["rsync", "-a", "--mkpath", f"{elsewhere}/", folder / "checkpoints/"], check=True
    )
    flags = "--checkpoint.verify", "checksums", *plain
    again = forks.train(config, *flags)
    assert again.code == 0, again.output
    assert re.search(r"skipping .*step_00000004: \S+rank_00000.pt is missing", again.output)
    assert f"resuming from {step(folder, 1)}: step 1" in again.output
    assert determined(folder) == determined(tmp_path / "whole")[1:]


@NEEDS_RSYNC
def test_a_preempted_run_waits_as_long_as_it_may(forks, tiny_config, tmp_path):
    """With 60 s the last checkpoint is copied. With 15 s, which the end needs itself, the command
    is stopped. Both exit with 75 and in time.
    """
    for grace_seconds, copied in ((60, True), (15, False)):
        folder, there = tmp_path / f"run_{copied}", tmp_path / f"copies_{copied}"
        there.mkdir()
        config = tiny_config(
            train__epochs=None, train__steps=5000, eval__at_start=False,
            launch={"preempt_grace_seconds": grace_seconds},
            checkpoint={"after_save": f"sleep 2; {RSYNC} {there}"},
        )  # fmt: skip
        run = forks.start(config, "--output_dir", folder)
        run.until(lambda f=folder: logged(f, "train"))
        began = time.monotonic()
        run.kill(0, signal.SIGTERM)
        finished = run.wait()
        assert finished.code == 75, finished.output
        last = f"step_{len(read_metrics(folder)):08d}"
        assert [path.name for path in there.iterdir()] == [last] * copied
        if copied:
            assert checkpoint_problem(there / last, checksums=True) is None
        else:
            assert f"{last} is complete, but checkpoint.after_save failed: stopped, since" \
                in finished.output  # fmt: skip
        assert time.monotonic() - began < grace_seconds


@NEEDS_ROOT
@NEEDS_RSYNC
@pytest.mark.launch
def test_each_node_copies_its_own_part(forks, tiny_config, tmp_path):
    """A checkpoint is kept on all nodes while one of them copies it."""
    at, disks, there = tmp_path / "run", [tmp_path / "disk_1", tmp_path / "disk_2"], tmp_path / "to"
    for folder in (at, *disks, there / "0", there / "1"):
        folder.mkdir(parents=True)
    slow = '[ $NODE_RANK$STEP != 11 ] || until [ -e "$OUTPUT_DIR"/go ]; do sleep .1; done'
    config = tiny_config(
        train__epochs=None, train__steps=3, eval__at_start=False,
        checkpoint={"every_steps": 1, "keep_last": 1, "node_local": True,
                    "after_save": f"{slow}; {RSYNC} {there}/$NODE_RANK",
                    "after_save_timeout_seconds": 60},
    )  # fmt: skip
    where = {"at": at, "disks": {disk: 1 for disk in disks}}
    run = forks.start(config, **where)
    run.until(lambda: "waiting for checkpoint.after_save" in run.log.read_text())
    names = [sorted(path.name for path in (disk / "checkpoints").iterdir()) for disk in disks]
    # the first node may have been copying step 2 when step 3 was saved
    assert names[0] == names[1] and {"step_00000001", "step_00000003"} <= set(names[0])
    (disks[1] / "go").touch()
    finished = run.wait()
    assert finished.code == 0 and "failed" not in finished.output, finished.output
    parts = [
        inspect_checkpoint(there / str(node) / "step_00000003", checksums=True) for node in (0, 1)
    ]
    assert [(part.problem, sorted(part.ranks)) for part in parts] == [(None, [0]), (None, [1])]
    assert parts[0].save_id == parts[1].save_id


@pytest.mark.skipif(
    not (shutil.which("rclone") and shutil.which("moto_server")),
    reason="needs an S3 server: apt install rclone, pip install 'moto[server]'",
)
def test_an_object_store_with_the_documented_commands(forks, tiny_config, tmp_path):
    text = (REPO / "docs" / "checkpoints.md").read_text()
    command = re.search(r"^  after_save: (.*)$", text, re.MULTILINE)[1]
    fetch = re.search(r"^\$ (rclone copy .*) runs/mine/checkpoints$", text, re.MULTILINE)[1]
    port = free_port()
    remote = {
        "TYPE": "s3", "PROVIDER": "Other", "ENDPOINT": f"http://127.0.0.1:{port}",
        "ACCESS_KEY_ID": "none", "SECRET_ACCESS_KEY": "none", "FORCE_PATH_STYLE": "true",
    }  # fmt: skip
    variables = {f"RCLONE_CONFIG_REMOTE_{name}": value for name, value in remote.items()}
    variables["AWS_CA_BUNDLE"] = ""  # which rclone 1.60 cannot use
    config = tiny_config(
        train__epochs=None, train__steps=2, eval__at_start=False,
        checkpoint={"every_steps": 1, "after_save": command},
    )  # fmt: skip
    server = subprocess.Popen(
        ["moto_server", "-p", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: can_connect(int(port)))
        first = forks.train(config, **variables)
        assert first.code == 0 and "failed" not in first.output, first.output
        shutil.rmtree(tmp_path / "run")
        fetch += f" {tmp_path / 'run' / 'checkpoints'}"
        fetched = subprocess.run(fetch, shell=True, env={**os.environ, **variables})
        assert fetched.returncode == 0
    finally:
        server.kill()
        server.wait()
    flags = "--checkpoint.verify", "checksums", "--checkpoint.after_save", "null"
    again = forks.train(config, "--train.steps", 3, *flags)
    assert again.code == 0, again.output
    assert f"resuming from {step(tmp_path / 'run', 2)}: step 2" in again.output


def can_connect(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
