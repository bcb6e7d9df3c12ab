"""Launching on real hosts: environment, exit codes, lost hosts.    pytest tests/test_launch.py"""

import asyncio
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import namespaces
import numpy as np
import pytest
from conftest import REPO, environment, read_metrics, run, wait_until

from cluster.agent import BEAT, Agent, remove_stale_folders
from cluster.environment import environment_of_job, environment_of_launcher
from cluster.hostfile import Host, format_hostfile, read_hostfile, select_hosts
from cluster.hosts import RemoteHost, ask_all
from cluster.job import Job, new_id
from cluster.rank import MARK, devices_of, job_folder, write
from cluster.supervise import launcher_command, watch
from config.schema import LaunchConfig
from runtime.errors import UserError
from runtime.redact import redactor

# --------------------------------------------------------------------------------------------------
# Hostfile and environment, without hosts

HOSTFILES = {
    "node-1": ":1: `node-1`: expected `NAME slots=N`; slots=N, the number of GPUs, is missing",
    "node-1 slots = 2": ":1: `node-1 slots = 2`: expected `NAME slots=N` without spaces",
    "node-1 slots=2x": ":1: `node-1 slots=2x`: expected `NAME slots=N`",
    "node-1:2": ":1: `node-1:2`: expected `NAME",
    "a slots=1\n\n# b\nb slots=0": ":4: b has slots=0; give its number of GPUs, or delete the line",
    "a slots=1 # first\nb slots=2\na slots=3": ":3: a is already listed in line 1",
    "me@node-1 slots=2": ":1: me@node-1: user@ is not supported",
    "a,b slots=2": ":1: a,b: not a valid host name or address",
    "# nothing\n": "hostfile: no hosts; expected `NAME slots=N` on each line",
    "a slots=1\nb max_slots=8": ":2: `b max_slots=8`: expected `NAME slots=N`; slots=N, the",
    "a slots=8 max_slots=4": "slots=8 is more than max_slots=4; lower slots",
    "a slots=8 max_slots=2.5": "`NAME slots=N` with a whole number, not `max_slots=2.5`",
    "\na slots=2.5": ":2: `a slots=2.5`: expected `NAME slots=N` with a whole number, not `slots",
    "a slots=-1": "`NAME slots=N` with a whole number, not `slots=-1`",
    "a slots": "`NAME slots=N` with a whole number, not `slots`",
    "a slots=": "without spaces around the =",
    "a slots=1 slots=2": "but found `slots=2`; only max_slots=M may follow",
    "this is bad slots=1": ":1: `this is bad slots=1`: expected `NAME slots=N`, but found `is`;",
    "a slots=1 port=22": "but found `port=22`; only",
    "-oProxyCommand=x slots=1": ":1: -oProxyCommand=x: not a valid host name or address",
    "a slots=1\n.. slots=1": ":2: ..: not a valid host name or address",
    "a..b slots=1": ":1: a..b: not a valid host name or address",
    "a slots=1025": ":1: a has more than 1,024 slots; give its GPUs",
    f"a slots={'9' * 5000}": "`NAME slots=N` with a whole number, not `slots=999",
    "\ufeffa slots=1": ":1: the file begins with a byte-order mark; save it as UTF-8 without",
    "\ufeff# all\na slots=1": ":1: the file begins with a byte-order mark",
}


@pytest.mark.parametrize("text", HOSTFILES)
def test_a_bad_hostfile_is_refused_by_line(tmp_path, text):
    (tmp_path / "hostfile").write_text(text)
    with pytest.raises(UserError) as error:
        read_hostfile(tmp_path / "hostfile")
    assert HOSTFILES[text] in str(error.value) and "\n" not in str(error.value)


def test_the_example_hostfile_is_read_by_us_and_by_deepspeed():
    from deepspeed.launcher.runner import fetch_hostfile

    example = REPO / "hostfile.example"
    ours = {host.name: len(host.slots) for host in read_hostfile(example)}
    assert ours == dict(fetch_hostfile(str(example))) == {"node-1": 8, "node-2": 8}


def test_a_hostfile_in_another_encoding_is_refused_by_line(tmp_path):
    for content, message in (
        ("a slots=1\n".encode("utf-16"), ":1: the file is UTF-16; save it as UTF-8"),
        (b"a slots=1\n\nb slots=1 # caf\xe9\n", ":3: not UTF-8 text; save it as UTF-8"),
    ):
        (tmp_path / "hostfile").write_bytes(content)
        with pytest.raises(UserError) as error:
            read_hostfile(tmp_path / "hostfile")
        assert message in str(error.value) and "\n" not in str(error.value)


