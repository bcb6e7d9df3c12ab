"""Packages import only from those before them.    pytest tests/repository/test_layers.py"""

import ast
import graphlib
from pathlib import Path

from harness.repository import REPO

LAYERS = (
    "zerotrain.runtime", "zerotrain.config", "zerotrain.data", "zerotrain.model",
    "zerotrain.training", "zerotrain.checkpoint", "zerotrain.tracking", "train",
    "zerotrain.rows", "zerotrain.tools", "zerotrain.launch", "scripts", "benchmarks",
)  # fmt: skip
"""From the bottom to the top. Those after train serve it; it knows none of them."""


def modules() -> dict[str, Path]:
    """Every module of the repository but the tests, by its dotted name."""
    folders = [REPO / room.replace(".", "/") for room in LAYERS]
    files = [REPO / "train.py", *(f for folder in folders for f in folder.rglob("*.py"))]
    return {str(f.relative_to(REPO)).removesuffix(".py").replace("/", "."): f for f in files}


def layer_of(module: str) -> int:
    return next(i for i, room in enumerate(LAYERS) if f"{module}.".startswith(f"{room}."))


def imports_of(file: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the repository that a file imports, anywhere in it, also for types alone."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(node.module)
    return {name for name in found if name in known}


def test_no_import_runs_up_not_even_for_types():
    """So train.py and what it imports know no tool."""
    known = modules()
    assert len(known) > 50
    for name, file in known.items():
        room = layer_of(name)
        for imported in imports_of(file, known):
            assert not imported.startswith("scripts."), f"{name}: scripts/ is on no path"
            other = layer_of(imported)
            assert other <= room, f"{name} imports {imported}, which is above it"
            if LAYERS[room] in ("scripts", "benchmarks") and other < room:
                assert imported != "train" or LAYERS[room] == "benchmarks", f"{name}: {imported}"


def test_no_circle_of_files():
    known = modules()
    graph = {name: imports_of(file, known) for name, file in known.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_each_room_says_what_it_holds_and_what_it_may_import():
    for room in LAYERS:
        folder = REPO / room.replace(".", "/")
        if room not in ("train", "scripts", "benchmarks") and folder.exists():
            lines = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
            assert lines and 2 <= len(lines.splitlines()) <= 5 and "import" in lines, room
