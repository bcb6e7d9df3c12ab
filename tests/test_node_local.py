"""Checkpoints without a shared disk: each node its part.    pytest tests/test_node_local.py

Nodes are ranks with a host name and a disk of their own (tests/fork_server.py), or hosts with an
sshd (tests/namespaces.py).
"""

import json
import os
import shutil
import subprocess

import namespaces
import pytest
from conftest import read_metrics

from finetune.checkpoint import fault, look_at
from finetune.errors import UserError
from finetune.export import export_checkpoint

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give nodes their disks")
WHY_NOT = namespaces.why_not()


def curve(folder):
    return [(step["step"], step["loss"], step["grad_norm"]) for step in read_metrics(folder)]


class Disks:
    """What each of two nodes has in the place of the run's folder: 2 ranks on node-1, 1 on node-2."""

    def __init__(self, folder) -> None:
        self.at = folder / "run"
        self.each = [folder / "disk_1", folder / "disk_2"]
        for path in (self.at, *self.each):
            path.mkdir()

    def ranks(self, *counts):
        return {"at": self.at, "disks": dict(zip(self.each, counts, strict=True))}

    def names(self):
        return [sorted(p.name for p in (disk / "checkpoints").iterdir()) for disk in self.each]

    def step(self, node, step):
        return self.each[node - 1] / "checkpoints" / f"step_{step:08d}"


@pytest.fixture
def disks(tmp_path):
    return Disks(tmp_path)


def restore(sound, disks):
    for disk in disks.each:
        shutil.rmtree(disk)
        shutil.copytree(sound / disk.name, disk)


@NEEDS_ROOT
@pytest.mark.launch
@pytest.mark.parametrize("stage", [2, 3])
def test_parts_count_only_together(
    forks, tiny_config, tmp_path, disks, tiny_model_with_dropout, stage
):
    """As after a crash between the renames of two nodes: passed over, and the curve goes on bit for
    bit. Then all that cannot go on, which is told before anything is loaded.
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
    parts = [look_at(disks.step(node, 6), checksums=True) for node in (1, 2)]
    assert [part.problem for part in parts] == [None, None]
    assert [sorted(part.ranks) for part in parts] == [[0, 1], [2]]
    assert parts[0].save_id == parts[1].save_id != look_at(disks.step(1, 4)).save_id
    for disk in disks.each:  # no probe, no draft
        left = {path.name for path in disk.iterdir()} - {"checkpoints"}
        assert left == (set() if disk is disks.each[1] else {
            "metrics.jsonl", "resolved_config.yaml", "resolved_ds_config.json"}), left  # fmt: skip

    shutil.rmtree(disks.step(2, 6))
    finished = forks.train(config, **disks.ranks(2, 1))
    assert finished.code == 0, finished.output
    newest, older = disks.at / "checkpoints/step_00000006", disks.at / "checkpoints/step_00000004"
    assert f"passing over {newest}: node-2 has no part of it\n" in finished.output
    assert f"resuming from {older}: step 4\n" in finished.output
    assert curve(disks.each[0]) == expected
    parts = [look_at(disks.step(node, 6)) for node in (1, 2)]
    assert parts[0].save_id == parts[1].save_id
    if stage == 3:
        return

    sound = tmp_path / "sound"
    sound.mkdir()
    for disk in disks.each:
        shutil.copytree(disk, sound / disk.name)

    def refusal(*flags, **where):
        finished = forks.train(config, *flags, **(where or disks.ranks(2, 1)))
        assert finished.code == 2 and len(set(finished.errors)) == 1, finished.output
        return finished.errors[0]

    def shorten(node, step):
        shard = next((disks.step(node, step) / "deepspeed").glob("*optim_states.pt"))
        os.truncate(shard, shard.stat().st_size // 2)

    assert (
        "node-2 does not see what node-1 writes to"
        in (line := refusal("--checkpoint.node_local", "false"))
        and "checkpoint.node_local true" in line
    )
    gather = "scripts/gather_checkpoint.py"
    line = refusal(**disks.ranks(1, 1))
    assert "node-1: " in line and "the files of ranks 0, 1 of 3" in line and gather in line
    line = refusal(**disks.ranks(1, 2))  # as with the hostfile in another order
    assert "node-2: " in line and "to have those of rank 1:" in line and gather in line
    line = refusal("--ds_config", "ds_configs/zero1.json")
    assert "those of rank 2:" in line and gather in line
    shorten(2, 6)
    line = refusal("--checkpoint.resume", newest)
    assert f"{newest} is no usable checkpoint: node-2: deepspeed/" in line
    shutil.copytree(disks.step(1, 4), disks.step(2, 4), dirs_exist_ok=True)
    manifest = disks.step(2, 4) / "manifest.json"
    manifest.write_text(manifest.read_text().replace(parts[0].save_id, "another"))
    made_by = json.loads(manifest.read_text())
    made_by["made_by"]["save_id"] = "another"
    manifest.write_text(json.dumps(made_by))
    line = refusal()
    assert "no usable checkpoint in" in line and "step_00000004: its parts are of different" in line
    shutil.rmtree(disks.each[1] / "checkpoints")
    line = refusal()
    assert "node-2 has no checkpoints at all: bring its folder back" in line and gather in line
    shared = {"at": disks.at, "disks": {disks.each[0]: 2, f"{disks.each[0]}/.": 1}}
    line = refusal(**shared)
    assert "node-1 sees in output_dir" in line and "what node-1 and node-2 wrote there" in line

    assert gather in fault(disks.step(1, 6)) and "without rank 2;" in fault(disks.step(1, 6))
    with pytest.raises(UserError, match="it is a node's part, without rank 2"):
        export_checkpoint(disks.step(1, 6), tmp_path / "exported")


@NEEDS_ROOT
@pytest.mark.launch
def test_a_full_disk_on_one_node_leaves_nothing_on_any(forks, tiny_config, disks):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "none", disks.each[1]], check=True)
    try:
        config = tiny_config(
            checkpoint={"every_steps": 2, "node_local": True, "on_failed_save": "continue"}
        )  # fmt: skip
        finished = forks.train(config, **disks.ranks(2, 1))
        assert finished.code == 0, finished.output
        assert "failed: node-2: it needs" in finished.output
        assert disks.names()[0] == disks.names()[1] != [], "the same on both, no debris"
    finally:
        subprocess.run(["umount", disks.each[1]], check=True)