def test_hostfiles_of_deepspeed_and_open_mpi_are_read_unchanged(tmp_path):
    """The forms of DeepSpeed's tests/unit/launcher/test_run.py, Open MPI's max_slots, CRLF."""
    from deepspeed.launcher.runner import fetch_hostfile

    path = tmp_path / "hostfile"
    text = "\n    worker-1 slots=2\n    worker-2 slots=2 # b\n\n    localhost slots=1\n"
    path.write_text(
        text + "    #w slots=3\n123.23.12.10 slots=8 max_slots=8\nn1\tslots=8   max-slots=16\r\n"
    )
    ours = {host.name: len(host.slots) for host in read_hostfile(path)}
    assert ours == dict(fetch_hostfile(str(path)))
    assert list(ours.values()) == [2, 2, 1, 8, 8]
    path.write_text("n1 max_slots=8 slots=4\n")  # as only mpirun takes it
    assert read_hostfile(path) == [Host("n1", (0, 1, 2, 3))]
    path.write_text(format_hostfile([Host("n1", (1, 3)), Host("n2", (0,))]))
    assert dict(fetch_hostfile(str(path))) == {"n1": 2, "n2": 1}


def random_filter(draw):
    """Hosts, slots, spaces, repetitions and mistakes, in the form of --include and --exclude."""

    def slot():
        return draw.choice([*"00011123", "4", "", "x", "-1", " 2", "0 "])

    def part():
        host = draw.choice(["a", "a", "b", "b", "c", "d", "a "] if draw.random() < 0.2 else "aabbc")
        kind = draw.random()
        if kind < 0.4:
            return host
        usual = kind < 0.9
        slots = [draw.choice("0123") if usual else slot() for _ in range(draw.randint(1, 3))]
        return f"{host}:{','.join(slots)}"

    return "@".join(part() for _ in range(draw.randint(1, 4)))


def test_include_and_exclude_choose_as_deepspeed_does(tmp_path):
    from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion

    path = tmp_path / "hostfile"
    path.write_text("a slots=4\nb slots=4\nc slots=2\n")
    pool, hosts = fetch_hostfile(str(path)), read_hostfile(path)
    draw = random.Random(0)
    filters = [
        ("", ""), ("a@b:0,2", ""), ("c@a", ""), ("a@a:1", ""), ("", "a@a:1"), ("a:", ""),
        ("a:0:1", ""), ("", "a:0,1,2,3"), ("", "a@b@c"), ("a:1@a:0", ""), ("a", "b"),
    ]  # fmt: skip
    for _ in range(3000):
        text = random_filter(draw)
        filters.append((text, "") if draw.random() < 0.5 else ("", text))
    chosen = 0
    for include, exclude in filters:
        try:
            theirs = parse_inclusion_exclusion(pool, include, exclude)
        except ValueError:
            theirs = {}
        if theirs:
            ours = select_hosts(hosts, include, exclude)
            assert {h.name: list(h.slots) for h in ours} == dict(theirs), (include, exclude)
            assert [h.name for h in ours] == list(theirs)
            chosen += 1
        else:  # DeepSpeed refuses it, or is left without hosts and raises an IndexError
            with pytest.raises(UserError):
                select_hosts(hosts, include, exclude)
    assert 1000 < chosen < 2900, "both accepted and refused ones"
    for include, exclude, message in (
        ("d", "", "--include d: no such host in the hostfile (a, b, c)"),
        ("", "a:4", "--exclude a:4: a has slots 0 to 3, not 4"),
        ("a:x", "", "--include a:x: write slots as numbers with commas: a:0,2"),
        ("a:", "", "--include a:: write slots as numbers with commas"),
        ("", "a@b@c", "leaves no hosts"),
        ("a", "b", "not both"),
    ):
        with pytest.raises(UserError) as error:
            select_hosts(hosts, include, exclude)
        assert message in str(error.value)


@pytest.mark.parametrize("launcher", ["slurm", "torchrun"])
def test_a_launcher_that_needs_equal_numbers_of_ranks_per_host_says_so(
    tmp_path, monkeypatch, launcher
):
    monkeypatch.setattr("shutil.which", lambda name: name)
    hosts = [Host("a", (0, 1)), Host("b", (1,))]
    job = Job(hosts=hosts, command=["x"], environment={}, launcher=launcher)
    with pytest.raises(UserError, match="same number of slots on every host, not a 2, b 1;"):
        launcher_command(job, tmp_path, "a", 1)


