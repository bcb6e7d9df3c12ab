"""Models and data of the hub, and code that comes with models.    pytest tests/model/test_hub.py"""

import re
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from harness.cures import refused
from harness.inputs import change_json, copy_with_code, read_config, strategy
from harness.processes import free_port, run
from transformers import AutoTokenizer

from zerotrain.config.schema import Source
from zerotrain.model.hub import load_pretrained
from zerotrain.model.load import load_model_config
from zerotrain.rows.sources import loaded_commit, read_rows
from zerotrain.runtime.errors import UserError

COMMIT, ROWS_COMMIT = "c0ffee" * 6 + "c0ff", "0d" * 20


@pytest.fixture
def hub(tmp_path, tiny_model, chat_rows):
    """Return variables that name a cache with the model org/tiny and the data set org/rows."""
    import datasets

    repo = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(tiny_model, repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    prepared = tmp_path / "datasets" / "org___rows" / "default" / "0.0.0" / ROWS_COMMIT
    rows = datasets.Dataset.from_list(chat_rows)
    rows.save_to_disk(tmp_path / "saved")
    prepared.mkdir(parents=True)
    [arrow] = (tmp_path / "saved").glob("*.arrow")
    shutil.copy(arrow, prepared / "rows-train.arrow")
    info = shutil.copy(tmp_path / "saved" / "dataset_info.json", prepared)
    split = {"name": "train", "num_examples": len(rows), "dataset_name": "rows"}
    named = {"config_name": "default", "dataset_name": "rows", "version": "0.0.0"}
    change_json(Path(info), splits={"train": split}, **named)
    return {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_DATASETS_CACHE": str(tmp_path / "datasets")}


def test_a_missing_folder_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("models/typo", "./typo"):
        with pytest.raises(UserError, match=r"^model.name_or_path: .* no such folder in "):
            load_pretrained(pytest.fail, name, "model.name_or_path")
        shutil.copytree(tiny_model, name)
        load_pretrained(AutoTokenizer.from_pretrained, name)


def test_a_tokenizer_in_which_rust_panics_is_one_line(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "damaged")
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    change_json(folder / "tokenizer.json", normalizer=normalizer)
    with pytest.raises(UserError, match=r"^model.tokenizer: cannot load"):
        load_pretrained(AutoTokenizer.from_pretrained, str(folder), "model.tokenizer")


@pytest.mark.parametrize(
    "changes, answer, code",
    [
        ({"model__tokenizer": "org/nothing"}, None, 1),
        ({"model__tokenizer": "org/nothing"}, 404, 2),
        ({"data__train_sources": [{"hub": "org/nothing"}]}, 501, 1),  # 503 is tried for 23 s
    ],
)
def test_a_silent_hub_is_a_failure_that_launchers_retry(tiny_config, changes, answer, code):
    """Without network the model's client would try as long."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(answer)

        do_GET = do_HEAD

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port if answer else free_port()
        hub = ["HF_HUB_OFFLINE=0", f"HF_ENDPOINT=http://127.0.0.1:{port}"]
        done = run(["env", *hub, sys.executable, "train.py", "--config", tiny_config(**changes)])
        server.shutdown()
    assert done.code == code and "cannot load org/nothing" in done.error, done.output
    assert answer or "Retrying in 2s" not in done.output


def test_the_commits_of_the_hub_are_recorded_and_a_run_resumes(tmp_path, tiny_config, hub, forks):
    path = tiny_config(
        model="org/tiny@main", model__tokenizer="org/tiny@main",
        train__steps=1,
        data__train_sources=[{"hub": "org/rows", "revision": "main"}],
        ds_config=strategy(tmp_path, "zero1"),
    )  # fmt: skip

    # for the ranks, which are forked from a process that has read other variables
    patches = {
        "huggingface_hub.constants.HF_HUB_CACHE": repr(hub["HF_HUB_CACHE"]),
        "datasets.config.HF_DATASETS_CACHE": f"Path({hub['HF_DATASETS_CACHE']!r})",
    }
    options = {"patches": patches, "ranks": 2, **hub}
    forks.finish(path, **options)
    resolved = yaml.safe_load((tmp_path / "run" / "resolved_config.yaml").read_text())
    assert resolved["model"]["name_or_path"] == f"org/tiny@{COMMIT}"
    assert resolved["model"]["tokenizer"] == f"org/tiny@{COMMIT}"
    assert resolved["data"]["train_sources"][0]["revision"] == ROWS_COMMIT
    again = forks.finish(path, **options)  # `main` in the config, a commit in the checkpoint
    assert "resuming from" in again.output and "the run began with" not in again.output

    repo = tmp_path / "hub" / "models--org--tiny"
    moved = shutil.copytree(repo / "snapshots" / COMMIT, repo / "snapshots" / ("f" * 40))
    (repo / "refs" / "main").write_text(moved.name)
    again = forks.finish(path, "--dry_run", **options)
    assert f"is org/tiny@{moved.name}, but the run began with org/tiny@{COMMIT};" in again.output
    change_json(moved / "config.json", rms_norm_eps=0.1)
    line = forks.refusal(path, "--dry_run", **options)
    named = re.search("set (model.name_or_path) to (.*?),", line).groups()
    assert "rms_norm_eps is 0.1" in line and named[1] == f"org/tiny@{COMMIT}"
    forks.finish(path, "--dry_run", f"--{named[0]}", named[1], **options)


def test_a_cached_commit_that_differs_from_the_configs_is_refused(hub, tmp_path, monkeypatch):
    """Without network `datasets` takes the newest commit that it has."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path(hub["HF_DATASETS_CACHE"]))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    of = {name: Source(hub="org/rows", revision=name) for name in (None, "main", ROWS_COMMIT)}
    assert {*map(loaded_commit, of.values())} == {ROWS_COMMIT}
    named = f"newest commit in the cache is {ROWS_COMMIT}; ... , or set its revision to that commit"
    refused(named, loaded_commit, Source(hub="org/rows", revision="b" * 40), of[ROWS_COMMIT])
    named = "; without a network, give a file or folder as its path"
    saved = Source(path=str(tmp_path / "saved"))
    refused(named, lambda source: next(read_rows(source)), Source(hub="org/none"), saved)


def test_code_that_comes_with_a_model_never_runs_nor_asks(
    tmp_path, tiny_config, tiny_model, monkeypatch
):
    """transformers would ask if standard input were a terminal."""
    folder = copy_with_code(tiny_model, tmp_path / "evil", tmp_path / "ran")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    path = tiny_config(model=folder)
    config = read_config(path)
    with pytest.raises(UserError, match=f"cannot load {folder}: .*model.trust_remote_code") as said:
        load_model_config(config.model)
    assert "\n" not in str(said.value) and not (tmp_path / "ran").exists()
    load_model_config(read_config(path, "--model.trust_remote_code", "true").model)
    assert (tmp_path / "ran").exists()
