"""Copies made by copier.yml with various answers, and their updates.
pytest tests/template/test_copier.py
"""

import re
import shutil
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml

pytest.importorskip("copier")

from copier import run_copy
from harness.forks import ForkServer
from harness.inputs import read_config, write_rows
from harness.processes import run
from harness.repository import REPO, copy_repository, repository_files
from harness.runs import read_metrics
from pages import commands_in, run_command

from scripts import plan
from zerotrain.launch.job import job_of, job_parser

QUESTIONS = yaml.safe_load((REPO / "copier.yml").read_text())
NO_GIT = "/nonexistent"
"""A PATH without git. Without it, copier takes the template's files as they are."""


@pytest.fixture(scope="module")
def copies(tmp_path_factory, chat_rows, tiny_model):
    """The folder of five copies. The smallest has its own rows and model."""
    template, folder = tmp_path_factory.mktemp("template"), tmp_path_factory.mktemp("copies")
    copy_repository(template)
    write_rows(folder / "rows.jsonl", chat_rows)
    answers = {
        "small": {
            "scheduler": "none", "gpus_per_node": 1, "keep": [], "recipe": "qwen3-0.6b",
            "model": str(tiny_model), "train_data": str(folder / "rows.jsonl"), "wandb_project": "",
        },
        "batch": {
            "scheduler": "slurm", "nodes": 3,
            "keep": ["docs", "tests", "tools", "fuzz", "benchmarks"],
        },
        "cloud": {
            "scheduler": "kubernetes", "recipe": "llama-3.1-8b-lora", "nodes": 3,
            "gpus_per_node": 4, "train_data": "rows.jsonl",
        },
        "pages": {
            "scheduler": "none", "keep": ["docs"], "recipe": "ministral-3-8b", "gpus_per_node": 2,
        },
        "hosts": {"scheduler": "ssh", "keep": ["tests"], "train_data": "{hub: my/rows}"},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", NO_GIT)
        for name, given in answers.items():
            data = {"project_name": name, **given}
            run_copy(str(template), folder / name, data=data, defaults=True, quiet=True)
    return folder


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def left_out(copy: Path) -> set[str]:
    """The template's files that the copy lacks."""
    return {f for f in repository_files() if not f.endswith(".copier")} - files_in(copy)


def test_copies_lack_what_was_not_asked_for_and_name_their_cluster(copies):
    small, batch, cloud = (left_out(copies / name) for name in ("small", "batch", "cloud"))
    assert {"zerotrain/launch/node.py", "docs/checkpoints.md", "benchmarks/gpu.py"} <= small
    assert {"CITATION.cff", "copier.yml"} <= small & batch & cloud
    assert {"zerotrain/launch/node.py", "docs/multi_node.md", "benchmarks/gpu.py"}.isdisjoint(batch)
    assert "deploy/Dockerfile" in batch - cloud
    for name, cluster in (("small", (1, 1, 24)), ("batch", (3, 8, 80)), ("cloud", (3, 4, 40))):
        readme = (copies / name / "README.md").read_text()
        assert readme.startswith(f"# {name}\n") and f"recipes/{name}.yaml" in readme
        assert "not to fit" not in readme
        assert plan.cluster_in((copies / name / f"recipes/{name}.yaml").read_text()) == cluster
    assert "not to fit" in (copies / "pages" / "README.md").read_text()
    assert "\n!/rows.jsonl\n" in (copies / "cloud" / ".dockerignore").read_text()
    jobset = (copies / "cloud/deploy/kubernetes/jobset.yaml").read_text()
    keys = "completions|parallelism|--nodes|--ranks_per_node|nvidia.com/gpu"
    assert re.findall(rf"(?:{keys})\W+(\d+)", jobset) == ["3", "3", "3", "4", "4"]
    assert "--config, recipes/cloud.yaml, --output_dir, /mnt/train/runs/cloud," in jobset
    sbatch = (copies / "batch" / "scripts" / "slurm.sbatch").read_text()
    assert "\n#SBATCH --nodes=3\n" in sbatch and "--job-name=batch\n" in sbatch


@pytest.mark.parametrize("name", ["small", "batch", "cloud", "pages", "hosts"])
def test_a_copy_names_only_files_that_it_has(copies, name):
    """Names are paths and modules, and for docs/ and scripts/ also the file's name alone."""
    here, gone = files_in(copies / name), left_out(copies / name)
    names = {Path(f).name for f in gone if re.match(r"(docs|scripts)/[^/]+$|[^/]+$", f)}
    names |= gone | {f"{Path(f).parent}/" for f in gone if "/" in f}
    modules = {f[:-3].replace("/", ".") for f in gone if f.endswith(".py")}
    names = {n for n in names if not any(f.startswith(n) for f in here)}
    for file in sorted(here):
        if not file.endswith((".lock", ".jsonl", ".jinja")) and not file.startswith(".copier"):
            text = (copies / name / file).read_text()
            words = set(re.findall(r"\w[\w./-]*[\w/]", text))
            used = modules.intersection(re.findall(r"(?:import|from|-m) +([\w.]+)", text))
            assert not (found := names & words | used), f"{file} names {found}"
            assert not (file.endswith(".md") and re.search(r"\b(recipes|runs)/mine\b", text)), file


def test_the_recipe_of_a_copy_follows_the_answers(copies):
    small = read_config(copies / "small/recipes/small.yaml")
    assert "tiny_model" in small.model.name_or_path and small.data.supervise == "answers"
    assert small.train.global_batch_size == 8 and small.train.steps is None
    assert small.data.train_sources[0].columns == {}
    assert small.tracking.wandb == "disabled" and small.output_dir == "runs/small"
    batch = read_config(copies / "batch/recipes/batch.yaml")
    own = read_config(REPO / "recipes/qwen3-8b.yaml")
    assert batch.model == own.model and batch.data == own.data and batch.train == own.train
    assert batch.tracking.wandb == "online" and batch.tracking.project
    [rows] = read_config(copies / "hosts/recipes/hosts.yaml").data.train_sources
    assert rows.hub == "my/rows"
    choices = set(QUESTIONS["recipe"]["choices"])
    assert choices == {f.stem for f in (REPO / "recipes").glob("*.yaml")} - {"demo"}


def test_preflight_accepts_the_command_in_a_copys_readme(copies, monkeypatch):
    monkeypatch.chdir(copies / "hosts")
    line = re.search(r"scripts.preflight (.*)", Path("README.md").read_text())[1]
    given = job_parser("scripts.preflight").parse_args(line.split())
    shutil.copy("hostfile.example", given.hostfile)
    job = job_of(given)
    assert len(job.hosts) == 2 and "recipes/hosts.yaml" in job.command


@pytest.mark.launch
def test_the_commands_in_a_copys_readme_train_a_model(copies, tmp_path):
    copy = copies / "small"
    (copy / ".venv").symlink_to(sys.prefix)
    with closing(ForkServer(tmp_path, copy)) as forks:
        for command in (
            *commands_in((copy / "README.md").read_text()),
            ".venv/bin/ruff check --no-cache .",
            f".venv/bin/pytest -q -n 0 -o cache_dir={tmp_path} tests/repository/test_layers.py",
        ):
            done = run_command(command, forks)
            assert done.code == 0, done.output
    losses = [record["eval_loss"] for record in read_metrics(copy / "runs/small", "eval")]
    assert losses[-1] < losses[0]


def commit(folder: Path, message: str, *then: list[str]) -> None:
    options = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", message], *then):
        run(["git", *options, *command], cwd=folder, code=0)


def test_the_readmes_example_then_a_copy_and_updates(tmp_path):
    """The way of a newcomer, in a template without tags. The rows stay out of the copy."""
    template, copy = tmp_path / "template", tmp_path / "mine"
    answers = tmp_path / "answers.yml"
    answers.write_text("project_name: mine\nrecipe: qwen3-0.6b\n")

    def copier(*words, code=0):
        program = Path(sys.executable).with_name("copier")
        return run([program, *words, "--defaults"], cwd=copy, code=code)

    def changed(*options):
        listed = run(["git", "-C", copy, "diff", "--name-only", *options]).output
        return sorted({*listed.split()})  # git lists a conflict twice

    copy_repository(template)
    for folder in ("tests", "zerotrain"):  # more than half of the files
        shutil.rmtree(template / folder)
    commit(template, "1")
    [example] = [c for c in commands_in((template / "README.md").read_text()) if "<<" in c]
    run(["bash", "-ec", example], cwd=template, code=0)
    assert (template / "recipes/mine.yaml").exists() and (template / "my_rows.jsonl").exists()
    copy.mkdir()
    copier("copy", "--data-file", answers, template, copy)
    assert not (copy / "my_rows.jsonl").exists()
    assert "base: qwen3-0.6b.yaml" in (copy / "recipes/mine.yaml").read_text()
    commit(copy, "copied")
    assert "recipes/mine.yaml" in run(["git", "-C", copy, "ls-files"]).output

    # Edits and deletions stay. A line that both have changed is a conflict.
    def first_line(folder, text):
        file = folder / "LICENSE"
        file.write_text("\n".join([text, *file.read_text().splitlines()[1:], ""]))

    train = copy / "train.py"
    train.write_text(train.read_text() + "# edited here\n")
    (copy / "SECURITY.md").unlink()
    first_line(copy, "ours")
    commit(copy, "edited")
    (template / "train.py").write_text("# upstream\n" + (REPO / "train.py").read_text())
    first_line(template, "theirs")
    commit(template, "2")
    copier("update")
    assert changed() == [".copier-answers.yml", "LICENSE", "train.py"]
    assert changed("--diff-filter=U") == ["LICENSE"]
    text = train.read_text()
    assert text.startswith("# upstream\n") and text.endswith("# edited here\n")
    assert not (copy / "SECURITY.md").exists()
    commit(copy, "updated")

    # A template with changes that are not committed is refused: the next update would lack them.
    (template / "key.txt").write_text("secret")
    for words in (["copy", template, tmp_path / "other"], ["update"], ["recopy", "--overwrite"]):
        refused = copier(*words, code=None)
        assert refused.code and f"git -C {template} status" in refused.output, refused.output
    assert not (tmp_path / "other").exists() and not changed()
