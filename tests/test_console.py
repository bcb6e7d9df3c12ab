"""What a person sees of a run, on a terminal and in a log.    pytest tests/test_console.py"""

import logging
import os
import re
import signal
import sys
import termios
import time
import warnings

import pytest
from terminal import Terminal
from transformers import AutoModelForCausalLM

from runtime import progress as progress_module
from runtime.errors import AgreedError, UserError, exit_on_error, rank_prefix
from runtime.progress import polled_progress, progress
from runtime.table import show_rows
from tracking import console
from tracking.console import ConsoleSink, quieten_libraries
from tracking.status import Status, describe, duration

TRAIN = {
    "epoch": 0.5, "loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 12345.6, "mfu": 0.412,
    "model_flops_per_s": 3.2e14, "padding_efficiency": 0.969, "memory_peak_bytes": 61.25 * 2**30,
}  # fmt: skip
RANKS = {"own_seconds": [1.0, 1.01, 1.2, 1.0], "hosts": ["a", "a", "host-2", "host-2"]}


@pytest.fixture(params=[80, 200])
def terminal(request):
    terminal = Terminal(request.param)
    yield terminal
    assert not terminal.screen.cursor_hidden
    assert termios.tcgetattr(terminal.slave) == terminal.settings
    terminal.close()


# --------------------------------------------------------------------------------------------------
# What is said


def test_status_says_what_a_run_reports_and_leaves_out_the_rest():
    now = [0.0]
    status = Status(first_step=10, total_steps=110, clock=lambda: now[0])
    assert status.remaining() is None and status.slowest() is None and status.facts() == {}
    for step in range(11, 51):
        now[0] += 3.0
        status.update("train", {"step": step, "loss": 4.0 if step <= 30 else 3.0})
    assert status.facts() == {"loss": "3.0000 (-25%)"}
    status.update("train", {"step": 50, "loss": float("nan")})
    assert status.facts() == {"loss": "nan (-25%)"}
    assert status.remaining() == "0:03:00" and "left 0:03:00" in status.line()

    status.update("train", {"step": 51, **TRAIN})
    status.update("eval", {"step": 51, "eval_loss": 2.25, "eval_seconds": 1.0})
    status.update("save", {"step": 51, "save_seconds": 1.0})
    status.update("ranks", {"step": 51, **RANKS})
    status.update("generations", {"step": 51, "rows": []})
    now[0] += 90
    facts = status.facts()
    assert list(facts) == [
        "epoch", "loss", "eval loss", "lr", "grad norm", "tokens/s", "MFU", "TFLOP/s", "padding",
        "memory", "saved",
    ]  # fmt: skip
    assert max(map(len, facts)) <= 9 and max(map(len, facts.values())) <= 15
    expected = {
        "tokens/s": "12,346", "MFU": "41.2%", "TFLOP/s": "320", "padding": "3.1%",
        "memory": "61.2 GiB", "saved": "0:01:30 ago", "eval loss": "2.2500",
    }  # fmt: skip
    assert expected.items() <= facts.items()
    assert status.slowest() == "rank 2 @ host-2, +19%"
    assert status.line().startswith("step  51/110  epoch 0.50  loss 2.0000 (")
    assert status.line().endswith("slowest rank 2 @ host-2, +19%")
    assert [duration(s) for s in (0.4, 3723, 90_000)] == ["0:00:00", "1:02:03", "1 d 1:00:00"]


def test_records_with_a_line_of_their_own():
    assert describe("event", {"step": 3, "name": "hang", "text": "no step for 60 s"}) == (
        "no step for 60 s"
    )
    assert describe("event", {"step": 3, "name": "hang"}) == "hang"
    assert describe("save", {"step": 3, "save_seconds": 1.23}) == "saved in 1.2 s"
    values = {
        "step": 3,
        "eval_loss": 2.0,
        "eval_seconds": 1.0,
        "loss/math": 2.0,
        "exact_match/b": 0.5,
    }
    assert describe("eval", values) == "eval_loss 2.0000  loss/math 2.0000  exact_match/b 0.5000"
    alone = {"eval_loss": 2.0, "eval_seconds": 1.0, "loss/a": 2.0, "perplexity/a": 7.389}
    assert describe("eval", {"step": 3, **alone}) == "eval_loss 2.0000  perplexity 7.3890"
    assert describe("train", TRAIN) is None and describe("unknown", {"step": 1}) is None


def test_a_log_gets_the_first_line_the_last_and_one_now_and_then(capsys, monkeypatch):
    def steps(interval, last=9):
        monkeypatch.setattr(console, "LINE_SECONDS", interval)
        sink = ConsoleSink(0, 9)
        for step in range(1, last + 1):
            sink.log("train", {"step": step, **TRAIN})
        sink.log("save", {"step": last, "save_seconds": 2.0})
        sink.close(0)
        lines = capsys.readouterr().out.splitlines()
        assert lines.pop(-1 if last == 9 else -2) == f"step {last}/9  saved in 2.0 s"
        return [int(re.match(r"step (\d)/9  epoch 0.50  loss", line)[1]) for line in lines]

    assert steps(60.0) == [1, 9] and steps(0.0) == list(range(1, 10))
    assert steps(60.0, last=4) == [1, 4], "stopped early"