def test_the_devices_of_a_rank():
    """As DeepSpeed's node launcher sets them; under srun a selection of the task's devices."""

    def devices(slots, **environment):
        return devices_of(slots, environment).get("CUDA_VISIBLE_DEVICES")

    assert devices([0, 2]) == "0,2"
    assert devices([1], RANK="3", CUDA_VISIBLE_DEVICES="0") == "1", (
        "DeepSpeed's node launcher set its own count"
    )
    assert devices([1], RANK="3", SLURM_PROCID="0", CUDA_VISIBLE_DEVICES="0") == "1"
    slurm = {"SLURM_PROCID": "0", "CUDA_VISIBLE_DEVICES": "4,5,6"}
    assert devices([0, 1], **slurm) is None, "all selected: SLURM's value stays"
    assert devices([0, 2], **slurm) == "4,6"
    with pytest.raises(ValueError, match="slot 3 is selected, but SLURM gives this task"):
        devices([3], **slurm)


def test_the_environment_has_the_allowed_and_the_added_variables(tmp_path):
    here = {
        "NCCL_DEBUG": "INFO", "HF_TOKEN": "s3cret", "WANDB_API_KEY": "s3cret", "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "3", "DS_ACCELERATOR": "cpu", "MINE": "a b", "AWS_SECRET": "x",
        "MLFLOW_TRACKING_TOKEN": "s3cret",
    }  # fmt: skip
    (tmp_path / "env").write_text("# a comment\n\nNCCL_DEBUG=WARN\nexport A=b=c d\n")
    job = environment_of_job(here, ["MINE", "B=$x"], [tmp_path / "env"])
    assert job == {
        "NCCL_DEBUG": "WARN", "HF_TOKEN": "s3cret", "WANDB_API_KEY": "s3cret", "A": "b=c d",
        "DS_ACCELERATOR": "cpu", "MINE": "a b", "B": "$x",
    }  # fmt: skip
    for added, message in (
        ("AWS_SECRET=x", "everyone on this machine can read command lines"),
        ("URI=https://me:x@host", "everyone on this machine can read command lines"),
        ("NOT_THERE", "--env NOT_THERE: not set here; set it"),
        ("A B=1", "not the name of a variable"),
        ("CUDA_VISIBLE_DEVICES=1", "the hostfile decides which devices are used"),
    ):
        with pytest.raises(UserError) as error:
            environment_of_job(here, [added])
        assert message in str(error.value)
    (tmp_path / "env").write_text("A=1\ns3cret, the rest of a value\n")
    with pytest.raises(UserError, match="env:2: not a line of the form NAME=VALUE"):
        environment_of_job(here, [], [tmp_path / "env"])


def test_launchers_get_few_variables_and_texts_no_secrets():
    """deepspeed puts PYTHON*, MLFLOW*, UCX*, MV2* and NCCL* on the command lines of pdsh."""
    kept = {"PATH": "/bin", "HOME": "/root", "SSH_AUTH_SOCK": "/tmp/agent", "OMPI_X": "1",
            "PYTHONPATH": "/code"}  # fmt: skip
    secrets = {"DB_PASS": "s3cret-1", "MYSQL_PWD": "s3cret-2", "SSH_PASSPHRASE": "s3cret-3",
               "APIKEY": "s3cret-4", "PDSH_X": "ssh://me:s3cret-5@host/"}  # fmt: skip
    others = {"MLFLOW_TRACKING_URI": "https://me:s3cret-6@host/", "MLFLOW_X": "x", "UCX_X": "x",
              "NCCL_DEBUG": "INFO", "PYTHONSTARTUP": "x", "MV2_X": "x", "MINE": "x"}  # fmt: skip
    assert environment_of_launcher(kept | secrets | others) == kept
    redact = redactor({**secrets, "PASS": "x"}, others)
    text = " ".join([*kept.values(), *secrets.values(), *others.values()])
    assert "s3cret" not in redact(text) and redact("x /code") == "x /code"
    assert (
        redact("https://me:s3cret-6@host/a@b, ssh://t0ken@b") == "https://***@host/a@b, ssh://***@b"
    )


def test_code_at_a_path_that_shells_would_change_is_refused(tmp_path):
    """deepspeed and torchrun's pdsh command do not quote it, and pdsh replaces %h."""
    there = tmp_path / "a b'c$(touch made) %h"
    (there / "scripts").mkdir(parents=True)
    for path in (".venv", *(init.parent.name for init in REPO.glob("*/__init__.py"))):
        (there / path).symlink_to(REPO / path)
    (there / "scripts" / "launch.sh").write_text((REPO / "scripts" / "launch.sh").read_text())
    (there / "hostfile").write_text("node-1 slots=1\n")
    finished = run(
        ["bash", there / "scripts/launch.sh", "--hostfile", "hostfile", "--", "x"], cwd=there
    )
    assert finished.code == 2 and len(finished.output.splitlines()) == 1, finished.output
    assert f"error: {there}: launchers pass this path through shells" in finished.output
    assert not [*tmp_path.rglob("made")]


