"""What a person sees of a run, on a terminal and in a log.
pytest tests/tracking/test_console.py"""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
from contextlib import suppress

import pytest

from zerotrain.runtime.errors import AgreedError, EnvironmentFailure, UserError, exit_on_error
from zerotrain.tracking import console
from zerotrain.tracking.console import ConsoleSink

TRAIN = {"epoch": 0.5, "loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 12345.6}
PATH = "/a/path" * 30


def on_a_terminal(work):
    """What `work()` writes to a terminal of 80 columns, in a process of its own."""
    pid, terminal = pty.fork()
    if pid == 0:
        for size in ("COLUMNS", "LINES"):  # exported by readline, and preferred by rich
            os.environ.pop(size, None)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        work()
        sys.stdout.flush()
        os._exit(0)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 40, 80, 0, 0))
    written = b""
    with suppress(OSError):  # of the end
        while part := os.read(terminal, 1 << 16):
            written += part
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


def test_the_bar_is_drawn_below_what_is_printed():
    def train():
        time.sleep(0.2)  # until the terminal has its size
        sink = ConsoleSink(0, 200)
        for step in range(1, 201):
            sink.log("train", {"step": step, **TRAIN, "loss": 2.0 - step / 1000})
            time.sleep(0.001)
            if step % 50 == 0:
                print(f"printed {step} {PATH}", flush=True)
                sink.log("event", {"step": step, "name": "x", "text": f"event {step}"})
                sink.log("eval", {"step": step, "eval_loss": 2.0 - step / 400})
        sink.close(0)

    written = on_a_terminal(train)
    text = re.sub(r"\x1b\[\??[\d;]*[A-Za-z]", "", written)
    for step in (50, 100, 150, 200):
        assert text.count(f"printed {step} {PATH}\n") == 1, "wrapped by the terminal alone"
        assert text.count(f"step {step}/200  event {step}") == 1
    last = text[text.rindex("step 200/200") :]
    for part in ("loss 1.8000", "eval loss 1.5000", "lr 1.00e-03", "tokens/s 12,346"):
        assert part in " ".join(last.split())
    assert "\x1b[2K" in written, "drawn in place"
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is shown"


def test_a_log_gets_the_first_line_the_last_and_one_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(console, "LINE_SECONDS", 60.0)
    sink = ConsoleSink(0, 9)
    for step in range(1, 10):
        sink.log("train", {"step": step, **TRAIN})
    sink.log("save", {"step": 9, "save_seconds": 2.0})
    sink.close(0)
    lines = capsys.readouterr().out.splitlines()
    assert "step 9/9  saved in 2.0 s" in lines
    assert [int(line[5]) for line in lines if "loss 2.0000" in line] == [1, 9]


def test_errors_are_one_line_with_the_rank_and_agreed_ones_are_said_once(capsys, monkeypatch):
    """Without terminal escapes. A failure of the environment has another exit code."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def end(error, rank, local_rank, world_size=16):
        for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", world_size)):
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
    code, text = end(ValueError("a\nb"), 3, 3)
    assert code == 1 and text.endswith(f"[rank 3 @ {here}] ValueError: a\n[rank 3 @ {here}] b\n")


@pytest.mark.launch
def test_other_ranks_are_silent_but_for_their_errors(forks, tiny_config):
    config, rank = tiny_config(), f"[rank 1 @ {os.uname().nodename}] "
    finished = forks.train(config, ranks=2, module="failing_rank")
    assert finished.code == 1
    assert finished.output.count(f"{rank}data: a file is missing\n") == 1
    assert finished.output.count("logged by every rank") == 1
    assert "chatter" not in finished.output
    assert finished.output.count("UserWarning: warned by every rank") == 1
    trace = [line for line in finished.output.splitlines() if line.startswith(rank)]
    assert trace[-2:] == [f"{rank}ValueError: two", f"{rank}lines"]
