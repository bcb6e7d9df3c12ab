"""One run at a time in an output folder.    pytest tests/checkpoint/test_lock.py"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from harness.cures import refused
from harness.runs import assert_each_step_once, logged

from zerotrain.checkpoint import lock
from zerotrain.checkpoint.run_folder import list_complete, list_temporary
from zerotrain.runtime.errors import EnvironmentFailure
from zerotrain.tools.saved import checkpoint_problem

LEASE_SECONDS = 1.0


@pytest.fixture(autouse=True)
def short_lease(monkeypatch):
    monkeypatch.setattr(lock, "LEASE_SECONDS", LEASE_SECONDS)


def hold(folder):
    with lock.RunLock(folder):
        assert f"pid={os.getpid()}\n" in (folder / "run.lock").read_text()


def of_another_host(path, lease_seconds=LEASE_SECONDS):
    """Write a lock as a process of another host does, which cannot be looked up here."""
    lines = ("pid=77", "host=elsewhere", "mode=lease", "token=ab", f"duration={lease_seconds}")
    path.write_text("\n".join(("filelock/2", *lines, "")))


def test_a_live_run_keeps_its_lock_and_is_named(tmp_path):
    path, done = tmp_path / "run.lock", threading.Event()
    of_another_host(path)

    def refresh():
        while not done.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=refresh)
    thread.start()
    try:
        refused("process 77 on elsewhere", hold, tmp_path)
    finally:
        done.set()
        thread.join()
    assert path.read_text().startswith("filelock/2\npid=77\n"), "left as it was"


def test_a_process_that_no_longer_exists_on_this_host_is_not_waited_for(tmp_path):
    program = (
        "import os, sys; from filelock import SoftFileLease\n"
        f"lease = SoftFileLease(sys.argv[1], lease_duration={LEASE_SECONDS})\n"
        "lease.acquire(); os._exit(9)"
    )
    path = tmp_path / "run.lock"
    assert subprocess.run([sys.executable, "-c", program, path]).returncode == 9
    began = time.monotonic()
    hold(tmp_path)
    assert time.monotonic() - began < LEASE_SECONDS
    assert not path.exists()


def test_an_empty_lock_is_taken_over_and_an_unknown_one_is_rejected(tmp_path):
    """A power cut leaves an empty lock. Another version of this program has a different lease."""
    path = tmp_path / "run.lock"
    path.touch()
    hold(tmp_path)
    for make in (lambda: of_another_host(path, 7.0), path.mkdir):
        make()
        refused(f"; if it has ended, remove {path}", hold, tmp_path, tmp_path / "another")
        subprocess.run(["rm", "-r", path], check=True)
        hold(tmp_path)


HOLD = """
import pathlib, sys, threading
from zerotrain.checkpoint.lock import RunLock
folder = pathlib.Path(sys.argv[1])
lock = RunLock(folder)
with lock:
    folder.chmod(0)
    threading.Timer(2, folder.chmod, [0o700]).start()
    assert not lock.is_lost()
    lock.check()
    (folder / "written").touch()