# --------------------------------------------------------------------------------------------------
# On a terminal


def train_on_a_terminal():
    """200 records of a run, drawn often, among all kinds of output; another process, for example a
    rank that fails, prints before the end.
    """
    console.DRAW_SECONDS = 0.01
    warnings.showwarning = lambda text, *_: print(text, file=sys.stderr)  # pytest collects them
    quieten_libraries(is_first=True)
    library = logging.getLogger("some_library")
    library.addHandler(logging.StreamHandler(sys.stderr))  # keeps the stream of now
    sink = ConsoleSink(0, 300)
    for step in range(1, 201):
        sink.log("train", {"step": step, **TRAIN, "loss": 2.0 - step / 1000})
        time.sleep(0.001)
        if step % 50 == 0:
            print(f"printed {step}", flush=True)
            warnings.warn("warned twice", UserWarning, stacklevel=1)
            with warnings.catch_warnings():  # makes Python forget what it has warned of
                warnings.simplefilter("ignore")
            library.warning("logged %d: %s", step, "a long text " * 12)
            sink.log("event", {"step": step, "name": "x", "text": f"event {step}"})
            sink.log("eval", {"step": step, "eval_loss": 1.5, "eval_seconds": 0.1})
        if step == 60:
            sink.log("ranks", {"step": step, **RANKS})
    return sink


def check_panel(lines, step, columns):
    """The only panel ends in these lines, and has all facts."""
    [top] = [i for i, line in enumerate(lines) if line.startswith("╭")]
    [bottom] = [i for i, line in enumerate(lines) if line.startswith("╰")]
    panel = lines[top : bottom + 1]
    assert {len(line) for line in panel} == {columns}, "every line has its right border"
    text = "\n".join(panel)
    for part in (
        f"step {step} of 300", r"\d+%  0:00:0\d left", r"loss +1.8", r"eval loss +1.5000",
        r"tokens/s +12,346", r"MFU +41.2%", r"padding +3.1%", r"memory +61.2 GiB",
        r"slowest +rank 2 @ host-2, \+19%",
    ):  # fmt: skip
        assert re.search(part, text), f"{part}\n{text}"
    return top, bottom


def test_the_panel_is_drawn_in_place_below_what_is_printed(terminal):
    assert terminal.run(lambda: train_on_a_terminal().close(0)) == 0
    lines, columns = terminal.screen.lines, terminal.screen.columns
    assert terminal.screen.wraps == 0
    top, bottom = check_panel(lines, 200, columns)
    assert not any(lines[bottom + 1 :]), lines[bottom:]
    for step in (50, 100, 150, 200):
        for line in (f"printed {step}", f"step {step:>3}/300  event {step}"):
            assert lines[:top].count(line) == 1, line
        assert any(line.startswith(f"logged {step}: a long text") for line in lines[:top])
    assert sum("warned twice" in line for line in lines) == 1


def test_a_failure_does_not_erase_what_other_ranks_printed(terminal):
    def fail():
        sink = train_on_a_terminal()
        os.write(2, b"".join(b"[rank 1 @ b] line %d\n" % i for i in range(12)))
        sink.close(1)
        print("after it")

    assert terminal.run(fail) == 0
    lines = terminal.screen.lines
    _, bottom = check_panel(lines, r"\d+", terminal.screen.columns)
    assert lines[bottom + 1 : bottom + 13] == [f"[rank 1 @ b] line {i}" for i in range(12)]
    assert [line for line in lines[bottom + 13 :] if line] == ["after it"]


def test_tables_wrap_on_a_terminal_only(terminal, capsys):
    rows = {"model": "m [0] " + "word " * 60, "data": "/a/path" * 40, "learning rate": "1e-3"}
    show_rows(rows)
    plain = capsys.readouterr().out.splitlines()
    assert plain == [f"  {name:<13}  {text}" for name, text in rows.items()]
    assert terminal.run(lambda: show_rows(rows, ("data",))) == 0
    lines = terminal.screen.lines
    assert terminal.screen.wraps == 0 and len(lines) > 5
    starts = [i for i, line in enumerate(lines) if line[:15].strip()]
    assert [lines[i].split()[0] for i in starts] == ["model", "data", "learning"]
    assert lines[0].startswith("  model          m [0] word word") and lines[starts[1] - 1] == ""
    assert "".join(line[17:] for line in lines[starts[1] : starts[2]]) == rows["data"]


