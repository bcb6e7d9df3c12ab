"""What a person sees of a run, on a terminal and in a log.
pytest tests/tracking/test_console.py"""

import os
import re
import time

import pytest

from zerotrain.runtime.errors import AgreedError, EnvironmentFailure, UserError, exit_on_error
from zerotrain.tracking import console
from zerotrain.tracking.console import ConsoleSink
from zerotrain.tracking.metrics import Metrics

TRAIN = {"epoch": 0.5, "loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 12345.6}
PATH = "/a/path" * 30


def test_the_bar_is_drawn_below_what_is_printed(capsys, monkeypatch):
    for name, value in (("COMPATIBLE", "1"), ("INTERACTIVE", "1")):  # rich takes it for a terminal
        monkeypatch.setenv(f"TTY_{name}", value)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-16color")
    sink = ConsoleSink(0, 200)
    for step in range(1, 201):
        sink.log("train", {"step": step, **TRAIN, "loss": 2.0 - step / 1000})
        time.sleep(0.01)  # the bar is drawn every second
        if step % 50 == 0:
            print(f"printed {step} {PATH}")
            sink.log("event", {"step": step, "name": "x", "text": f"event {step}"})
            loss = 2.0 - step / 400
            Metrics([sink]).log("eval", {"step": step, "eval_loss": loss, "loss/held_out": loss})
    sink.close(0)
    written = capsys.readouterr().out
    text = re.sub(r"\x1b\[\??[\d;]*[A-Za-z]", "", written)
    for step in (50, 100, 150, 200):
        assert text.count(f"printed {step} {PATH}\n") == 1, "wrapped by the terminal alone"
        assert text.count(f"step {step}/200  event {step}") == 1
        assert text.count(f"step {step}/200  loss/held_out {2.0 - step / 400:.4f}\n") == 1
    last = " ".join(text[text.rindex("step 200/200") :].split())
    for part in ("loss 1.8000", "eval loss 1.5000", "lr 1.00e-03", "tokens/s 12,346"):
        assert part in last
    bars = re.findall(r"\x1b\[(\d+)m━{12}", written)
    assert bars[0] != bars[-1], "an empty one and a full one, on a terminal with 16 colors"
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is shown"


def test_without_a_terminal_the_first_step_the_last_and_some_get_a_line(capsys, monkeypatch):
    monkeypatch.setattr(console, "LINE_SECONDS", 60.0)
    sink = ConsoleSink(0, 9)
    for step in range(1, 10):
        sink.log("train", {"step": step, **TRAIN})
    sink.log("save", {"step": 9, "save_seconds": 2.0})
    sink.close(0)
    lines = capsys.readouterr().out.splitlines()
    assert "step 9/9  saved in 2.0 s" in lines
    assert [int(line[5]) for line in lines if "loss 2.0000" in line] == [1, 9]


def test_errors_are_one_line_with_the_rank_and_agreed_ones_come_once(capsys, monkeypatch):
    """Terminal escapes in them are quoted. A failure of the environment has its own exit code."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def end(error, rank, local_rank):
        for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", 16)):
            monkeypatch.setenv(name, str(value))

        def fail():
            raise error

        with pytest.raises(SystemExit) as ended:
            exit_on_error(fail)
        return ended.value.code, capsys.readouterr().err

    here = os.uname().nodename
    assert end(UserError("bad key"), 0, 0) == (2, "error: bad key\n")
    assert end(UserError("bad key"), 12, 4) == (2, f"[rank 12 @ {here}] error: bad key\n")
    assert end(AgreedError("bad key"), 8, 0) == (2, "")
    escapes = EnvironmentFailure("key '\x1b[2J\nerror: fake\u202e' caf\u00e9")
    assert end(escapes, 0, 0) == (1, "error: key '\\x1b[2J\\nerror: fake\\u202e' caf\u00e9\n")


@pytest.mark.launch
def test_other_ranks_print_only_errors(forks, tiny_config):
    config, rank = tiny_config(), f"[rank 1 @ {os.uname().nodename}] "
    finished = forks.train(config, ranks=2, module="failing_rank")
    assert finished.code == 1
    assert finished.output.count(f"{rank}data: a file is missing\n") == 1
    assert finished.output.count("logged by every rank") == 1
    assert "chatter" not in finished.output
    assert finished.output.count("UserWarning: warned by every rank") == 1
    trace = [line for line in finished.output.splitlines() if line.startswith(rank)]
    assert trace[-2:] == [f"{rank}ValueError: two", f"{rank}lines"]
