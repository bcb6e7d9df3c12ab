"""What others have written is only read: no code of a checkpoint runs, nothing of a user's is
touched, and a file of the wrong shape is one line.    pytest tests/test_trust.py
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_config
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from checkpoint.export import export_checkpoint
from checkpoint.files import checksum
from checkpoint.find import find_checkpoint
from checkpoint.lock import RunLock
from checkpoint.run_folder import list_complete
from checkpoint.shards import load_safely
from config.schema import CheckpointConfig
from runtime.errors import UserError
from runtime.files import new_folder, replace_text
from tracking.jsonl import JsonlSink

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")


class Touch:
    """Unpickling creates the file `canary`."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.mknod, (self.canary,)


class Attribute:
    """Unpickled by getattr, as enumerations are that Python 3.11.2 writes."""

    def __init__(self, *of):
        self.of = of

    def __reduce__(self):
        return getattr, self.of


def rewrite(checkpoint, file, content):
    """Replace a file of a checkpoint and its entry in the manifest, as an attacker would."""
    torch.save(content, file)
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    entry = {"bytes": file.stat().st_size, "xxh3_64": checksum(file)}
    manifest["files"][str(file.relative_to(checkpoint))] = entry
    path.write_text(json.dumps(manifest))


# --------------------------------------------------------------------------------------------------
# Reading runs nothing


