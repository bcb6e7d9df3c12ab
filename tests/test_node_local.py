"""Per-node checkpoints, for runs without a shared disk.    pytest tests/test_node_local.py

The nodes are forked ranks with their own host name and disk (tests/fork_server.py), or hosts with
an sshd (tests/namespaces.py).
"""

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import namespaces
import numpy as np
import pytest
from conftest import REPO, environment, read_metrics, wait_until

from checkpoint.export import export_checkpoint
from checkpoint.find import (
    check_local_shards,
    checkpoint_problem,
    inspect_checkpoint,
    joint_problem,
)
from cluster.hosts import Reach
from runtime.errors import UserError
from scripts import gather_checkpoint

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount disks for nodes")
WHY_NOT = namespaces.why_not()


def curve(folder):
    return [(step["step"], step["loss"], step["grad_norm"]) for step in read_metrics(folder)]


class Disks:
    """The folders that node-1 and node-2 see in place of the run folder."""

    def __init__(self, folder) -> None:
        self.at = folder / "run"
        self.each = [folder / "disk_1", folder / "disk_2"]
        for path in (self.at, *self.each):
            path.mkdir()

    def ranks(self, *counts):
        """Arguments of forks.train for these numbers of ranks on the nodes."""
        return {"at": self.at, "disks": dict(zip(self.each, counts, strict=True))}

    def names(self):
        return [sorted(p.name for p in (disk / "checkpoints").iterdir()) for disk in self.each]

    def step(self, node, step):
        return self.each[node - 1] / "checkpoints" / f"step_{step:08d}"


@pytest.fixture
def disks(tmp_path):
    return Disks(tmp_path)


@NEEDS_ROOT
@pytest.mark.launch
@pytest.mark.parametrize("stage", [2, 3])
def test_per_node_checkpoints_count_only_together(
    forks, tiny_config, tmp_path, disks, tiny_model_with_dropout, stage
):
    """After a crash between the renames of two nodes the checkpoint is skipped, and the resumed
    curve is the same bit for bit. What cannot be resumed is refused before anything is loaded.
    """
    settings = {"every_steps": 2, "node_local": True}
    config = tiny_config(
        model=tiny_model_with_dropout, train__epochs=None, train__steps=6, checkpoint=settings,
        ds_config=f"ds_configs/zero{stage}.json",
    )  # fmt: skip
    whole = forks.train(config, "--output_dir", tmp_path / "whole", ranks=3)
    assert whole.code == 0, whole.output
    expected = curve(tmp_path / "whole")
    finished = forks.train(config, **disks.ranks(2, 1))
    assert finished.code == 0, finished.output
    assert disks.names() == [["step_00000004", "step_00000006"]] * 2
    parts = [inspect_checkpoint(disks.step(node, 6), checksums=True) for node in (1, 2)]
    assert [part.problem for part in parts] == [None, None]
    assert [sorted(part.ranks) for part in parts] == [[0, 1], [2]]
    assert parts[0].save_id == parts[1].save_id != inspect_checkpoint(disks.step(1, 4)).save_id
    for disk in disks.each:  # no probe or draft is left
        left = {path.name for path in disk.iterdir()} - {"checkpoints"}
        assert left == (set() if disk is disks.each[1] else {
            "metrics.jsonl", "resolved_config.yaml", "resolved_ds_config.json"}), left  # fmt: skip

    shutil.rmtree(disks.step(2, 6))
    finished = forks.train(config, **disks.ranks(2, 1))
    assert finished.code == 0, finished.output
    newest, older = disks.at / "checkpoints/step_00000006", disks.at / "checkpoints/step_00000004"
    assert f"skipping {newest}: it is missing on node-2\n" in finished.output
    assert f"resuming from {older}: step 4\n" in finished.output
    assert curve(disks.each[0]) == expected
    parts = [inspect_checkpoint(disks.step(node, 6)) for node in (1, 2)]
    assert parts[0].save_id == parts[1].save_id
    if stage == 3:
        return

    def refusal(*flags, **where):
        finished = forks.train(config, *flags, **(where or disks.ranks(2, 1)))
        assert finished.code == 2 and len(set(finished.errors)) == 1, finished.output
        return finished.errors[0]

    line = refusal("--checkpoint.node_local", "false")
    assert "node-2 does not see what node-1 writes to" in line
    assert "set checkpoint.node_local true" in line
    line = refusal(at=disks.at, disks={disks.each[0]: 2, f"{disks.each[0]}/.": 1})
    assert "node-1 sees in output_dir" in line and "what node-1 and node-2 wrote there" in line
    line = refusal(**disks.ranks(1, 1))
    assert "node-1: " in line and "but needs those of rank 2: " in line
    assert "scripts/gather_checkpoint.py" in line

    assert "without rank 2; scripts/gather_checkpoint.py" in checkpoint_problem(disks.step(1, 6))
    with pytest.raises(UserError, match="it is a per-node checkpoint without rank 2"):
        export_checkpoint(disks.step(1, 6), tmp_path / "exported")
    with pytest.raises(UserError, match=r"of ranks 0, 1 of 3 here, but needs those of rank 2: "):
        check_local_shards(disks.step(1, 6), [0, 2])  # as with the hostfile in another order

    shard = next((disks.step(2, 6) / "deepspeed").glob("*optim_states.pt"))
    os.truncate(shard, shard.stat().st_size // 2)
    line = refusal("--checkpoint.resume", newest)
    assert f"{newest} is not a usable checkpoint: node-2: deepspeed/" in line
    assert "bytes instead of" in line
    another_save = {
        "node-1": inspect_checkpoint(disks.step(1, 6)),
        "node-2": inspect_checkpoint(disks.step(2, 4)),
    }
    assert joint_problem(another_save) == "its nodes hold different saves"
    shutil.rmtree(disks.each[1] / "checkpoints")
    line = refusal()
    assert "no usable checkpoint in " in line
    assert "node-2 has no checkpoints at all: restore its folder" in line
    assert "scripts/gather_checkpoint.py" in line


@NEEDS_ROOT
@pytest.mark.launch
def test_a_full_disk_on_one_node_leaves_nothing_on_any(forks, tiny_config, disks):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500k", "none", disks.each[1]], check=True)
    try:
        config = tiny_config(
            checkpoint={"every_steps": 2, "node_local": True, "on_failed_save": "continue"}
        )  # fmt: skip
        finished = forks.train(config, **disks.ranks(2, 1))
        assert finished.code == 0, finished.output
        assert "failed: node-2: it needs" in finished.output
        assert disks.names()[0] == disks.names()[1] != [], "the same on both, nothing half-written"
    finally:
        subprocess.run(["umount", disks.each[1]], check=True)


# --------------------------------------------------------------------------------------------------
# Real hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    made = namespaces.Hosts(tmp_path_factory.mktemp("hosts"), 2).up()
    yield made
    made.down()


def needs_hosts(test):
    return pytest.mark.launch(pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))(test))


