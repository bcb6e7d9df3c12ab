"""The commands as users run them: exit codes, messages, files.
pytest tests/commands/test_commands.py"""

import re
import sys
from sysconfig import get_path

import pytest
from harness.processes import run
from harness.repository import REPO, SAMPLE
from harness.runs import read_metrics
from transformers.utils import is_flash_attn_2_available

METRICS = {
    "step", "epoch", "loss", "lr", "grad_norm", "tokens", "supervised_tokens", "tokens_per_s",
    "padding_efficiency", "micro_steps", "step_seconds", "data_seconds",
}  # fmt: skip


# --------------------------------------------------------------------------------------------------
# A user's mistake: exit code 2 and one line through the launcher, no processes left


def test_a_mistake_exits_2_with_one_line(forks, left_running, tiny_config, tmp_path):
    rows, ds_config = tmp_path / "rows.jsonl", tmp_path / "ds.json"
    rows.write_text('{"messages": [\n')
    ds_config.write_text('{"zero_optimization": {"stage": 7}}')
    line = forks.refusal(tiny_config(), f"--ds_config={ds_config}")
    assert "ds.json: zero_optimization.stage: Input should be" in line
    line = forks.refusal(tiny_config(), f"--data.train_sources=[{rows}]", ranks=2)
    assert "rows.jsonl:1: not JSON" in line
    assert not (tmp_path / "run").exists(), "nothing half-written"
    assert not left_running()


FIXES = {  # a mistake -> the value in its message, and the flag that the message tells to set
    "--data.max_length=2048": (r"at most (\d+)", "--data.max_length={}"),
    "--data.micro_batch_tokens=9": (r"has (\d+) tokens", "--data.micro_batch_tokens={}"),
    "--distributed.world_size=3": (r"set it to (\d+)", "--distributed.world_size={}"),
    "--train.global_batch_size=71": (r"epoch \((\d+)", "--train.global_batch_size={}"),
    "--model.lora={target_modules: [q_prj]}": (
        r"mean (\w+)\?", "--model.lora={{target_modules: [{}]}}"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", FIXES)
def test_a_run_starts_with_what_a_message_tells_to_set(forks, tiny_config, mistake):
    value, flag = FIXES[mistake]
    config = tiny_config()
    refusal = forks.refusal(config, mistake)
    forks.finish(config, flag.format(re.search(value, refusal)[1]), "--dry_run")


def test_a_python_without_the_packages_is_told_where_they_are():
    commands = [["-m", f"scripts.{file.stem}"] for file in (REPO / "scripts").glob("[a-z]*.py")]
    for command in (["train.py"], *commands):
        finished = run([sys.executable, "-E", "-S", *command])
        assert finished.code == 2 and len(finished.output.splitlines()) == 1, finished.output
        assert ".venv/bin/python" in finished.output and "scripts/setup.sh" in finished.output


@pytest.mark.parametrize("name", ["export", "compare_runs"])
def test_a_script_runs_in_any_folder(tmp_path, name):
    """Python finds the other packages, but not this one (-S)."""
    packages = f"PYTHONPATH={get_path('purelib')}"
    script = REPO / "scripts" / f"{name}.py"
    finished = run(["env", packages, sys.executable, "-S", script, "--help"], cwd=tmp_path)
    assert finished.code != 1 and "Traceback" not in finished.output


# --------------------------------------------------------------------------------------------------
# What a run writes


def test_dry_run_prints_the_arithmetic_and_writes_nothing(forks, tiny_config, tmp_path):
    """It also warns of a generation prompt that the rows do not have."""
    template = tmp_path / "thinks.jinja"
    text = (SAMPLE / "model" / "chat_template.jinja").read_text()
    template.write_text(text + "{% if add_generation_prompt %}<think>{% endif %}")
    config = tiny_config(
        model__chat_template=template,
        train__lr_scaling="sqrt",
        train__reference_global_batch=3,
        data__batching="bucketed",
        data__micro_batch_tokens=300,
    )
    finished = forks.finish(config, "--dry_run", ranks=2)
    for text in (
        r"70 rows, 70 training examples; over data.max_length 256: none",
        r"11.7 examples per step; first step: \d micro-steps x 2 data ranks x at most 300",
        r"0.00592 = 0.003 x sqrt\(11.6667 / 3\), linear, warm-up 24 examples = 2 steps",
        r"12 = 2 epochs of 6; seed 7",
        r"WARNING: held_out +9 of its 9 examples are also training",
        r"WARNING 1: '<think>' +ends the generation prompt, but 70 rows have no such text",
    ):
        assert re.search(text, finished.output), f"{text}\n{finished.output}"
    attention = "unknown" if is_flash_attn_2_available() else "flash_attention_2"
    flags = "--dry_run", f"--model.attn_implementation={attention}"
    assert "model.attn_implementation" in forks.refusal(config, *flags)
    assert not (tmp_path / "run").exists()


def test_metrics_and_resolved_configs(forks, tiny_config, tmp_path):
    """The two resolved configs alone start a run again."""
    config = tiny_config(eval__every_steps=5)
    forks.finish(config, ranks=2)
    steps = read_metrics(tmp_path / "run")
    assert all(set(step) >= METRICS for step in steps)
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert [e["step"] for e in read_metrics(tmp_path / "run", "eval")] == [0, 5, 10, 12]
    assert sum(step["examples"] for step in steps) == 140, "70 rows, 2 epochs"

    resolved = tmp_path / "run" / "resolved_config.yaml"
    again = tmp_path / "again"
    forks.finish(resolved, "--output_dir", again, ranks=2)
    assert [s["loss"] for s in read_metrics(again)] == [s["loss"] for s in steps]

    faster = forks.refusal(config, "--train.learning_rate", "1e-2", ranks=2)
    assert "train.learning_rate (scaled): " in faster


# --------------------------------------------------------------------------------------------------
# The DeepSpeed configs


def test_the_same_ds_configs_train_with_transformers_trainer(forks, tiny_config):
    """Real two-rank Trainer runs (through accelerate) with files of ds_configs/."""
    finished = forks.finish(tiny_config(), ranks=2, module="trainer")
    assert "TRAINED 2" in finished.output and "TRAINED 3" in finished.output, finished.output
