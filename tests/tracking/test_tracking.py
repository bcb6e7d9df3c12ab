"""What a run records: metrics.jsonl and W&B.    pytest tests/tracking/test_tracking.py"""

import importlib.util
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from harness.inputs import read_config
from harness.processes import NEEDS_ROOT, mounted, start, wait_until
from harness.repository import REPO
from harness.runs import checkpoints, logged, read_metrics

pytest.importorskip("wandb")

from zerotrain.checkpoint.lock import RunLock
from zerotrain.config.parse import check_start
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.preemption import TIDY_SECONDS
from zerotrain.tools.goodput import measure_goodput
from zerotrain.tracking import wandb as wandb_sink
from zerotrain.tracking.metrics import JsonlSink, Metrics, UsefulTime
from zerotrain.tracking.wandb import FINISH_SECONDS, WandbSink

SECRETS = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567", "HF_TOKEN": "hf_neverWriteThis"}
ANSWER = {"prompt": "1 + 1", "expected": "2", "answer": "</script>", "score": 0.0}


def starts_of(run_folder):
    """W&B's id and rows of each start of a run, oldest first, as W&B reads its own files."""
    starts = []
    for file in sorted((run_folder / "wandb").glob("offline-run-*/run-*.wandb")):
        records = records_of(file)
        [run] = [record["run"] for record in records if record["type"] == "run"][:1]
        rows = [record["history"]["item"] for record in records if record["type"] == "history"]
        starts.append((run["run_id"], rows))
    return starts


def records_of(file):
    """The records in a file of W&B."""
    from wandb.util import get_core_path

    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json"]
    command += ["--run-file", file, file.parent.parent]
    return [*map(json.loads, subprocess.check_output(command, text=True).splitlines())]


def assert_no_secret_in(folder):
    for file in folder.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert not any(secret.encode() in content for secret in SECRETS.values()), file


def test_trackers_have_every_step_of_a_killed_and_resumed_run(
    forks, tiny_config, tmp_path, monkeypatch
):
    """W&B has the steps before the kill, also those after the last checkpoint. The resumed run has
    the same id, and logs the repeated steps again. Goodput counts from the first start, and
    is the report's. No file of the run has a key in it. TensorBoard shows each step in one run; so
    does MLflow, where somebody has installed it.
    """
    folder = tmp_path / "run"
    trackers = [name for name in ("tensorboard", "mlflow") if importlib.util.find_spec(name)]
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    environment = {
        **SECRETS, "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlflow",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }  # fmt: skip
    config = tiny_config(
        train__steps=300, checkpoint={"every_steps": 8},
        eval={"every_steps": 8}, tracking={"wandb": "offline", "also": trackers},
    )  # fmt: skip
    process = forks.start(config, **environment)
    process.until(lambda: len(logged(folder)) >= 12)
    time.sleep(4)  # W&B and TensorBoard write every 2 s
    process.kill(0)
    process.wait()
    [(name, rows)] = starts_of(folder)
    assert rows[-1]["step"] >= 12
    live = {step["step"]: step["goodput"] for step in read_metrics(folder)}
    assert [*live.values()][-1] == pytest.approx(measure_goodput(folder).share, 1e-9)
    shown = {row["step"]: row["train/goodput"] for row in rows if "train/goodput" in row}
    assert shown == {step: live[step] for step in shown}

    saved = int(checkpoints(folder)[-1].name.removeprefix("step_"))
    last = saved + 10
    forks.finish(config, "--train.steps", last, **environment)
    _, (again, rows) = starts_of(folder)
    losses = {step["step"]: step["loss"] for step in read_metrics(folder)}
    assert again == name and list(losses) == list(range(1, last + 1))
    shown = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert shown == {step: loss for step, loss in losses.items() if step > saved}
    assert any("eval/eval_loss" in row for row in rows)
    first, second = read_metrics(folder, "start")
    steps = read_metrics(folder)
    useful = 0.0
    for attempt in (steps[:saved], steps[saved:]):
        took = [step["step_seconds"] for step in attempt]
        useful += min(took[0], took[1]) + sum(took[1:])
    # the kernel says to a second when a process began
    assert second["started"] > steps[saved - 1]["time"] - 1 > first["started"] - 1
    live = [row["train/goodput"] for row in rows if "train/goodput" in row][-1]
    assert live == pytest.approx(useful / (steps[-1]["time"] - first["started"]), 1e-9)
    assert live == pytest.approx(measure_goodput(folder).share, 1e-9)
    assert [start["step"] for start in read_metrics(folder, "start")] == [0, saved]
    assert_no_secret_in(folder)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert len(events.Scalars("train/loss")) == last and shown == pytest.approx(losses, 1e-6)

    if "mlflow" in trackers:
        client = importlib.import_module("mlflow").MlflowClient(environment["MLFLOW_TRACKING_URI"])
        [run] = client.search_runs([client.get_experiment_by_name("deepspeed-zero").experiment_id])
        history = client.get_metric_history(run.info.run_id, "train/loss")
        assert {metric.step: metric.value for metric in history} == losses


