"""Hosts without a shared disk: restart, and scripts/gather_checkpoint.py. The hosts have an sshd
(tests/launch/namespaces.py).    pytest tests/launch/test_node_local.py
"""

import shutil

import namespaces
import numpy as np
import pytest
from harness.inputs import flip
from harness.processes import wait_until
from harness.repository import REPO
from harness.runs import curve
from namespaces import needs_hosts
from test_per_node_checkpoints import Disks

from zerotrain.tools.saved import checkpoint_problem

pytest_plugins = ["namespaces"]


@pytest.fixture
def disks(tmp_path, hosts):
    """Each host sees its own disk in place of the run folder."""
    made = Disks(tmp_path)
    for i, disk in enumerate(made.each, start=1):
        hosts.boot(i, {disk: made.at})
    return made


HELD = """
import os, runpy, time
from zerotrain.data import loader
load_steps = loader.load_steps
def held(*arguments):
    for i, batch in enumerate(load_steps(*arguments)):
        if i == 9 and os.environ["RANK"] == "1":  # not when resumed: fewer steps are left
            time.sleep(1000)
        yield batch
loader.load_steps = held
runpy.run_path("train.py", run_name="__main__")
"""


@needs_hosts
def test_a_killed_run_restarts_on_hosts_without_a_shared_disk(
    hosts, hostfile, forks, tiny_config, tmp_path, disks, tiny_model_with_dropout
):
    config = tiny_config(
        model=tiny_model_with_dropout, train__steps=12,
        eval__every_steps=4, checkpoint={"every_steps": 2},
    )  # fmt: skip
    forks.finish(config, "--output_dir", tmp_path / "whole", ranks=2)
    script, log = tmp_path / "held" / "train.py", tmp_path / "log"
    script.parent.mkdir()
    script.write_text(HELD)
    process = namespaces.start(
        hosts, log, REPO / "scripts/launch.sh", "--hostfile", hostfile, "--max_restarts", "2",
        "--", script, "--config", config,
    )  # fmt: skip
    try:
        wait_until(lambda: disks.step(1, 8).exists() and disks.step(2, 8).exists(), process, log)
        hosts.run(2, "pkill -KILL -f '[t]rain.py --config'")
        assert process.wait(300) == 0, log.read_text()
    finally:
        process.kill()
    assert "launch: restart from step_00000008\n" in log.read_text()
    assert "/step_00000008: step 8\n" in log.read_text()
    assert curve(disks.each[0]) == curve(tmp_path / "whole"), "each step once, bit for bit"
    assert disks.names()[0] == disks.names()[1]
    assert disks.names()[0][-2:] == ["step_00000010", "step_00000012"]


@needs_hosts
def test_per_node_checkpoints_are_combined(hosts, hostfile, forks, tiny_config, tmp_path, disks):
    """The result is resumed with other world sizes, on one node and, copied to each, on two; and
    what cannot be combined is refused.
    """
    config = tiny_config(train__steps=6, checkpoint={"every_steps": 2})
    forks.finish(config, **disks.ranks(2, 1))
    expected = curve(disks.each[0])

    def gather(step, out, listed=hostfile):
        source = disks.at / "checkpoints" / f"step_{step:08d}"
        command = ["scripts.gather_checkpoint", "--hostfile", listed, source, out]
        return forks.script(*namespaces.with_ssh(hosts, command))

    whole_at, out = tmp_path / "gathered", tmp_path / "out"
    gathered = gather(4, whole_at)
    assert gathered.code == 0 and checkpoint_problem(whole_at) is None, gathered.output
    # the last two steps once more, from the step before
    resume = ("--checkpoint.resume", whole_at, "--output_dir")
    forks.finish(config, *resume, tmp_path / "one")
    np.testing.assert_allclose(curve(tmp_path / "one"), expected[-2:], rtol=1e-5)
    for disk in disks.each:
        shutil.copytree(whole_at, disk / "gathered")

    first = tmp_path / "first"
    first.write_text("node-1 slots=1\n")
    lacking = gather(6, out, first)
    assert lacking.code == 2 and "shards/rank_00002.pt cannot be read" in lacking.error
    flip(next((disks.step(2, 6) / "shards").iterdir()))
    damaged = gather(6, out)
    assert damaged.code == 2 and "is damaged" in damaged.error
    assert not [*tmp_path.glob("*out*")], "nothing half-written"

    for disk in disks.each:
        shutil.rmtree(disk / "checkpoints")
    resume = ("--checkpoint.resume", disks.at / "gathered")
    forks.finish(config, *resume, **disks.ranks(1, 1))
    np.testing.assert_allclose(curve(disks.each[0]), expected, rtol=1e-5)
    assert disks.step(2, 6).exists()
