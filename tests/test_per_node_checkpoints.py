"""checkpoint.node_local: each node keeps its own ranks' shards on its own disk. The nodes are
forked ranks with their own host name and disk (tests/fork_server.py).

pytest tests/test_per_node_checkpoints.py
"""

import os
import shutil
import subprocess

import pytest
from conftest import read_metrics

from zerotrain.checkpoint.find import checkpoint_problem, inspect_part, missing_ranks

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
    settings = {"every_steps": 2, "node_local": True}
    config = tiny_config(
        model=tiny_model_with_dropout, train__epochs=None, train__steps=6, checkpoint=settings,
        ds_config="ds_configs/zero3.json",
    )  # fmt: skip
    whole = forks.train(config, "--output_dir", tmp_path / "whole", ranks=3)
    assert whole.code == 0, whole.output
    expected = curve(tmp_path / "whole")
    finished = forks.train(config, **disks.ranks(2, 1))
    assert finished.code == 0, finished.output
    assert disks.names() == [["step_00000004", "step_00000006"]] * 2
    parts = [inspect_part(disks.step(node, 6), checksums=True) for node in (1, 2)]
    assert parts[0] == parts[1] != inspect_part(disks.step(1, 4))
    assert [missing_ranks(disks.step(node, 6)) for node in (1, 2)] == [[2], [0, 1]]

    shutil.rmtree(disks.step(2, 6))
    finished = forks.train(config, **disks.ranks(2, 1))
    assert finished.code == 0, finished.output
    newest, older = disks.at / "checkpoints/step_00000006", disks.at / "checkpoints/step_00000004"
    assert f"skipping {newest}: node-2: it does not exist\n" in finished.output
    assert f"resuming from {older}: step 4\n" in finished.output
    assert curve(disks.each[0]) == expected
    assert len({inspect_part(disks.step(node, 6)) for node in (1, 2)}) == 1

    def refusal(*flags, **where):
        finished = forks.train(config, *flags, **(where or disks.ranks(2, 1)))
        assert finished.code == 2 and len(set(finished.errors)) == 1, finished.output
        return finished.errors[0]

    line = refusal("--checkpoint.node_local", "false")
    assert "node-2 does not see" in line and "checkpoint.node_local true" in line
    line = refusal(at=disks.at, disks={disks.each[0]: 2, f"{disks.each[0]}/.": 1})
    assert "each node needs a disk of its own" in line
    assert "gather_checkpoint.py" in refusal(**disks.ranks(1, 1))
    assert "gather_checkpoint.py" in checkpoint_problem(disks.step(1, 6))


def test_a_full_disk_on_one_node_leaves_nothing_on_any(forks, tiny_config, disks):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500k", "none", disks.each[1]], check=True)
    try:
        config = tiny_config(
            checkpoint={"every_steps": 2, "node_local": True, "on_failed_save": "continue"}
        )  # fmt: skip
        finished = forks.train(config, **disks.ranks(2, 1))
        assert finished.code == 0, finished.output
        assert "failed: node-2: " in finished.output
        assert disks.names()[0] == disks.names()[1] != [], "the same on both, nothing half-written"
    finally:
        subprocess.run(["umount", disks.each[1]], check=True)