def test_a_tracker_that_fails_ends_no_run(forks, tiny_config, tmp_path):
    """A run does not begin if the tracker's package is missing."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").touch()  # where TensorBoard wants a folder
    config = tiny_config(
        train__steps=3, tracking={"wandb": "disabled", "also": ["tensorboard"]},
    )  # fmt: skip
    output = forks.finish(config).output
    assert output.count("tensorboard failed") == 1 and "finished: step 3" in output
    assert "pip install swanlab" in forks.refusal(config, "--tracking.also", "[swanlab]")


@pytest.mark.launch
def test_ctrl_c_under_deepspeed_closes_the_run_of_wandb(tiny_config, tmp_path):
    """The launcher also sends SIGTERM to the rank and all its children."""
    folder = tmp_path / "run"
    config = tiny_config(
        train__steps=100_000, checkpoint={"every_steps": 2}, tracking={"wandb": "offline"}
    )
    log = tmp_path / "log"
    with log.open("w") as stdout:
        run = start(config, ranks=1, stdout=stdout)
        wait_until(lambda: len(logged(folder)) > 4, run)
        started = psutil.Process(run.pid).children(recursive=True)
        os.killpg(run.pid, signal.SIGINT)
        run.wait(120)  # the runner does not wait for its launcher and the ranks
        assert not psutil.wait_procs(started, 120)[1]
    output = log.read_text()
    assert re.search(rf"^interrupted; .*{folder}/checkpoints/step_", output, re.MULTILINE)
    assert output.count("Traceback") == output.count("launcher/runner.py") == 1, output
    [(_, rows)] = starts_of(folder)
    # the interrupt may come between metrics.jsonl and W&B
    assert read_metrics(folder)[-1]["step"] - rows[-1]["step"] in (0, 1)
    [file] = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    assert "exit" in {record["type"] for record in records_of(file)}


@pytest.mark.parametrize("answers", ["refuses", "is silent"])
def test_a_server_that_does_not_answer_delays_no_step_and_no_exit(
    tiny_config, tmp_path, monkeypatch, capsys, answers
):
    """After INIT_SECONDS, tracking is offline and has every step. From then on, nothing connects to
    the server.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    config = read_config(tiny_config(tracking__wandb="online"))
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    with socket.socket() as server, ExitStack() as connections:
        server.bind(("127.0.0.1", 0))
        server.setblocking(False)
        if answers == "is silent":
            server.listen()

        def new_connections():
            found = []
            with suppress(OSError):  # there is none, or the server refuses them
                while True:
                    found.append(connections.enter_context(server.accept()[0]))
            return len(found)

        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.delenv("WANDB_MODE", raising=False)
        monkeypatch.setattr(wandb_sink, "INIT_SECONDS", 6)
        sink = WandbSink(config, "earlier")
        assert "W&B: tracking is offline" in capsys.readouterr().out
        assert (new_connections() > 0) == (answers == "is silent")
        for step in (3, 4):
            sink.log("train", {"step": step, "loss": 1 / step})
        sink.log("event", {"step": 4, "name": "skipped_step", "text": "loss 9"})
        sink.log("generations", {"step": 4, "set": "dev", "rows": [ANSWER]})
        sink.close(0)
        assert new_connections() == 0
        wandb_sink.wandb.teardown()
    assert FINISH_SECONDS + 3 < TIDY_SECONDS, "a run that is reported online ends in time, too"
    for _ in range(40):  # W&B's process may still write.
        [(name, rows)] = starts_of(folder)
        if len(rows) == 4:
            break
        time.sleep(0.5)
    assert name == "earlier" and [row["step"] for row in rows] == [3, 4, 4, 4]
    assert rows[1]["train/loss"] == 0.25 and rows[2]["event/skipped_step"] == 1
    [file] = folder.rglob("media/html/**/*.html")
    assert "&lt;/script&gt;" in file.read_text()
    assert_no_secret_in(folder)


