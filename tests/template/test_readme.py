"""The commands in the pages work as written, and the pages name what exists.
pytest tests/template/test_readme.py
"""

import os
import re
import shutil
import sys
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from harness.forks import ForkServer
from harness.processes import run
from harness.repository import REPO, copy_repository, repository_files
from harness.runs import read_metrics
from pages import commands_in, run_command

from zerotrain.config.schema import config_keys

README = (REPO / "README.md").read_text()
FOLDERS = "zerotrain|scripts|tests|recipes|ds_configs|docs|deploy|benchmarks|data"
SECTIONS = "model|data|train|eval|checkpoint|tracking|distributed"
WHOLE_DEMO = "WHOLE_DEMO" in os.environ
TRAINED, HELD_OUT = (4000, 200) if WHOLE_DEMO else (400, 6)  # rows
# README.md first: it makes the run that the other pages use. recipes/ last: it overwrites
# recipes/mine.yaml.
PAGES = (
    "README.md", "AGENTS.md", "docs/*.md", "data/*.md", "ds_configs/*.md", "CONTRIBUTING.md",
    "SECURITY.md", "recipes/*.md",
)  # fmt: skip
NOT_RUN = {  # commands with a match are only parsed: why
    r"IMAGE|\b(docker|kubectl|sky|vllm|curl|hf|rclone|rsync|pipx?) |-m venv": "services, network",
    r"scripts\.backup": "an S3 server: test_backup.py",
    r"hostfile hostfile|^sbatch|torchrun|gathered|--nodes 2 --gpus": "several hosts: tests/launch",
    r"test\.sh|pytest|copier |my-project|diff-filter": "this suite, and test_copier.py",
    r"^.*--dry_run": "what comes after it does the same first",
    r"prove equivalence": "minutes: test_equivalence.py",
    r"prove golden": "a minute: test_golden.py",
    r"benchmarks.goodput": "two hosts, an hour",
    r"\.\./|train.steps 100|runs/others": "minutes, in other versions",
    r"exact_match": "demo.sh runs it",
    r"WANDB_RUN_GROUP|runs/rates": "more runs of the demo",
    r"~/(lm_eval|trl|llama|serve)|llama-server": "other environments: test_after.py",
    r"^(sudo|ssh|tmux|cd|for node|export HF|\S*vllm)": "other machines",
    r"first_run": "pretrained weights: test_recipes.py",
    r"pictures\.sh|benchmarks\.offload": "minutes",
}
FILLED_IN = {  # placeholders and slow options, and their values in the test
    r"\b(RUN|RUN_OR_CHECKPOINT|runs/(before|after|other))\b": "runs/mine",
    r"seq 300": "seq 40",
    r"\bOUT\b|\S+(?= --dtype)": "runs/mine/again",
    r"\s+# .*|\\\n|(?<=^tail) -f|(?<=bfloat16) --verify": "",
}
if not shutil.which("ssh-keygen"):
    NOT_RUN["ssh-keygen"] = "openssh-client"
if not WHOLE_DEMO:
    FILLED_IN[r"^\S*demo\.sh"] = "./scripts/demo.sh --train.steps 15 --train.warmup_examples 80"


def test_every_file_and_setting_named_in_the_pages_exists():
    keys, files = set(config_keys()), repository_files()
    made = {"recipes/mine.yaml", "recipes/my-project.yaml"}  # by commands
    for page in (REPO / name for name in files if re.search(r"\.md$|^\.github/workflows/", name)):
        text = page.read_text()
        for path in re.findall(rf"(?<![\w/.])((?:{FOLDERS})/[\w./-]+\.\w+)", text):
            assert (REPO / path).exists() or path in made, f"{page.name}: {path}"
        for module in re.findall(r"-m ((?:scripts|zerotrain)\.[a-z_.]+)", text):
            path = REPO / module.rstrip(".").replace(".", "/")
            is_program = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
            assert is_program, f"{page.name}: {module}"
        for name, path in re.findall(r"`(\w+)`, `([\w/]+\.py)`", text):
            assert re.search(rf"^(class|def) {name}\b", (REPO / path).read_text(), re.M), name
        for key in re.findall(rf"(?:`|--)((?:{SECTIONS})\.[a-z_.]+)", text):
            found = any(f"{known}.".startswith(f"{key}.") for known in keys)
            assert found or key.endswith((".py", ".jsonl")), f"{page.name}: {key}"
    tree = README.split("```text\n")[1].split("```")[0]
    for line in tree.splitlines():
        assert (REPO / line.split()[0]).exists(), line
    tops = {name.split("/")[0] + "/" * ("/" in name) for name in files}
    for folder in (top for top in tops if top.endswith("/") and top[0] != "."):
        assert folder in tree, f"{folder} is not in the README's tree"


