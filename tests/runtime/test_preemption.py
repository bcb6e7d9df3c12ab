"""Preempt a run at any moment, by a signal to one rank.
pytest tests/runtime/test_preemption.py
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial

import psutil
import pytest
from harness.inputs import strategy, write_rows
from harness.processes import environment, run, start, wait_until
from harness.repository import REPO
from harness.runs import determined, is_saving, logged, read_metrics

from zerotrain.checkpoint.run_folder import list_complete
from zerotrain.tools.saved import checkpoint_problem


@pytest.fixture
def config(tiny_config, tmp_path, chat_rows, tiny_model_with_dropout):
    """Evaluations take half a second, so that a signal can arrive during one."""
    return tiny_config(
        model=tiny_model_with_dropout,
        data__eval_sources=[write_rows(tmp_path / "many.jsonl", chat_rows * 6)],
        train__steps=12, eval__every_steps=6,
        checkpoint={"every_steps": 1},
    )  # fmt: skip


def curves(folder):
    evals = [(e["step"], e["eval_loss"]) for e in read_metrics(folder, "eval")]
    return determined(folder), evals


# When to send the signal to a run that has started at the time `began`.
MOMENTS = {
    "at the start": lambda folder, began: (folder / "metrics.jsonl").exists(),
    "in the first step": lambda folder, began: [
        record for record in logged(folder, "eval") if record["time"] > began
    ],
    "in a save": lambda folder, began: is_saving(folder / "checkpoints", began),
    "in an evaluation": lambda folder, began: (
        len(logged(folder, "train")) == 6 and len(logged(folder, "eval")) == 1
    ),
}


def test_preempted_at_any_moment(forks, config, tmp_path):
    """All ranks save the same step and exit with code 75. The next start resumes, and is preempted
    at another moment. At last the run completes the curve.
    """
    whole = "--output_dir", tmp_path / "whole", "--checkpoint.every_steps", 12
    forks.finish(config, *whole, ranks=2)
    folder = tmp_path / "run"
    for number, (moment, has_come) in enumerate(MOMENTS.items()):
        began = time.time()
        run = forks.start(config, ranks=2)
        run.until(partial(has_come, folder, began))
        run.kill(number % 2, (signal.SIGTERM, signal.SIGUSR1)[number // 2])
        finished = run.wait()
        steps, evals = len(logged(folder, "train")), len(logged(folder, "eval"))
        if moment == "at the start":  # 143: just before the loop began
            assert finished.code in (75, 143), finished.output
            assert finished.code == 143 or "preempted: step 0, " in finished.output
            assert steps == 0 and not list_complete(folder / "checkpoints")
        else:
            assert finished.code == 75, f"{moment}\n{finished.output}"
            saved = list_complete(folder / "checkpoints")
            assert saved[-1].name == f"step_{steps:08d}" and checkpoint_problem(saved[-1]) is None
            assert f"preempted: step {steps}, " in finished.output
        if moment == "in an evaluation":
            assert (steps, evals) == (6, 1)  # it is interrupted, and no step follows
        else:
            assert steps < 6, moment
    forks.finish(config, ranks=2)
    assert curves(folder) == curves(tmp_path / "whole")


def test_a_hanging_rank_ends_after_the_grace_time(forks, left_running, tiny_config, tmp_path):
    """One rank is stopped; the other waits for it in a collective and cannot act on a signal."""
    config = tiny_config(train__steps=5000, distributed__preempt_grace_seconds=2)
    run = forks.start(config, ranks=2)
    run.until(lambda: logged(tmp_path / "run", "train"))
    run.kill(1, signal.SIGSTOP)
    run.until(lambda: is_waiting(run.pids[0]))
    assert {process.pid for process in left_running()} == set(run.pids)
    began = time.monotonic()
    run.kill(0, signal.SIGTERM)
    run.kill(0, signal.SIGTERM)  # launchers may forward it more than once
    run.until(lambda: "exiting without another save" in run.log.read_text())
    assert time.monotonic() - began >= 2
    run.kill(1)
    run.wait(143)
    assert not left_running()


@pytest.mark.parametrize(
    "number, seconds, code", [(15, 0, 75), (10, 0, 75), (2, 0, 75), (15, 99, 143)]
)
def test_no_signal_after_the_loop_changes_the_code_unless_the_rank_hangs(number, seconds, code):
    """Another rank's signal has ended the loop, and this rank has saved. Its shutdown is slow."""
    program = (
        "import sys, time; from zerotrain.runtime.preemption import PreemptionHandler\n"
        "class Slow:\n    def __del__(self): sleep(1)\n"
        "slow, sleep = Slow(), time.sleep\n"
        f"with PreemptionHandler(1).deferred(): pass\nprint(flush=True); sleep({seconds})\n"
        "sys.exit(75)"
    )
    rank = subprocess.Popen([sys.executable, "-c", program], env=environment(), stdout=-1)
    rank.stdout.readline()
    while rank.poll() is None:
        rank.send_signal(number)
        time.sleep(0.02)
    assert rank.returncode == code


