"""copier.yml: what the answers give, `copier update`, and copies without copier.
pytest tests/test_copier.py
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from allpairspy import AllPairs
from conftest import REPO, read_metrics, run, write_rows
from copier import run_copy, run_update
from test_layers import ROOMS, is_in
from test_readme import FOLDERS, tracked_files
from test_recipes import RECIPES, folders, load, overrides, rows_like  # noqa: F401

from cluster.hostfile import read_hostfile
from config.ds_config import merge_ds_config
from config.parse import parse_command_line
from model.architecture import hidden_size
from model.memory import estimate_memory
from model.trained import trained_skeleton
from scripts import memory

QUESTIONS = yaml.safe_load((REPO / "copier.yml").read_text())
LEAST_GPUS = yaml.safe_load(QUESTIONS["least_gpus"]["default"])
KEPT = {
    "docs": ["documents", "worked changes, as diffs"], "proofs": ["proofs of the data"],
    "benchmarks": ["measurements"],
}  # fmt: skip
ANSWERS = {
    "recipe": ["qwen3-8b", "qwen3-30b-a3b", "llama-3.2-1b-pretraining"],
    "model": [None, "my/model"],
    "data_source": ["recipe", "files", "hub"],
    "eval_data": ["", "data/sample/eval.jsonl"],
    "data_format": ["auto", "text"],
    "scheduler": ["ssh", "slurm", "kubernetes", "none"],
    "nodes": [1, 5],
    "gpus_per_node": [1, 8],
    "gpu_memory_gb": [24, 141],
    "node_local": [False, True],
    "precision": ["bf16", "fp16", "fp32"],
    "wandb_project": ["team", ""],
    "keep": [[], ["docs"], ["proofs", "benchmarks"]],
    "copyright": ["", "2026 Example Ltd"],
}
"""Of each question the answers that are tried, each pair of two questions at least once."""


def pairwise() -> list[dict]:
    rows = AllPairs(list(ANSWERS.values()))
    found = [dict(zip(ANSWERS, row, strict=True)) for row in rows]
    for i, answers in enumerate(found):
        answers["project_name"] = f"project-{i}"
        if answers["model"] is None:
            del answers["model"]
        if answers["data_source"] == "files":
            answers["train_data"] = "data/sample/train.jsonl"
        elif answers["eval_data"]:
            answers["eval_data"] = "org/held-out"
    return found


PAIRWISE = pairwise()
NO_GIT = "/nowhere"
"""A PATH: copier asks git about every file that it writes, which takes longer than to write it."""


def copy_of(files: list[str], folder: Path) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The repository's files, without git and without most of the Python that every copy has."""
    removable = [path for paths in ROOMS.values() for path in paths]
    files = [n for n in tracked_files() if not n.endswith(".py") or is_in(n, removable)]
    files += [n for n in tracked_files() if n.startswith("scripts/") or n.endswith("__init__.py")]
    return copy_of(files, tmp_path_factory.mktemp("template"))


@pytest.fixture
def rendered_only(tmp_path):
    """What copier renders, and what it reads for that."""
    needed = ("copier.yml", "CONTRIBUTING.md", ".copier/*", "recipes/*", "*.copier")
    files = [name for name in tracked_files() if is_in(name, needed)]
    files += [name.removesuffix(".copier") for name in files if name.endswith(".copier")]
    return copy_of([n for n in files if (REPO / n).exists()], tmp_path / "template")


@pytest.fixture(scope="module")
def copies(template, tmp_path_factory):
    """One of each row of answers."""
    folder = tmp_path_factory.mktemp("copies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", NO_GIT)
        for answers in PAIRWISE:
            render(template, folder / answers["project_name"], **answers)
    return folder


def render(template, out, **answers) -> Path:
    run_copy(str(template), out, data=answers, defaults=True, quiet=True)
    return out


def files_in(out: Path) -> list[str]:
    return [str(f.relative_to(out)) for f in out.rglob("*") if f.is_file()]


