"""One run at a time in an output folder.    pytest tests/test_lock.py"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import REPO, read_metrics, wait_until
from filelock import SoftFileLease

from checkpoint import lock
from checkpoint.find import checkpoint_problem
from checkpoint.run_folder import list_complete, list_drafts
from runtime.errors import UserError

LEASE_SECONDS = 1.0
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for mounts and host names")


@pytest.fixture(autouse=True)
def short_lease(monkeypatch):
    monkeypatch.setattr(lock, "LEASE_SECONDS", LEASE_SECONDS)
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.1)


def of_another_host(path):
    """A lock as a process of another host writes it, about which nobody can know here."""
    lines = ("pid=77", "host=elsewhere", "mode=lease", "token=ab", f"duration={LEASE_SECONDS}")
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
        line = r"in use by another run \(process 77 on elsewhere\)"
        with pytest.raises(UserError, match=line), lock.RunLock(tmp_path):
            pass
    finally:
        done.set()
        thread.join()
    assert path.read_text().startswith("filelock/2\npid=77\n"), "left as it was"


def test_the_lock_of_a_dead_run_is_taken_over(tmp_path, capsys):
    path = tmp_path / "run.lock"
    of_another_host(path)
    began = time.monotonic()
    with lock.RunLock(tmp_path):
        assert f"pid={os.getpid()}\n" in path.read_text()
        assert time.monotonic() - began >= LEASE_SECONDS, "it is watched for as long as it counts"
        assert "its run is dead; taking over" in capsys.readouterr().out
    assert not path.exists()


def test_a_process_that_no_longer_exists_on_this_host_is_not_waited_for(tmp_path, capsys):
    hold = (
        "import os, sys; from filelock import SoftFileLease\n"
        f"lease = SoftFileLease(sys.argv[1], lease_duration={LEASE_SECONDS})\n"
        "lease.acquire(); os._exit(9)"
    )
    path = tmp_path / "run.lock"
    assert subprocess.run([sys.executable, "-c", hold, path]).returncode == 9
    owner = SoftFileLease(path, lease_duration=LEASE_SECONDS).owner
    assert owner.hostname.split("?")[0] == socket.gethostname()
    with lock.RunLock(tmp_path):
        assert f"pid={os.getpid()}\n" in path.read_text()
    assert "checking whether it is alive" not in capsys.readouterr().out


HOLD = f"""
import os, sys, time
from pathlib import Path
from checkpoint import lock
lock.LEASE_SECONDS, lock.HEARTBEAT_SECONDS = {LEASE_SECONDS}, .1
folder = Path(sys.argv[1])

def slow(name):  # a disk that takes a while for one call, until the test has created a file
    real = getattr(os, name)
    def call(*args):
        if name == "write" or ".break." in str(args):
            (folder / f"{{name}}_began").touch()
            while not (folder / f"{{name}}_may_end").exists():
                time.sleep(.01)
        return real(*args)
    setattr(os, name, call)

if len(sys.argv) > 2:
    slow(sys.argv[2])
held = lock.RunLock(folder)
with held:
    print("acquired", flush=True)
    for line in sys.stdin:
        print("lost" if held.is_lost() else "held", flush=True)
