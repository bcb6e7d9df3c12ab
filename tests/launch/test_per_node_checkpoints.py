"""Nodes without a shared disk: each keeps its own ranks' shards on its own disk. The nodes are
forked ranks with their own host name and disk (tests/harness/fork_server.py).

pytest tests/launch/test_per_node_checkpoints.py
"""

import os
import shutil
import subprocess

import pytest
from harness.runs import read_metrics

from zerotrain.checkpoint.manifest import inspect
from zerotrain.tools.saved import checkpoint_problem

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount disks for nodes")


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


def test_per_node_checkpoints_count_only_together(
    forks, tiny_config, tmp_path, disks, tiny_model_with_dropout
):
    """After a crash between the renames of two nodes the checkpoint is skipped, and the resumed
    curve is the same bit for bit. What cannot be resumed is refused before anything is loaded.
    """
    config = tiny_config(
        model=tiny_model_with_dropout, train__epochs=None, train__steps=6,
        checkpoint={"every_steps": 2}, ds_config="ds_configs/zero3.json",
    )  # fmt: skip
    forks.train(config, "--output_dir", tmp_path / "whole", ranks=3, code=0)
    expected = curve(tmp_path / "whole")
    finished = forks.train(config, **disks.ranks(2, 1), code=0)
    assert finished.output.count("WARNING: node-2 does not share") == 1
    assert disks.names() == [["step_00000004", "step_00000006"]] * 2
    (first, missing), (second, also) = (inspect(disks.step(node, 6)) for node in (1, 2))
    assert first == second != inspect(disks.step(1, 4))[0]
    shards = [f"shards/rank_0000{rank}.pt" for rank in range(3)]
    assert [*missing] == shards[2:] and [*also] == shards[:2]

    shutil.rmtree(disks.step(2, 6))
    finished = forks.train(config, **disks.ranks(2, 1), code=0)
    newest, older = disks.at / "checkpoints/step_00000006", disks.at / "checkpoints/step_00000004"
    assert f"skipping {newest}: " in finished.output
    assert f"resuming from {older}: step 4\n" in finished.output
    assert curve(disks.each[0]) == expected
    assert len({inspect(disks.step(node, 6))[0] for node in (1, 2)}) == 1

    moved = forks.train(config, **disks.ranks(1, 2))
    assert moved.code == 2 and "gather the files of all nodes" in moved.errors[0], moved.output
    assert checkpoint_problem(disks.step(1, 6)).startswith(shards[2])
    shutil.rmtree(disks.step(2, 6))
    shutil.rmtree(disks.step(2, 4))
    lost = forks.train(config, **disks.ranks(2, 1))
    assert lost.code == 2 and "not all nodes have the same save" in lost.errors[0], lost.output


def test_a_full_disk_on_one_node_leaves_nothing_on_any(forks, tiny_config, disks):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500k", "none", disks.each[1]], check=True)
    try:
        config = tiny_config(checkpoint={"every_steps": 2, "keep_last": 9})
        finished = forks.train(config, **disks.ranks(2, 1))
        assert finished.code == 1 and "@ node-2]" in finished.errors[0]
        assert disks.names()[0] == disks.names()[1] != [], "the same on both, nothing half-written"
    finally:
        subprocess.run(["umount", disks.each[1]], check=True)
