"""Installing: setup.sh, requirements.txt, requirements.lock.
pytest tests/commands/test_setup.py"""

import ast
import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from harness.processes import run
from harness.repository import REPO, repository_files
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from zerotrain.runtime.process_group import find_ninja

ENVIRONMENTS = [
    {"python_version": version, "python_full_version": f"{version}.1", "platform_machine": machine}
    for version in ("3.11", "3.12", "3.13")
    for machine in ("x86_64", "aarch64")
]


def pins(file: Path, environment: dict[str, str]) -> dict[str, str]:
    """Version by name of the packages that `file` pins in an environment."""
    found = {}
    for line in file.read_text().splitlines():
        text = line.split("#")[0].rstrip("\\ ")
        if text and not text.startswith(" "):
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate(environment):
                [pin] = wanted.specifier
                assert pin.operator == "==", line
                assert found.setdefault(canonicalize_name(wanted.name), pin.version) == pin.version
    return found


def test_ninja_is_found_in_an_environment_that_is_not_activated(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    find_ninja()
    assert Path(shutil.which("ninja")).parent == Path(sysconfig.get_path("scripts"))


def test_every_imported_package_is_pinned():
    distributions = importlib.metadata.packages_distributions()
    pinned = pins(REPO / "requirements.txt", ENVIRONMENTS[2])
    code = [REPO / name for name in repository_files() if name.endswith(".py")]
    ours = {p.removesuffix(".py") for file in code for p in file.relative_to(REPO).parts}
    imported = {}
    for file in code:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", node.names[0].name)
                imported[module.split(".")[0]] = file
    assert {"torch", "yaml", "numpy"} <= imported.keys()
    # installed in environments of their own
    elsewhere = {"vllm", "trl", "liger_kernel"}
    for name in imported.keys() - ours - elsewhere - sys.stdlib_module_names:
        packages = {canonicalize_name(package) for package in distributions[name]}
        assert packages & pinned.keys(), f"{imported[name]} imports {name}: pin {packages}"


def test_the_lock_has_the_pinned_versions_with_hashes_and_no_index():
    lock = (REPO / "requirements.lock").read_text()
    entries = re.findall(
        r"^\S.*==.*(?:\n +--hash=sha256:[0-9a-f]{64}(?: \\)?)+$", lock, re.MULTILINE
    )
    assert len(entries) == len(re.findall(r"^[^#\s]", lock, re.MULTILINE)) > 60
    assert "://" not in lock and "index" not in lock
    listed = (REPO / "requirements.txt").read_text()
    sections = re.compile(r"^# \[(\w+)\]$", re.MULTILINE)
    assert sections.findall(lock) == sections.findall(listed)
    last = [re.findall(r"^[\w-]+", t.split("# [copying]")[1], re.MULTILINE) for t in (listed, lock)]
    assert set(last[0]) <= set(last[1])
    for environment in ENVIRONMENTS:
        wanted = pins(REPO / "requirements.txt", environment)
        locked = pins(REPO / "requirements.lock", environment)
        assert "torch" in wanted and not {"torch", "triton"} & locked.keys()
        assert not [name for name in locked if name.startswith("nvidia-") and name not in wanted]
        del wanted["torch"]
        assert wanted.items() <= locked.items(), "renew the lock: scripts/lock.sh"


# --------------------------------------------------------------------------------------------------
# setup.sh, in a folder with requirements of its own


def wheel(folder: Path, name: str, version: str, files: dict | None = None) -> str:
    """Write a wheel, by default with an empty module, and return its entry of a lock."""
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    files = files or {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def checkout(tmp_path):
    """A folder with setup.sh, a package, and requirements that the folder wheels has."""
    folder, wheels = tmp_path / "checkout", tmp_path / "checkout" / "wheels"
    (folder / "scripts").mkdir(parents=True)
    wheels.mkdir()
    shutil.copy(REPO / "scripts" / "setup.sh", folder / "scripts")
    shutil.copy(REPO / "pyproject.toml", folder)
    (folder / "zerotrain").mkdir()
    (folder / "zerotrain" / "__init__.py").touch()
    wheel(wheels, "torch", "2.0")
    setuptools = importlib.metadata.distribution("setuptools")
    inside = [f for f in setuptools.files if not {"..", "__pycache__"} & {*f.parts}]
    builder = wheel(
        wheels, "setuptools", setuptools.version, {str(f): f.read_binary() for f in inside}
    )
    (folder / "requirements.lock").write_text(wheel(wheels, "locked", "1.0") + builder)
    (folder / "requirements.txt").write_text("torch==2.0   # first\nlocked==1.0\n")
    return folder


def set_up(folder: Path, code: int = 0, uv: bool = False, **variables: str):
    """Source setup.sh as test.sh does, then import what it should have installed. Fails with
    another exit code than `code`.
    """
    settings = {
        "PYTHON": sys.executable,
        "PATH": os.environ["PATH"] if uv else "/usr/bin:/bin",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "UV_NO_CONFIG": "1",
        "UV_OFFLINE": "1",
        "PIP_FIND_LINKS": folder / "wheels",
        "UV_FIND_LINKS": folder / "wheels",
        "UV_CACHE_DIR": folder / "cache",
        **variables,
    }
    command = "set -euo pipefail; source scripts/setup.sh; python -c 'import locked, torch'"
    assign = [f"{name}={value}" for name, value in settings.items()]
    return run(["env", *assign, "bash", "-c", command], cwd=folder, code=code)


def contents(folder: Path) -> list[tuple[str, int]]:
    """Every path and its time of change, not following links."""
    return sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*"))


def test_an_install_checks_hashes_ends_at_a_section_and_is_not_repeated(checkout):
    listed, lock = checkout / "requirements.txt", checkout / "requirements.lock"
    later = wheel(checkout / "wheels", "later", "1.0")
    for file, last in ((listed, "later==1.0\n"), (lock, later)):
        file.write_text(f"# [first]\n{file.read_text()}\n# [second]\n{last}")
    hashes = lock.read_text()
    assert "first second" in set_up(checkout, 2, UP_TO="third").error
    lock.write_text(f"locked==1.0 --hash=sha256:{'0' * 64}\n")
    line = set_up(checkout, 2).error
    assert "scripts/lock.sh" in line and "NO_LOCK=1" in line
    lock.write_text(hashes)
    set_up(checkout, UP_TO="first")
    assert not [*checkout.glob(".venv/lib/*/site-packages/later.py")]
    assert "no hashes are checked" in set_up(checkout, NO_LOCK="1").output
    assert [*checkout.glob(".venv/lib/*/site-packages/later.py")]
    made = contents(checkout / ".venv")
    assert set_up(checkout).output == "" and contents(checkout / ".venv") == made

    # a link to that folder is used, but nothing is installed through it
    (checkout / ".venv").rename(checkout / "elsewhere")
    (checkout / ".venv").symlink_to("elsewhere")
    assert set_up(checkout).output == ""
    lock.write_text("# changed\n")
    made = contents(checkout / "elsewhere")
    assert ".venv is a link to elsewhere" in set_up(checkout, 2).error
    assert contents(checkout / "elsewhere") == made


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder", "file"])
def test_a_venv_of_the_user_is_never_cleared(checkout, kind):
    venv, mine = checkout / ".venv", checkout / "mine"
    if "link" in kind:
        venv.symlink_to("mine")
    if kind != "dangling link":
        folder = mine if kind == "link" else venv
        folder.touch() if kind == "file" else folder.mkdir()
    if kind in ("link", "folder"):
        (folder / "notes.txt").write_text("mine")
    before = contents(checkout)
    [line] = set_up(checkout, 2).output.splitlines()
    assert line.startswith("error: .venv ") and "run this again" in line
    assert contents(checkout) == before


def test_a_link_to_an_environment_that_has_the_requirements_is_used(checkout):
    """Another checkout with different requirements may have made it."""
    (checkout / ".venv").symlink_to(sys.prefix)
    version = importlib.metadata.version
    lines = [f"{name}=={version(name).split('+')[0]}\n" for name in ("torch", "pytest")]
    (checkout / "requirements.txt").write_text("".join(lines) + "x==1 ; python_version < '3'\n")
    assert "No module named 'locked'" in set_up(checkout, 1).output
    (checkout / "requirements.txt").write_text("pytest==0.1\n")
    set_up(checkout, 2)


@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
def test_uv_makes_and_fills_the_environment(checkout):
    set_up(checkout, uv=True)
    assert not (checkout / ".venv" / "bin" / "pip").exists()
    assert set_up(checkout).output == ""  # needs no uv once it is complete
    (checkout / ".venv" / "installed").unlink()  # as if somebody else had made it with uv
    assert "install uv" in set_up(checkout, 2).error
    set_up(checkout, uv=True)
    (checkout / "requirements.lock").write_text(f"locked==1.0 --hash=sha256:{'0' * 64}\n")
    shutil.rmtree(checkout / ".venv")
    assert "NO_LOCK=1" in set_up(checkout, 2, uv=True).errors[-1]
