"""What every process needs: errors, the process group.    pytest tests/test_runtime.py"""

import ast
import threading
import time

import pytest
from conftest import REPO

from zerotrain.runtime import library_output
from zerotrain.runtime.errors import EnvironmentFailure, UserError, exit_on_error
from zerotrain.runtime.hang import position, ranks_behind
from zerotrain.runtime.process_group import check_devices
from zerotrain.runtime.redact import redactor


def test_a_rank_that_fails_alone_does_not_wait_for_the_others(forks, tiny_config):
    """NCCL's shutdown would, until the timeout, and the traceback would not be printed before."""
    began = time.monotonic()
    finished = forks.train(tiny_config(), ranks=2, module="nccl_shutdown", FAILS="alone")
    assert finished.code == 1 and "ValueError: on this one" in finished.output, finished.output
    assert time.monotonic() - began < 50
    finished = forks.train(tiny_config(), ranks=2, module="nccl_shutdown", FAILS="together")
    assert finished.code == 2 and finished.errors == ["error: on all ranks"], finished.output
    finished = forks.train(tiny_config(), ranks=2, module="nccl_shutdown", FAILS="disk")
    assert finished.code == 1 and len(finished.errors) == 1, finished.output
    assert "no room" in finished.errors[0]


def test_a_rank_that_others_wait_for_is_named_with_its_host(forks, tiny_config, tmp_path):
    """Rank 1 sleeps; rank 0 waits for it in a collective."""
    finished = forks.train(tiny_config(), ranks=2, module="nccl_shutdown", FAILS="late")
    (line,) = [x for x in finished.output.splitlines() if "nothing has moved" in x]
    assert "waiting for rank 1 on here (at " in line, line
    assert finished.code == 0 and "training continues" in finished.output


def test_ranks_behind():
    assert ranks_behind({0: {"a": 3, "b": 1}, 1: {"a": 3}, 2: {"a": 2, "b": 1}}, 4) == [2, 3]
    assert ranks_behind({0: {"a": 3}, 1: {"b": 7}}, 2) == []
    assert ":" in position()


def test_a_rank_without_a_gpu_is_one_line(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    check_devices(0, visible=1)
    with pytest.raises(UserError, match=r"LOCAL_RANK is 1, but the rank sees 1 GPUs .*=5\)"):
        check_devices(1, visible=1)


@pytest.mark.parametrize(("kind", "code"), [(UserError, 2), (EnvironmentFailure, 1)])
def test_an_error_is_one_line_without_terminal_escapes(capsys, kind, code):
    def fail():
        raise kind("rows.jsonl: key '\x1b[2J\nerror: fake\u202e' caf\u00e9")

    with pytest.raises(SystemExit) as ended:
        exit_on_error(fail)
    said = capsys.readouterr().err
    assert ended.value.code == code
    assert said == "error: rows.jsonl: key '\\x1b[2J\\nerror: fake\\u202e' caf\u00e9\n"


def test_a_stale_lock_of_a_compile_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("stale", "held"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    with (tmp_path / "held" / "lock").open(), library_output.locks_named(0.01):
        deadline = time.monotonic() + 60
        while threading.active_count() > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
            if "lock" in (said := capsys.readouterr().err):
                break
    assert f"{tmp_path}/stale/lock" in said and "held" not in said


def test_secrets_are_neither_printed_nor_in_a_command():
    redact = redactor({"HF_TOKEN": "abcdefgh", "PGPASSWORD": "s3cret77", "PASS": "x", "HOME": "h"})
    for text in ("abcdefgh", "s3cret77", "Bearer eyJhbGci", "hf_ABCDEFGHIJ", "sk-abcdefgh12"):
        assert text.split()[-1] not in redact(text) and "***" in redact(text)
    for text in (
        "--password hunter2x", "X_API_KEY=hunter2x", '{"token": "hunter2x"}', "key: hunter2x",
        "https://h/a?token=hunter2x&b=1", "?X-Amz-Signature=hunter2x", "npm_hunter2x",
        "AUTHORIZATION: TOKEN hunter2x", "eyJhbGciOiJI.eyJzdWIi.hunter2x", "ASIAhunter2x",
    ):  # fmt: skip
        assert "hunter2x" not in redact(text), text
    assert redact("https://me:pw@host") == "https://***@host"
    assert redact("x in h, risk-free, https://host/a@b") == "x in h, risk-free, https://host/a@b"


def test_no_message_between_ranks_is_a_pickle():
    """Torch's object collectives pickle."""
    files = [REPO / "train.py", *(REPO / "zerotrain").rglob("*.py")]
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node, "attr", "")
            assert not name.endswith(("gather_object", "broadcast_object", "_object_list")), (
                f"{file}: {name}"
            )
