"""The parts of libraries that are not public.    pytest tests/repository/test_internals.py"""

import ast
import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from harness.repository import REPO

from zerotrain.runtime.internals import INTERNALS, PATCHES, READ_FROM

FILES = [REPO / "train.py", *sorted((REPO / "zerotrain").rglob("*.py"))]
PRIVATE = re.compile(r"(?<!\bself)(?<!\bcls)(?<!\bsys)(?<!\bos)\.(_[a-z]\w+)")
METHODS = {"forward", "step", "backward", "checkpoint_engine"}


def entries(file: str) -> dict[str, list[str]]:
    """Module of a library -> names, of a file of ours."""
    parts = re.split(r"(\S+): ", INTERNALS[file])[1:]
    return {module: names.split() for module, names in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize("file", INTERNALS)
def test_every_listed_name_is_used_here_and_exists_in_the_library(file):
    here = (REPO / file).read_text()
    for module, names in entries(file).items():
        library = Path(importlib.util.find_spec(module).origin).read_text()
        for name in names:
            assert re.search(rf"\b{name}\b", here), f"{name}: not used, remove it from the list"
            assert re.search(rf"\b{name}\b", library), f"{name}: not in the installed {module}"


def changed_attributes(text: str, internals: set[str]) -> set[str]:
    """The attributes that a file assigns, deletes, clears or removes on objects of libraries: of a
    module, or with a name that is private, in the list or a method of engines and models.
    """
    tree = ast.parse(text)
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {(a.asname or a.name).split(".")[0] for node in imports for a in node.names}
    changed = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            changed += [(target, False) for target in node.targets]
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("clear", "remove"):
            changed.append((node.func.value, True))
    found = set()
    for target, is_call in changed:
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute) and not ast.unparse(target).startswith("self."):
            name = target.attr
            root = ast.unparse(target).split(".")[0]
            is_library = name.startswith("_") or name in METHODS or root in modules
            if name in internals or (is_library and not is_call and name != "environ"):
                found.add(name)
    return found


def test_private_names_and_patches_are_listed():
    """Private names begin with an underscore; `self._x` and `_x(...)` are our own."""
    found = set()
    for file in FILES:
        name, text = str(file.relative_to(REPO)), file.read_text()
        if not name.endswith("internals.py"):
            listed = INTERNALS.get(name, "")
            changed = changed_attributes(text, set(listed.split()))
            found |= {f"{name}: {attribute}" for attribute in changed}
            private = {p for p in PRIVATE.findall(text) if p not in listed}
            assert not private, (name, private)
    assert found == PATCHES.keys() and len(PATCHES) <= 5


@pytest.mark.parametrize(
    "text",
    [
        "import warnings\nwarnings.showwarning = print",
        "generation._original_object_hash = 1",
        "engine.first_dataloader_check.remove()",
        "engine.optimizer.averaged_gradients.clear()",
        "import deepspeed\ndeepspeed.ops.__compatible_ops__['x'] = False",
        "model.lm_head.forward = print",
    ],
)
def test_each_kind_of_patch_is_found(text):
    assert changed_attributes(text, {"first_dataloader_check", "averaged_gradients"})


def test_the_list_is_of_the_installed_versions():
    for name, read in READ_FROM.items():
        assert f"{version(name)}.".replace("+", ".").startswith(f"{read}."), name