def is_waiting(pid):
    """Whether the process is idle: it uses no CPU time for a quarter of a second."""
    return not psutil.Process(pid).cpu_percent(0.25)


# --------------------------------------------------------------------------------------------------
# Resuming in the same layout, bit for bit


@pytest.mark.parametrize("name, is_async", [("zero2_offload", "false"), ("zero3", "true")])
def test_resumed_bit_for_bit(forks, tiny_config, tmp_path, tiny_model_with_dropout, name, is_async):
    """The run stops within an epoch and a schedule, and has dropout. test_training.py covers fp32
    with ZeRO 0 and 3, and bf16 with 0, 1 and 3 with offload; test_checkpoints.py covers ZeRO 2.
    """
    config = tiny_config(
        model=tiny_model_with_dropout, ds_config=strategy(tmp_path, name),
        train__precision="bf16", eval__every_steps=2,
    )  # fmt: skip
    flags = ["--checkpoint.async_save", is_async]
    forks.finish(config, "--output_dir", tmp_path / "whole", *flags, ranks=2)
    run = forks.start(config, *flags, ranks=2)
    run.until(lambda: len(logged(tmp_path / "run", "train")) >= 3)
    run.kill(1, signal.SIGTERM)
    run.wait(75)
    flags += ["--train.replay_every", 1]  # which changes nothing
    assert "resuming from" in forks.finish(config, *flags, ranks=2).output
    assert curves(tmp_path / "run") == curves(tmp_path / "whole")


# --------------------------------------------------------------------------------------------------
# Launchers


def ranks_in(processes):
    """Return the processes to which a launcher has given a rank, the oldest first."""
    ranks = []
    for process in processes:
        with suppress(psutil.Error):
            if "RANK" in process.environ():
                ranks.append((process.create_time(), process.pid, process))
    # not by their numbers alone, which begin again at 32,768
    return [process for *_, process in sorted(ranks)]


@pytest.mark.launch
@pytest.mark.parametrize(
    "victim, number, ranks, trains",
    [
        ("torchrun", signal.SIGKILL, 1, False),
        ("deepspeed", signal.SIGTERM, 1, True),  # its launcher and the ranks go on
        ("deepspeed's launcher", signal.SIGKILL, 2, True),
        ("torchrun", signal.SIGKILL, 1, True),
        ("torchrun", signal.SIGTERM, 1, True),  # it ends its ranks, and kills them 30 s later
    ],
)
def test_ranks_whose_launcher_is_ended_save_and_end(
    left_running, tiny_config, tmp_path, victim, number, ranks, trains
):
    """Otherwise they would train for ever, with the GPUs and the lock of the folder."""
    folder = tmp_path / "run"
    config = tiny_config(train__steps=100_000)
    started = start(config, ranks=ranks, launcher=victim.split("'")[0])
    wait_until(lambda: logged(folder, "train") or not trains, started)
    found = wait_until(lambda: ranks_in(left_running())[ranks - 1 :], started, interval=0.2)
    os.kill(found[0].ppid() if "'" in victim else started.pid, number)
    code = started.wait(200)
    assert code or number == signal.SIGKILL
    deadline = time.monotonic() + 120
    while left_running() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left_running()
    if not trains:  # the ranks were importing
        assert not folder.exists()
        return
    [saved] = list_complete(folder / "checkpoints")
    assert checkpoint_problem(saved) is None
    assert saved.name == f"step_{len(logged(folder, 'train')):08d}"
    assert not (folder / "run.lock").exists()


