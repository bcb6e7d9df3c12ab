"""The parts of libraries that are not public.    pytest tests/test_internals.py"""

import importlib.util
import re
from pathlib import Path

import pytest
from conftest import REPO

from runtime.internals import INTERNALS, READ_FROM, installed_versions, version_warning


@pytest.mark.parametrize("entry", INTERNALS, ids=lambda e: f"{e.used_in} {e.module}")
def test_every_listed_name_is_used_here_and_exists_in_the_library(entry):
    here = (REPO / entry.used_in).read_text()
    library = Path(importlib.util.find_spec(entry.module).origin).read_text()
    for name in entry.names:
        assert re.search(rf"\b{name}\b", here), f"{name}: no longer used, remove it from the list"
        assert re.search(rf"\b{name}\b", library), f"{name}: not in the installed {entry.module}"


def test_private_names_of_the_libraries_are_listed():
    """Those that begin with an underscore; `self._x` and `_x(...)` are our own."""
    private = re.compile(r"\b(?!self\b|cls\b|dist\b)(?:c10d|ops|engine|optimizer|p)\.(_[a-z]\w+)")
    for room in ("runtime", "model", "checkpoint", "tracking"):
        for file in (REPO / room).glob("*.py"):
            name = str(file.relative_to(REPO))
            listed = {n for entry in INTERNALS if entry.used_in == name for n in entry.names}
            assert set(private.findall(file.read_text())) <= listed, name


def test_another_version_is_named_in_one_line():
    tested = {"deepspeed": "0.19.8", "torch": "2.13.0+cpu", "transformers": "5.23.0"}
    assert version_warning(tested) is None
    assert version_warning(installed_versions()) is None, "requirements.txt, or READ_FROM"
    for name, other in (("deepspeed", "0.19.80"), ("torch", "2.14.0"), ("torch", "2.1.3")):
        line = version_warning({**tested, name: other})
        assert line.startswith(f"WARNING: untested version of {name} {other} ")
        assert READ_FROM[name] in line and "\n" not in line
