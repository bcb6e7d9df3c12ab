"""The parts of libraries that are not public.    pytest tests/repository/test_internals.py"""

import importlib.util
import re
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

import pytest
from harness.repository import REPO

from zerotrain.runtime.internals import INTERNALS, PATCHES, READ_FROM

FILES = [REPO / "train.py", *sorted((REPO / "zerotrain").rglob("*.py"))]
PRIVATE = re.compile(r"(?<!\bself)(?<!\bcls)(?<!\bsys)(?<!\bos)\.(_[a-z]\w+)")
REPLACED = re.compile(
    r"\b(?:engine|block|mlp|module|head|model|basic_optimizer|optimizer)"
    r"\.(forward|step|backward|clip_\w+|checkpoint_engine) = "
)


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


def test_private_names_and_patches_are_listed():
    """Private names begin with an underscore; `self._x` and `_x(...)` are our own."""
    found = set()
    for file in FILES:
        name, text = str(file.relative_to(REPO)), file.read_text()
        found |= {f"{name}: {attribute}" for attribute in REPLACED.findall(text)}
        if not name.endswith("internals.py"):
            private = {p for p in PRIVATE.findall(text) if p not in INTERNALS.get(name, "")}
            assert not private, (name, private)
    unlisted = [patch for patch in found if not any(fnmatch(patch, each) for each in PATCHES)]
    assert not unlisted and len(PATCHES) <= 5


def test_the_list_is_of_the_installed_versions():
    for name, read in READ_FROM.items():
        assert f"{version(name)}.".replace("+", ".").startswith(f"{read}."), name
