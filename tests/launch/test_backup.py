"""Checkpoints in object storage: scripts/backup.py beside real runs, with moto's S3 server.

pytest tests/launch/test_backup.py
"""

import json
import shutil
import signal
import subprocess
import sys
import threading
from urllib.request import urlopen

import psutil
import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from harness.processes import NEEDS_ROOT, environment, free_port, wait_until
from harness.repository import REPO
from harness.runs import checkpoints, determined, logged
from moto.server import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

from scripts.backup import copy, fetch
from zerotrain.checkpoint.manifest import measure
from zerotrain.checkpoint.state import read_state
from zerotrain.tools.saved import checkpoint_problem

BACKUP = "scripts.backup"
URL = "s3://bucket/run"


class Server:
    """moto's S3 server with a bucket. Tests may replace `answer`, the WSGI application."""

    def __init__(self):
        self.moto = self.answer = DomainDispatcherApplication(create_backend_app)
        server = make_server("127.0.0.1", 0, lambda *call: self.answer(*call), threaded=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.port}"
        self.variables = {
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "s3cret",
            "AWS_ENDPOINT_URL": address,
        }  # fmt: skip
        self.files = S3FileSystem(
            key="key", secret="s3cret", endpoint_url=address, use_listings_cache=False
        )
        urlopen(f"{address}/moto-api/reset", b"")  # buckets of an earlier server in this process
        self.files.mkdir("bucket")
        self.stop = server.shutdown

    def complete(self):
        """The names of the checkpoints that are complete in the bucket."""
        return [path.split("/")[2][:13] for path in self.files.glob("bucket/run/*/COMPLETE")]

    def node(self, first, ranks, world):
        """The variables of a node with these ranks."""
        node = {"RANK": first, "LOCAL_WORLD_SIZE": ranks, "WORLD_SIZE": world}
        return self.variables | {name: str(value) for name, value in node.items()}


