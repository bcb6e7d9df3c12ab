"""W&B and TensorBoard, read back by their own readers.    pytest tests/test_tracking.py"""

import json
import re
import shutil
import socket
import subprocess
import time
from dataclasses import replace

import psutil
import pytest
from conftest import read_metrics

from checkpoint.run_folder import METRICS, RESOLVED_DS_CONFIG, list_complete
from checkpoint.state import Progress
from config.parse import parse_command_line
from runtime.errors import UserError
from tracking import wandb as wandb_sink
from tracking.metrics import Metrics
from tracking.names import grouped
from tracking.wandb import FINISH_SECONDS, WandbSink, log_model

SECRETS = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567", "HF_TOKEN": "hf_neverWriteThis"}


GENERATION = {"prompt": "1 + 1", "expected": "2", "answer": "</script>", "score": 0.0}


def inspect(folder):
    """The records of a folder of W&B, as `wandb leet inspect --json` prints them."""
    from wandb.util import get_core_path

    (file,) = folder.glob("run-*.wandb")
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json"]
    command += ["--run-file", file, folder.parent]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in finished.stdout.splitlines()]


def of_type(kind, records):
    return [record[kind] for record in records if record["type"] == kind]


def starts_of(run_folder):
    """The records of each start of the run, oldest first, with W&B's id of it."""
    starts = []
    for folder in sorted((run_folder / "wandb").glob("offline-run-*")):
        records = inspect(folder)
        starts.append((of_type("run", records)[0]["run_id"], records))
    return starts


def history(records):
    return [row["item"] for row in of_type("history", records)]