def test_each_switch_of_the_security_page_keeps_its_facts_out_of_wandb(
    tiny_config, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "--config", "mine.yaml"])
    subprocess.check_call(["git", "init", "-q"])
    remote = "https://me:very-secret@git.example.org/repo"
    subprocess.check_call(["git", "remote", "add", "origin", remote])
    facts = {
        "WANDB_CONSOLE": "to be printed",
        "WANDB__SAVE_REQUIREMENTS": "requirements.txt",
        "WANDB_DISABLE_GIT": "git.example.org",
        "WANDB__DISABLE_META": '"args"',
        "WANDB__DISABLE_STATS": "cpu_count",
        "WANDB_HOST": f'"host": "{os.uname().nodename}"',
        "WANDB__DISABLE_MACHINE_INFO": "environment|git.example.org",
    }

    def sent(switch, value):
        """The records of a run with a switch, as text."""
        folder = tmp_path / switch
        folder.mkdir()
        config = read_config(tiny_config(tracking__wandb="offline", output_dir=folder))
        with monkeypatch.context() as patch:
            patch.setenv(switch, value)
            sink = WandbSink(config, "id")
            print("to be printed")
            sink.close(0)
            wandb_sink.wandb.teardown()
        [file] = folder.rglob("offline-run-*/run-*.wandb")
        return json.dumps(records_of(file))

    text = sent("NO_SWITCH", "")
    assert "very-secret" not in text
    switches = dict(re.findall(r"`(WANDB_\w+)=(\w+)`", (REPO / "SECURITY.md").read_text()))
    assert switches.keys() == facts.keys()
    for switch, value in switches.items():
        assert re.search(facts[switch], text) and not re.search(facts[switch], sent(switch, value))


TRACK = """
import os, platform, socket, sys
name, config, trackers = sys.argv[1:]
sys.path.append(trackers)
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
socket.gethostname = platform.node = lambda: "name-of-the-host"
sys.argv = ["train.py", "--secret", "in-the-command-line"]
from zerotrain.config.parse import parse_command_line
from zerotrain.tracking.trackers import TrackerSink
sink = TrackerSink(name, parse_command_line(["--config", config]).config, "0123abcd", 0)
print("the text of a row", flush=True)
print("an error that quotes a row", file=sys.stderr, flush=True)
sink.log("train", {"step": 1, "loss": 0.5, "text": "a value that is no number"})
sink.close(0)
"""
COLLECTED = (
    "very-secret", "git.example.org", "hf_neverWriteThis", "name-of-the-host", "name-of-the-user",
    "in-the-command-line", "the text of a row", "that quotes a row", "that is no number",
    "packages==", "cpu",
)  # fmt: skip


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "trackio", "swanlab"])
def test_a_tracker_gets_numbers_and_collects_nothing_by_itself(tiny_config, tmp_path, name):
    """In a repository whose remote has a password. Where the tracker is not installed, TRACKERS may
    name a folder that has it.
    """
    trackers = os.environ.get("TRACKERS", "")
    if not (importlib.util.find_spec(name) or Path(trackers, name).exists()):
        pytest.skip(f"needs {name}")
    work = tmp_path / "work"
    for command in (
        f"git init -q {work}",
        f"git -C {work} remote add origin https://me:very-secret@git.example.org/repo",
        f"git -C {work} -c user.name=a -c user.email=b commit -q --allow-empty -m c",
    ):
        subprocess.check_call(command.split())
    config = tiny_config(output_dir=tmp_path / "run")
    variables = {
        **os.environ, **SECRETS, "USER": "name-of-the-user", "LOGNAME": "name-of-the-user",
        "HOME": str(work), "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1",
        "SWANLAB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlflow", "MLFLOW_ALLOW_FILE_STORE": "true",
    }  # fmt: skip
    command = [sys.executable, "-c", TRACK, name, config, trackers]
    subprocess.run(command, cwd=work, env=variables, check=True, timeout=300)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and ".git" not in path.parts]
    contents = {path: path.read_bytes() for path in files}
    assert any(b"train/loss" in each or path.name == "loss" for path, each in contents.items())
    for path, content in contents.items():
        for text in COLLECTED:
            assert text.encode() not in content, (path, text)