def check_left_out(template: Path, out: Path, scheduler: str, keep: list[str]) -> None:
    gone = {"copies by copier", *(room for name in KEPT.keys() - keep for room in KEPT[name])}
    gone |= {"many hosts"} if scheduler == "none" else set()
    gone |= {"containers, Kubernetes, SkyPilot"} if scheduler != "kubernetes" else set()
    left_out = [path for room in gone for path in ROOMS.get(room, ())]
    rendered = {"README.md", "pyproject.toml", ".copier-answers.yml", f"recipes/{out.name}.yaml"}
    expected = {n for n in files_in(template) if not is_in(n, [*left_out, ".copier/"])} | rendered
    files = files_in(out)
    assert set(files) == {n for n in expected if not n.endswith(".copier")}
    for name in files:
        same = REPO / name
        if not (REPO / f"{name}.copier").exists() and same.exists():
            assert (out / name).read_bytes() == same.read_bytes(), name
            assert os.access(out / name, os.X_OK) == os.access(same, os.X_OK), name


def check_readme(template: Path, out: Path) -> None:
    """Each command and each file that it names exists in the copy."""
    text = (out / "README.md").read_text()
    blocks = "\n".join(re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL))
    paths = rf"(?:{FOLDERS}|benchmarks)/[\w./-]*"
    named = re.findall(rf"(?<![\w/.-]){paths}", blocks)
    assert f"recipes/{out.name}.yaml" in named and len(named) > 8
    named += re.findall(rf"`({paths}|[A-Z]+\.md)", text)
    for name in set(named) - {"recipes/mine.yaml"}:  # made by a command
        is_in_every_copy = not (template / name).exists() and (REPO / name).exists()
        assert (out / name).exists() or is_in_every_copy, name
    assert "\n\n\n" not in text and "deepspeed-zero-template" not in text


@pytest.mark.parametrize("answers", PAIRWISE, ids=lambda a: a["project_name"])
def test_every_two_answers_together(template, copies, monkeypatch, answers):
    """The copy has the right files, and its recipe is what was asked for."""
    name = answers["project_name"]
    out = copies / name
    nodes = 1 if answers["scheduler"] == "none" else answers["nodes"]
    check_left_out(template, out, answers["scheduler"], answers["keep"])
    check_readme(template, out)
    assert tomllib.loads((out / "pyproject.toml").read_text())["project"]["name"] == name
    assert (answers["copyright"] or "[yyyy]") in (out / "LICENSE").read_text()
    for target in re.findall(r"scripts/\S+", (out / "Makefile").read_text()):
        assert (out / target).exists(), target
    if answers["scheduler"] != "none":
        hosts = read_hostfile(out / "hostfile.example")
        assert [len(host.slots) for host in hosts] == [answers["gpus_per_node"]] * nodes
        sbatch = (out / "scripts" / "slurm.sbatch").read_text()
        for option in ("gpus-per-node", "ntasks-per-node"):
            assert f"\n#SBATCH --{option}={answers['gpus_per_node']}\n" in sbatch
        assert f"\n#SBATCH --nodes={nodes}\n" in sbatch and f"--job-name={name}\n" in sbatch

    monkeypatch.chdir(out)
    recipe = f"recipes/{name}.yaml"
    config = parse_command_line(["--config", recipe]).config
    assert config.output_dir == f"runs/{name}" and config.train.precision == answers["precision"]
    cluster = memory.cluster_of(Path(recipe).read_text())
    assert vars(cluster) == {
        "nodes": nodes, "gpus": answers["gpus_per_node"],
        "gpu_memory_gib": answers["gpu_memory_gb"],
    }  # fmt: skip
    assert config.checkpoint.node_local == (answers["node_local"] and nodes > 1)
    wandb = (config.tracking.project, config.tracking.wandb)
    assert wandb == (
        ("team", "offline") if answers["wandb_project"] else ("deepspeed-zero", "disabled")
    )
    if answers["data_source"] != "recipe":
        [source] = config.data.train_sources
        held_out = config.data.eval_sources
        hub_id = getattr(source, "hub", None)  # a path is a string
        assert hub_id if answers["data_source"] == "hub" else source == answers["train_data"]
        assert config.data.eval_fraction == 0 if answers["eval_data"] else not held_out
        assert config.data.format == answers["data_format"] and not config.data.columns
        assert not re.search("epochs:.*steps", Path(recipe).read_text()), "of other data"