def test_pictures_show_their_data_and_load_nothing(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from benchmarks import pictures

    shutil.copytree(REPO / pictures.DATA, tmp_path / pictures.DATA)
    monkeypatch.chdir(tmp_path)
    pictures.main()
    page = (REPO / "docs/bf16.md").read_text().replace("](pictures/", "](docs/pictures/")
    for name in re.findall(r"!\[.+\]\((.+)\)", README + page):
        picture = (REPO / name).read_text()
        assert not re.search(r"<script|@import|(href|src)=\W*http|url\(\W*http", picture), name
        if "report" not in name:  # a browser draws the report
            assert_same_picture(name, picture)


def assert_same_picture(name, stored):
    """The texts are equal but for numbers, whose last digit depends on the CPU."""
    drawn, message = Path(name).read_text(), f"{name}: ./benchmarks/pictures.sh"
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("", drawn) == number.sub("", stored), message
    places = ([*map(float, number.findall(text))] for text in (drawn, stored))
    np.testing.assert_allclose(*places, atol=1e-3, err_msg=message)


def filled_in_commands():
    """Return each command of the pages once, in their order, with FILLED_IN applied."""
    pages = [page.read_text() for pattern in PAGES for page in sorted(REPO.glob(pattern))]
    commands = [command for page in pages for command in commands_in(page)]
    for pattern, value in FILLED_IN.items():
        commands = [re.sub(pattern, value, command) for command in commands]
    return dict.fromkeys(commands)


@cache
def help_of(program, forks):
    if program == "train.py":
        return run([sys.executable, program, "--help"]).output
    return forks.script(program, "--help").output


def check_without_running(command, forks):
    """The shell can parse it, and its options of this repository's commands exist."""
    assert run(["bash", "-nc", command]).code == 0, command
    for part in command.replace("scripts/launch.sh", "zerotrain.launch.launch").split(" -- "):
        if found := re.search(r"((?:scripts|zerotrain\.launch)\.\w+|train\.py)(.*)", part):
            for option in re.findall(r"--[\w.]+", found[2]):
                assert re.search(rf"{option}\b", help_of(found[1], forks)), command


@pytest.mark.launch
@pytest.mark.timeout(1500)
def test_the_commands_run_in_a_fresh_copy(tmp_path):
    """They run in order, in a clean checkout with an empty HOME and this .venv. Unless WHOLE_DEMO
    is set, the demo trains for 15 steps, with a short warm-up, and answers 6 questions.
    """
    copy = tmp_path / "copy"
    copy_repository(copy)
    venv = Path(os.environ.get("VIRTUAL_ENV", ""))
    if not (venv / "installed").exists():
        pytest.skip("needs the .venv that ./scripts/test.sh creates")
    (copy / ".venv").symlink_to(venv)
    (tmp_path / "home").mkdir()
    for name, rows in (("train", TRAINED), ("eval", HELD_OUT)):
        file = copy / "data" / "sample" / f"{name}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:rows]))
    # drop the variables that `run` sets for this checkout, and keep the machine's PYTHONPATH
    variables = ("-uDS_ACCELERATOR", "-uHF_HUB_OFFLINE", "-uTORCHDYNAMO_DISABLE",
                 f"HOME={tmp_path / 'home'}", "EDITOR=true",
                 f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}")  # fmt: skip
    with closing(ForkServer(tmp_path, copy)) as forks:
        for command in filled_in_commands():
            if any(re.search(pattern, command) for pattern in NOT_RUN):
                check_without_running(command, forks)
                continue
            done = run_command(command, forks, *variables)
            assert done.code == 0, f"{command}\n{done.output[-3000:]}"
            if "demo.sh" in command:
                check_demo(done.output, copy)
    assert (copy / "runs" / "mine" / "model" / "model.safetensors").exists()


def check_demo(output, copy):
    """Assert that the demo's model has learned, is exported, and answers."""
    run_folder = copy / re.search(r"-> (\S+)/model$", output, re.MULTILINE)[1]
    losses = [record["eval_loss"] for record in read_metrics(run_folder, "eval")]
    assert losses[-1] < losses[0] / (500 if WHOLE_DEMO else 2), output
    right = re.search(rf"exact match: (\d+) of {HELD_OUT} ", output)[1]
    assert int(right) >= (190 if WHOLE_DEMO else 0), output