"""


class Holder:
    """A process that acquires the lock of a folder; on a host of its own if it has a name."""

    def __init__(self, folder, host=None, slow=()):
        command = [sys.executable, "-c", HOLD, folder, *slow]
        if host:
            rename = 'hostname "$0" && exec "$@"'
            command = ["unshare", "--uts", "sh", "-c", rename, host, *command]
        self.process = subprocess.Popen(
            command, cwd=REPO, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(REPO)},
        )  # fmt: skip

    def says(self, *expected):
        """Read lines up to one that starts with one of `expected`, and return it."""
        for line in self.process.stdout:
            if line.startswith(expected):
                return line.strip()
        raise AssertionError(f"ended with code {self.process.wait()}")

    def state(self):
        print(file=self.process.stdin, flush=True)
        return self.says("held", "lost")

    def end(self):
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
        self.process.wait(30)


@NEEDS_ROOT
def test_a_stopped_holder_on_another_host_notices_before_it_writes(tmp_path):
    first = Holder(tmp_path, host="first")
    first.says("acquired")
    first.process.send_signal(signal.SIGSTOP)
    second = Holder(tmp_path, host="second")
    second.says("acquired")
    first.process.send_signal(signal.SIGCONT)
    assert (first.state(), second.state()) == ("lost", "held")
    first.end()  # leaves the lock of the second
    assert second.state() == "held"
    second.end()
    assert not (tmp_path / "run.lock").exists()


@NEEDS_ROOT
def test_a_slow_disk_admits_one_of_two_contenders(tmp_path):
    """Between finding a dead lock and moving it, and between creating a lock and writing it."""
    of_another_host(tmp_path / "run.lock")
    slow = Holder(tmp_path, host="slow", slow=["rename"])
    wait_until((tmp_path / "rename_began").exists, slow.process)
    quick = Holder(tmp_path, host="quick")
    quick.says("acquired")
    (tmp_path / "rename_may_end").touch()
    assert "is in use by another run (process" in slow.says("runtime.errors.UserError")
    assert quick.state() == "held"
    quick.end()
    slow.end()

    slow = Holder(tmp_path, host="slow", slow=["write"])
    wait_until((tmp_path / "write_began").exists, slow.process)
    quick = Holder(tmp_path, host="quick")
    quick.says("acquired")  # an empty lock is nobody's after some seconds
    (tmp_path / "write_may_end").touch()
    assert "now belongs to another run (process" in slow.says("runtime.errors.UserError")
    assert quick.state() == "held"
    quick.end()
    slow.end()


@NEEDS_ROOT
def test_a_full_disk_admits_nobody_and_takes_no_lock_away(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], check=True)
    try:
        filler = tmp_path / "filler"
        with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for _ in range(2):
            with pytest.raises(UserError, match="No space left"), lock.RunLock(tmp_path):
                pass
        filler.unlink()
        holder = Holder(tmp_path)
        holder.says("acquired")
        with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(UserError, match="in use by another run"), lock.RunLock(tmp_path):
            pass
        assert holder.state() == "held"
        holder.end()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_lock_of_the_wrong_shape_is_one_line(tmp_path):
    path = tmp_path / "run.lock"
    path.mkdir()
    with pytest.raises(UserError, match="output_dir: cannot write"), lock.RunLock(tmp_path):
        pass
    path.rmdir()
    of_another_host(path)
    path.write_text(path.read_text().replace("duration=1.0", "duration=2.0"))
    with pytest.raises(UserError, match="other settings of the lock"), lock.RunLock(tmp_path):
        pass


def test_a_run_that_was_stopped_writes_nothing_into_the_folder_of_its_successor(
    forks, tiny_config, tmp_path
):
    """Rank 0 is stopped for longer than the lease, and continues after another run has started."""
    config = tiny_config(train__epochs=None, train__steps=100_000, checkpoint={"every_steps": 5})
    run_folder, options = tmp_path / "run", {"module": "short_lease"}
    checkpoints = run_folder / "checkpoints"
    first = forks.start(config, "--checkpoint.async_save", "true", **options)
    first.until(lambda: len(list_complete(checkpoints)) > 1)
    first.kill(0, signal.SIGSTOP)
    second = forks.start(config, **options)
    second.until(lambda: "resuming from" in second.log.read_text())
    newest = list_complete(checkpoints)[-1]
    second.until(lambda: list_complete(checkpoints)[-1] > newest)
    first.kill(0, signal.SIGCONT)
    ended = first.wait()
    assert ended.code == 2 and len(ended.errors) == 1, ended.output
    assert f"output_dir {run_folder} now belongs to another run (process" in ended.errors[0]
    before = list_complete(checkpoints)[-1]
    second.until(lambda: list_complete(checkpoints)[-1] > before)
    second.kill(0, signal.SIGTERM)
    assert second.wait().code == 75
    steps = [step["step"] for step in read_metrics(run_folder)]
    assert steps == list(range(1, steps[-1] + 1)), "each step once"
    assert not list_drafts(checkpoints)
    assert all(checkpoint_problem(path, True) is None for path in list_complete(checkpoints))
