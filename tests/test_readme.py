"""The commands in the README work as written.    pytest tests/test_readme.py"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import REPO, environment
from test_layers import is_left_out

FOLDERS = (
    "runtime|config|data|model|checkpoint|tracking|scripts|tests|recipes|ds_configs|cluster|docs"
    "|deploy"
)
SECTIONS = "model|data|train|eval|guard|checkpoint|tracking|distributed|launch|profile"
README = (REPO / "README.md").read_text()
SHORT_DEMO = "--train.steps 25"

NOT_IN_THE_TREE = {
    "README.md", "CONTRIBUTING.md", "LICENSE", "SECURITY.md", "pyproject.toml", "requirements.txt",
    "requirements.lock", "AGENTS.md", "CITATION.cff", "copier.yml",
    *(file.name for file in REPO.glob("*.copier")),
}  # fmt: skip
"""Files that every repository has at its top level; names that begin with a dot are not listed."""


def tracked_files() -> list[str]:
    """The repository's files, including those not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: cannot tell the repository's files from others")
    return [name for name in listed.stdout.splitlines() if (REPO / name).is_file()]


def tree_mistakes(tree: str, files: list[str]) -> list[str]:
    """Differences between the README's tree and the repository's `files`. Each line of the tree
    names a top-level entry and describes it; indented lines below a folder may list its modules.
    """
    listed, mistakes, folder = set(), [], ""
    paths = {*files, *(f"{parent}/" for name in files for parent in Path(name).parents)}
    for line in filter(str.strip, tree.splitlines()):
        name, _, text = line.strip().partition(" ")
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
        path = name if name == folder else folder + name
        listed.add(path)
        inside = re.findall(r"[\w/]+\.(?:py|md|sh|yaml|json|sbatch|example)\b", text)
        inside = [folder + other.removeprefix(folder) for other in inside if folder]
        mistakes += [f"{name} does not exist" for name in (path, *inside) if name not in paths]
    tops = {name.split("/")[0] + "/" * ("/" in name) for name in files if name[0] != "."}
    rooms = {path.rpartition("/")[0] + "/" for path in listed if path[-1] != "/"} - {"/"}
    modules = {f for f in files if f.endswith(".py") and f.rpartition("/")[0] + "/" in rooms}
    modules -= {f for f in modules if f.endswith("__init__.py")}
    mistakes += [f"{name} is not listed" for name in (tops | modules) - listed - NOT_IN_THE_TREE]
    return mistakes


def test_the_readme_is_short_and_its_tree_is_the_real_one():
    if (REPO / "copier.yml").exists():  # else it is a copy's own
        assert len(README.splitlines()) <= 200
    tree = README.split("## What is where")[1].split("```")[1].removeprefix("text")
    files = tracked_files()
    assert tree_mistakes(tree, files) == []
    # and new, missing or misspelled entries are noticed
    assert tree_mistakes(tree, [*files, "module.py"]) == ["module.py is not listed"]
    assert tree_mistakes(tree, [*files, "room/module.py"]) == ["room/ is not listed"]
    whole = (
        tree + "runtime/\n" + "".join(f"  {f.name}\n" for f in (REPO / "runtime").glob("[a-z]*"))
    )
    assert tree_mistakes(whole, files) == []
    assert tree_mistakes(whole, [*files, "runtime/x.py"]) == ["runtime/x.py is not listed"]
    lines = tree.strip().splitlines()
    for i, line in enumerate(lines):
        assert tree_mistakes("\n".join(lines[:i] + lines[i + 1 :]), files), line
    assert tree_mistakes(tree.replace("train.py ", "trian.py "), files)


def test_every_file_and_flag_named_in_the_documents_exists():
    from config.places import config_keys
    from config.schema import Config

    keys = set(config_keys(Config))
    for document in REPO.glob("**/*.md"):
        if ".venv" in document.parts or "runs" in document.parts:
            continue
        text = document.read_text()
        for path in re.findall(rf"`((?:{FOLDERS})/[\w./]+)`", text):
            assert (REPO / path).exists() or is_left_out(path), f"{document.name}: {path}"
        for key in re.findall(rf"(?:`|--)((?:{SECTIONS})\.[a-z_]+)", text):
            assert key in keys or key in ("train.py", "launch.sh"), f"{document.name}: {key}"


@pytest.mark.launch
@pytest.mark.timeout(1500)
def test_the_commands_run_in_a_fresh_copy(tmp_path):
    """Every ```bash block in order, in a clean checkout with an empty HOME.

    The copy uses this checkout's .venv, so that packages are not installed again. The demo trains
    for 25 of its 320 steps, unless WHOLE_DEMO is set; then it learns what the README shows.
    """
    copy = tmp_path / "copy"
    for name in tracked_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, copy / name)
    venv = os.environ.get("VIRTUAL_ENV")
    if not venv or not (Path(venv) / "installed").exists():
        pytest.skip("needs the .venv that ./scripts/test.sh creates")
    (copy / ".venv").symlink_to(venv)
    (tmp_path / "home").mkdir()

    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", README, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4 and "./scripts/demo.sh" in blocks[0]
    whole = "WHOLE_DEMO" in os.environ
    for block in blocks:
        if not whole:
            block = block.replace("./scripts/demo.sh", f"./scripts/demo.sh {SHORT_DEMO}")
        env = {**environment(), "HOME": str(tmp_path / "home")}
        for ours in ("PYTHONPATH", "DS_ACCELERATOR", "HF_HUB_OFFLINE"):
            env.pop(ours)
        finished = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=copy, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1200,
        )  # fmt: skip
        assert finished.returncode == 0, f"{block}\n{finished.stdout[-3000:]}"
        if "demo.sh" in block:
            check_demo(finished.stdout, copy, whole)
    assert (copy / "runs" / "mine" / "model" / "model.safetensors").exists()


def check_demo(output, copy, whole):
    """The demo prints what the README shows, and the model has learned."""
    before, after = map(float, re.search(r"held-out loss\D+([\d.]+)\s+([\d.]+)", output).groups())
    assert after < before / (100 if whole else 2), output
    right = re.search(r"answers right\s+(\d+) of 200\s+(\d+) of 200", output).groups()
    assert int(right[0]) == 0 and int(right[1]) >= (100 if whole else 0), output
    for name in ("speed", "checkpoint", "model", "metrics", "report", "W&B", "next:"):
        assert re.search(rf"^  {name}", output, re.MULTILINE), output
    checkpoint = re.search(r"^  checkpoint\s+(\S+)", output, re.MULTILINE)[1]
    assert (copy / checkpoint / "COMPLETE").exists()
