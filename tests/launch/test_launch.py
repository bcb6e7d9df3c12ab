"""scripts/launch.sh trains: it loses hosts, replaces them and resumes.
pytest tests/launch/test_launch.py
"""

import json
import math
import re
import shlex
import shutil
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from harness.processes import run, wait_until
from harness.repository import REPO
from harness.runs import assert_each_step_once, curve, determined, read_metrics
from namespaces import kill, left_on_hosts, needs_hosts, start

from zerotrain.launch.launch import Attempt, event_of
from zerotrain.launch.node import EVENT
from zerotrain.tools.goodput import USEFUL, measure_goodput
from zerotrain.tools.launches import note_attempt

pytest_plugins = ["namespaces"]
LAUNCH = REPO / "scripts/launch.sh"


def at_step(folder, step):
    return (folder / "checkpoints" / f"step_{step:08d}" / "COMPLETE").exists


def check_goodput(folder):
    """Compare the parts of a run of several attempts by launch.sh with its records."""
    goodput = measure_goodput(folder)
    seconds = goodput.seconds
    assert math.isclose(sum(seconds.values()), goodput.wall_seconds, rel_tol=1e-9)
    for part in ("imports", "loading", "preflight", "detection", "ending the ranks", "saves"):
        assert seconds[part] > 0, part
    assert seconds["between two starts, not recorded"] == 0 and seconds["other"] > 0
    steps = [step["step_seconds"] for step in read_metrics(folder)]
    assert 0 < seconds[USEFUL] <= sum(steps) and 0 < goodput.share < 1
    assert goodput.to_next_step and min(goodput.to_next_step) > 0
    without = folder.with_name("without")
    without.mkdir()
    shutil.copy(folder / "metrics.jsonl", without)
    unnoted = measure_goodput(without)
    assert unnoted.seconds["between two starts, not recorded"] > 0 == unnoted.seconds["preflight"]
    assert unnoted.seconds[USEFUL] == seconds[USEFUL]
    assert unnoted.wall_seconds == goodput.wall_seconds and unnoted.share == goodput.share
    assert goodput.share == read_metrics(folder)[-1]["goodput"]


@needs_hosts
@pytest.mark.timeout(2000)
def test_a_spare_host_replaces_a_lost_one_and_a_run_goes_on_with_fewer_and_under_deepspeed(
    forks, hosts, tiny_config, tmp_path
):
    """The job needs two of three hosts. A link is cut and every process behind it is killed, so no
    process reports it. The spare replaces the host, and the losses stay the same bit for bit. The
    spare is lost as well, and the job goes on alone on the first host. The host that was lost first
    returns, and the next restart uses it. Then the job is preempted, and bare deepspeed finishes
    it. DeepSpeed's launcher starts on the first host, as in its README.
    """
    config = tiny_config(
        train__steps=90, checkpoint={"every_steps": 5}, ds_config="ds_configs/zero1.json"
    )
    whole = "--output_dir", tmp_path / "whole", "--checkpoint.every_steps", 90
    forks.finish(config, *whole, ranks=2)
    log, folder, hostfile = tmp_path / "log", tmp_path / "run", tmp_path / "hostfile"
    slots = [f"{name} slots=1\n" for name in ("node-1", "node-2", "node-3")]
    hostfile.write_text("".join(slots))
    hosts.boot(3)
    options = ["--nodes", "2", "--max_restarts", "1", "--restart_wait_seconds", "0"]
    process = start(
        hosts, log, LAUNCH, "--hostfile", hostfile, *options, "--", "train.py", "--config", config
    )

    def seen(text, times=1):
        wait_until(lambda: log.read_text().count(text) == times, process, log)

    def new_checkpoint():
        done = read_metrics(folder)[-1]["step"]
        wait_until(at_step(folder, done // 5 * 5 + 10), process, log)

    def lose(i):
        hosts.cut(i)
        hosts.kill(i)

    try:
        wait_until(at_step(folder, 10), process, log)
        lose(2)
        seen("launch: continuing on node-1, node-3: node-2: ssh: ")
        seen("launch: restart from step_")
        new_checkpoint()
        lose(3)
        seen("launch: continuing on node-1: ")
        seen("launch: restart from step_", times=2)
        alone = int(re.findall(r"restart from step_(\d+)", log.read_text())[-1])
        hosts.mend(2)
        hosts.boot(2)
        new_checkpoint()
        hosts.run(1, kill("[t]rain.py --config"))
        seen("launch: restart from step_", times=3)
        new_checkpoint()
        while process.poll() is None:
            process.terminate()
            time.sleep(0.02)
    finally:
        process.kill()
    assert process.returncode == 75, log.read_text()
    done = read_metrics(folder)[-1]["step"]
    assert done < 90 and at_step(folder, done)()
    assert determined(folder)[:alone] == determined(tmp_path / "whole")[:alone]
    check_goodput(folder)
    assert not left_on_hosts(str(config))
    hostfile.write_text("".join(slots[:2]))

    (tmp_path / "env").write_text(
        "DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\nGLOO_SOCKET_IFNAME=eth0\nHF_HUB_OFFLINE=1\n"
    )
    deepspeed = [
        "env", "-C", REPO, f"PDSH_SSH_ARGS_APPEND=-F {hosts.ssh_config}", "DS_ACCELERATOR=cpu",
        f"DS_ENV_FILE={tmp_path}/env", sys.executable.replace("python", "deepspeed"),
        "--hostfile", hostfile, "--master_addr", "node-1", "--master_port", "29572",
        "--no_ssh_check", "train.py", "--config", config,
    ]  # fmt: skip
    resumed = run(hosts.ssh(1, shlex.join(map(str, deepspeed))), code=0)
    assert f"step_{done:08d}: step {done}" in resumed.output, resumed.output
    assert_each_step_once(folder)
    assert len(curve(folder)) == 90
    np.testing.assert_allclose(curve(folder)[:40], curve(tmp_path / "whole")[:40], rtol=1e-5)
    assert not left_on_hosts(str(config))


@pytest.mark.parametrize("event, is_said", [
    ({"failed": "rank 0", "code": 1}, True),
    ({"failed": "rank 0", "code": 0}, False),
    ({"failed": "rank 0", "code": 10**30}, False),
    ({"stalled": 2.0, "watched": 30.0}, True),
    ({"stalled": float("inf"), "watched": float("nan")}, False),
    ({"stalled": -1.0, "watched": 30.0}, False),
])  # fmt: skip
def test_an_event_that_no_wrapper_says_is_a_line_of_a_rank(event, is_said):
    line = f"{EVENT}{json.dumps(event)}"
    assert (event_of(line) is not None) == is_said


def test_launch_follows_no_link_in_a_run_folder(tmp_path):
    theirs, event = tmp_path / "theirs", {"stalled": 1.0, "watched": 30.0}
    theirs.write_text("theirs")
    files = [tmp_path / name for name in ("stalls.jsonl", "launches.jsonl")]
    for file in files:
        file.symlink_to(theirs)
    (tmp_path / "metrics.jsonl").touch()
    launcher = SimpleNamespace(job=SimpleNamespace(config=SimpleNamespace(output_dir=tmp_path)))
    Attempt.handle_event(launcher, SimpleNamespace(host="a"), event)
    note_attempt(tmp_path, {"started": 1.0}, "")
    assert not any(file.is_symlink() for file in files) and theirs.read_text() == "theirs"
