"""Hosts without a shared disk: restart, and scripts/gather_checkpoint.py. The hosts have an sshd
(tests/launch/namespaces.py).    pytest tests/launch/test_node_local.py
"""

import shutil
import subprocess
import sys

import namespaces
import numpy as np
import pytest
from harness.inputs import flip
from harness.processes import environment, wait_until
from harness.repository import REPO
from harness.runs import curve
from test_per_node_checkpoints import Disks

from scripts import gather_checkpoint
from zerotrain.runtime.errors import UserError
from zerotrain.tools.saved import checkpoint_problem

WHY_NOT = namespaces.why_not()
pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    made = namespaces.Hosts(tmp_path_factory.mktemp("hosts"), 2).up()
    yield made
    made.down()


@pytest.fixture
def disks(tmp_path):
    return Disks(tmp_path)


@pytest.fixture
def hostfile(hosts, tmp_path, disks):
    """A hostfile of the two hosts, each with its own disk."""
    for i, disk in enumerate(disks.each, start=1):
        hosts.boot(i, {disk: disks.at})
    path = tmp_path / "hostfile"
    path.write_text("node-1 slots=1\nnode-2 slots=1\n")
    return path


def test_a_killed_run_restarts_on_hosts_without_a_shared_disk(
    hosts, hostfile, forks, tiny_config, tmp_path, disks, tiny_model_with_dropout
):
    config = tiny_config(
        model=tiny_model_with_dropout, train__steps=12,
        eval__every_steps=4, checkpoint={"every_steps": 2},
    )  # fmt: skip
    forks.finish(config, "--output_dir", tmp_path / "whole", ranks=2)
    log, ssh_args = tmp_path / "log", f"-F {hosts.ssh_config}"
    command = [REPO / "scripts/launch.sh", "--hostfile", hostfile, "--ssh_args", ssh_args,
               "--max_restarts", "2", "--", "train.py", "--config", config]  # fmt: skip
    process = subprocess.Popen(
        [str(c) for c in command], cwd=REPO, env=environment(), stdout=log.open("w"),
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(disks.step(2, 4).exists, process)
        hosts.run(2, "pkill -KILL -f '[t]rain.py --config'")
        assert process.wait(300) == 0, log.read_text()
    finally:
        process.kill()
    assert "resuming from " in log.read_text()
    assert curve(disks.each[0]) == curve(tmp_path / "whole"), "each step once, bit for bit"
    assert disks.names()[0] == disks.names()[1]
    assert disks.names()[0][-2:] == ["step_00000010", "step_00000012"]


def test_per_node_checkpoints_are_combined(
    hosts, hostfile, forks, tiny_config, tmp_path, disks, monkeypatch
):
    """The result is resumed with other world sizes, on one node and, copied to each, on two; and
    what cannot be combined is refused.
    """
    config = tiny_config(train__steps=6, checkpoint={"every_steps": 2})
    forks.finish(config, **disks.ranks(2, 1))
    expected = curve(disks.each[0])
    ssh_args = f"-F {hosts.ssh_config}"

    def gather(source, out, listed=hostfile):
        arguments = ["gather", "--hostfile", listed, "--ssh_args", ssh_args, source, out]
        monkeypatch.setattr(sys, "argv", [str(a) for a in arguments])
        gather_checkpoint.main()

    checkpoints, whole_at = disks.at / "checkpoints", tmp_path / "gathered"
    gather(checkpoints / "step_00000004", whole_at)
    assert checkpoint_problem(whole_at) is None
    # the last two steps once more, from the step before
    resume = ("--checkpoint.resume", whole_at, "--output_dir")
    forks.finish(config, *resume, tmp_path / "one")
    np.testing.assert_allclose(curve(tmp_path / "one"), expected[-2:], rtol=1e-5)
    for disk in disks.each:
        shutil.copytree(whole_at, disk / "gathered")

    def refused(source, out, listed=hostfile):
        with pytest.raises(UserError) as error:
            gather(source, out, listed)
        assert not [*tmp_path.glob("out*")], "nothing half-written"
        return str(error.value)

    newest, out = checkpoints / "step_00000006", tmp_path / "out"
    (tmp_path / "first").write_text("node-1 slots=1\n")
    assert "shards/rank_00002.pt cannot be read" in refused(newest, out, tmp_path / "first")
    flip(next((disks.step(2, 6) / "shards").iterdir()))
    assert "is damaged" in refused(newest, out)

    for disk in disks.each:
        shutil.rmtree(disk / "checkpoints")
    resume = ("--checkpoint.resume", disks.at / "gathered")
    forks.finish(config, *resume, **disks.ranks(1, 1))
    np.testing.assert_allclose(curve(disks.each[0]), expected, rtol=1e-5)
    assert disks.step(2, 6).exists()
