"""One run at a time in an output folder.    pytest tests/checkpoint/test_lock.py"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from harness.cures import refused
from harness.runs import assert_each_step_once

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
        assert held.is_lost()
        of_another_host(path)
        assert held.is_lost()
        with pytest.raises(EnvironmentFailure) as failed:
            held.check()
        assert failed.value.exit_code == 1, "a launcher starts the run again"
    assert path.read_text().startswith("filelock/2\npid=77\n"), "left as it was"


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
