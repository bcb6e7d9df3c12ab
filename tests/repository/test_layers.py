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
"""From the lowest layer to the highest. Packages after train are tools."""


def modules() -> dict[str, Path]:
    """All modules of the repository except the tests: dotted name -> file."""
    folders = [REPO / room.replace(".", "/") for room in LAYERS]
    files = [REPO / "train.py", *(f for folder in folders for f in folder.rglob("*.py"))]
    return {str(f.relative_to(REPO)).removesuffix(".py").replace("/", "."): f for f in files}


def layer_of(module: str) -> int:
    return next(i for i, room in enumerate(LAYERS) if f"{module}.".startswith(f"{room}."))


def imports_of(file: Path, known: dict[str, Path]) -> set[str]:
    """The repository's modules that a file imports, in any of its lines."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = [node.module] if isinstance(node, ast.ImportFrom) else []
            found.update(module, (".".join([*module, alias.name]) for alias in node.names))
    return found & known.keys()


def test_a_module_imports_only_from_its_layer_and_those_below():
    """Imports for types count too. Scripts are imported by nothing, and train.py by benchmarks."""
    known = modules()
    assert len(known) > 50
    for name, file in known.items():
        layer = layer_of(name)
        for imported in imports_of(file, known):
            below = layer_of(imported)
            assert below <= layer, f"{name} imports {imported}, which is above it"
            assert LAYERS[below] != "scripts", f"{name} imports a script"
            assert imported != "train" or LAYERS[layer] == "benchmarks", f"{name} imports train.py"


def test_modules_do_not_import_each_other_in_a_circle():
    known = modules()
    graph = {name: imports_of(file, known) for name, file in known.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_each_package_lists_contents_and_imports():
    for room in LAYERS:
        folder = REPO / room.replace(".", "/")
        if room not in ("train", "scripts", "benchmarks") and folder.exists():
            lines = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
            assert lines and 2 <= len(lines.splitlines()) <= 5 and "import" in lines, room