"""


def test_a_folder_that_cannot_be_searched_for_two_seconds_is_waited_for(tmp_path):
    as_user = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]  # root may search it
    command = [*as_user * (not os.geteuid()), sys.executable, "-c", HOLD, tmp_path]
    subprocess.run(command, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["written"]


def test_a_run_that_has_lost_its_lock_fails_so_that_it_is_started_again(tmp_path):
    path, held = tmp_path / "run.lock", lock.RunLock(tmp_path)
    with held:
        text = path.read_text()
        path.write_text("")  # it cannot be read for a moment
        assert not held.is_lost()
        path.write_text(text)
        assert not held.is_lost()
        path.unlink()
        of_another_host(path)
        assert held.is_lost()
        with pytest.raises(EnvironmentFailure) as failed:
            held.check()
        assert failed.value.exit_code == 1, "a launcher starts the run again"
    assert path.read_text().startswith("filelock/2\npid=77\n"), "left as it was"


def test_a_removed_lock_is_taken_again_unless_another_run_may_have_had_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(lock, "LEASE_SECONDS", 9.0)  # a busy machine stops nobody for so long
    path, held = tmp_path / "run.lock", lock.RunLock(tmp_path)
    with held:
        for _ in range(2):
            path.unlink()
            held.check()
            assert f"pid={os.getpid()}\n" in path.read_text()
            assert f"{path} was removed" in capsys.readouterr().out
        path.unlink()
        time.sleep(4)  # the thread looks every 3 s
        assert f"pid={os.getpid()}\n" in path.read_text() and not held.is_lost()
        path.unlink()
        held._looked -= 10  # stopped for 10 s
        assert held.is_lost() and held.is_lost(), "it stays lost"
        with pytest.raises(EnvironmentFailure, match="was stopped for over 9 s"):
            held.check()
    assert not path.exists()


def test_a_folder_that_is_gone_is_reported_until_it_is_back(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "REPORT_SECONDS", 1.5)
    folder, away = tmp_path / "run", tmp_path / "away"
    with lock.RunLock(folder):
        folder.rename(away)
        time.sleep(2.5)
        said = capsys.readouterr().out
        assert said.count(f"WARNING: output_dir: {folder} was removed or renamed") == 2, said
        away.rename(folder)
        time.sleep(1)
        said = capsys.readouterr().out
        assert "there again" in said and "WARNING" not in said
    assert [*folder.iterdir()] == []


def test_a_folder_without_its_surroundings_is_not_made_again(tmp_path, monkeypatch, capsys):
    """As when a disk is no longer mounted."""
    monkeypatch.setattr(lock, "OUT_OF_REACH_SECONDS", 0)
    folder, held = tmp_path / "disk" / "run", lock.RunLock(tmp_path / "disk" / "run")
    with held:
        folder.parent.rename(tmp_path / "away")
        with pytest.raises(EnvironmentFailure, match="is out of reach"):
            held.check()
        assert "is out of reach; training continues" in capsys.readouterr().out
        (tmp_path / "away").rename(folder.parent)
        held.check()


def test_a_run_whose_folder_is_removed_trains_on_and_saves_into_a_new_one(
    forks, tiny_config, tmp_path
):
    """run.lock is removed first, then the whole folder. The new one has the records of all steps,
    and the run resumes from it.
    """
    config, run_folder = tiny_config(train__steps=100_000), tmp_path / "run"
    patches = {
        "zerotrain.checkpoint.lock.LEASE_SECONDS": "6.0",
        "zerotrain.checkpoint.lock.OUT_OF_REACH_SECONDS": "0",
    }
    run = forks.start(config, ranks=2, patches=patches)
    run.until(lambda: len(logged(run_folder)) > 2)
    (run_folder / "run.lock").unlink()
    run.until(lambda: "run.lock was removed, and is taken again" in run.log.read_text())
    reached = len(logged(run_folder))
    run.until(lambda: len(logged(run_folder)) > reached)
    shutil.rmtree(run_folder)
    run.until(lambda: f"{run_folder} was removed or renamed" in run.log.read_text())
    run.kill(0, signal.SIGTERM)
    output = run.wait(75).output
    [checkpoint] = list_complete(run_folder / "checkpoints")
    assert f"{run_folder} is made again" in output and checkpoint_problem(checkpoint) is None
    steps = int(checkpoint.name.removeprefix("step_"))
    assert len(logged(run_folder)) == steps > reached and logged(run_folder, "start")
    assert_each_step_once(run_folder)
    again = forks.finish(config, "--train.steps", steps + 1, ranks=2)
    assert f"resuming from {checkpoint}" in again.output
    assert_each_step_once(run_folder)


def test_a_run_that_was_stopped_does_not_write_after_another_has_started(
    forks, tiny_config, tmp_path
):
    """Rank 0 is stopped for longer than the lease, and continues after another run has started."""
    config = tiny_config(train__steps=100_000, checkpoint={"every_steps": 5})
    run_folder = tmp_path / "run"
    options = {"patches": {"zerotrain.checkpoint.lock.LEASE_SECONDS": str(LEASE_SECONDS)}}
    checkpoints = run_folder / "checkpoints"
    first = forks.start(config, "--checkpoint.async_save", "true", **options)
    first.until(lambda: len(list_complete(checkpoints)) > 1)
    first.kill(0, signal.SIGSTOP)
    second = forks.start(config, **options)
    second.until(lambda: "resuming from" in second.log.read_text())
    assert f"waiting for process {first.pids[0]} on " in second.log.read_text()
    newest = list_complete(checkpoints)[-1]
    second.until(lambda: list_complete(checkpoints)[-1] > newest)
    first.kill(0, signal.SIGCONT)
    ended = first.wait(1)
    assert "output_dir" in ended.error
    before = list_complete(checkpoints)[-1]
    second.until(lambda: list_complete(checkpoints)[-1] > before)
    second.kill(0, signal.SIGTERM)
    second.wait(75)
    assert_each_step_once(run_folder)
    assert not list_temporary(checkpoints)
    assert all(checkpoint_problem(path) is None for path in list_complete(checkpoints))
