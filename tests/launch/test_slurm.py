"""scripts/slurm.sbatch under a slurmctld with two slurmd.    pytest tests/launch/test_slurm.py"""

import re
import sys
from contextlib import suppress

import psutil
import pytest
from harness.processes import environment, free_port
from harness.repository import REPO
from harness.runs import determined, logged
from slurm_cluster import Cluster, Job, why_not

from zerotrain.checkpoint.run_folder import list_complete

pytestmark = pytest.mark.launch
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1")
ENDLESS = {"train__epochs": None, "train__steps": 100_000}  # a signal or its user stops the run


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
    """A function that submits scripts/slurm.sbatch and returns the job."""

    def submit(config, *flags, options=()) -> Job:
        log = f"--output={tmp_path}/slurm-%j.out"
        options = ["--parsable", f"--chdir={REPO}", "--time=10", log, *TWO_NODES, *options]
        number = slurm.run("sbatch", *options, "scripts/slurm.sbatch", "--config", config, *flags)
        return Job(slurm, number, tmp_path / f"slurm-{number}.out")

    return submit


def steps_of(run_folder) -> list[int]:
    return [step["step"] for step in logged(run_folder)]


def ranks_of_job(folder) -> dict[int, tuple[psutil.Process, str]]:
    """Return {rank: (process, node)} of the run in `folder`."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()):
                variables = process.environ()
                if "RANK" in variables:
                    found[int(variables["RANK"])] = (process, variables["SLURMD_NODENAME"])
    return found


def test_a_shell_of_salloc_is_one_rank_and_srun_starts_all(slurm):
    code = "from zerotrain.runtime import rank_env; print(*rank_env.rank_variables().values())"
    salloc = ["salloc", "--quiet", f"--chdir={REPO}", "--nodes=2", "--ntasks-per-node=2", "srun"]
    ranks = [sys.executable, "-c", code]
    assert slurm.run(*salloc, "--interactive", "--preserve-env", *ranks) == "0 0 1 1"
    lines = slurm.run(*salloc, *ranks).splitlines()
    assert sorted(lines) == ["0 0 4 2", "1 1 4 2", "2 0 4 2", "3 1 4 2"]


def test_a_preempted_job_requeues_itself(forks, slurm, submit, tiny_config, tmp_path):
    """Its losses are bitwise equal to the losses of a run without an interruption."""
    config = tiny_config(**ENDLESS, eval__every_steps=50)
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    job = submit(config, "--output_dir", cut)
    job.until(lambda: steps_of(cut))
    assert {rank: node for rank, (_, node) in ranks_of_job(cut).items()} == {0: "n1", 1: "n2"}

    slurm.run("scancel", "--signal=USR1", "--batch", job.number)
    job.until(lambda: job.facts()["Restarts"] == "1")
    left = steps_of(cut)[-1]
    assert [c.name for c in list_complete(cut / "checkpoints")] == [f"step_{left:08d}"]
    job.until(lambda: job.facts()["JobState"] == "PENDING")
    # Otherwise it would start after two minutes. A start within the second in which the job ended
    # fails: "credential revoked".
    slurm.run("scontrol", "update", f"JobId={job.number}", "StartTime=now+2")
    job.until(lambda: steps_of(cut)[-1] > left + 20)
    (cut / "stop").touch()
    assert job.wait() == ("COMPLETED", "0:0")
    assert f"/step_{left:08d}: step {left}\n" in job.log.read_text(), "resumed"
    steps = steps_of(cut)
    assert steps == list(range(1, len(steps) + 1))

    uncut = forks.start(config, "--output_dir", whole, ranks=2)
    uncut.until(lambda: len(steps_of(whole)) >= len(steps))
    (whole / "stop").touch()
    assert uncut.wait().code == 0
    assert determined(whole)[: len(steps)] == determined(cut)


def test_scancel_saves_an_array_resumes_and_a_stop_ends_it(slurm, submit, tiny_config, tmp_path):
    run = tmp_path / "run"
    options = ["--array=1-3%1", "--nodes=1", f"--output={tmp_path}/%a.out"]
    array = submit(tiny_config(**ENDLESS), "--output_dir", run, options=options)
    first, second, third = (
        Job(slurm, f"{array.number}_{i}", tmp_path / f"{i}.out") for i in (1, 2, 3)
    )
    first.until(lambda: steps_of(run))
    ranks = [process for process, _ in ranks_of_job(run).values()]
    assert len(ranks) == 1
    for _ in range(10):  # the rank gets each signal twice: from scancel and from the node wrapper
        slurm.run("scancel", first.number, check=False)
    assert first.wait()[0] == "CANCELLED"
    second.until(lambda: "exit code 75" in first.log.read_text())
    assert not any(process.is_running() for process in ranks)
    left = int(re.search(r"preempted: step (\d+)", first.log.read_text())[1])
    assert left >= 1

    second.until(lambda: steps_of(run)[-1] > left)
    (run / "stop").touch()  # the user stops the run, so nothing starts again
    assert third.wait() == ("COMPLETED", "0:0")
    assert second.facts()["JobState"] == "COMPLETED"
    assert f"step_{left:08d}: step {left}\n" in second.log.read_text()
    stopped = int(re.search(r"stopped by .*: step (\d+)", second.log.read_text())[1])
    assert left < stopped and steps_of(run) == list(range(1, stopped + 1))
    assert "step" not in third.log.read_text(), "nothing is left to do"
    assert not ranks_of_job(run)


def test_a_mistake_is_not_requeued(submit, tiny_config, tmp_path):
    there = tmp_path / "a b'c$(touch made) %h"  # a possible folder of the code
    there.mkdir()
    for path in REPO.iterdir():
        (there / path.name).symlink_to(path)
    job = submit(tiny_config(), "--train.nonsense", "1", options=[f"--chdir={there}"])
    assert job.wait() == ("FAILED", "2:0")
    assert job.facts()["Restarts"] == "0"
    assert "train.nonsense" in job.log.read_text()
    assert not [*tmp_path.rglob("made")]
