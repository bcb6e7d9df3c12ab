"""No code of a checkpoint runs, and no file of a user is touched.
pytest tests/checkpoint/test_trust.py
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from harness.cures import refused
from harness.inputs import rewrite

from zerotrain.checkpoint.run_folder import list_complete
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.files import replace_text
from zerotrain.tools.export import export_checkpoint
from zerotrain.tools.new_folder import new_folder


class Touch:
    """Unpickling creates the file `canary`."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.mknod, (self.canary,)


# --------------------------------------------------------------------------------------------------
# Reading runs no code


def test_a_shard_that_would_run_code_is_refused(forks, tiny_config, tmp_path):
    """The shard's entry in the manifest is right, as an attacker would write it."""
    config = tiny_config(train__steps=2)
    forks.finish(config, ranks=2)
    canary, checkpoint = tmp_path / "canary", tmp_path / "run/checkpoints/step_00000002"
    shard = checkpoint / "shards/rank_00001.pt"
    torch.save(torch.load(shard, weights_only=False) | {"extra": Touch(canary)}, shard)
    rewrite(checkpoint, "shards/rank_00001.pt", shard.read_bytes())
    with pytest.raises(UserError) as caught:
        export_checkpoint(checkpoint, tmp_path / "exported")
    assert caught.value.place == str(shard) and not (tmp_path / "exported").exists()
    flags = "--output_dir", tmp_path / "other", "--checkpoint.resume", checkpoint
    for more in ([], ["--checkpoint.weights_only", "true"]):
        error = UserError(forks.refusal(config, *flags, *more, ranks=2))
        assert error.place == str(shard)
    assert not canary.exists()


# --------------------------------------------------------------------------------------------------
# Files of a user are not touched


def test_only_the_runs_own_names_are_touched(forks, tiny_config, tmp_path):
    config = tiny_config(
        train__steps=5, checkpoint={"every_steps": 1, "keep_last": 2}
    )  # fmt: skip
    folder = tmp_path / "run" / "checkpoints"
    mine = [folder / name / "note" for name in (
        ".step_notes.tmp", ".step_00000001.tmp", "step_00000001.old", "step_lowlr_ok",
        "step_\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661", "step_00000001.universal.mine",
    )]  # fmt: skip
    for file in mine:
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    kept_elsewhere = tmp_path / "elsewhere"
    target = tmp_path / "important.yaml"
    target.write_text("mine")
    (tmp_path / "run" / "resolved_config.yaml").symlink_to(target)
    for _ in range(2):
        (tmp_path / "run" / "stop").touch()  # after one step
        forks.finish(config)
    (folder / "step_00000001").rename(kept_elsewhere)
    (folder / "step_00000001").symlink_to(kept_elsewhere)
    shutil.copytree(kept_elsewhere, folder / "step_lowlr_ok", dirs_exist_ok=True)
    (folder / ".step_00000009.tmp").symlink_to(kept_elsewhere)
    draft = folder / f".step_00000009.{'a' * 32}.tmp"
    draft.symlink_to(kept_elsewhere)  # a link with the name of a run's draft
    finished = forks.finish(config)
    assert f"resuming from {folder}/step_00000002: step 2" in finished.output
    steps = [int(path.name[-1]) for path in list_complete(folder)]
    assert steps == [2, 4, 5], "the run resumed from step 2"
    assert all(file.read_text() == "mine" for file in [*mine, target])
    assert (kept_elsewhere / "COMPLETE").exists() and (folder / ".step_00000009.tmp").is_symlink()
    assert not draft.is_symlink() and not (folder / "step_00000001").is_symlink()
    draft.mkdir()  # as a killed save leaves it; it goes although the next run has nothing to save
    forks.finish(config)
    assert not draft.exists()


def test_a_new_folder_is_whole_or_missing_and_replaces_no_file(tmp_path, monkeypatch):
    out = tmp_path / "out"
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "mine").touch()
    with pytest.raises(ZeroDivisionError), new_folder(out) as draft:
        (draft / "half").touch()
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["out.tmp", "mine"]
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), fsync(fd)))
    out.mkdir()  # an empty one may exist
    with new_folder(out) as draft:
        (draft / "whole").touch()
    assert synced == {path.stat().st_ino for path in (tmp_path, out, out / "whole")}
    assert [path.name for path in out.iterdir()] == ["whole"]

    def write(folder):
        with new_folder(folder):
            pass

    refused("is not empty, or not a folder; choose a new one", write, out, tmp_path / "another")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    refused("is the current folder; choose a new one", write, Path(), Path("within"))
    link = tmp_path / "link"
    link.symlink_to(out / "whole")
    replace_text(link, "new")
    assert not link.is_symlink() and (out / "whole").read_text() == ""