@pytest.fixture
def hostfile(hosts, tmp_path, disks):
    """A hostfile of the two hosts, each with its own disk."""
    for i, disk in enumerate(disks.each, start=1):
        hosts.boot(i, {disk: disks.at})
    path = tmp_path / "hostfile"
    path.write_text("node-1 slots=2\nnode-2 slots=1\n")
    return path


@needs_hosts
def test_a_killed_run_restarts_on_hosts_without_a_shared_disk(
    hosts, hostfile, forks, tiny_config, tmp_path, disks, tiny_model_with_dropout
):
    config = tiny_config(
        model=tiny_model_with_dropout, train__epochs=None, train__steps=12,
        eval__every_steps=4, checkpoint={"every_steps": 2, "node_local": True},
    )  # fmt: skip
    whole = forks.train(config, "--output_dir", tmp_path / "whole", ranks=3)
    assert whole.code == 0, whole.output
    log, ssh_args = tmp_path / "log", f"-F {hosts.ssh_config}"
    command = [REPO / "scripts/launch.sh", "--hostfile", hostfile, "--ssh_args", ssh_args,
               "--max_restarts", "2", "--", "train.py", "--config", config]  # fmt: skip
    process = subprocess.Popen(
        [str(c) for c in command], cwd=REPO, env=environment(), stdout=log.open("w"),
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(disks.step(2, 4).exists, process, 300)
        hosts.run(2, "pkill -KILL -f '[t]rain.py --config'")
        assert process.wait(300) == 0, log.read_text()
    finally:
        process.kill()
    assert "launch: restart from step_" in log.read_text()
    assert "resuming from " in log.read_text()
    assert curve(disks.each[0]) == curve(tmp_path / "whole"), "each step once, bit for bit"
    assert disks.names()[0] == disks.names()[1]
    assert disks.names()[0][-2:] == ["step_00000010", "step_00000012"]


@needs_hosts
def test_per_node_checkpoints_are_combined(
    hosts, hostfile, forks, tiny_config, tmp_path, disks, monkeypatch
):
    """The result is exported and resumed with other world sizes, on one node and, copied to each,
    on two; and what cannot be combined is refused.
    """
    settings = {"every_steps": 2, "node_local": True}
    config = tiny_config(train__epochs=None, train__steps=6, checkpoint=settings)
    finished = forks.train(config, **disks.ranks(2, 1))
    assert finished.code == 0, finished.output
    expected = curve(disks.each[0])
    ssh_args = f"-F {hosts.ssh_config}"
    script = "scripts/gather_checkpoint.py"

    def gather(source, out, listed=hostfile):
        return forks.script(script, "--hostfile", listed, "--ssh_args", ssh_args, source, out)

    checkpoints, whole_at = disks.at / "checkpoints", tmp_path / "gathered"
    finished = gather(checkpoints / "step_00000004", whole_at)
    assert finished.code == 0, finished.output
    assert checkpoint_problem(whole_at, checksums=True) is None
    assert sorted(inspect_checkpoint(whole_at).ranks) == [0, 1, 2]
    export_checkpoint(whole_at, tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").exists()
    # the last two steps once more, from the step before
    resume = ("--checkpoint.resume", whole_at, "--output_dir")
    finished = forks.train(config, *resume, tmp_path / "one", "--checkpoint.node_local", "false")
    assert finished.code == 0, finished.output
    np.testing.assert_allclose(curve(tmp_path / "one"), expected[-2:], rtol=1e-5)
    for disk in disks.each:
        shutil.rmtree(disk / "checkpoints")
        shutil.copytree(whole_at, disk / "gathered")
    resume = ("--checkpoint.resume", disks.at / "gathered")
    finished = forks.train(config, *resume, **disks.ranks(1, 1))
    assert finished.code == 0, finished.output
    np.testing.assert_allclose(curve(disks.each[0]), expected, rtol=1e-5)

    def refused(source, out, listed=hostfile):
        arguments = ["gather", "--hostfile", listed, "--ssh_args", ssh_args, source, out]
        monkeypatch.setattr(sys, "argv", [str(a) for a in arguments])
        with pytest.raises(UserError) as error:
            gather_checkpoint.main()
        assert not [*tmp_path.glob("out*")], "nothing half-written"
        return str(error.value)

    newest, out = checkpoints / "step_00000006", tmp_path / "out"
    assert "is not empty" in refused(newest, whole_at)
    (tmp_path / "first").write_text("node-1 slots=1\n")
    assert "has the files of rank 1; is it the hostfile of the run?" in (
        refused(newest, out, tmp_path / "first")
    )
    shard = next((disks.step(2, 6) / "deepspeed").glob("*optim_states.pt"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert re.search(r"node-2: .*optim_states.pt is damaged", refused(newest, out))
    shutil.rmtree(disks.step(2, 6))
    assert "step_00000006: it is missing on node-2" in refused(newest, out)
    shutil.rmtree(disks.each[1] / "checkpoints")
    assert "node-2: has no per-node checkpoint: " in refused(disks.at, out)
    hosts.cut(2)
    try:
        finished = gather(disks.at, out)
        assert finished.code == 2 and len(finished.errors) == 1, finished.output
        assert "node-2: cannot be reached over ssh" in finished.errors[0]
    finally:
        hosts.mend(2)


@needs_hosts
def test_a_failed_transfer_names_its_host_and_cause(hosts, tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    for path in (there, here):
        path.mkdir()
    (there / "shard.pt").write_bytes(os.urandom(4 << 20))
    reach = Reach(("-F", str(hosts.ssh_config), "-o", "ServerAliveInterval=1"))

    def failure(*options):
        with pytest.raises((UserError, OSError)) as error:
            gather_checkpoint.rsync(reach, "node-2", there, here, "-r", *options)
        assert "installed" not in str(error.value) and "\n" not in str(error.value)
        return error.value

    def failure_while(lose):
        """In the middle of a transfer that takes 40 s."""
        with ThreadPoolExecutor(1) as pool:
            failed = pool.submit(failure, "--bwlimit=100")
            while not [*here.glob(".shard.pt.*")]:
                assert not failed.done(), failed.result()
                time.sleep(0.01)
            lose(2)
            return str(failed.result())

    try:
        for lose in (hosts.kill, hosts.cut):
            hosts.boot(2)
            lost = failure_while(lose)
            assert lost.startswith("node-2: cannot be reached over ssh (")
    finally:
        hosts.mend(2)
    hosts.boot(2, environment={"PATH": "/nowhere"})
    message = str(failure())
    assert message.startswith("node-2: rsync cannot be run there (") and "apt install" in message
    hosts.boot(2)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500k", "none", here], check=True)
    try:
        assert failure().errno == errno.ENOSPC
    finally:
        subprocess.run(["umount", here], check=True)
    message = str(failure("--nonsense"))
    assert message.startswith("node-2: rsync failed: rsync: --nonsense: unknown option; syntax or")