@pytest.fixture(scope="module")
def trained(forks, tmp_path_factory, tiny_model, chat_rows):
    """A config and the checkpoint of its second step, ZeRO 2, 2 ranks."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_tiny_config(
        folder, chat_rows, tiny_model, train__epochs=None, train__steps=2
    )  # fmt: skip
    finished = forks.train(config, ranks=2)
    assert finished.code == 0, finished.output
    return config, folder / "run" / "checkpoints" / "step_00000002"


def test_enumerations_of_older_pythons_are_read_and_no_other_attribute(tmp_path):
    file = tmp_path / "shard.pt"
    torch.save({"zero_stage": Attribute(ZeroStageEnum, "gradients")}, file)
    assert load_safely(file) == {"zero_stage": ZeroStageEnum.gradients}
    for of in ((ZeroStageEnum, "__class__"), (LossScaler, "__init__"), ("text", "format")):
        torch.save({"zero_stage": Attribute(*of)}, file)
        with pytest.raises(UserError, match="holds an object of getattr, which no checkpoint"):
            load_safely(file)


@pytest.mark.parametrize("pattern", ["*optim_states.pt", "mp_rank_00_model_states.pt"])
def test_a_shard_that_would_run_code_is_refused(forks, trained, tmp_path, pattern):
    config, intact = trained
    canary, checkpoint = tmp_path / "canary", tmp_path / "step_00000002"
    shutil.copytree(intact, checkpoint)
    shard = min((checkpoint / "deepspeed").glob(pattern))
    content = torch.load(shard, weights_only=False)
    rewrite(checkpoint, shard, content | {"extra": Touch(canary)})
    line = f"{shard} holds an object of posix.mknod, which no checkpoint"
    with pytest.raises(UserError, match=line):
        export_checkpoint(checkpoint, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    flags = "--output_dir", tmp_path / "run", "--checkpoint.resume", checkpoint
    for more in ([], ["--checkpoint.weights_only", "true"]):
        finished = forks.train(config, *flags, *more, ranks=2)  # DeepSpeed's loader, and ours
        assert finished.code == 2, finished.output
        assert line in finished.errors[0]
    assert not canary.exists()


def test_a_file_that_the_manifest_does_not_name_is_not_opened(forks, trained, tmp_path):
    """Shards of a rank that the run did not have, and another random state."""
    config, intact = trained
    canary, checkpoint = tmp_path / "canary", tmp_path / "step_00000002"
    shutil.copytree(intact, checkpoint)
    torch.save(Touch(canary), checkpoint / "deepspeed/zero_pp_rank_2_mp_rank_00_optim_states.pt")
    torch.save(Touch(canary), checkpoint / "deepspeed/zero_pp_rank_2_mp_rank_00_model_states.pt")
    torch.save(Touch(canary), checkpoint / "rng/rank_00002.pt")
    (checkpoint / "model" / "extra.json").write_text("{}")
    export_checkpoint(checkpoint, tmp_path / "exported")
    assert not (tmp_path / "exported" / "extra.json").exists()
    flags = "--output_dir", tmp_path / "run", "--checkpoint.resume", checkpoint
    finished = forks.train(config, *flags, "--train.steps", "2", ranks=2)
    assert finished.code == 0, finished.output
    assert not canary.exists()


def test_a_manifest_or_state_of_the_wrong_shape_is_skipped_with_the_reason(trained, tmp_path):
    _, intact = trained
    checkpoint = tmp_path / "step_00000002"
    shutil.copytree(intact, checkpoint)
    manifest, state = checkpoint / "manifest.json", checkpoint / "trainer_state.json"
    good = json.loads(manifest.read_text()), json.loads(state.read_text())

    def refusal():
        with pytest.raises(UserError) as refused:
            find_checkpoint(CheckpointConfig(), tmp_path)
        message = str(refused.value)
        assert message.startswith(f"no usable checkpoint in {tmp_path}: skipping {checkpoint}: ")
        assert len(message.splitlines()) == 1 and len(message) < 500
        return message

    entry = {"bytes": 1, "xxh3_64": "0"}
    for text in (
        "", "[]", "{}", "null", "\x00", "[" * 100_000, '{"files": []}', '{"files": {}}',
        '{"made_by": {}, "files": {"a": 1}}', '{"made_by": {}, "files": {"a": {"bytes": "x"}}}',
        '{"made_by": {"save_id": []}, "files": {}}',
        *(json.dumps(good[0] | {"files": good[0]["files"] | {name: entry}})
          for name in ("../outside", "/etc/passwd", "a//b", "a\nb", "a" * 256)),
    ):  # fmt: skip
        manifest.write_text(text)
        assert "its manifest or trainer state cannot be read" in refusal(), text[:80]
    manifest.write_text('{"made_by": {}, "files": {}}')
    assert "its manifest does not name trainer_state.json" in refusal()
    manifest.write_text(json.dumps(good[0]))
    for part, key, value in (
        ("progress", "step", "2"), ("progress", "step", -2), ("progress", "step", 2**80),
        ("progress", "plan_changes", [{}]), ("run", "world_size", 10**9), ("run", "schedule", []),
        ("run", "plan", None), ("run", "precision", "fp8"), ("run", "schedule", None),
    ):  # fmt: skip
        state.write_text(json.dumps(good[1] | {part: good[1][part] | {key: value}}))
        assert key in refusal()
    state.write_text("[" * 100_000)
    refusal()


# --------------------------------------------------------------------------------------------------
# Nothing of a user's is touched


def test_only_the_runs_own_names_are_touched(forks, tiny_config, tmp_path):
    config = tiny_config(
        train__epochs=None, train__steps=5, checkpoint={"every_steps": 1, "keep_last": 2}
    )  # fmt: skip
    folder = tmp_path / "run" / "checkpoints"
    mine = [folder / name / "note" for name in (
        "step_notes.tmp", "step_00000001.tmp", "step_00000001.old", "step_lowlr_ok",
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
        assert (finished := forks.train(config)).code == 0, finished.output
    (folder / "step_00000001").rename(kept_elsewhere)
    (folder / "step_00000001").symlink_to(kept_elsewhere)
    shutil.copytree(kept_elsewhere, folder / "step_lowlr_ok", dirs_exist_ok=True)
    (folder / "step_00000009.tmp").symlink_to(kept_elsewhere)
    draft = folder / f"step_00000009.{'a' * 32}.tmp"
    draft.symlink_to(kept_elsewhere)  # a draft of a run by its name, a link by its kind
    finished = forks.train(config)
    assert finished.code == 0, finished.output
    assert f"resuming from {folder}/step_00000002: step 2" in finished.output
    steps = [int(path.name[-1]) for path in list_complete(folder)]
    assert steps == [2, 4, 5], "that of step 2 was resumed from"
    assert all(file.read_text() == "mine" for file in [*mine, target])
    assert (kept_elsewhere / "COMPLETE").exists() and (folder / "step_00000009.tmp").is_symlink()
    assert not draft.is_symlink() and not (folder / "step_00000001").is_symlink()


def test_a_new_folder_deletes_nothing_and_is_whole_or_missing(tmp_path, monkeypatch):
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
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for path, line in ((".", "the current folder"), ("..", "is not empty"), (out, "is not empty")):
        with pytest.raises(UserError, match=line), new_folder(Path(path)):
            pass
    link = tmp_path / "link"
    link.symlink_to(out / "whole")
    replace_text(link, "new")
    assert not link.is_symlink() and (out / "whole").read_text() == ""


def test_export_into_the_current_folder_is_one_line(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^\. is the current folder; choose a new one$"):
        export_checkpoint(trained[1], Path())
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------
# Full disks


@NEEDS_ROOT
def test_metrics_on_a_full_disk_are_written_later(tmp_path, capsys):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", tmp_path], check=True)
    try:
        path, filler = tmp_path / "metrics.jsonl", tmp_path / "filler"
        sink = JsonlSink(path, 0, RunLock(tmp_path), {})
        sink.log("train", {"step": 1})
        with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        steps = range(2, 300)  # more than what is left of the file's last block
        for step in steps:
            sink.log("train", {"step": step})
        lines = capsys.readouterr().out.splitlines()
        assert lines == [
            f"WARNING: cannot write {path}: No space left on device; training continues, and the "
            "lines follow when there is room"
        ]
        with pytest.raises(UserError, match=r"output_dir: cannot write .*No space left"):
            JsonlSink(path, 299, RunLock(tmp_path), {})
        filler.unlink()
        sink.log("train", {"step": 300})
        sink.close(0)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(301)), "the first is that of the start"
    finally:
        subprocess.run(["umount", tmp_path], check=True)