@pytest.mark.launch
@pytest.mark.parametrize("stopped", [0, 1])  # the rank, and the program that it has started
def test_what_is_stopped_while_rows_are_tokenized_leaves_no_process(
    left_running, tiny_config, tmp_path, stopped
):
    rows = write_rows(tmp_path / "many.jsonl", [{"text": f"row {i} " * 200} for i in range(30_000)])
    config = tiny_config(data__train_sources=[rows], data__on_too_long="split")
    started = start(config, ranks=1, launcher="torchrun")
    # the launcher, the rank, the program and its pool
    wait_until(lambda: len(left_running()) > 3, started, interval=0.1)
    ranks_in(left_running())[stopped].terminate()
    assert started.wait(120) != 0
    assert not left_running()


def test_a_shell_that_has_the_name_of_a_launcher_is_none(tmp_path):
    program = (
        "import pathlib, time; from zerotrain.runtime.preemption import *\n"
        "follow_launcher(); PreemptionHandler(1); time.sleep(4)\n"
        f"pathlib.Path('{tmp_path}/on').touch()"
    )
    run(["bash", "-c", f'{sys.executable} -c "{program}" & sleep 3; : torchrun'])
    assert (tmp_path / "on").exists()


def test_a_rank_that_another_process_has_adopted_ends(tmp_path):
    """Its launcher has ended before the rank looks for it. A user's systemd adopts orphans, as
    `sleep` does here, which keeps the mark of a process that does.
    """
    program = (
        "import os, pathlib, time; from zerotrain.runtime.preemption import *\n"
        "while os.getppid() != int(os.environ['ADOPTER']): time.sleep(0.01)\n"
        "try: follow_launcher(); ended = 'trains'\n"
        "except SystemExit as error: ended = str(error.code)\n"
        f"pathlib.Path('{tmp_path}/draft').write_text(ended)\n"
        f"os.rename('{tmp_path}/draft', '{tmp_path}/ended')\n"
    )
    launcher = f"import subprocess; subprocess.Popen({[sys.executable, '-c', program]})"
    adopter = (
        "import ctypes, os, subprocess, sys; ctypes.CDLL(None).prctl(36, 1)\n"
        "os.environ |= {'TORCHELASTIC_RUN_ID': 'none', 'ADOPTER': str(os.getpid())}\n"
        f"subprocess.Popen({[sys.executable, '-c', launcher]})\n"
        "os.execvp('sleep', ['sleep', '200'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", adopter], cwd=REPO)
    try:
        wait_until((tmp_path / "ended").exists, process)
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "ended").read_text() == "143"


@pytest.mark.launch
def test_torchrun_gets_75_however_many_signals_a_rank_gets(left_running, tiny_config, tmp_path):
    log = tmp_path / "log"
    config = tiny_config(train__steps=100_000)
    started = start(config, ranks=1, launcher="torchrun", stdout=log.open("w"))
    wait_until(lambda: logged(tmp_path / "run", "train"), started)
    rank = ranks_in(left_running())[0]
    while started.poll() is None:
        with suppress(psutil.NoSuchProcess):
            rank.terminate()
        time.sleep(0.02)
    assert "exitcode  : 75 " in log.read_text()
