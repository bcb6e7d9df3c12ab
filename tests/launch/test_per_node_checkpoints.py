"""Nodes without a shared disk, each with its own ranks' shards on its own disk.

The nodes are forked ranks with their own host name and disk (tests/harness/fork_server.py). Real
hosts have an sshd, for rsync.    pytest tests/launch/test_per_node_checkpoints.py
"""

import shutil
from functools import partial

import namespaces
import numpy as np
import pytest
from harness.inputs import flip
from harness.processes import NEEDS_ROOT, mounted
from harness.runs import curve
from namespaces import needs_hosts

from zerotrain.checkpoint.manifest import inspect
from zerotrain.tools.saved import checkpoint_problem

pytest_plugins = ["namespaces"]
pytestmark = NEEDS_ROOT


class Disks:
    """The folders that node-1 and node-2 see instead of the run folder."""

    def __init__(self, folder) -> None:
        self.at = folder / "run"
        self.each = [folder / "disk_1", folder / "disk_2"]
        for path in (self.at, *self.each):
            path.mkdir()

    def ranks(self, *counts):
        """Return arguments of forks.train for these numbers of ranks on the nodes."""
        return {"at": self.at, "disks": dict(zip(self.each, counts, strict=True))}

    def names(self):
        return [sorted(p.name for p in (disk / "checkpoints").iterdir()) for disk in self.each]

    def step(self, node, step):
        return self.each[node - 1] / "checkpoints" / f"step_{step:08d}"


@pytest.fixture
def disks(tmp_path):
    return Disks(tmp_path)


def test_per_node_checkpoints_count_only_together(
    forks, tiny_config, tmp_path, disks, tiny_model_with_dropout
):
    """After a crash between the renames of two nodes, the checkpoint is skipped, and the resumed
    curve is the same bit for bit. A checkpoint that cannot be resumed is an error before loading.
    """
    config = tiny_config(
        model=tiny_model_with_dropout, train__steps=6,
        checkpoint={"every_steps": 2}, ds_config="ds_configs/zero3.json",
    )  # fmt: skip
    forks.finish(config, "--output_dir", tmp_path / "whole", ranks=3)
    expected = curve(tmp_path / "whole")
    finished = forks.finish(config, **disks.ranks(2, 1))
    assert finished.output.count("WARNING: node-2 does not share") == 1
    assert disks.names() == [["step_00000004", "step_00000006"]] * 2
    (first, missing), (second, also) = (inspect(disks.step(node, 6)) for node in (1, 2))
    assert first == second != inspect(disks.step(1, 4))[0]
    shards = [f"shards/rank_0000{rank}.pt" for rank in range(3)]
    assert [*missing] == shards[2:] and [*also] == shards[:2]

    shutil.rmtree(disks.step(2, 6))
    finished = forks.finish(config, **disks.ranks(2, 1))
    checkpoints = disks.at / "checkpoints"
    assert f"skipping {checkpoints}/step_00000006: " in finished.output
    assert f"resuming from {checkpoints}/step_00000004: step 4\n" in finished.output
    assert curve(disks.each[0]) == expected
    assert len({inspect(disks.step(node, 6))[0] for node in (1, 2)}) == 1

    moved = forks.refusal(config, **disks.ranks(1, 2))
    assert "same ranks on the same nodes, or gather the files of all nodes" in moved
    forks.finish(config, **disks.ranks(2, 1))
    assert checkpoint_problem(disks.step(1, 6)).startswith(shards[2])
    shutil.rmtree(disks.step(2, 6))
    shutil.rmtree(disks.step(2, 4))
    lost = forks.refusal(config, **disks.ranks(2, 1))
    assert "not all nodes have the same save" in lost


def test_a_full_disk_on_one_node_leaves_nothing_on_any(forks, tiny_config, disks):
    with mounted(disks.each[1], "-t", "tmpfs", "-o", "size=500k", "none"):
        config = tiny_config(checkpoint={"every_steps": 2, "keep_last": 9})
        failed = forks.train(config, **disks.ranks(2, 1), code=1)
        assert "@ node-2]" in failed.error
        assert disks.names()[0] == disks.names()[1] != [], "the same on both, nothing half-written"


@needs_hosts
def test_gathered_checkpoints_resume_on_other_nodes(
    hosts, hostfile, forks, tiny_config, tmp_path, disks
):
    """On one node and, copied to each, on two. Missing and damaged files are errors.

    Each host sees its own disk instead of the run folder.
    """
    for i, disk in enumerate(disks.each, start=1):
        hosts.boot(i, {disk: disks.at})
    config = tiny_config(train__steps=6, checkpoint={"every_steps": 2})
    forks.finish(config, **disks.ranks(2, 1))
    expected = curve(disks.each[0])

    def gather(step, out, listed=hostfile, code=2):
        source = disks.at / "checkpoints" / f"step_{step:08d}"
        command = ["scripts.gather_checkpoint", "--hostfile", listed, source, out]
        return forks.script(*namespaces.with_ssh(hosts, command), code=code)

    whole_at, out = tmp_path / "gathered", tmp_path / "out"
    gather(4, whole_at, code=0)
    assert checkpoint_problem(whole_at) is None
    # the last two steps once more, from the step before
    resume = ("--checkpoint.resume", whole_at, "--output_dir")
    forks.finish(config, *resume, tmp_path / "one")
    np.testing.assert_allclose(curve(tmp_path / "one"), expected[-2:], rtol=1e-5)
    for disk in disks.each:
        shutil.copytree(whole_at, disk / "gathered")

    first = tmp_path / "first"
    first.write_text("node-1 slots=1\n")
    lacking = gather(6, out, first).error
    assert "shards/rank_00002.pt cannot be read" in lacking
    assert "; list all hosts, or take another step" in lacking
    flip(next((disks.step(2, 6) / "shards").iterdir()))
    assert "is damaged" in gather(6, out).error
    assert not [*tmp_path.glob("*out*")], "nothing half-written"

    copies, combined = tmp_path / "copies", tmp_path / "combined"
    combine = partial(forks.script, "scripts.gather_checkpoint", "--disks", copies)
    assert "give a folder with one per node" in combine("run", combined, code=2).error
    for i, disk in enumerate(disks.each):
        (copies / f"{i}").mkdir(parents=True)
        (copies / f"{i}" / "run").symlink_to(disk)
    checkpoint = "run/checkpoints/step_0000000"
    assert "; check the path" in combine(f"{checkpoint}9", combined, code=2).error
    combine(f"{checkpoint}4", combined, code=0)

    for disk in disks.each:
        shutil.rmtree(disk / "checkpoints")
    resume = ("--checkpoint.resume", disks.at / "gathered")
    forks.finish(config, *resume, **disks.ranks(1, 1))
    np.testing.assert_allclose(curve(disks.each[0]), expected, rtol=1e-5)
    assert disks.step(2, 6).exists()