# --------------------------------------------------------------------------------------------------
# Agents, ranks and the watch over them, without hosts


def test_only_the_processes_of_a_job_are_ended():
    job = new_id()
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    others = [
        subprocess.Popen(words)
        for words in (
            [*sleep, f"launch-{job}.log"],
            [*sleep, "cluster/rank.py", job],
            ["bash", "-c", f"sleep 300; grep 'export {MARK}={job}' log"],
            ["bash", "-c", 'sleep 300; cat "$0"', f"{MARK}={job}"],
        )
    ]
    of_job = [
        subprocess.Popen(sleep, env={**os.environ, MARK: job}),
        subprocess.Popen(["bash", "-c", f"export A=B; export {MARK}={job};  sleep 300; sleep 300"]),
    ]
    agent = Agent()
    agent.job = {"job": job}
    try:
        wait_until(lambda: len(agent.processes()) >= 2, others[0])
        assert agent.signal({"number": signal.SIGTERM}) == 0, "none is a rank"
        assert agent.stop({"grace_seconds": 0})["left"] == 0
        assert [process.wait(30) for process in of_job] == [-signal.SIGKILL] * 2
        assert [process.poll() for process in others] == [None] * len(others)
    finally:
        for process in (*others, *of_job):
            process.kill()
            process.wait()


def test_the_folder_of_a_live_job_outlives_a_step_of_the_clock(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", f"node-{new_id()}")
    job, agent = new_id(), Agent()
    folder = job_folder(job)
    request = {"job": job, "command": [], "environment": {}, "slots": []}
    for beat_after_seconds in (None, -31, 100):  # as it is; a dead agent; before a reboot
        agent.take_job(request)
        os.utime(folder, (time.time() - 3600,) * 2)  # what a step of an hour looks like
        if beat_after_seconds is not None:
            write(folder / BEAT, time.monotonic() + beat_after_seconds)
        remove_stale_folders()
        assert folder.exists() == (beat_after_seconds is None)
        agent.forget({})
    assert not folder.exists()


UNDER_LOAD = """
import os, pathlib, signal, sys, time
folder, kind, rank = pathlib.Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
signal.signal(signal.SIGTERM, lambda *_: folder.joinpath(f"preempted_{rank}").touch())
folder.joinpath(f"started_{rank}").touch()
while not folder.joinpath("go").exists():
    time.sleep(0.01)
if kind == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
# Not sys.exit: the agents share a machine here, so that each signals both ranks, and Python resets
# its signal handlers while it exits.
os._exit({"preempted": 75, "lost": 75, "done": 0, "killed": 3}[kind])
"""


async def ending_of(folder, kind, late_seconds):
    """The ending of a job of two ranks whose launcher has exited while the second agent, stopped
    as if the machine were busy, has not yet reported how its rank ended.
    """
    script = folder / "script.py"
    script.write_text(UNDER_LOAD)
    job = Job(
        hosts=[Host("node-1", (0,)), Host("node-2", (0,))], command=[], environment={}, id=new_id(),
        launch=LaunchConfig(heartbeat_seconds=15 if kind == "lost" else 60),
    )  # fmt: skip
    hosts, lines = [], []
    for rank, host in enumerate(job.hosts):
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-u", "-m", "cluster.agent", cwd=REPO, stdin=-1, stdout=-1, stderr=-1,
            env={**environment(), "SLURMD_NODENAME": host.name},
        )  # fmt: skip
        hosts.append(RemoteHost(host, agent))
        await hosts[-1].ask(
            "take_job", job=job.id, command=[str(script), str(folder), kind], environment={},
            slots=[0], beat_seconds=0.2, silence_seconds=24, grace_seconds=0,
        )  # fmt: skip
        lines.append(
            f"SLURMD_NODENAME={host.name} RANK={rank} WORLD_SIZE=2 {MARK}={job.id} "
            f"{sys.executable} cluster/rank.py {job.id} &"
        )
    launcher = await asyncio.create_subprocess_exec(
        "bash", "-c", "\n".join([*lines, "wait", f"exit {int(kind != 'done')}"]), cwd=REPO
    )
    signals = asyncio.Queue()
    watching = asyncio.create_task(watch(job, hosts, launcher, signals))

    async def until(happened):
        async with asyncio.timeout(60):
            while not happened():
                assert not watching.done(), watching.result()
                await asyncio.sleep(0.02)

    try:
        await until(lambda: len([*folder.glob("started_?")]) == 2)
        await until(lambda: all(host.ranks for host in hosts))
        if kind in ("preempted", "lost"):
            signals.put_nowait(signal.SIGTERM)
            await until(lambda: len([*folder.glob("preempted_?")]) == 2)
        hosts[1].process.send_signal(signal.SIGSTOP)
        (folder / "go").touch()
        await launcher.wait()
        await asyncio.wait({watching}, timeout=late_seconds)
        if kind != "lost":
            assert not watching.done(), watching.result()
            hosts[1].process.send_signal(signal.SIGCONT)
        return await watching
    finally:
        hosts[1].process.send_signal(signal.SIGCONT)
        await ask_all(hosts, "stop", grace_seconds=0)
        await ask_all(hosts, "forget")
        for host in hosts:  # close() kills an agent that is too busy to clean up within 2 s
            host.process.stdin.close()
        async with asyncio.timeout(60):
            await asyncio.gather(*(host.process.wait() for host in hosts))
        await asyncio.gather(*(host.close() for host in hosts))


