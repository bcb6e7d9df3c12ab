"""scripts/launch.sh without training: hostfile, environment, exit codes, hosts that are lost or
stall. pytest tests/launch/test_hosts.py
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import namespaces
import numpy as np
import psutil
import pytest
from harness.cures import refused
from harness.processes import environment, run, wait_until
from harness.repository import REPO
from namespaces import kill, left_on_hosts, needs_hosts, start

from zerotrain.launch.hostfile import read_hosts
from zerotrain.launch.job import job_of, job_parser
from zerotrain.launch.node import EVENT, stalled_seconds
from zerotrain.tools.records import read_stalls

pytest_plugins = ["namespaces"]
LAUNCH = REPO / "scripts/launch.sh"
NODE = [sys.executable, "-m", "zerotrain.launch.node"]
OPTIONS = ["--master_addr=localhost", "--nodes=2", "--node_rank=0"]

# --------------------------------------------------------------------------------------------------
# Without hosts: hostfile, command line, node wrapper

BAD_HOSTFILES = {  # text: line in the message
    "node-1": 1,
    "node-1 slots=2x": 1,
    "a slots=1\n\n# b\nb slots=0": 4,
    "a slots=1 # first\nb slots=2\na slots=3": 3,
    "fe80::1 slots=2": 1,
    "a,b slots=2": 1,
    "-oProxyCommand=x slots=1": 1,
    "# nothing\n": None,
    "a slots=1\n# caf\xe9": None,  # written as Latin-1
}


@pytest.mark.parametrize("text", BAD_HOSTFILES)
def test_a_bad_hostfile_is_refused_by_line(tmp_path, text):
    path = tmp_path / "hostfile"
    path.write_bytes(text.encode("latin-1" if "\xe9" in text else "utf-8"))
    number = BAD_HOSTFILES[text]
    line = refused(f"{path}:{number}: " if number else str(path), read_hosts, str(path))
    if form := re.search("write `NAME (slots=)N`", line):
        path.write_text(f"node-1 {form[1]}2\n")
        assert read_hosts(str(path)) == {"node-1": [0, 1]}


def test_hostfiles_are_read_as_deepspeed_reads_them(tmp_path):
    """hostfile.example, and the forms of DeepSpeed's tests/unit/launcher/test_run.py, with CRLF."""
    from deepspeed.launcher.runner import fetch_hostfile

    path = tmp_path / "hostfile"
    path.write_text(
        "\n    worker-1 slots=2\n    worker-2 slots=2 # b\n\n    localhost slots=1\n"
        "    #w slots=3\n123.23.12.10 slots=8 max_slots=8\nn1\tslots=8   max-slots=16\r\n"
    )
    for file in (path, REPO / "hostfile.example"):
        ours = {host: len(devices) for host, devices in read_hosts(str(file)).items()}
        assert ours == dict(fetch_hostfile(str(file)))


