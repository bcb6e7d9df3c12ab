"""Rooms import only from rooms below; some can be deleted.    pytest tests/test_layers.py"""

import ast
import graphlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, ForkServer, read_metrics

LAYERS = (
    "runtime", "config", "data", "model", "checkpoint", "tracking", "train",
    "cluster", "scripts", "benchmarks",
)  # fmt: skip
"""From the bottom to the top. The last three serve train.py, which knows none of them."""
CLUSTER = (
    "cluster", "scripts/launch.sh", "scripts/preflight.py", "scripts/slurm.sbatch",
    "scripts/gather_checkpoint.py", "scripts/scaling_test.py", "docs/multi_node.md",
    "hostfile.example", "tests/test_scaling.py", "tests/test_launch.py",
    "tests/test_preflight.py", "tests/test_slurm.py", "tests/test_node_local.py",
    "tests/namespaces.py", "tests/slurm_cluster.py",
)  # fmt: skip
BENCHMARKS = ("benchmarks", "tests/test_benchmark_plan.py", "tests/test_gpu.py")
CHANGES = ("docs/changes", "tests/test_changes.py")
DEPLOY = (
    "deploy", "docs/orchestrators.md", "docs/containers.md",
    "tests/test_orchestrators.py", "tests/test_container.py",
)  # fmt: skip
CONVERSION = ("checkpoint/convert.py",)
EVERYTHING = CLUSTER + BENCHMARKS + CHANGES + DEPLOY + CONVERSION


def modules() -> dict[str, Path]:
    """Every module of the repository but the tests, by its dotted name."""
    files = [REPO / "train.py", *(f for room in LAYERS for f in (REPO / room).rglob("*.py"))]
    return {str(f.relative_to(REPO)).removesuffix(".py").replace("/", "."): f for f in files}


def imports_of(file: Path, known: dict[str, Path], types_too: bool) -> set[str]:
    """The modules of the repository that a file imports, anywhere in it."""
    found, todo = set(), [ast.parse(file.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types_too:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(node.module)
        todo += ast.iter_child_nodes(node)
    return {name for name in found if name in known}


def test_no_import_runs_up_not_even_for_types():
    known = modules()
    assert len(known) > 50
    for name, file in known.items():
        room = LAYERS.index(name.split(".")[0])
        for imported in imports_of(file, known, types_too=True):
            other = LAYERS.index(imported.split(".")[0])
            assert other <= room, f"{name} imports {imported}, which is above it"
            if LAYERS[room] in ("scripts", "benchmarks") and other < room:
                assert imported != "train" or LAYERS[room] == "benchmarks", f"{name}: {imported}"


def test_no_circle_of_files():
    known = modules()
    graph = {name: imports_of(file, known, types_too=True) for name, file in known.items()}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle


def test_each_room_says_what_it_holds_and_what_it_may_import():
    for room in LAYERS:
        if room not in ("train", "scripts", "benchmarks"):
            lines = ast.get_docstring(ast.parse((REPO / room / "__init__.py").read_text()))
            assert lines and 2 <= len(lines.splitlines()) <= 5 and "import" in lines, room


def test_functions_and_train_py_are_short():
    assert len((REPO / "train.py").read_text().splitlines()) <= 350
    for name, file in modules().items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                most = 60 if (name, node.name) == ("train", "main") else 80
                assert lines <= most, f"{name}.{node.name} has {lines} lines"


@pytest.mark.launch
@pytest.mark.parametrize("left_out", [CLUSTER, BENCHMARKS, EVERYTHING])
def test_a_copy_without_some_rooms_trains_and_resumes(tiny_config, tmp_path, left_out):
    copy = tmp_path / "copy"
    names = ["ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(["git", *names], cwd=REPO, capture_output=True, check=True).stdout
    for name in filter(None, files.decode().split("\0")):
        if not any(name == gone or name.startswith(f"{gone}/") for gone in left_out):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, copy / name)
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    helped = subprocess.run(
        [sys.executable, "train.py", "--help"], cwd=copy, env=environment, capture_output=True
    )
    assert helped.returncode == 0, helped.stderr

    server = ForkServer(tmp_path, copy)
    try:
        config, run_folder = tiny_config(train__epochs=None, train__steps=3), tmp_path / "run"
        run_folder.mkdir()
        (run_folder / "stop").touch()  # seen after the first step
        stopped = server.train(config, ranks=2)
        assert stopped.code == 75, stopped.output
        resumed = server.train(config, ranks=2)
        assert resumed.code == 0 and "resuming from" in resumed.output, resumed.output
        assert [line["step"] for line in read_metrics(run_folder)] == [1, 2, 3]
        if left_out == EVERYTHING:
            refused = server.train(config, ranks=1)
            assert refused.code == 2 and len(refused.errors) == 1, refused.output
            assert "this copy has no checkpoint/convert.py: resume with" in refused.errors[0]
    finally:
        server.close()