def test_the_bar_of_long_work_is_erased_at_its_end(terminal):
    def work():
        progress_module.DRAW_SECONDS = 0.0
        with progress("converting", 1_000_000, "weights") as report:
            with progress("within", 10, "rows") as inner:
                inner(5)
            for done in range(0, 1_000_001, 200_000):
                report(done)
                print(f"printed {done}")
        done = [0]
        with polled_progress("tokenizing", 500, "rows", lambda: done[0]):
            for done[0] in range(500):
                time.sleep(0.0001)

    assert terminal.run(work) == 0
    seen = "\n".join(terminal.screen.erased)
    assert re.search(r"converting ━+╺━+ 400,000 of 1,000,000 weights, [\d,]+ weights/s 0:", seen)
    assert re.search(r"tokenizing .* of 500 rows, [\d,]+ rows/s", seen) and "within" not in seen
    assert terminal.screen.wraps == 0
    printed = [f"printed {n}" for n in range(0, 1_000_001, 200_000)]
    assert [line for line in terminal.screen.lines if line] == printed


def test_long_work_in_a_log(capsys, monkeypatch):
    def work():
        with progress("exporting", 4, "tensors") as report, progress("inner", None, "x") as inner:
            for done in range(5):
                report(done)
                inner(done)

    work()
    assert capsys.readouterr() == ("", ""), "short work"
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
    work()
    out, lines = capsys.readouterr()
    assert out == "" and len(lines.splitlines()) == 5
    assert re.fullmatch(r"exporting: 4 of 4 tensors, [\d,]+ tensors/s", lines.splitlines()[-1])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    work()
    assert capsys.readouterr() == ("", "")


def test_weights_that_are_loaded_in_a_log(tiny_model, capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    quieten_libraries(is_first=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    lines = capsys.readouterr().err.splitlines()
    tensors = len(list(model.parameters()))
    expected = rf"loading weights: \d+ of {tensors} tensors, [\d,.]+ tensors/s"
    assert len(lines) == tensors and all(re.fullmatch(expected, line) for line in lines), lines


# --------------------------------------------------------------------------------------------------
# Errors of ranks


def test_errors_carry_the_rank_and_agreed_ones_are_said_once(capsys, monkeypatch):
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
    assert end(AgreedError("bad key"), 0, 0) == (2, "error: bad key\n")
    assert end(AgreedError("bad key"), 8, 0) == (2, "")
    code, text = end(ValueError("a\nb"), 3, 3)
    assert code == 1 and text.endswith(f"[rank 3 @ {here}] ValueError: a\n[rank 3 @ {here}] b\n")
    assert all(line.startswith(f"[rank 3 @ {here}] ") for line in text.splitlines())
    assert end(ValueError("alone"), 0, 0, 1)[1].startswith("Traceback (most recent call last)")
    assert rank_prefix() == ""


@pytest.mark.launch
def test_other_ranks_are_silent_but_for_their_errors(forks, tiny_config):
    config, rank = tiny_config(), f"[rank 1 @ {os.uname().nodename}] "
    for variables, times in (({}, 1), ({"LIBRARY_LOGS": "INFO"}, 2)):
        finished = forks.train(config, ranks=2, module="odd_rank", **variables)
        assert finished.code == 1
        assert finished.output.count(f"{rank}data: a file is missing\n") == 1
        assert finished.output.count("logged by every rank") == times
        assert finished.output.count("chatter") == 2 * (times - 1)
        if times == 1:
            assert finished.output.count("UserWarning: warned by every rank") == 1
        assert "logged error" in finished.output
        trace = [line for line in finished.output.splitlines() if line.startswith(rank)]
        assert f"{rank}Traceback (most recent call last):" in trace
        assert trace[-2:] == [f"{rank}ValueError: two", f"{rank}lines"]


@pytest.mark.launch
def test_a_run_on_a_terminal_is_stopped_by_a_signal(forks, tiny_config):
    """Two ranks share the terminal, as under a launcher."""
    terminal = Terminal(80)
    config = tiny_config(train__epochs=None, train__steps=100_000, train__global_batch_size=35)
    ranks = forks.start(config, ranks=2, log=terminal.name, TERM="xterm")
    terminal.until(lambda: re.search(r"step \d+ of 100,000", "\n".join(terminal.screen.lines)))
    ranks.kill(1, signal.SIGTERM)
    terminal.until(lambda: any("preempted, saved" in line for line in terminal.screen.lines))
    assert forks.ask({"wait": ranks.pids})["codes"] == [75, 75]
    lines = terminal.screen.lines
    step = int(re.search(r"preempted, saved: step ([\d,]+)", lines[-2])[1].replace(",", ""))
    top, bottom = (next(i for i, x in enumerate(lines) if x.startswith(c)) for c in "╭╰")
    assert re.match(rf"│ step {step:,} of 100,000 .* left │$", lines[top + 1]), lines
    assert sum("of 100,000" in line for line in lines) == 1
    assert {len(line) for line in lines[top : bottom + 1]} == {80} and bottom == len(lines) - 3
    assert any(line.startswith(f"step {step:>6}/100000  saved in ") for line in lines[:top])
    assert any(line.startswith("  tokenizer      ") for line in lines[:top])
    assert not terminal.screen.cursor_hidden
    assert termios.tcgetattr(terminal.slave) == terminal.settings
    terminal.close()
