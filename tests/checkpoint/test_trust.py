"""No code of a checkpoint runs, and no file of a user is touched.
pytest tests/checkpoint/test_trust.py
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from harness.cures import refused
from harness.inputs import rewrite

from zerotrain.checkpoint import run_folder
from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.run_folder import list_complete, refuse_links
from zerotrain.checkpoint.state import read_state
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.files import replace_text
from zerotrain.runtime.hang import HangWatch
from zerotrain.tools.export import export_checkpoint
from zerotrain.tools.new_folder import new_folder
from zerotrain.tracking.metrics import JsonlSink, UsefulTime


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
    content = torch.load(checkpoint / "shards/rank_00000.pt", weights_only=False)
    for name, (first, states) in content["parts"].items():
        content["parts"][name] = (first, {key: t.to(torch.complex64) for key, t in states.items()})
    shard = checkpoint / "shards/rank_00000.pt"
    torch.save(content, shard)
    rewrite(checkpoint, "shards/rank_00000.pt", shard.read_bytes())
    with pytest.raises(UserError, match="complex numbers"):
        export_checkpoint(checkpoint, tmp_path / "exported")


def test_a_position_that_no_run_has_reached_is_refused(forks, tiny_config, tmp_path):
    config = tiny_config(train__steps=1)
    forks.finish(config)
    file = tmp_path / "run/checkpoints/step_00000001/trainer_state.json"
    text = file.read_text()

    def start_at(key, value):
        state = json.loads(text)
        state["progress"]["plan_start"][key] = value
        rewrite(file.parent, file.name, json.dumps(state).encode())

    for key, value in (("position", 2**2000), ("epoch", 10**400), ("step", 10**308)):
        start_at(key, value)
        with pytest.raises(UserError, match="use another checkpoint") as caught:
            read_state(file.parent)
        assert caught.value.place == str(file)
    for key, value in (("position", 2**40), ("step", 2**40), ("epoch", 3)):
        start_at(key, value)
        error = UserError(forks.refusal(config, "--dry_run"))
        assert error.place == str(file) and "use another checkpoint" in str(error)
    start_at("position", 0)
    forks.finish(config, "--dry_run")


# --------------------------------------------------------------------------------------------------
# Files of a user are not touched


LAYOUT = re.findall(r"^        (?=\S)(.+?)  ", run_folder.__doc__, re.MULTILINE)
NAMES = [name for line in LAYOUT for name in line.replace(", ...", "").split(", ")]
FILES = [name for name in NAMES if not name.endswith("/")]
FOLDERS = [name.rstrip("/") for name in NAMES if name.endswith("/")] + ["checkpoints"]
"""All names in a run folder."""


def test_no_link_in_a_run_folder_is_followed_to_write(tmp_path, monkeypatch, capfd):
    """What trainer, report and hang watch write, for each name of the layout."""
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    monkeypatch.setenv("RANK", "0")
    for folder in (run, theirs):
        folder.mkdir()
    for name in FILES:
        (theirs / name).write_text("theirs")
        (run / name).symlink_to(theirs / name)
    watch = HangWatch(60, str(run))

    def lock():
        with RunLock(run):
            assert (run / "run.lock").exists()

    writers = {
        "metrics.jsonl": lambda: JsonlSink(0, RunLock(run), UsefulTime().add).log("train", {}),
        "collectives_0": watch._record,
        "report.html": lambda: replace_text(run / "report.html", "as scripts.report does"),
        "run.lock": lock,
    }
    for name, write in writers.items():
        write()
        assert not (run / name).is_symlink(), name
    watch.close()
    # launch.sh writes the first two (tests/launch), the trainer the next two
    # (test_only_the_runs_own_names_are_touched), and requests are removed.
    assert {*FILES} - {*writers} == {
        "launches.jsonl", "stalls.jsonl", "resolved_config.yaml", "resolved_ds_config.json",
        "stop", "save_now", "profile_now",
    }  # fmt: skip
    assert all((theirs / name).read_text() == "theirs" for name in FILES)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_a_run_that_is_a_link_is_refused(tmp_path, name):
    (tmp_path / name).symlink_to(tmp_path.parent)
    refused(
        f"output_dir: {tmp_path / name} is a link ... ; remove the link", refuse_links, tmp_path
    )
    (tmp_path / name).unlink()
    refuse_links(tmp_path)


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
    targets = [tmp_path / name for name in FILES]
    for target in targets:
        target.write_text("mine")
        if target.name != "run.lock":
            (tmp_path / "run" / target.name).symlink_to(target)
    for _ in range(2):
        (tmp_path / "run" / "stop").unlink(missing_ok=True)
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
    assert all(file.read_text() == "mine" for file in [*mine, *targets])
    assert (kept_elsewhere / "COMPLETE").exists() and (folder / ".step_00000009.tmp").is_symlink()
    assert not draft.is_symlink() and not (folder / "step_00000001").is_symlink()
    draft.mkdir()  # as a killed save leaves it; it goes although the next run has nothing to save
    forks.finish(config)
    assert not draft.exists()
    folder.rename(tmp_path / "checkpoints")
    folder.symlink_to(tmp_path / "checkpoints")
    assert f"{folder} is a link" in forks.refusal(config)


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