def test_the_exit_code_is_that_of_the_ranks_however_late_their_reports(tmp_path):
    """On a busy machine the launcher has exited, or the consequence of a failure is known, seconds
    before an agent reports how its ranks ended.
    """
    # seconds until the late report; a failed job would be decided after SETTLE_SECONDS, 3
    kinds = {"preempted": 1, "lost": 1, "done": 4, "killed": 4}

    async def all_of_them():
        for kind in kinds:
            (tmp_path / kind).mkdir()
        jobs = (ending_of(tmp_path / kind, kind, late) for kind, late in kinds.items())
        return dict(zip(kinds, await asyncio.gather(*jobs), strict=True))

    endings = asyncio.run(all_of_them())
    assert endings["preempted"].code == 75 and endings["preempted"].stopped_by_user
    assert endings["preempted"].cause == "preempted and saved; the same command resumes"
    assert endings["done"].code == 0
    assert endings["killed"].code == 137, endings["killed"]
    assert endings["killed"].cause.startswith("rank 1 on node-2 was killed by SIGKILL")
    assert endings["lost"].code == 143 and endings["lost"].stopped_by_user
    assert "stopped by SIGTERM; node-2 is lost: no message from it" in endings["lost"].cause
    assert not [*job_folder("*").parent.glob("launch-*-node-?")]


# --------------------------------------------------------------------------------------------------
# Real hosts

WHY_NOT = namespaces.why_not()


def needs_hosts(test):
    return pytest.mark.launch(pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))(test))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    made = namespaces.Hosts(tmp_path_factory.mktemp("hosts"), 2).up()
    yield made
    made.down()


