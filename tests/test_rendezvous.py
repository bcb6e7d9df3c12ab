"""Who can join a job, how it is left, and that what is read runs nothing.

pytest tests/test_rendezvous.py
"""

import ast
import os
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from conftest import REPO, free_port, logged, read_metrics

from runtime.errors import UserError
from runtime.flight_record import keep_flight_records
from runtime.process_group import check_devices
from runtime.rendezvous import SignedStore, _listen


def test_an_uninvited_process_runs_nothing(forks, tiny_config, tmp_path):
    """Without a secret, as under `deepspeed`, it can take the place of rank 1."""
    finished = forks.train(
        tiny_config(), ranks=3, module="uninvited", RAN_BY=str(tmp_path / "ran_by_")
    )
    assert not (tmp_path / "ran_by_0").exists(), finished.output
    assert finished.code == 2 and len(finished.errors) == 1, finished.output
    assert finished.errors[0].startswith("error: rank 1 sent what is not JSON: another program")
    assert "Traceback" not in finished.output


def test_a_job_with_a_secret_admits_only_its_ranks(forks, tiny_config, tmp_path):
    """The uninvited process comes before rank 1, and the job trains. Nothing listens on other
    interfaces than the loopback one.
    """
    config = tiny_config(train__epochs=None, train__steps=5000)
    running = forks.start(
        config, ranks=3, module="uninvited", RAN_BY=str(tmp_path / "ran_by_"), INVITED="1",
        LAUNCH_SECRET="5ec2e7",
    )  # fmt: skip
    running.until(lambda: logged(tmp_path / "run", "eval"))
    listening = [
        connection.laddr.ip
        for pid in running.pids[:2]
        for connection in psutil.Process(pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    (tmp_path / "run" / "stop").touch()
    finished = running.wait()
    assert finished.code == 0, finished.output
    assert read_metrics(tmp_path / "run") and not (tmp_path / "ran_by_0").exists()
    assert len(listening) > 2 and set(listening) == {"127.0.0.1"}


def test_a_rank_that_fails_alone_does_not_wait_for_the_others(forks, tiny_config):
    """NCCL's shutdown would, until the timeout, and the traceback would not be printed before."""
    began = time.monotonic()
    finished = forks.train(tiny_config(), ranks=2, module="like_nccl", FAILS="alone")
    assert finished.code == 1 and "ValueError: on this one" in finished.output, finished.output
    assert time.monotonic() - began < 50
    finished = forks.train(tiny_config(), ranks=2, module="like_nccl", FAILS="together")
    assert finished.code == 2 and finished.errors == ["error: on all ranks"], finished.output


def test_a_rank_without_a_gpu_is_one_line(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    check_devices(0, visible=1)
    with pytest.raises(UserError, match=r"LOCAL_RANK is 1, but the rank sees 1 GPUs .*=5\)") as one:
        check_devices(1, visible=1)
    assert "--gpus-per-node" in str(one.value) and "\n" not in str(one.value)


def test_only_signed_values_are_read():
    plain = dist.HashStore()
    plain.set_timeout(timedelta(seconds=0.3))
    store, other = SignedStore(plain, b"a"), SignedStore(plain, b"b")
    store.set("a/key", b"\0value")
    assert store.get("a/key") == dist.PrefixStore("a", store).clone().get("key") == b"\0value"
    signed = plain.get("a/key")
    for key, written in (("unsigned", b"value"), ("copied", signed), ("short", b"")):
        plain.set(key, written)
        with pytest.raises(UserError, match=f"does not belong to this job has written {key} at"):
            store.get(key)
    with pytest.raises(UserError):
        other.get("a/key")


def test_rank_0_listens_only_where_its_ranks_connect():
    for address, place in (
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.7", "127.0.0.7"),
        ("192.0.2.1", "::"),  # of no machine: perhaps of a gateway
        ("node-1", "::"),  # names may resolve differently on each host
    ):
        with _listen(address, int(free_port())) as listener:
            assert listener.getsockname()[0] in (place, "0.0.0.0" if place == "::" else place)
            port = listener.getsockname()[1]
            with pytest.raises(UserError, match=f"MASTER_PORT {port}: rank 0 cannot listen on it"):
                _listen(address, port)


def test_flight_records_are_not_written_through_a_link(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(UserError, match="must be a folder of this user, not a link; remove it"):
            keep_flight_records(tmp_path / name)
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ


def test_no_message_between_ranks_is_a_pickle():
    """Torch's object collectives pickle."""
    rooms = (
        "runtime",
        "config",
        "data",
        "model",
        "checkpoint",
        "tracking",
        "cluster",
        "benchmarks",
    )
    files = [REPO / "train.py", *(file for room in rooms for file in (REPO / room).rglob("*.py"))]
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node, "attr", "")
            assert not name.endswith(("_object", "_object_list")), f"{file}: {name}"
