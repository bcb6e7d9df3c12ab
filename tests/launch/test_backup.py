"""Checkpoints in object storage: scripts/backup.py beside real runs, with moto's S3 server.

pytest tests/launch/test_backup.py
"""

import shutil
import signal
import subprocess
import sys
import threading
from urllib.request import urlopen

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from harness.processes import NEEDS_ROOT, environment, free_port, wait_until
from harness.repository import REPO
from harness.runs import checkpoints, determined, logged
from moto.server import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

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
