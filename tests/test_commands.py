"""The commands as users run them: exit codes, messages, files.    pytest tests/test_commands.py"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import (
    REPO,
    SAMPLE,
    environment,
    launch_command,
    logged,
    ranks_of,
    read_metrics,
    run,
    start,
    train,
    wait_until,
)

from checkpoint.run_folder import list_complete

METRICS = {
    "step", "epoch", "loss", "lr", "grad_norm", "tokens", "supervised_tokens", "tokens_per_s",
    "padding_efficiency", "micro_steps", "step_seconds", "data_seconds",
}  # fmt: skip


# --------------------------------------------------------------------------------------------------
# A user's mistake: exit code 2 and one line through the launcher, no processes left

SHORT_ROW = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
UNSUPERVISED = {"messages": [{"role": "user", "content": "1"}]}
MISTAKES = {
    "malformed line": ({"rows": '{"messages": [\n'}, [], "rows.jsonl:1: not JSON"),
    "empty file": ({"rows": ""}, [], "rows.jsonl: has no rows"),
    "nothing supervised": ({"rows": json.dumps(UNSUPERVISED) + "\n"}, [],
                           "rows.jsonl:1: no message has the role assistant"),
    "missing model folder": ({}, ["--model.name_or_path", "./nowhere"],
                             "model.name_or_path: no such folder: ./nowhere"),
    "model that is not on the hub": ({}, ["--model.name_or_path", "no-one/no-model"],
                                     "cannot load no-one/no-model"),
    "unknown key": ({}, ["--train.nonsense", "1"], "command line: train.nonsense: unknown key"),
    "contradiction": ({"ds": {"gradient_clipping": 9}}, [], "gradient_clipping is 9, but "
                      "train.gradient_clipping is 0.5"),
    "ds_config that DeepSpeed refuses": ({"ds": {"zero_optimization": {"stage": 2, "stagee": 3}}},
                                         [], "ds.json: zero_optimization.stagee: unknown key"),
    "ds_config that fails as the engine starts": (
        {"ds": {"zero_optimization": {"stage": 1, "legacy_stage1": True}}}, ["--dry_run"],
        "ds.json: DeepSpeed refuses it: The deprecated version of ZeRO Stage 1"),
    "schedule without its argument": ({}, ["--train.lr_schedule", "cosine_with_min_lr"],
                                      "train.lr_schedule_args: cosine_with_min_lr cannot use {}"),
    "fewer ranks than promised": ({}, ["--launch.world_size", "3"],
                                  "launch.world_size promises 3 ranks, but WORLD_SIZE is 1"),
    "batch under ranks": ({}, ["--train.global_batch_size", "1"],
                          "1 is smaller than the number of ranks (2)"),
}  # fmt: skip

# Found by the first rank, and by each rank on its own. The second through a launcher.
ON_TWO_RANKS = {"malformed line": False, "batch under ranks": True}


def test_what_only_the_engine_refuses_is_one_line_in_a_run_too(forks, tiny_config, tmp_path):
    files, _, message = MISTAKES["ds_config that fails as the engine starts"]
    (tmp_path / "ds.json").write_text(json.dumps(files["ds"]))
    finished = forks.train(tiny_config(ds_config=str(tmp_path / "ds.json")), ranks=2)
    assert finished.code == 2 and "Traceback" not in finished.output, finished.output
    assert len(set(finished.errors)) == 1 and message in finished.errors[0], finished.output
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == [
        "resolved_config.yaml", "resolved_ds_config.json",
    ]  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_exits_2_with_one_line(forks, left_running, tiny_config, tmp_path, case):
    files, flags, message = MISTAKES[case]
    changes = {}
    if "rows" in files:
        (tmp_path / "rows.jsonl").write_text(files["rows"])
        changes["data__train_sources"] = [str(tmp_path / "rows.jsonl")]
    if "ds" in files:
        (tmp_path / "ds.json").write_text(json.dumps(files["ds"]))
        changes["ds_config"] = str(tmp_path / "ds.json")
    if ON_TWO_RANKS.get(case):
        finished = train(tiny_config(**changes), *flags, ranks=2)
    else:
        ranks = 2 if case in ON_TWO_RANKS else 1
        finished = forks.train(tiny_config(**changes), *flags, ranks=ranks)
    assert finished.code == 2, finished.output
    assert len(finished.errors) == 1 and message in finished.errors[0], finished.output
    assert "Traceback" not in finished.output
    assert not (tmp_path / "run").exists(), "nothing half-written"
    assert not left_running()


@pytest.mark.launch
def test_a_missing_hostfile_is_no_reason_to_train_on_one_machine(tiny_config, tmp_path):
    """DeepSpeed warns and starts the ranks on this host; train.py knows what was asked for."""
    deepspeed, *rest = launch_command(["train.py", "--config", tiny_config()], 1)
    finished = run([deepspeed, "--hostfile", tmp_path / "nowhere", *rest])
    assert finished.code == 2, finished.output
    assert f"error: hostfile {tmp_path}/nowhere: cannot read it" in finished.errors[0]


def test_a_failure_is_neither_0_nor_2_and_leaves_no_process(forks, left_running, tiny_config):
    """A run that diverges is stopped by its guard, and not finished."""
    config = tiny_config(train__learning_rate=1e30, train__gradient_clipping=0.0)
    finished = forks.train(config, ranks=2)
    assert finished.code not in (0, 2), finished.output
    assert re.search(
        r"error: step \d+: loss .* The last good checkpoint is none\.", finished.output
    )
    assert not left_running()


def test_a_killed_rank_ends_the_job(left_running, tiny_config, tmp_path):
    config = tiny_config(train__epochs=None, train__steps=5000)
    process = start(config, ranks=2)
    wait_until(lambda: logged(tmp_path / "run", "eval"), process)
    assert len(left_running()) >= 4, "runner, launcher and two ranks"
    ranks_of(process)[1].kill()
    assert process.wait(60) not in (0, 2)
    assert not left_running()


LAUNCHERS = {"deepspeed": (2, "deepspeed"), "its launch.py": (1, "deepspeed"),
             "torchrun": (1, "torchrun")}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_terminated_launcher_saves_and_leaves_no_process(
    left_running, tiny_config, tmp_path, launcher
):
    """DeepSpeed's own runner dies of SIGTERM and leaves its launcher and the ranks running; the
    launcher terminates its ranks one by one and kills them 30 s later. W&B has processes too.
    """
    config = tiny_config(
        train__epochs=None, train__steps=5000, tracking={"wandb": "offline"}
    )  # fmt: skip
    ranks, command = LAUNCHERS[launcher]
    process = start(config, ranks=ranks, launcher=command)
    wait_until(lambda: logged(tmp_path / "run"), process)
    assert len(left_running()) > ranks
    told = process
    if launcher == "its launch.py":
        (told,) = psutil.Process(process.pid).children()
    told.terminate()
    assert process.wait(60) != 0
    deadline = time.monotonic() + 25
    while left_running() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left_running()
    saved = list_complete(tmp_path / "run" / "checkpoints")
    step = read_metrics(tmp_path / "run")[-1]["step"]
    assert [path.name for path in saved] == [f"step_{step:08d}"], "in time"


# --------------------------------------------------------------------------------------------------
# What a run writes


def test_dry_run_prints_the_arithmetic_and_writes_nothing(forks, tiny_config, tmp_path):
    config = tiny_config(
        train__lr_scaling="sqrt",
        train__reference_global_batch_size=3,
        data__batching="bucketed",
        data__micro_batch_tokens=300,
        data__eval_sources=[str(tmp_path / "train.jsonl")],
    )
    finished = forks.train(config, "--dry_run", ranks=2)
    assert finished.code == 0, finished.output
    for text in (
        r"70 rows read as messages, 70 training examples; over data.max_length 256: none; WARNING: "
        r"\S+/train.jsonl is in more than one of train_sources and eval_sources",
        r"2 ranks x \d-\d micro-steps x <= 300 tokens = 11-12 examples per step",
        r"11.6667 examples per step: 6 equal steps of at most 12 for the 70 of an epoch",
        r"0.00592 \(0.003 x sqrt\(11.6667 / 3\)\), linear, warm-up 24 examples = 2 steps",
        r"12 = 2 epochs of 6",
        r"global gradient norm 0.5",
        r"[\d,]+ supervised \(\d+%; assistant turns, .*\), padding adds [\d.]+%",
        r"bucketed: as configured",
        r"[\d.]+% of the ranks' time is neither padding nor waiting",
        r"7 for weights and plan, a hash of it and the rank for dropout",
    ):
        assert re.search(text, finished.output), f"{text}\n{finished.output}"
    assert not (tmp_path / "run").exists()


def test_metrics_wandb_and_resolved_configs(forks, tiny_config, tmp_path):
    """A run with W&B offline; then the two resolved configs alone start it again, with torchrun."""
    config = tiny_config(tracking__wandb="offline", eval__every_steps=5)
    first = forks.train(config, ranks=2)
    assert first.code == 0, first.output
    steps = read_metrics(tmp_path / "run")
    assert all(set(step) >= METRICS for step in steps)
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert [e["step"] for e in read_metrics(tmp_path / "run", "eval")] == [0, 5, 10, 12]
    assert sum(step["examples"] for step in steps) == 140, "70 rows, 2 epochs"

    (offline,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    rows, logged_config = read_wandb(offline)
    assert [r["_step"] for r in rows] == list(range(13))
    assert [r["train/loss"] for r in rows[1:]] == pytest.approx([s["loss"] for s in steps])
    assert {5, 10, 12} <= {r["_step"] for r in rows if "eval/eval_loss" in r}
    assert logged_config["train"]["global_batch_size"] == 12
    assert logged_config["resolved_ds_config"]["zero_optimization"]["stage"] == 2
    if (REPO / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}", logged_config["git_commit"])

    resolved = tmp_path / "run" / "resolved_config.yaml"
    again = tmp_path / "again"
    flags = ["--output_dir", again, "--tracking.wandb", "disabled"]
    second = train(resolved, *flags, ranks=2, launcher="torchrun")
    assert second.code == 0, second.output
    assert [s["loss"] for s in read_metrics(again)] == [s["loss"] for s in steps]

    mixed = forks.train(config, "--checkpoint.resume", "none")
    assert mixed.code == 2 and "has checkpoints of an earlier run" in mixed.errors[0]
    other = forks.train(config, "--train.seed", "8", ranks=2)
    assert (
        other.code == 2
        and "its step plan differs: train.seed was 7, is 8; resume" in other.errors[0]
    )
    faster = forks.train(config, "--train.learning_rate", "1e-2", ranks=2)
    assert faster.code == 2 and "train.learning_rate (scaled) was 0.003" in faster.errors[0]


def read_wandb(folder):
    """(history rows, run config) of an offline run, as wandb's own inspector reads it back."""
    wandb = Path(sys.executable).parent / "wandb"
    finished = subprocess.run(
        [wandb, "leet", "inspect", "--json", folder], capture_output=True, text=True, cwd=REPO,
        env=environment(),
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    records = [json.loads(line) for line in finished.stdout.splitlines()]
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    (first,) = (record["run"] for record in records if record["type"] == "run")
    return history, first["config"]["update"]


# --------------------------------------------------------------------------------------------------
# The exported model, the sample, the recipes


def test_export_answers_and_complains(forks, tiny_config, tmp_path):
    assert forks.train(tiny_config()).code == 0
    out = tmp_path / "hf"

    def export(*args):
        return forks.script("scripts/export.py", *args)

    finished = export(tmp_path / "run", out)
    assert finished.code == 0, finished.output
    files = {path.name for path in out.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= files
    few = tmp_path / "few.jsonl"
    few.write_text("".join((SAMPLE / "eval.jsonl").read_text().splitlines(True)[:20]))
    answers = forks.script("scripts/exact_match.py", out, few, "--show", "1")
    assert answers.code == 0 and re.search(r"exact match: \d+ of 20", answers.output)

    assert "is not empty" in export(tmp_path / "run", out).errors[0]
    assert "no such folder" in export(tmp_path / "nowhere", out).errors[0]
    assert "it has no COMPLETE" in export(out, tmp_path / "x").errors[0]


def test_the_sample_is_what_its_script_writes(tmp_path):
    finished = run([sys.executable, "-m", "data.sample.make_sample", tmp_path])
    assert finished.code == 0, finished.output
    counts = re.search(r"(\S+) training rows, (\S+) held-out rows, (\d+) tokens", finished.output)
    readme = (REPO / "data" / "README.md").read_text()
    assert all(count in readme for count in counts.groups()), "data/README.md states the counts"
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        shipped = SAMPLE / path.relative_to(tmp_path)
        assert path.read_bytes() == shipped.read_bytes(), path.name


@pytest.mark.launch
def test_the_same_ds_configs_train_with_transformers_trainer(tmp_path, tiny_model):
    """Real two-rank Trainer runs (through accelerate) with files of ds_configs/."""
    script = tmp_path / "trainer.py"
    script.write_text(f"""
import deepspeed, torch
from accelerate.state import AcceleratorState
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no compiler needed
deepspeed.init_distributed("gloo")  # Trainer does so itself, but not on CPU
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
rows = [dict(input_ids=torch.arange(2, 18), labels=torch.arange(2, 18)) for _ in range(16)]
for stage in (2, 3):
    AcceleratorState._reset_state()
    args = TrainingArguments(r"{tmp_path}/out", deepspeed=f"ds_configs/zero{{stage}}.json",
        max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1)
    model = AutoModelForCausalLM.from_pretrained(r"{tiny_model}")
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0], losses
    print("TRAINED", trainer.model_wrapped.zero_optimization_stage())
torch.distributed.destroy_process_group()
""")
    finished = run(launch_command([script], 2, "torchrun"))
    assert finished.code == 0, finished.output
    assert "TRAINED 2" in finished.output and "TRAINED 3" in finished.output, finished.output