def scalars(folder, name):
    """{step: value} as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    shown = accumulator.Scalars(name)
    assert len(shown) == len({event.step for event in shown}), "no step twice"
    return {event.step: event.value for event in shown}


def steps_in(run_folder):
    file = run_folder / METRICS
    lines = file.read_text().splitlines() if file.is_file() else []
    return [int(step) for line in lines for step in re.findall(r'"train".*"step": (\d+)', line)]


def test_a_resumed_run_has_every_step_once(forks, tiny_config, tmp_path):
    """In W&B's files and in TensorBoard's: killed after a checkpoint and resumed; then resumed from
    an older one, which is another W&B run. No file of the run has a key in it.
    """
    folder = tmp_path / "run"
    config = tiny_config(
        train__epochs=None, train__steps=300, checkpoint={"every_steps": 5, "keep_last": 9},
        tracking={"wandb": "offline", "tensorboard": True, "wandb_artifacts": True},
    )  # fmt: skip
    process = forks.start(config, **SECRETS)
    process.until(lambda: steps_in(folder)[-1:] > [11])
    children = psutil.Process(process.pids[0]).children(recursive=True)
    process.kill(0)
    process.wait()
    assert not psutil.wait_procs(children, timeout=30)[1], "W&B's processes"
    complete = list_complete(folder / "checkpoints")
    saved = int(complete[-1].name.removeprefix("step_"))
    ((name, records),) = starts_of(folder)
    sent = [row["step"] for row in history(records)]
    assert sent == list(range(len(sent))) and len(sent) <= saved + 1 <= steps_in(folder)[-1]

    last = saved + 5
    finished = forks.train(config, "--train.steps", last, **SECRETS)
    assert finished.code == 0 and "resuming from" in finished.output, finished.output
    starts = starts_of(folder)
    assert [start[0] for start in starts] == [name, name], "one run"
    check_steps([row for _, records in starts for row in history(records)], folder, last)
    (artifact,) = of_type("artifact", starts[1][1])
    assert set(artifact["aliases"]) == {f"step_{last}", "latest"}
    assert f"file://{folder}/checkpoints/step_{last:08d}/manifest.json" in str(artifact)

    for later in list_complete(folder / "checkpoints")[1:]:
        shutil.rmtree(later)
    finished = forks.train(config, "--train.steps", last, **SECRETS)
    assert finished.code == 0, finished.output
    assert "continuing as another W&B run" in finished.output
    *before, old, new = starts_of(folder)
    assert [start[0] for start in before] == [name, name] and old[0] == name != new[0]
    assert not history(old[1]), "opened, and left"
    check_steps(history(new[1]), folder, last)
    about = of_type("run", new[1])[0]["config"]["update"]
    assert about["forked_from"] == {"id": name, "step": 5}
    assert about["train"]["seed"] == 7 and about["resolved_ds_config"]["zero_optimization"]
    assert about["cluster"]["hosts"] == [socket.gethostname()]
    assert about["cluster"]["versions"]["deepspeed"] == "0.19.8"
    axes = [metric.get("step_metric") for metric in of_type("metric", new[1])]
    assert axes.count("step") == len({"train", "data", "time", "memory", "eval", "event"})

    assert_no_secret_in(folder)


def assert_no_secret_in(folder):
    for file in folder.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert not any(secret.encode() in content for secret in SECRETS.values()), file


def check_steps(rows, folder, last):
    """Each step once and in order, with the losses of metrics.jsonl; in TensorBoard too."""
    losses = {step["step"]: step["loss"] for step in read_metrics(folder)}
    assert list(losses) == list(range(1, last + 1))
    assert [row["step"] for row in rows] == [row["_step"] for row in rows] == [0, *losses]
    assert {row["step"]: row["train/loss"] for row in rows[1:]} == losses
    assert "eval/eval_loss" in rows[0] and rows[5]["time/save_seconds"] > 0
    shown = scalars(folder / "tensorboard", "train/loss")
    assert shown == pytest.approx(losses) and list(shown) == list(losses)


def test_groups_have_units_and_unknown_kinds_are_left_out():
    train = {"step": 3, "time": 1e9, "loss": 2.5, "tokens_per_s": 10.0, "update_skipped": False,
             "tokens_total": 99, "tokens": 7, "memory_peak_bytes": 5, "new": 1}  # fmt: skip
    assert grouped("train", train) == {
        "train/loss": 2.5, "time/tokens_per_s": 10.0, "train/update_skipped": 0, "data/tokens": 7,
        "memory/memory_peak_bytes": 5, "train/new": 1,
    }  # fmt: skip
    evaluation = {"step": 3, "eval_loss": 1.5, "eval_seconds": 2.0, "loss/dev": 1.5}
    assert grouped("eval", evaluation) == {
        "eval/eval_loss": 1.5, "time/eval_seconds": 2.0, "eval/loss/dev": 1.5
    }  # fmt: skip
    ranks = {"step": 3, "own_seconds": [1.0, 4.0, 2.0], "hosts": ["a", "b"], "slow_ranks": [1]}
    assert grouped("ranks", ranks) == {
        "time/own_seconds_median": 2.0, "time/own_seconds_max": 4.0
    }  # fmt: skip
    assert grouped("event", {"step": 3, "name": "hang", "text": "a"}) == {"event/hang": 1}
    assert grouped("start", {"step": 3, "world_size": 2}) == {}


@pytest.mark.parametrize("answers, live", [("refuses", True), ("is silent", False)])
def test_a_server_that_does_not_answer_delays_no_step_and_no_exit(
    tiny_config, tmp_path, monkeypatch, answers, live
):
    """Tracking is offline after INIT_SECONDS, here 1, and what was logged is in the run folder. A
    step after a save, which is not complete here, is held back unless wandb_live is set.
    """
    import wandb

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / RESOLVED_DS_CONFIG).write_text("{}")
    (folder / METRICS).touch()
    config = parse_command_line(["--config", str(tiny_config(tracking__wandb="online"))]).config
    config = replace(config, tracking=replace(config.tracking, wandb_live=live))
    monkeypatch.setattr(wandb_sink, "INIT_SECONDS", 1)
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers == "is silent":
            server.listen()  # the kernel accepts
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.delenv("WANDB_MODE", raising=False)
        began = time.monotonic()
        sink = WandbSink(config, folder, Progress(), {"hosts": ["host-1"]})
        assert 1 < time.monotonic() - began < 30, "offline mode takes seconds to start too"
        slowest = 0.0
        with (folder / METRICS).open("a", buffering=1) as metrics:
            for kind, values in [
                *(("train", {"step": n, "loss": 1 / n, "tokens_total": 7 * n}) for n in (1, 2, 3)),
                ("event", {"step": 3, "name": "loss_spike", "text": "loss 9"}),
                ("generations", {"step": 3, "set": "dev", "rows": [GENERATION]}),
                ("save", {"step": 3, "save_seconds": 2.5}),
                ("train", {"step": 4, "loss": 0.25, "tokens_total": 28}),
            ]:
                metrics.write(json.dumps({"kind": kind, "time": 1e9 + 1, **values}) + "\n")
                began = time.monotonic()
                sink.log(kind, values)
                slowest = max(slowest, time.monotonic() - began)
        began = time.monotonic()
        sink.close(0)
        assert slowest < 0.5 and time.monotonic() - began < FINISH_SECONDS + 2
        wandb.teardown()
    ((_, records),) = starts_of(folder)
    rows = history(records)
    assert [row["step"] for row in rows] == [1, 2, 3, 4][: 4 if live else 3]
    assert [row["tokens_total"] for row in rows] == [7 * row["step"] for row in rows]
    assert {row["_timestamp"] for row in rows} == {1e9 + 1}, "of the record"
    assert rows[2]["event/loss_spike"] == 1 and rows[2]["time/save_seconds"] == 2.5
    summary = {k: v for record in of_type("summary", records) for k, v in record["update"].items()}
    assert live or summary["latest/train/loss"] == 0.25
    (file,) = folder.rglob("media/table/**/*.json")
    assert json.loads(file.read_text())["data"] == [list(GENERATION.values())]
    assert_no_secret_in(folder)


def test_an_exported_model_is_an_artifact_of_its_path(tiny_config, tmp_path):
    config = parse_command_line(["--config", str(tiny_config(tracking__wandb="offline"))]).config
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    log_model(config, tmp_path, model, Progress(step=7, wandb_id="trained1"))
    ((_, records),) = starts_of(tmp_path)
    (artifact,) = of_type("artifact", records)
    assert artifact["type"] == "model" and "step_7" in artifact["aliases"]
    assert f"file://{model}/model.safetensors" in str(artifact)
    (about,) = of_type("run", records)
    assert (about["run_group"], about["job_type"]) == ("trained1", "export")


def test_a_sink_that_fails_is_left_out(capsys):
    class Fails:
        def log(self, kind, values):
            raise OSError(28, "No space left on device")

        def close(self, exit_code):
            raise AssertionError("it is left out")

    class Counts:
        logged = closed = 0

        def log(self, kind, values):
            self.logged += 1

        def close(self, exit_code):
            self.closed += 1

    counts = Counts()
    metrics = Metrics([Fails(), counts])
    metrics.log("train", {"step": 7})
    metrics.log("train", {"step": 8})
    metrics.close(0)
    assert (counts.logged, counts.closed) == (2, 1)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "WARNING: Fails stopped at step 7 (No space left on device); training continues without it"
    )


def test_what_is_off_is_not_imported(forks, tiny_config):
    config = tiny_config(train__epochs=None, train__steps=2)
    finished = forks.train(config, module="without_trackers")
    assert finished.code == 0, finished.output


def test_shared_needs_online(tiny_config):
    config = str(tiny_config(tracking={"wandb": "offline", "wandb_shared": True}))
    with pytest.raises(UserError, match=r"tracking.wandb_shared.*needs tracking.wandb online"):
        parse_command_line(["--config", config])