def test_the_choices_are_the_recipes_and_with_their_own_answers_they_are_themselves(
    rendered_only, tmp_path, monkeypatch
):
    names = [name for name in LEAST_GPUS if (REPO / "recipes" / f"{name}.yaml").exists()]
    described = {f.stem for f in (REPO / "recipes").glob("*.yaml")} - {"demo", "gsm8k"}
    assert set(names) == set(LEAST_GPUS) == described == {f[:-5] for f in RECIPES if "/" not in f}
    assert set(QUESTIONS["recipe"]["choices"].values()) == described
    monkeypatch.setenv("PATH", NO_GIT)
    for name in names:
        text, _ = load(f"{name}.yaml")
        cluster = memory.cluster_of(text)
        out = render(
            rendered_only, tmp_path / name, project_name="same", recipe=name, wandb_project=name,
            nodes=cluster.nodes, gpus_per_node=cluster.gpus, gpu_memory_gb=cluster.gpu_memory_gib,
            scheduler="ssh",
        )  # fmt: skip
        mine = (out / "recipes" / "same.yaml").read_text()
        assert (
            mine.replace("recipes/same", f"recipes/{name}").replace("runs/same", f"runs/{name}")
            == text
        )


@pytest.mark.parametrize("name", LEAST_GPUS)
def test_least_gpus_is_what_the_estimate_says(name):
    """With as many GPUs as the table says the recipe fits, with one less it does not."""
    config = parse_command_line(["--config", str(REPO / "recipes" / f"{name}.yaml")]).config
    own = Path(config.ds_config).stem
    stages = ("zero2" if own == "zero3" else own, "zero3")
    architecture = memory.load_shape(config)
    skeleton, counts = trained_skeleton(config.model, architecture)
    parameters = list(skeleton.parameters())  # to find them takes most of an estimate's time
    skeleton.parameters = lambda: iter(parameters)

    def fits(ds_config: str, precision: str, ranks: int, gpu_memory_gb: int) -> bool:
        changed = replace(
            config, ds_config=f"ds_configs/{ds_config}.json",
            train=replace(config.train, precision=precision),
        )  # fmt: skip
        merged = merge_ds_config(changed, precision, hidden_size(architecture))
        need = estimate_memory(changed, skeleton, counts.quantized, merged, ranks, min(ranks, 8))
        return need.peak <= memory.SPARE * gpu_memory_gb * memory.GIB

    for precision, of_memory in LEAST_GPUS[name].items():
        assert list(of_memory) == QUESTIONS["gpu_memory_gb"]["choices"]
        for gpu_memory_gb, least in of_memory.items():
            for ds_config, ranks in zip(stages, least, strict=True):
                case = ds_config, precision, gpu_memory_gb
                assert fits(ds_config, precision, ranks or 1024, gpu_memory_gb) == (ranks > 0), case
                assert ranks < 2 or not fits(ds_config, precision, ranks - 1, gpu_memory_gb), case
    assert fits(own, "fp16", 8, 80) == fits(own, "bf16", 8, 80)


# --------------------------------------------------------------------------------------------------
# Whole copies