@pytest.fixture
def hostfile(hosts, tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two hosts\nnode-1 slots=1\n\nnode-2 slots=1  # the second\n")
    return path


STARTED = []


@pytest.fixture(autouse=True)
def no_launch_outlives_its_test():
    yield
    while STARTED:
        STARTED.pop().kill()  # the agents end what it has started


def start_launch(hosts, hostfile, log, script, *args, options=(), **variables):
    """scripts/launch.sh left running, its output in the file `log`."""
    command = [
        REPO / "scripts/launch.sh", "--hostfile", hostfile,
        "--ssh_args", f"-F {hosts.ssh_config}", *options, "--", script, *args,
    ]  # fmt: skip
    process = subprocess.Popen(
        [str(c) for c in command], cwd=REPO, env={**environment(), **variables},
        stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    STARTED.append(process)
    return process


def launch(hosts, hostfile, log, script, *args, options=(), timeout=120, **variables):
    process = start_launch(hosts, hostfile, log, script, *args, options=options, **variables)
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"still running after {timeout} s:\n{log.read_text()[-4000:]}")
    return code, log.read_text()


def assert_nothing_left(hosts, text, seconds=0):
    """No process with `text` in its command line and no job's folder, on any host or here."""
    deadline = time.monotonic() + seconds
    while True:
        left = [line for i in (1, 2) for line in hosts.processes(i, text)]
        left += [line for i in (1, 2) for line in hosts.run(i, "ls -d /dev/shm/launch-*").split()]
        left += subprocess.run(["pgrep", "-af", text], capture_output=True, text=True).stdout.split(
            "\n"
        )[:-1]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert not left


# Writes down what a rank sees; without torch, so that it takes seconds.
LOOK = """
import json, os, pathlib, sys, time
out = pathlib.Path(sys.argv[1]) / f"rank_{os.environ.get('RANK', 'none')}.json"
lines = []
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        lines.append(path.read_bytes().decode(errors="replace"))
    except OSError:
        pass
job = sorted(pathlib.Path("/dev/shm").glob(f"launch-*-{os.uname().nodename}"))
print("hello from rank", os.environ["RANK"], os.environ["MY_PASSWORD"])
out.write_text(json.dumps({
    "environment": dict(os.environ), "arguments": sys.argv[2:], "command_lines": lines,
    "host": os.uname().nodename,
    "modes": [oct(p.stat().st_mode) for f in job for p in (f, f / "job.json")],
}))
"""
AWKWARD = ["two words", 'a "quoted" word', "$HOME", "it's", "a;b&c|d", "{x: [1, *]}", "%h", "", "ü",
           "back\\slash", "`ls`", "x=y=z"]  # fmt: skip


@pytest.mark.parametrize("launcher", ["pdsh", "torchrun", "openmpi"])
@needs_hosts
def test_every_rank_gets_command_and_environment_as_they_are(hosts, hostfile, tmp_path, launcher):
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    bashrc = tmp_path / "bashrc"
    bashrc.write_text("echo welcome; echo it is noon\n")
    hosts.boot(2, binds={bashrc: Path.home() / ".bashrc"})
    variables = {f"NCCL_TEST_{i}": text for i, text in enumerate(AWKWARD)}
    code, output = launch(
        hosts, hostfile, tmp_path / "log", script, tmp_path, *AWKWARD,
        options=["--launcher", launcher, "--env", "MINE=a $b", "--env", "MY_PASSWORD"],
        WANDB_API_KEY="s3cret-1", MY_PASSWORD="s3cret-2", MLFLOW_TRACKING_TOKEN="s3cret-3",
        MLFLOW_TRACKING_URI="https://me:s3cret-4@host/", DB_PASS="s3cret-5", UCX_NOTE="s3cret-6",
        PYTHON_NOTE="s3cret-7", NOT_FOR_THEM="x", OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        **variables,
    )  # fmt: skip
    hosts.boot(2)
    assert code == 0, output
    assert "s3cret" not in output
    assert "launch: node-2: its shell prints `it is noon`: let ~/.bashrc there print only" in output
    assert "node-1: hello from rank 0 ***\n" in output
    assert "node-2: hello from rank 1 ***\n" in output
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        there = seen["environment"]
        assert seen["arguments"] == AWKWARD
        assert {name: there.get(name) for name in variables} == variables
        assert (there["WANDB_API_KEY"], there["MY_PASSWORD"]) == ("s3cret-1", "s3cret-2")
        assert there["MINE"] == "a $b" and "NOT_FOR_THEM" not in there
        assert not any("s3cret" in line for line in seen["command_lines"])
        assert seen["modes"] == ["0o40700", "0o100600"]
        assert seen["host"] == f"node-{rank + 1}"
        assert there["MASTER_ADDR"] == f"{namespaces.PREFIX}.1", "not docker0's, the first"
        assert there["GLOO_SOCKET_IFNAME"] == "eth0"
        assert len(there["LAUNCH_SECRET"]) == 64
        assert not any(there["LAUNCH_SECRET"] in line for line in seen["command_lines"])
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LAUNCH_WORLD_SIZE")
        assert [there[n] for n in names] == [str(rank), "0", "2", "1", "2"]
    assert_nothing_left(hosts, str(script))


DEVICE = """
import json, os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES",
         "GLOO_SOCKET_IFNAME")
said = {"host": os.uname().nodename} | {name: os.environ.get(name) for name in names}
pathlib.Path(sys.argv[1], f"rank_{said['RANK']}.json").write_text(json.dumps(said))
"""
FILTERS = {  # on two hosts with 3 slots: option, selected slots. docs/multi_node.md has the first.
    "pdsh": (("--include", "node-1@node-2:0,2"), {"node-1": (0, 1, 2), "node-2": (0, 2)}),
    "torchrun": (("--exclude", "node-1:1@node-2:0"), {"node-1": (0, 2), "node-2": (1, 2)}),
    "openmpi": (("--exclude", "node-1@node-2:1"), {"node-2": (0, 2)}),
}


@pytest.mark.parametrize("launcher", FILTERS)
@needs_hosts
def test_the_slots_that_a_filter_leaves_are_the_devices_of_the_ranks(hosts, tmp_path, launcher):
    script, hostfile = tmp_path / "device.py", tmp_path / "hostfile"
    script.write_text(DEVICE)
    hostfile.write_text("node-1 slots=3 max_slots=3\nnode-2 slots=3\n")
    chosen, left = FILTERS[launcher]
    code, output = launch(
        hosts, hostfile, tmp_path / "log", script, tmp_path,
        options=["--launcher", launcher, *chosen], CUDA_VISIBLE_DEVICES="7",
        OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )  # fmt: skip
    assert code == 0, output
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank_*.json"))]
    assert [rank["host"] for rank in ranks] == [host for host in left for _ in left[host]]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {str(len(ranks))}
    for rank in ranks:
        slots = left[rank["host"]]
        assert rank["LOCAL_WORLD_SIZE"] == str(len(slots))
        assert rank["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, slots))
        # on one machine the ranks choose the loopback interface
        assert rank["GLOO_SOCKET_IFNAME"] == (None if len(left) == 1 else "eth0")
    used = [(r["host"], left[r["host"]][int(r["LOCAL_RANK"])]) for r in ranks]
    assert sorted(used) == [(host, slot) for host, slots in left.items() for slot in slots]


@needs_hosts
def test_bare_deepspeed_on_a_hostfile(hosts, hostfile, tiny_config, tmp_path):
    """Without launch.sh, from the first host, as in DeepSpeed's README."""
    config = tiny_config(launch={"world_size": 2})
    (tmp_path / "env").write_text("DS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=eth0\nHF_HUB_OFFLINE=1\n")
    deepspeed = [
        "env", "-C", REPO, f"PDSH_SSH_ARGS_APPEND=-F {hosts.ssh_config}", "DS_ACCELERATOR=cpu",
        f"DS_ENV_FILE={tmp_path}/env", Path(sys.executable).with_name("deepspeed"),
        "--hostfile", hostfile, "--master_addr", "node-1", "--master_port", "29572",
        "--no_ssh_check", "train.py", "--config", config, "--dry_run",
    ]  # fmt: skip
    command = hosts.ssh(1, shlex.join(map(str, deepspeed)))
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert re.search(r"ranks +2 on cpu", finished.stdout)


# --------------------------------------------------------------------------------------------------
# Training: stop, resume, lose a host, restart


def losses_of(folder):
    return [(step["step"], step["loss"], step["grad_norm"]) for step in read_metrics(folder)]


def at_step(folder, step):
    return (folder / "checkpoints" / f"step_{step:08d}").exists


@needs_hosts
def test_preempted_under_launch_and_resumed_under_torchrun_by_hand(
    forks, hosts, hostfile, tiny_config, tmp_path, tiny_model_with_dropout
):
    config = tiny_config(
        model=tiny_model_with_dropout, train__epochs=None, train__steps=30,
        eval__every_steps=7, checkpoint={"every_steps": 5},
        ds_config="ds_configs/zero1.json",
    )  # fmt: skip
    whole = forks.train(config, "--output_dir", tmp_path / "whole", ranks=2)
    assert whole.code == 0, whole.output
    expected = losses_of(tmp_path / "whole")
    log = tmp_path / "log"
    process = start_launch(hosts, hostfile, log, "train.py", "--config", config)
    wait_until(at_step(tmp_path / "run", 10), process)
    process.terminate()
    assert process.wait(60) == 75, log.read_text()
    assert "launch: preempted and saved; the same command resumes" in log.read_text()
    done = losses_of(tmp_path / "run")[-1][0]
    assert 10 <= done < 30 and at_step(tmp_path / "run", done)()
    assert_nothing_left(hosts, str(config))

    by_hand = [
        subprocess.Popen(hosts.ssh(i, shlex.join([
            "env", "-C", str(REPO), "DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1",
            "GLOO_SOCKET_IFNAME=eth0", "HF_HUB_OFFLINE=1",
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank",
            str(i - 1), "--nproc_per_node", "1", "--master_addr", "node-1", "--master_port",
            "29571", "train.py", "--config", str(config),
        ])), stdout=(tmp_path / f"log{i}").open("w"), stderr=subprocess.STDOUT)
        for i in (1, 2)
    ]  # fmt: skip
    codes = [p.wait(120) for p in by_hand]
    output = (tmp_path / "log1").read_text()
    assert codes == [0, 0], output
    assert f"resuming from {tmp_path}/run/checkpoints/step_{done:08d}: step {done}" in output
    assert losses_of(tmp_path / "run") == expected, "each step once, bit for bit"
    assert_nothing_left(hosts, str(config))


@needs_hosts
def test_a_run_continues_without_a_lost_host_and_takes_it_back(
    forks, hosts, hostfile, tiny_config, tmp_path
):
    """A link is cut and every process behind it killed, so nothing reports it. The job stops on the
    other host and continues there alone; the lost host comes back, and the next restart uses both.
    """
    config = tiny_config(
        train__epochs=None, train__steps=90, checkpoint={"every_steps": 5},
        launch={"heartbeat_seconds": 10, "restart_wait_seconds": 0},
    )  # fmt: skip
    whole = forks.train(config, "--output_dir", tmp_path / "whole", ranks=2)
    assert whole.code == 0, whole.output
    log = tmp_path / "log"
    process = start_launch(
        hosts, hostfile, log, "train.py", "--config", config,
        options=["--max_restarts", "1", "--launcher", "torchrun"],  # the quickest to start
    )  # fmt: skip

    def printed(text):
        return lambda: text in log.read_text()

    wait_until(at_step(tmp_path / "run", 10), process)
    hosts.cut(2)
    hosts.kill(2)
    lost_at = time.monotonic()
    try:
        wait_until(printed("launch: node-2 is lost: no message from it for"), process)
        while hosts.processes(1, "cluster/rank.py"):
            time.sleep(0.2)
        assert time.monotonic() - lost_at < 10 + 3, "launch.heartbeat_seconds, and some for polling"
        wait_until(
            printed("launch: continuing without node-2: node-2: ssh: cannot be reached"), process
        )
    finally:
        hosts.mend(2)
        hosts.boot(2)
    wait_until(lambda: re.search(r"converting .* for 1 ranks", log.read_text()), process)
    alone = read_metrics(tmp_path / "run")[-1]["step"]
    wait_until(at_step(tmp_path / "run", alone // 5 * 5 + 10), process)
    hosts.run(1, kill("[t]rain.py --config"))
    assert process.wait(300) == 0, log.read_text()
    output = log.read_text()
    assert re.search(r"rank 0 on node-1 was killed by SIGKILL", output)
    assert re.search(r"converting .* for 2 ranks", output), "with node-2 again"
    assert output.count("launch: restart from step_") == 2, "two restarts, each after progress"
    curves = [np.array(losses_of(tmp_path / name)) for name in ("run", "whole")]
    assert curves[0].shape == curves[1].shape == (90, 3), "each step once"
    np.testing.assert_allclose(curves[0][:40], curves[1][:40], rtol=1e-5)
    assert_nothing_left(hosts, str(config))


# --------------------------------------------------------------------------------------------------
# Ways in which a job ends, after each of which nothing is left

SLEEP = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], f"started_{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(1000)
"""


def kill(pattern, number="KILL"):
    return f"pkill -{number} -f {shlex.quote(pattern)}"


ENDINGS = {  # action, exit code, printed line
    "a rank is killed": (
        lambda hosts, process: hosts.run(2, kill("sleep.py")),
        137, "rank 1 on node-2 was killed by SIGKILL (out of memory? check `dmesg` there)"),
    "a node launcher is killed": (
        lambda hosts, process: hosts.run(2, kill("[d]eepspeed.launcher.launch")),
        1, "the launcher on node-2 was killed; its ranks were preempted"),
    "a link is cut": (
        lambda hosts, process: hosts.cut(2), 1, "node-2 is lost: no message from it for"),
    "launch.sh is killed": (lambda hosts, process: process.kill(), -9, ""),
    "Ctrl-C, twice": (
        lambda hosts, process: (process.send_signal(signal.SIGINT), time.sleep(1),
                                process.send_signal(signal.SIGINT)),
        130, "stopped immediately"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDINGS)
@needs_hosts
def test_however_it_ends_nothing_is_left_and_nothing_else_is_touched(
    hosts, hostfile, tmp_path, case
):
    script = tmp_path / "sleep.py"
    script.write_text(SLEEP)
    # DeepSpeed's Ctrl-C handler kills every process with this in its command line, on every host
    foreign = subprocess.Popen(
        hosts.ssh(1, f"exec -a '{sys.executable} -u -m deepspeed.launcher.launch' sleep 300")
    )
    log = tmp_path / "log"
    process = start_launch(hosts, hostfile, log, script, tmp_path,
                           options=["--heartbeat_seconds", "10"])  # fmt: skip
    try:
        wait_until(lambda: len([*tmp_path.glob("started_?")]) == 2, process)
        act, expected, line = ENDINGS[case]
        act(hosts, process)
        began = time.monotonic()
        code = process.wait(60)
        if case == "a link is cut":
            time.sleep(max(0, began + 12 - time.monotonic()))  # heartbeat_seconds and polling
            hosts.mend(2)
        assert code == expected, log.read_text()
        assert line in log.read_text()
        assert_nothing_left(hosts, str(script), seconds=15)
        assert foreign.poll() is None and hosts.processes(1, "launcher.launch 300"), (
            "another job's process"
        )
    finally:
        hosts.mend(2)
        hosts.run(1, kill("launcher.launch 300"))
        foreign.kill()
        process.kill()