def test_what_wandb_rejects_is_one_line(tiny_config, tmp_path, monkeypatch):
    path = tiny_config(tracking={"wandb": "offline"})
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match=r"^tracking: .*$"):
        WandbSink(read_config(path, "--tracking.project", "a/b"), "id")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 54321)  # a user without an entry in /etc/passwd
    with pytest.raises(UserError, match="set HOME to a folder"):
        WandbSink(read_config(path), "id")
    monkeypatch.setenv("HOME", str(tmp_path))
    WandbSink(read_config(path), "id").close(0)


@NEEDS_ROOT
def test_a_full_disk_costs_no_record_once_it_has_room_again(tmp_path, tiny_config, capsys):
    """A full disk costs one warning. No run starts on it."""
    config = read_config(tiny_config())
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=64k", "none"):
        metrics = Metrics([JsonlSink(0, RunLock(tmp_path), UsefulTime().add)])
        metrics.log("train", {"step": 1})
        ballast = tmp_path / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        with pytest.raises(UserError, match="No space left"):
            check_start(config)
        for step in range(2, 200):
            metrics.log("train", {"step": step, "text": "x" * 50})
        assert capsys.readouterr().out.count("WARNING: JsonlSink failed") == 1
        ballast.unlink()
        metrics.log("train", {"step": 200})
        metrics.close(0)
        assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, 201))


def test_malformed_lines_of_metrics_are_skipped(tmp_path, monkeypatch):
    """A run resumes with more records of its own than a tool reads."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '[1]\n{"step": "x"}\n{"kind": "train"}\n7\n{"kind": "train", "step": 2, "loss": NaN}\n'
        '{"kind": "eval", "step": 2.5}\n{"kind": "eval", "step": 5}\n{"kind": "train", "st'
    )
    [step] = read_metrics(tmp_path)
    assert step["step"] == 2 and math.isnan(step["loss"])
    monkeypatch.setattr("zerotrain.tracking.metrics.MAX_METRICS_BYTES", 10)
    JsonlSink(3, RunLock(tmp_path), UsefulTime().add).close(0)
    [line] = path.read_text().splitlines()
    assert line.startswith('{"kind": "train", "step": 2, "loss": NaN')
    os.truncate(path, 1 << 40)
    with pytest.raises(UserError, match=r"metrics\.jsonl has more than"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("odd", ['"x"', "0", "1e400", "-1", "null", str(10**400)])
def test_no_time_of_a_record_ends_a_run(tmp_path, odd):
    """A resumed run reads its earlier records. A live run's clock may be set back. Steps with
    ordinary times have their goodput, and the others have none.
    """
    start = '{"kind": "start", "step": 0, "time": %s}'
    step = '{"kind": "train", "step": 1, "time": %s, "step_seconds": %s}'
    lines = [start % odd, start % 9, step % (odd, odd), step % (10, 1), step % (11, 1)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))
    metrics = Metrics([])
    metrics.sinks.append(JsonlSink(1, RunLock(tmp_path), metrics.useful_time.add))
    for now in (12.0, 9.0, 8.0):  # 9.0: when the run began
        metrics.log("train", {"step": 2, "time": now, "step_seconds": 1.0})
    metrics.close(0)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    shares = [record.get("goodput") for record in found]
    assert 0 < shares[-4] < 2 and 0 < shares[-3] < 2 and shares[-2:] == [None, None]
    assert 0 < measure_goodput(tmp_path).share < 2


def test_a_run_without_wandb_warns_of_few_steps(forks, tiny_config, tmp_path):
    """The settings that the warning names give a schedule without it."""
    config = tiny_config(train__epochs=2, train__warmup_examples=5000, tracking__wandb="online")
    for variable in ({"WANDB_DISABLED": "true"}, {"WANDB_MODE": "disabled"}):
        finished = forks.finish(config, "--train.epochs", "1", **variable)
    assert not (tmp_path / "run" / "wandb").exists()
    warning = re.search("few steps.*", finished.output)[0]
    flags = re.findall(r"(--train\.\w+) (\w+)", warning)
    again = forks.finish(config, *sum(flags, ()), "--output_dir", "x", "--dry_run").output
    assert "few steps" not in again and re.search(r"\n  steps +100 = ", again)