WHOLE = {
    "alone": {"recipe": "qwen3-0.6b", "data_source": "files", "scheduler": "none", "keep": []},
    "slurm": {
        "recipe": "llama-3.1-8b-lora", "scheduler": "slurm", "precision": "fp32", "keep": ["docs"],
    },
    "node-local": {
        "recipe": "qwen3-30b-a3b", "data_source": "hub", "node_local": True, "keep": ["proofs"],
    },
    "pretraining": {
        "recipe": "llama-3.2-1b-pretraining", "scheduler": "kubernetes", "precision": "fp16",
        "keep": ["docs", "proofs", "benchmarks"],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def whole_copies(tmp_path_factory, chat_rows):
    """Four copies with all Python; the first is for rows of files."""
    source = copy_of(tracked_files(), tmp_path_factory.mktemp("whole_template"))
    folder = tmp_path_factory.mktemp("whole")
    rows = write_rows(folder / "rows.jsonl", chat_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", NO_GIT)
        for name, answers in WHOLE.items():
            render(source, folder / name, project_name=name, train_data=str(rows), **answers)
    return folder


def test_whole_copies_are_linted(whole_copies):
    for command in (["check"], ["format", "--check"]):
        linted = run([sys.executable, "-m", "ruff", *command, "--no-cache", "."], cwd=whole_copies)
        assert linted.code == 0, linted.output


@pytest.mark.parametrize("name", WHOLE)
def test_the_recipe_of_a_copy_trains(whole_copies, forks, folders, chat_rows, tmp_path, name):  # noqa: F811
    """Two steps, with the shrunk model of its family and local rows in place of those of a hub."""
    file = whole_copies / name / "recipes" / f"{name}.yaml"
    recipe = yaml.safe_load(file.read_text())
    rows = rows_like(recipe, chat_rows, tmp_path / "rows.jsonl")
    flags = overrides(recipe, rows, folders(recipe["model"]["name_or_path"], False), tmp_path)
    if name == "alone":  # its own rows
        del flags[flags.index("--data.train_sources") :][:2]
    unit = "tokens" if "global_batch_tokens" in recipe["train"] else "examples"
    batch = ("tokens", "2048") if unit == "tokens" else ("size", "16")
    finished = forks.train(
        file, *flags, f"--train.global_batch_{batch[0]}", batch[1], "--train.epochs", "null",
        "--train.steps", "2", f"--train.warmup_{unit}", "0", "--data.max_length", "256",
        "--data.micro_batch_tokens", "1024",
        "--train.precision", "fp32" if recipe["train"]["precision"] == "fp16" else "bf16",
        ranks=2 if "zero3" in recipe["ds_config"] else 1,
    )  # fmt: skip
    assert finished.code == 0, finished.output
    assert [step["step"] for step in read_metrics(tmp_path / "run")] == [1, 2]


# --------------------------------------------------------------------------------------------------
# Updates


def git(folder: Path, *args: str) -> str:
    user = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(["git", *user, *args], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode()


def commit(folder: Path, *tags: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a change")
    for tag in tags:
        git(folder, "tag", tag)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, old
    file.write_text(text.replace(old, new))


@pytest.fixture
def upstream(rendered_only):
    """A part of the template as a git repository with a version."""
    copy_of([*CHANGED, "docs/watching.md", "data/plan.py"], rendered_only)
    git(rendered_only, "init", "--quiet")
    commit(rendered_only, "v1.0.0")
    return rendered_only


CHANGED = ("train.py", "SECURITY.md", "scripts/compare_runs.py", "cluster/hosts.py")


def test_an_update_keeps_edits_deletions_and_what_was_left_out(upstream, tmp_path):
    mine = tmp_path / "mine"
    answers = {"scheduler": "none", "keep": ["proofs"], "project_name": "mine"}
    run_copy(str(upstream), mine, data=answers, defaults=True, quiet=True)
    git(mine, "init", "--quiet")
    edit(mine / "train.py", "    # 5. Train.\n", "    # 5. Train. My own words.\n")
    edit(mine / "recipes" / "mine.yaml", "epochs: 1 ", "epochs: 9 ")
    edit(mine / "SECURITY.md", "# Security\n", "# My security\n")
    (mine / "scripts" / "compare_runs.py").unlink()
    (mine / "own.py").write_text("my_own = True\n")
    commit(mine)

    edit(upstream / "train.py", "    gc.freeze()\n", "    # later\n    gc.freeze()\n")
    edit(upstream / "recipes" / "qwen3-8b.yaml", "max_length: 4096", "max_length: 2048")
    edit(upstream / "SECURITY.md", "# Security\n", "# Their security\n")
    with (upstream / "scripts" / "compare_runs.py").open("a") as file:
        file.write("# later\n")
    with (upstream / "cluster" / "hosts.py").open("a") as file:
        file.write("# later\n")
    (upstream / "cluster" / "later.py").write_text("later = True\n")
    (upstream / "data" / "later.py").write_text("later = True\n")
    (upstream / "docs" / "later.md").write_text("Later.\n")
    commit(upstream, "v1.1.0")
    (upstream / "data" / "not_yet.py").write_text("no version has it\n")
    commit(upstream)

    run_update(mine, defaults=True, overwrite=True, quiet=True)
    trainer = (mine / "train.py").read_text()
    assert "# 5. Train. My own words." in trainer and "    # later\n    gc.freeze()" in trainer
    recipe = (mine / "recipes" / "mine.yaml").read_text()
    assert "epochs: 9 " in recipe and "max_length: 2048" in recipe
    assert (mine / "own.py").exists() and (mine / "data" / "later.py").exists()
    assert not (mine / "data" / "not_yet.py").exists()
    assert not (mine / "scripts" / "compare_runs.py").exists(), "deleted stays deleted"
    assert not (mine / "cluster").exists() and not (mine / "docs").exists(), "left out stays out"
    conflict = (mine / "SECURITY.md").read_text()
    assert re.search(r"<<<<<<< .*\n# My security\n(.*\n)*=+\n# Their security\n>>>>>>> ", conflict)
    assert git(mine, "diff", "--name-only", "--diff-filter=U").split() == ["SECURITY.md"]
    answers = yaml.safe_load((mine / ".copier-answers.yml").read_text())
    assert answers["_commit"] == "v1.1.0" and answers["scheduler"] == "none"

    (mine / "SECURITY.md").write_text("# Our security\n")
    commit(mine)
    run_update(mine, data={"scheduler": "ssh"}, defaults=True, overwrite=True, quiet=True)
    assert (mine / "cluster" / "later.py").exists() and "# later" in (
        mine / "cluster" / "hosts.py"
    ).read_text(), "another answer brings the room"
    assert "## Many nodes" in (mine / "README.md").read_text()
    assert (mine / "SECURITY.md").read_text() == "# Our security\n"
    assert not (mine / "scripts" / "compare_runs.py").exists() and not (mine / "docs").exists()


# --------------------------------------------------------------------------------------------------
# The tests of copies


def run_tests(folder: Path, *args: str) -> None:
    git(folder, "init", "--quiet")
    finished = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args], cwd=folder
    )
    assert finished.code == 0, finished.output


STRUCTURE = ("tests/test_readme.py", "tests/test_ci.py", "tests/test_layers.py", "-m", "not launch")


def test_the_tests_of_the_smallest_copy_hold_there(whole_copies):
    run_tests(whole_copies / "alone", *STRUCTURE)


def test_nothing_in_the_smallest_copy_imports_what_was_left_out(whole_copies):
    copy = whole_copies / "alone"
    files = [Path(file) for file in files_in(copy) if file.endswith(".py")]
    for file in files:
        body = ast.parse((copy / file).read_text()).body
        imported = {a.name for node in body if isinstance(node, ast.Import) for a in node.names}
        imported |= {node.module for node in body if isinstance(node, ast.ImportFrom)}
        for module in imported:
            path = Path(module.replace(".", "/") + ".py")
            for folder in (Path(), Path("tests"), Path("scripts")):
                assert folder / path in files or not (REPO / folder / path).exists(), (file, module)


def test_a_copy_without_copier(tmp_path):
    mine = copy_of(tracked_files(), tmp_path / "template")
    unnamed = run([mine / "scripts" / "rename.sh", "My Project"], cwd=mine)
    assert unnamed.code == 2 and "such as my-project" in unnamed.errors[0]
    assert (mine / "copier.yml").exists(), "nothing is done by halves"
    renamed = run([mine / "scripts" / "rename.sh", "mine"], cwd=tmp_path)
    assert renamed.code == 0, renamed.output
    assert tomllib.loads((mine / "pyproject.toml").read_text())["project"]["name"] == "mine"
    assert (mine / "README.md").read_text().startswith("# mine\n\nCopy this repository")
    left = [name for name in files_in(mine) if re.search(r"\bcopier\b", (mine / name).read_text())]
    assert set(left) <= {
        "CONTRIBUTING.md", "benchmarks/wheels.py", "requirements.txt", "requirements.lock",
        "tests/test_readme.py",
    }  # fmt: skip
    run_tests(mine, *STRUCTURE)
