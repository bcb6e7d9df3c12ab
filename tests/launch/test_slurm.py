"""scripts/slurm.sbatch on a real slurmctld with two slurmd.    pytest tests/launch/test_slurm.py"""

import json
import re
import time
from contextlib import suppress

import psutil
import pytest
from harness.processes import environment, free_port
from harness.repository import REPO
from harness.runs import determined, read_metrics
from slurm_cluster import Cluster, why_not

from zerotrain.checkpoint.run_folder import list_complete
from zerotrain.runtime.rank_env import rank_variables

pytestmark = pytest.mark.launch
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1")
STEPS = 80  # of about 30 ms each, so that a signal can arrive in the middle of the run


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    cluster = Cluster(folder, environment(), [free_port() for _ in range(3)]).up()
    yield cluster
    cluster.down()


@pytest.fixture
def submit(slurm, tmp_path):
    """sbatch of scripts/slurm.sbatch; returns the job's number."""

    def submit(config, *flags, options=()) -> str:
        log = f"--output={tmp_path}/slurm-%j.out"
        options = ["--parsable", f"--chdir={REPO}", "--time=10", log, *TWO_NODES, *options]
        return slurm.run("sbatch", *options, "scripts/slurm.sbatch", "--config", config, *flags)

    return submit


def wait_for(happened, log, seconds=240):
    """Poll until `happened()` returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (result := happened()):
        if time.monotonic() > deadline:
            pytest.fail(f"not in {seconds} s\n{log.read_text() if log.exists() else 'no log'}")
        time.sleep(0.1)
    return result


def steps_of(run_folder) -> list[int]:
    with suppress(FileNotFoundError, json.JSONDecodeError):  # missing yet, or half a line
        return [step["step"] for step in read_metrics(run_folder)]
    return []


def wait_for_loop(run_folder, log, after=0):
    wait_for(lambda: [step for step in steps_of(run_folder) if step > after], log)


def wait_for_end(slurm, job, log) -> tuple[str, str]:
    """Wait until a job has ended. Returns its state and its exit code, such as `75:0` for 75."""

    def ended():
        facts = slurm.job(job)
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return (facts["JobState"], facts["ExitCode"]) if facts["JobState"] in over else None

    return wait_for(ended, log)


def ranks_of_job(folder) -> dict[int, tuple[psutil.Process, str]]:
    """The ranks of the run in `folder`: {rank: (process, node)}."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()):
                variables = process.environ()
                if ranks := rank_variables(variables):
                    found[int(ranks["RANK"])] = (process, variables["SLURMD_NODENAME"])
    return found


def test_a_preempted_job_requeues_itself(forks, slurm, submit, tiny_config, tmp_path):
    """The same run without an interruption has bitwise equal losses."""
    config = tiny_config(train__epochs=None, train__steps=STEPS, eval__every_steps=50)
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    job = submit(config, "--output_dir", cut)
    log = tmp_path / f"slurm-{job}.out"
    wait_for_loop(cut, log)
    assert {rank: node for rank, (_, node) in ranks_of_job(cut).items()} == {0: "n1", 1: "n2"}

    slurm.run("scancel", "--signal=USR1", "--batch", job)
    wait_for(lambda: slurm.job(job)["Restarts"] == "1", log)
    left = steps_of(cut)[-1]
    assert 1 <= left < STEPS
    assert [c.name for c in list_complete(cut / "checkpoints")] == [f"step_{left:08d}"]
    wait_for(lambda: slurm.job(job)["JobState"] == "PENDING", log)
    # Otherwise it would start after two minutes. SLURM refuses a start within the second in which
    # the job ended: "credential revoked".
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    assert wait_for_end(slurm, job, log) == ("COMPLETED", "0:0")
    assert forks.train(config, "--output_dir", whole, ranks=2).code == 0

    assert f"/step_{left:08d}: step {left}\n" in log.read_text(), "resumed"
    assert steps_of(cut) == list(range(1, STEPS + 1))
    assert determined(whole) == determined(cut)


def test_scancel_saves_an_array_resumes_and_a_stop_ends_it(slurm, submit, tiny_config, tmp_path):
    run = tmp_path / "run"
    config = tiny_config(train__epochs=None, train__steps=10 * STEPS)  # never reached
    array = submit(
        config, "--output_dir", run, options=["--array=1-3%1", f"--output={tmp_path}/%a.out"]
    )
    logs = [tmp_path / f"{element}.out" for element in (1, 2, 3)]
    wait_for_loop(run, logs[0])
    ranks = [process for process, _ in ranks_of_job(run).values()]
    assert len(ranks) == 2
    slurm.run("scancel", f"{array}_1")
    assert wait_for_end(slurm, f"{array}_1", logs[0])[0] == "CANCELLED"
    wait_for(lambda: "exit code 75" in logs[0].read_text(), logs[0])
    assert not any(process.is_running() for process in ranks)
    left = int(re.search(r"preempted: step (\d+)", logs[0].read_text())[1])
    assert left >= 1

    wait_for_loop(run, logs[1], after=left)
    (run / "stop").touch()  # the user's wish, not a preemption: nothing starts again
    assert wait_for_end(slurm, f"{array}_3", logs[1]) == ("COMPLETED", "0:0")
    assert slurm.job(f"{array}_2")["JobState"] == "COMPLETED"
    assert f"step_{left:08d}: step {left}\n" in logs[1].read_text()
    stopped = int(re.search(r"stopped: step (\d+)", logs[1].read_text())[1])
    assert left < stopped < 10 * STEPS and steps_of(run) == list(range(1, stopped + 1))
    assert "step" not in logs[2].read_text(), "nothing is left to do"
    assert not ranks_of_job(run)


def test_a_mistake_is_not_requeued(slurm, submit, tiny_config, tmp_path):
    there = tmp_path / "a b'c$(touch made) %h"  # where the code may be
    there.mkdir()
    for path in REPO.iterdir():
        (there / path.name).symlink_to(path)
    job = submit(tiny_config(), "--train.nonsense", "1", options=[f"--chdir={there}"])
    log = tmp_path / f"slurm-{job}.out"
    assert wait_for_end(slurm, job, log) == ("FAILED", "2:0")
    assert slurm.job(job)["Restarts"] == "0"
    assert "train.nonsense" in log.read_text()
    assert not [*tmp_path.rglob("made")]
