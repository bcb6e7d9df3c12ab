"""Rooms import only from rooms below; some can be deleted.    pytest tests/test_layers.py"""

import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import pytest
from conftest import REPO, ForkServer, read_metrics

LAYERS = (
    "runtime", "config", "data", "model", "checkpoint", "tracking", "train",
    "cluster", "scripts", "benchmarks",
)  # fmt: skip
"""From the bottom to the top. The last three serve train.py, which knows none of them."""


def removable_rooms() -> dict[str, tuple[str, ...]]:
    """The table in CONTRIBUTING.md: what a copy can do without -> its files and folders."""
    table = (REPO / "CONTRIBUTING.md").read_text().split("| without |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE)
    return {room: tuple(re.findall(r"`([^`]+)`", paths)) for room, paths in rows if "`" in paths}


def is_in(name: str, paths: Iterable[str]) -> bool:
    """Whether a file is one of `paths`, which may have wildcards, or in a folder of them."""
    return any(fnmatch(name, path) or f"{name}/".startswith(path) for path in paths)


ROOMS = removable_rooms()
HERE = [room for room, paths in ROOMS.items() if (REPO / paths[0]).exists()]
CONVERSION = "resuming with another world size, ZeRO stage or optimizer"


def is_left_out(name: str) -> bool:
    """Whether a file of the template is missing here because a room of it has been deleted."""
    gone = [path for room, paths in ROOMS.items() if room not in HERE for path in paths]
    return is_in(name, gone) and not (REPO / name).exists()


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
        if room not in ("train", "scripts", "benchmarks") and (REPO / room).exists():
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
@pytest.mark.parametrize("left_out", [HERE[::2], HERE[1::2], HERE], ids=", ".join)
def test_a_copy_without_some_rooms_trains_and_resumes(tiny_config, tmp_path, left_out):
    gone = [path for room in left_out for path in ROOMS[room]]
    copy = tmp_path / "copy"
    names = ["ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(["git", *names], cwd=REPO, capture_output=True, check=True).stdout
    for name in filter(None, files.decode().split("\0")):
        if not is_in(name, gone) and (REPO / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, copy / name)
    assert not any((copy / path).exists() for path in gone)
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
        assert stopped.code == 0, stopped.output
        resumed = server.train(config, ranks=2)
        assert resumed.code == 0 and "resuming from" in resumed.output, resumed.output
        assert [line["step"] for line in read_metrics(run_folder)] == [1, 2, 3]
        if CONVERSION in left_out:
            refused = server.train(config, ranks=1)
            assert refused.code == 2 and len(refused.errors) == 1, refused.output
            assert "this copy has no checkpoint/convert.py: resume with" in refused.errors[0]
    finally:
        server.close()