def expired(request, start_response):
    """Answer as S3 does when a credential has expired."""
    start_response("400 Bad Request", [("Content-Type", "application/xml")])
    return [b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"]


@pytest.fixture
def s3():
    server = Server()
    yield server
    server.stop()


def test_a_run_on_a_new_disk_continues_from_the_bucket(forks, tiny_config, tmp_path, s3):
    """An expired credential does not change how a preempted run ends, and its copy is made later.
    On a new disk the run then has the same curve and W&B run.
    """
    config = tiny_config(train__steps=30, checkpoint={"every_steps": 4})
    forks.finish(config, "--output_dir", tmp_path / "whole")
    run, log = tmp_path / "run", tmp_path / "log"
    command = [
        sys.executable, "-m", "zerotrain.launch.node", "--nodes", "1", "--node_rank", "0",
        "--ranks_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", free_port(),
        "train.py", "--config", str(config),
    ]  # fmt: skip

    def start():
        variables = environment() | s3.variables | {"BACKUP_URL": URL}
        return subprocess.Popen(
            command, cwd=REPO, env=variables, stdout=log.open("w"), stderr=subprocess.STDOUT
        )

    job = start()
    wait_until(lambda: len(logged(run)) > 4, job, log)
    commands = [" ".join(each.cmdline()) for each in psutil.Process(job.pid).children()]
    assert any(BACKUP in line for line in commands) and not any(URL in line for line in commands)
    s3.answer = expired
    job.terminate()
    assert job.wait(600) == 75, log.read_text()
    assert "WARNING: backup" in log.read_text() and "The token has expired" in log.read_text()
    s3.answer = s3.moto
    forks.script(BACKUP, "--to", URL, "--config", config, code=0, **s3.variables)
    saved = [path.name for path in checkpoints(run)]
    assert s3.complete() == saved
    wandb_id = read_state(checkpoints(run)[-1]).progress.wandb_id

    shutil.rmtree(run)
    job = start()
    assert job.wait(600) == 0, log.read_text()
    output = log.read_text()
    assert f"resuming from {run}/checkpoints/{saved[-1]}" in output and "s3cret" not in output
    assert determined(run) == determined(tmp_path / "whole")
    assert read_state(checkpoints(run)[-1]).progress.wandb_id == wandb_id
    assert {path.name for path in checkpoints(run)} <= {*s3.complete()}


@NEEDS_ROOT
def test_nodes_copy_and_fetch_their_shares(forks, tiny_config, tmp_path, s3, left_running):
    """Nodes with disks of their own upload parts. A killed upload leaves nothing that counts. The
    second node loses its disk: the first uses what it has, and the curve is the same bit for bit.
    While the bucket is gone, the copy waits for it.
    """
    config = tiny_config(train__steps=6, checkpoint={"every_steps": 2, "keep_last": 9})
    whole, first, second, new, empty = (tmp_path / name for name in "abcde")
    forks.finish(config, "--output_dir", whole, ranks=3)
    nodes = s3.node(0, 2, 3), s3.node(2, 1, 3)
    copy = (BACKUP, "--config", config, "--to", URL, "--output_dir")
    fetch = (BACKUP, "--fetch", *copy[1:])
    for disk, others in ((first, "rank_00002.pt"), (second, "rank_0000[01].pt")):
        shutil.copytree(whole, disk)
        shutil.rmtree(checkpoints(disk)[-1])
        for shard in disk.glob(f"checkpoints/*/shards/{others}"):
            shard.unlink()
    lacking = forks.script(*copy, first, **nodes[0], code=1)
    assert "lacks shards/rank_00002.pt" in lacking.error
    held = threading.Event()

    def hold(request, start_response):
        if "rank_00002" in request["PATH_INFO"]:
            held.set()
            threading.Event().wait()
        return s3.moto(request, start_response)

    s3.answer = hold
    upload = forks.start(*copy[2:], second, module=BACKUP, **nodes[1])
    upload.until(held.is_set)
    upload.kill(0)
    upload.wait()
    s3.answer = s3.moto
    assert s3.complete() == []
    forks.script(*copy, second, **nodes[1], code=0)
    assert s3.complete() == ["step_00000002", "step_00000004"]

    for disk, node, shards in ((first, nodes[0], 2), (new, nodes[1], 1)):
        forks.script(*fetch, disk, **node, code=0)
        assert len([*disk.glob("checkpoints/step_00000004/shards/*")]) == shards
        assert forks.script(*fetch, disk, **node, code=0).output == "", "nothing left to do"
    run = tmp_path / "run"
    run.mkdir()
    resumed = forks.finish(config, at=run, disks={first: 2, new: 1})
    assert "step_00000004: step 4\n" in resumed.output
    assert determined(first) == determined(whole)
    forks.script(*fetch, empty, **s3.node(0, 1, 1), code=0)
    assert checkpoint_problem(*checkpoints(empty)) is None, "one rank takes all shards"

    s3.files.rm("bucket", recursive=True)
    assert "WARNING" in forks.script(*fetch, empty, **s3.variables, code=0).output
    shutil.rmtree(empty)
    assert "does not exist" in forks.script(*fetch, empty, **s3.variables, code=1).error
    assert "gcsfs" in forks.script(*fetch, empty, "--to", "gs://bucket/run", code=2).error
    run = subprocess.Popen(["sleep", "1000"])
    watch = forks.start(*copy[2:], whole, "--pid", run.pid, module=BACKUP, **s3.node(0, 3, 3))

    def until(happened):
        wait_until(happened, watch, watch.log, interval=0.3)

    until(lambda: "WARNING" in watch.log.read_text())
    watch.kill(0, signal.SIGTERM)  # as a scheduler does
    s3.files.mkdir("bucket")
    until(lambda: len(s3.complete()) == 3)
    shutil.rmtree(checkpoints(whole)[0])
    until(lambda: s3.complete() == ["step_00000004", "step_00000006"])
    run.kill()
    run.wait()
    watch.wait(code=0)


SAVE = "step_00000002." + "ab" * 16


def write_checkpoint(run, step, save_id=None, files=("trainer_state.json",)):
    """Write a small checkpoint, and the files beside it. Return the name of its save."""
    folder = run / f"checkpoints/step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    entry = measure(folder / "trainer_state.json")
    save_id = f".{folder.name}.{'ab' * 16}.tmp" if save_id is None else save_id
    manifest = {"save_id": save_id, "files": dict.fromkeys(files, entry)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "COMPLETE").touch()
    for name in ("metrics.jsonl", "resolved_config.yaml", "resolved_ds_config.json"):
        (run / name).write_text(name)
    return save_id[1:-4]


def test_only_saves_of_the_run_are_copied_and_removed(s3, tmp_path, monkeypatch, capsys):
    """The run removes checkpoints. Some have ids that a stranger may have written."""
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    s3.files.pipe({f"bucket/run/{name}": b"" for name in ("note", "older/COMPLETE")})
    s3.files.pipe("bucket/other", b"")
    before = {*s3.files.find("bucket")}
    no_saves = (
        "", "12345", ".//.tmp", ".../other.tmp", f".{SAVE}.tmp", f".{SAVE[:13]}.tmp",
        ".step_0000000{}.tmp", f".step_0000001{{}}.{SAVE[14:]}", f".step_0000001{{}}.{SAVE[14:]}\n",
        f".step_0000001{{}}.{SAVE[14:].upper()}.tmp", f".../step_0000001{{}}.{SAVE[14:]}.tmp",
    )  # fmt: skip
    for step, save_id in enumerate(no_saves):
        write_checkpoint(tmp_path, 10 + step, save_id.format(step))
    kept, mine = write_checkpoint(tmp_path, 4), write_checkpoint(tmp_path, 3)
    copied = set()
    for _ in range(2):
        assert copy(URL, tmp_path, copied) == ""
    found = {path.split("/")[2] for path in {*s3.files.find("bucket")} - before}
    assert found == {kept, mine}
    assert capsys.readouterr().out.count("WARNING") == len(no_saves)
    for path in checkpoints(tmp_path):
        if not kept.startswith(path.name):
            shutil.rmtree(path)
    assert copy(URL, tmp_path, copied) == ""
    after = {*s3.files.find("bucket")}
    assert before < after and {path.split("/")[2] for path in after - before} == {kept}


def test_a_stranger_in_the_bucket_writes_nothing_outside_the_checkpoint(
    s3, tmp_path, monkeypatch, capsys
):
    """Each save is refused before its files are downloaded, or is left out."""
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    asked = []
    s3.answer = lambda request, start: (asked.append(request), s3.moto(request, start))[1]

    def refuse(content="{}", **manifest):
        shutil.rmtree(theirs, ignore_errors=True)
        write_checkpoint(theirs, 2, **manifest)
        folder = theirs / "checkpoints/step_00000002"
        (folder / "trainer_state.json").write_text(content)
        s3.files.put(f"{folder}/", f"bucket/run/{SAVE}/", recursive=True)
        asked.clear()
        with pytest.raises(Exception, match=r"manifest\.json|trainer_state\.json") as refused:
            fetch(URL, run)
        got = [r["PATH_INFO"] for r in asked if r["REQUEST_METHOD"] == "GET"]
        assert not any("trainer_state" in path for path in got), refused
        assert not any(path.is_file() for path in run.rglob("*"))
        s3.files.rm(f"bucket/run/{SAVE}", recursive=True)

    refuse(files=["../trainer_state.json"])
    refuse(files=[f"{tmp_path}/trainer_state.json"])
    refuse(files=["model/../../trainer_state.json"])
    refuse(save_id="")
    refuse(save_id=f".{SAVE.replace('ab', 'cd')}.tmp")
    refuse(content="{}" * 1000)
    s3.files.pipe("bucket/run/step_A.x/COMPLETE", b"")
    s3.files.pipe("bucket/run/step_99999999/COMPLETE", b"")
    fetch(URL, run)
    assert "no complete checkpoint" in capsys.readouterr().out
    assert not any(path.is_file() for path in run.rglob("*"))


@pytest.mark.parametrize("link", ["step_00000002", "step_00000002/shards"])
def test_fetch_replaces_links_in_a_run_folder(s3, tmp_path, monkeypatch, link):
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    theirs, run, victim = (tmp_path / name for name in ("theirs", "run", "victim"))
    write_checkpoint(theirs, 2, files=["trainer_state.json", "shards/rank_00000.pt"])
    checkpoint = theirs / "checkpoints/step_00000002"
    (checkpoint / "shards").mkdir()
    shutil.copy(checkpoint / "trainer_state.json", checkpoint / "shards/rank_00000.pt")
    assert copy(URL, theirs, set()) == ""
    victim.mkdir()
    path = run / "checkpoints" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    fetch(URL, run)
    assert not path.is_symlink() and not [*victim.iterdir()]
    assert checkpoint_problem(run / "checkpoints/step_00000002") is None


def test_a_password_in_the_url_is_not_printed(forks, tiny_config):
    port = free_port()
    url = f"ftp://me:very-secret@127.0.0.1:{port}/run"
    done = forks.script(BACKUP, "--fetch", "--config", tiny_config(), code=1, BACKUP_URL=url)
    assert f"127.0.0.1:{port}" in done.error and "very-secret" not in done.output + done.error