def test_include_and_exclude_select_hosts_and_slots(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("a slots=4\nb slots=4\nc slots=2\nnode-1 slots=1\nnode-2 slots=3\n")
    assert read_hosts(str(path), include="c:1@a") == {"a": [0, 1, 2, 3], "c": [1]}
    assert read_hosts(str(path), exclude="a:0,1@c@node-1@node-2")["a"] == [2, 3]
    for selection in (
        ("d", ""),
        ("a:4", ""),
        ("a:x", ""),
        ("a:1:2", ""),
        ("a", "b"),
        ("", "a@b@c@node-1@node-2"),
    ):
        named = "; give one of the two, with hosts of ... , as in node-1@node-2:0,2"
        as_named = "node-1@node-2:0,2", ""
        refused(named, lambda chosen: read_hosts(str(path), *chosen), selection, as_named)


def test_mistakes_on_the_command_line_are_one_line(tmp_path):
    (tmp_path / "hostfile").write_text("node-1 slots=1\n")
    hostfile = ["--hostfile", tmp_path / "hostfile"]
    script = ["--", "train.py", "--config", "recipes/demo.yaml"]
    for command, named in (
        ([LAUNCH, *hostfile], "SCRIPT"),
        ([LAUNCH, *script], "--hostfile"),
        ([LAUNCH, *hostfile, *script, "--train.nonsense", "1"], "train.nonsense"),
        ([LAUNCH, *hostfile, "--max_restarts", "-1", *script], "--max_restarts: -1 "),
        ([LAUNCH, *hostfile, "--nodes", "2", *script], "--nodes 2: "),
        ([*NODE, *OPTIONS, "--ranks_per_node=0", script[1]], "--ranks_per_node: 0 "),
        ([*NODE, *OPTIONS, "--ranks_per_node=1", "--node_rank=2", script[1]], "nodes are 0 to 1"),
    ):
        *usage, line = run(command, code=2).output.splitlines()
        assert named in line and (not usage or usage[0].startswith("usage: ")), usage


def test_mistakes_in_a_job_are_refused_with_cures_that_work(tmp_path, monkeypatch):
    (tmp_path / "hostfile").write_text("node-1 slots=1\n")

    def read(words):
        words = f"--hostfile {tmp_path}/hostfile {words}".split()
        return job_of(job_parser("launch.sh").parse_args(words))

    monkeypatch.chdir(REPO)
    monkeypatch.setenv("HOME", str(tmp_path))
    script = "-- train.py --config recipes/demo.yaml"
    refused(f"trian.py: no such script; ... as in `{script}`", read, "-- trian.py", script)
    named = "--env MINE: ... as in `NAME=VALUE scripts/launch.sh --env NAME"
    monkeypatch.setenv("MINE", "1")
    refused(named, read, f"--env MINE=1 {script}", f"--env MINE {script}")
    file = tmp_path / ".deepspeed_env"
    file.write_text("MINE=1")
    refused("; rename it, set its variables in this shell, and name them with --env", read, script)
    file.rename(tmp_path / "renamed")
    assert read(f"--env MINE {script}").environment["MINE"] == "1"


RANK = """
import os, pathlib, signal, subprocess, sys, time
folder, kind, rank = pathlib.Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
subprocess.Popen(["sleep", sys.argv[3]], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
(folder / f"started_{kind}_{rank}").touch()
while not (folder / f"started_{kind}_1").exists() or not (folder / f"started_{kind}_0").exists():
    time.sleep(0.01)
number = {"killed": 9, "crashed": 11, "stopped": 19}.get(kind)
if rank == "1" and number:
    os.kill(os.getpid(), number)
if rank == "1" and kind == "memory":
    pathlib.Path(sys.argv[4], "cgroup.procs").write_text(str(os.getpid()))
    held = [b"x" * (1 << 20) for _ in range(200)]
if rank == "0" and kind == "stopped":
    sys.exit(3)
time.sleep(0 if kind == "done" else 100)
"""
SAID = {
    "killed": "rank 1 ended with exit code 137 (SIGKILL); the kernel has killed nothing",
    "memory": "rank 1 ended with exit code 137 (SIGKILL); out of memory",
    "crashed": "rank 1 ended with exit code 139 (SIGSEGV)",
    "stopped": "rank 1 is stopped (SIGSTOP)",
}


@pytest.fixture
def small_cgroup():
    """A cgroup whose processes get 100 MB."""
    v1 = Path("/sys/fs/cgroup/memory")
    limit = "memory.limit_in_bytes" if v1.is_dir() else "memory.max"
    folder = (v1 if v1.is_dir() else v1.parent) / f"test_{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(100 << 20))
    except OSError as error:
        pytest.skip(f"needs root and a memory cgroup: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.parametrize(
    "kind, code",
    [("killed", 137), ("crashed", 139), ("stopped", 3), ("done", 0), ("term", 75)],
)
def test_the_node_wrapper_returns_the_code_of_its_ranks_and_leaves_nothing(tmp_path, kind, code):
    run_in_node_wrapper(tmp_path, kind, code)


def test_the_node_wrapper_says_that_a_rank_was_killed_for_its_memory(tmp_path, small_cgroup):
    run_in_node_wrapper(tmp_path, "memory", 137, small_cgroup)


def run_in_node_wrapper(tmp_path, kind, code, *more):
    """SLURM and Kubernetes start it like this. A rank's child in a new session is ended, too."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    sleep = f"1000.{os.getpid()}"
    options = [*OPTIONS, "--nodes=1", "--ranks_per_node=2"]
    command = [*NODE, *options, script, tmp_path, kind, sleep, *more]
    wrapper = subprocess.Popen(
        list(map(str, command)), cwd=REPO, env=environment(), stdout=subprocess.PIPE, text=True
    )
    if kind == "term":
        wait_until((tmp_path / "started_term_1").exists, wrapper)
        time.sleep(0.5)
        while wrapper.poll() is None:  # a scheduler may send the signal more than once
            wrapper.terminate()
            time.sleep(0.001)
    output, _ = wrapper.communicate(timeout=200)
    assert wrapper.returncode == code
    assert SAID.get(kind, "") in output
    assert ("rank 1" in output) == (kind in SAID)
    assert ("rank 1 has not ended 15 s after SIGTERM" in output) == (kind == "stopped")
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(script) not in listed and f"sleep {sleep}" not in listed


def test_an_unresolved_address_is_a_failure_unless_the_interface_is_given(tmp_path):
    """On Kubernetes the first pod's name may resolve later. torch's rendezvous waits for that."""
    script = tmp_path / "nothing.py"
    script.touch()
    command = [*NODE, *OPTIONS, "--ranks_per_node=1", "--master_addr=nosuch.invalid", script]
    assert "nosuch.invalid" in run(command).error
    run(["env", "GLOO_SOCKET_IFNAME=eth0", *command], code=0)


def launch_here(tmp_path, code, slots):
    """scripts/launch.sh with ranks that run `code`, and a stand-in for ssh that runs it here, with
    a network of its own for each host.
    """
    script, hostfile, ssh = (tmp_path / name for name in ("rank.py", "hostfile", "ssh"))
    script.write_text(code)
    hostfile.write_text(slots)
    ssh.write_text('#!/bin/bash\nexec unshare -n bash -c "ip link set lo up; ${@: -1}"\n')
    ssh.chmod(0o755)
    limited = ["bash", "-c", 'ulimit -v 500000; PATH="$0:$PATH" exec "$@"', tmp_path]
    return run([*limited, LAUNCH, "--hostfile", hostfile, "--", script, tmp_path])


@needs_hosts
@pytest.mark.parametrize(
    "code, expected, line",
    [
        (f"for x in ('x', '[]', '{{}}', '[' * 9000): print('{EVENT}' + x)", 0, f"here: {EVENT}[]"),
        ("for _ in range(300): os.write(1, b'x' * (1 << 20))", 0, "here: xxx"),
        ("os.kill(os.getppid(), 9)", 1, "launch: here is lost"),
    ],
)
def test_output_of_ranks_is_harmless_and_a_killed_ssh_is_a_lost_host(
    tmp_path, code, expected, line
):
    done = launch_here(tmp_path, f"import os\n{code}\n", "here slots=1\n")
    assert done.code == expected and line in done.output, done.output[-2000:]


LOST = """
import os, pathlib, signal, sys, time
from zerotrain.runtime.errors import exit_on_error
ready = pathlib.Path(sys.argv[1], "ready")
signal.signal(signal.SIGTERM, lambda *_: 1 / 0)  # as a collective fails
if os.environ["RANK"] == "0":
    ready.touch()
    exit_on_error(lambda: time.sleep(1000))
while not ready.exists():
    time.sleep(0.01)
time.sleep(1)
os.kill(os.getppid(), 9)
"""


@needs_hosts
def test_errors_after_a_lost_host_are_one_line(tmp_path):
    done = launch_here(tmp_path, LOST, "here slots=1\nthere slots=1\n")
    assert "launch: there is lost" in done.output and "ZeroDivisionError" in done.output
    assert "Traceback" not in done.output and "exit_on_error" not in done.output


WRONG = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def tidy(*_):
    time.sleep(10.5)  # as long as W&B may take
    (folder / "tidy").touch()
    os._exit(143)
signal.signal(signal.SIGTERM, tidy)
(folder / f"started_{rank}").touch()
while not ((folder / "started_0").exists() and (folder / "started_1").exists()):
    time.sleep(0.01)
print("error: no such key", flush=True)
time.sleep(1000 if rank == "0" else 1)
sys.exit(2)
"""


@needs_hosts
def test_ranks_have_time_to_finish_after_a_mistake_on_another_host(tmp_path):
    done = launch_here(tmp_path, WRONG, "here slots=1\nthere slots=1\n")
    assert done.code == 2 and (tmp_path / "tidy").exists(), done.output
    assert done.output.splitlines()[-1].startswith("launch: there: rank 1 "), done.output


# --------------------------------------------------------------------------------------------------
# Real hosts

# A rank that writes down what it sees. It does not import torch, so it takes seconds.
LOOK = """
import json, os, pathlib, sys
lines = []
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        lines.append(path.read_bytes().decode(errors="replace"))
    except OSError:
        pass
sys.stdout.write(f"hello from rank {os.environ['RANK']}\\n")  # one call: ranks share the pipe
pathlib.Path(sys.argv[1], f"rank_{os.environ['RANK']}.json").write_text(json.dumps({
    "environment": dict(os.environ), "arguments": sys.argv[2:], "command_lines": lines,
    "host": os.uname().nodename,
}))
"""
AWKWARD = ["two words", 'a "quoted" word', "$HOME", "it's", "a;b&c|d", "{x: [1, *]}", "%h", "", "ü",
           "back\\slash", "`ls`", "x=y=z"]  # fmt: skip


@needs_hosts
def test_every_rank_gets_command_environment_and_devices_as_they_are(hosts, tmp_path):
    script, noise, hostfile = tmp_path / "look.py", tmp_path / "bashrc", tmp_path / "hostfile"
    script.write_text(LOOK)
    noise.write_text("echo welcome\n")
    hostfile.write_text("node-1 slots=3\nnode-2 slots=3\n")
    hosts.boot(2, environment={"BASH_ENV": noise})  # its shell prints a line, as a ~/.bashrc may
    variables = {f"NCCL_TEST_{i}": text for i, text in enumerate(AWKWARD)}
    given = variables | {
        "WANDB_API_KEY": "s3cret-1", "MY_PASSWORD": "s3cret-2", "MLFLOW_TRACKING_TOKEN": "s3cret-3",
        "MINE": "a $b", "NOT_FOR_THEM": "x", "CUDA_VISIBLE_DEVICES": "7",
    }  # fmt: skip
    done = namespaces.run(
        hosts, "env", *(f"{name}={value}" for name, value in given.items()),
        LAUNCH, "--hostfile", hostfile, "--include", "node-1:1@node-2:0,2",
        "--env", "MINE", "--env", "MY_PASSWORD", "--", script, tmp_path, *AWKWARD,
        code=0,
    )  # fmt: skip
    hosts.boot(2)
    assert "s3cret" not in done.output
    assert "node-1: hello from rank 0\n" in done.output
    assert "node-2: hello from rank 2\n" in done.output
    for rank, local_rank, host, devices in ((0, 0, 1, "1"), (1, 0, 2, "0,2"), (2, 1, 2, "0,2")):
        seen = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        expected = variables | {
            "RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": str(len(devices.split(","))), "CUDA_VISIBLE_DEVICES": devices,
            "WANDB_API_KEY": "s3cret-1", "MY_PASSWORD": "s3cret-2", "MINE": "a $b",
            "MLFLOW_TRACKING_TOKEN": "s3cret-3",
            "MASTER_ADDR": f"{namespaces.PREFIX}.1",  # not the address of docker0
            "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip
        assert seen["environment"] == seen["environment"] | expected
        assert "NOT_FOR_THEM" not in seen["environment"]
        assert seen["arguments"] == AWKWARD and seen["host"] == f"node-{host}"
        assert not any("s3cret" in line for line in seen["command_lines"])
    assert not left_on_hosts(str(script))


@needs_hosts
@pytest.mark.parametrize("nodes", [[], ["--nodes", "1"]])
def test_a_machine_under_two_names_is_refused(hosts, tmp_path, nodes):
    hostfile, script = tmp_path / "hostfile", tmp_path / "script.py"
    script.touch()
    hostfile.write_text(f"node-1 slots=1\n{namespaces.PREFIX}.1 slots=1\n")
    done = namespaces.run(hosts, LAUNCH, "--hostfile", hostfile, *nodes, "--", script, code=2)
    [line] = done.output.splitlines()
    assert f"node-1 and {namespaces.PREFIX}.1 are the same machine; list it once" in line
    hostfile.write_text("node-1 slots=1\n")
    namespaces.run(hosts, LAUNCH, "--hostfile", hostfile, *nodes, "--", script, code=0)


SLEEP = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(__file__).with_name(f"started_{os.environ['RANK']}").touch()
time.sleep(1000)
"""


@pytest.fixture
def sleeping(hosts, hostfile, tmp_path):
    """Starts ranks that ignore SIGTERM on both hosts: (launch.sh, its log, their script)."""
    started = []

    def start_one(name, *words):
        folder = tmp_path / name
        folder.mkdir()
        script, log = folder / f"{name}.py", folder / "log"
        script.write_text(SLEEP)
        job = start(hosts, log, LAUNCH, "--hostfile", hostfile, "--", script, *words)
        started.append(job)
        wait_until(lambda: len([*folder.glob("started_?")]) == 2, job, log)
        return job, log, script

    yield start_one
    for job in started:
        job.kill()


def assert_none_left(script, until):
    """Wait for the end of a script on all hosts."""
    while left := left_on_hosts(str(script)):
        assert time.monotonic() < until, left
        time.sleep(0.5)


@needs_hosts
def test_however_it_ends_nothing_is_left_and_nothing_else_is_touched(hosts, sleeping):
    """A rank is killed, launch.sh is killed, or it gets Ctrl-C twice."""
    other = subprocess.Popen(hosts.ssh(1, "exec -a 'python -u train.py' sleep 300"))
    jobs = [sleeping(f"sleep_{name}") for name in ("rank", "launcher", "user")]
    (rank, log, _), (launcher, *_), (user, *_) = jobs
    hosts.run(2, kill("[s]leep_rank.py"))
    launcher.kill()
    user.send_signal(signal.SIGINT)
    time.sleep(1)
    user.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert user.wait(200) == 130
    assert rank.wait(200) == 137, log.read_text()
    said = "launch: node-2: rank 1 ended with exit code 137 (SIGKILL)"
    assert said in log.read_text()
    for *_, script in jobs:
        assert_none_left(script, began + 60)
    assert other.poll() is None, "another job's process"
    other.kill()


@needs_hosts
def test_a_host_behind_a_cut_link_ends_its_ranks_within_a_minute(hosts, sleeping):
    job, log, script = sleeping("sleep_cut")
    began = time.monotonic()
    hosts.cut(2)
    assert job.wait(200) == 1 and "launch: node-2 is lost" in log.read_text(), log.read_text()
    assert_none_left(script, began + 64)  # 60 s, and 4 s for signals


@needs_hosts
def test_a_host_that_stalls_is_named_while_the_job_runs(hosts, sleeping, tiny_config, tmp_path):
    """One host is stopped for 0.3 s in every 0.6 s, and the other one once for 5 s."""
    (tmp_path / "run").mkdir()
    _, log, _ = sleeping("train", "--config", tiny_config())

    def running_on(i):
        server = f" {namespaces.PREFIX}.{i} 22"
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SSH_CONNECTION", "").endswith(server):
                    yield process

    def signal_all(processes, number):
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # a rank's child may have ended
                process.send_signal(number)

    first, second = ([*running_on(i)] for i in (1, 2))
    assert len(first) > 1 < len(second)  # wrapper and rank
    began = time.monotonic()
    is_stopped = False
    while len(stalls := read_stalls(tmp_path / "run")) < 2 and time.monotonic() < began + 60:
        signal_all(first, signal.SIGSTOP)
        if not is_stopped and time.monotonic() > began + 4:
            is_stopped = True
            signal_all(second, signal.SIGSTOP)
        if is_stopped and time.monotonic() > began + 9:
            signal_all(second, signal.SIGCONT)
        time.sleep(0.3)
        signal_all(first, signal.SIGCONT)
        time.sleep(0.3)
    named = {host: seconds for _, host, seconds in stalls}
    assert 8 < named["node-1"] < 25 and 4 < named["node-2"] < 8, log.read_text()
    for host in named:
        assert f"launch: {host} did not run for " in log.read_text()


def test_a_busy_host_does_not_stall():
    times = np.arange(0, 30, 0.1)
    late = times + np.random.default_rng(0).uniform(0, 0.15, len(times))
    assert stalled_seconds(times) == stalled_seconds(np.sort(late)) == 0
    assert stalled_seconds(np.where(times > 9, times + 5, times)) == pytest.approx(5, abs=0.2)
