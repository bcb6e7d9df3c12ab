"""What every process needs: errors, the process group.    pytest tests/test_runtime.py"""

import ast
import time

import pytest
from conftest import REPO

from zerotrain.runtime.errors import EnvironmentFailure, UserError, exit_on_error
from zerotrain.runtime.process_group import check_devices


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


def test_a_rank_without_a_gpu_is_one_line():
    check_devices(0, visible=1)
    with pytest.raises(UserError, match=r"LOCAL_RANK is 1, but the rank sees 1 GPUs"):
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
