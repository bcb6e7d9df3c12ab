"""The commands in the README work as written, and the pages name what exists.
pytest tests/template/test_readme.py
"""

import os
import re
from pathlib import Path

import pytest
from harness.processes import run
from harness.repository import REPO, copy_repository, repository_files
from harness.runs import read_metrics

from zerotrain.config.schema import config_keys

README = (REPO / "README.md").read_text()
FOLDERS = "zerotrain|scripts|tests|recipes|ds_configs|docs|deploy|benchmarks|data"
SECTIONS = "model|data|train|eval|checkpoint|tracking|distributed"
WHOLE_DEMO = "WHOLE_DEMO" in os.environ
HELD_OUT = 200 if WHOLE_DEMO else 20  # rows


def test_every_file_and_setting_named_in_the_pages_exists():
    keys, files = set(config_keys()), repository_files()
    made = {"recipes/mine.yaml", "recipes/my-project.yaml"}  # by commands
    for page in (REPO / name for name in files if name.endswith(".md")):
        text = page.read_text()
        for path in re.findall(rf"(?<![\w/.])((?:{FOLDERS})/[\w./-]+\.\w+)", text):
            assert (REPO / path).exists() or path in made, f"{page.name}: {path}"
        for module in re.findall(r"-m ((?:scripts|zerotrain)\.[a-z_.]+)", text):
            file = f"{module.rstrip('.').replace('.', '/')}.py"
            assert (REPO / file).exists(), f"{page.name}: {module}"
        for key in re.findall(rf"(?:`|--)((?:{SECTIONS})\.[a-z_.]+)", text):
            found = any(f"{known}.".startswith(f"{key}.") for known in keys)
            assert found or key.endswith((".py", ".jsonl")), f"{page.name}: {key}"
    tree = README.split("```text\n")[1].split("```")[0]
    for line in tree.splitlines():
        assert (REPO / line.split()[0]).exists(), line
    tops = {name.split("/")[0] + "/" * ("/" in name) for name in files}
    for folder in (top for top in tops if top.endswith("/") and top[0] != "."):
        assert folder in tree, f"{folder} is not in the README's tree"


@pytest.mark.launch
@pytest.mark.timeout(1500)
def test_the_commands_run_in_a_fresh_copy(tmp_path):
    """Every ```bash block in order, in a clean checkout with an empty HOME and this .venv. Unless
    WHOLE_DEMO is set, the demo trains for 25 of its 320 steps and answers 20 of its 200 questions,
    and there is no dry run before the other run.
    """
    copy = tmp_path / "copy"
    copy_repository(copy)
    venv = Path(os.environ.get("VIRTUAL_ENV", ""))
    if not (venv / "installed").exists():
        pytest.skip("needs the .venv that ./scripts/test.sh creates")
    (copy / ".venv").symlink_to(venv)
    (tmp_path / "home").mkdir()
    held_out = copy / "data" / "sample" / "eval.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:HELD_OUT]))
    # of the checkout's own, which `run` sets, nothing but packages of a machine without a network
    variables = ("-uDS_ACCELERATOR", "-uHF_HUB_OFFLINE", f"HOME={tmp_path / 'home'}",
                 f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}")  # fmt: skip
    blocks = re.findall(r"^```bash\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        command = block
        if not WHOLE_DEMO:
            command = re.sub(r"^.* --dry_run\n", "", block, flags=re.MULTILINE)
            command = command.replace("demo.sh", "demo.sh --train.steps 25")
        shell = ("env", *variables, "bash", "-euo", "pipefail", "-c", command)
        done = run(shell, timeout=1200, cwd=copy)
        assert done.code == 0, f"{block}\n{done.output[-3000:]}"
        if "demo.sh" in block:
            check_demo(done.output, copy)
    assert (copy / "runs" / "mine" / "model" / "model.safetensors").exists()


def check_demo(output, copy):
    """The model has learned, and is exported."""
    run_folder = copy / re.search(r"-> (\S+)/model$", output, re.MULTILINE)[1]
    losses = [record["eval_loss"] for record in read_metrics(run_folder, "eval")]
    assert losses[-1] < losses[0] / (70 if WHOLE_DEMO else 2), output
    right = re.search(rf"exact match: (\d+) of {HELD_OUT} ", output)[1]
    assert int(right) >= (70 if WHOLE_DEMO else 0), output
