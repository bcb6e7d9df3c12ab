"""Collect wheels for benchmarks/gpu.py on a machine without a network, whose image has Python and
torch.

    python benchmarks/wheels.py FOLDER [--python 3.12] [--machine x86_64] [--cuda 13.0]
                                [--have NAME,...]

Downloads into FOLDER, for that Python on Linux, what gpu.py uses of requirements.txt and everything
that those packages need, at the versions installed here; without torch and what torch itself needs,
without the packages named by --have, and without bitsandbytes' kernels for other versions of CUDA.
Prints the command that installs them there.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.errors import UserError, exit_on_error

REPO = Path(__file__).resolve().parent.parent
UNUSED = {  # by gpu.py and the tests that it runs: 92 of 173 MB
    "allpairspy", "copier", "kubeflow-trainer-api", "matplotlib", "plotly", "py-spy", "ruff",
    "tensorboard", "wandb",
}  # fmt: skip
NO_WHEEL = {"deepspeed"}  # only its source is published; its ops are compiled at their first use
GLIBC = range(5, 40)  # 2.5 to 2.39: pip takes a wheel only if its tag is named exactly


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version there (default 3.12)")
    parser.add_argument("--machine", default="x86_64", help="x86_64 (default) or aarch64")
    parser.add_argument("--cuda", default="13.0", help="of torch there (default 13.0)")
    parser.add_argument(
        "--have", default="numpy,pandas,pyarrow", help="packages of the image (default %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="only print what would be collected")
    args = parser.parse_args()
    text = (REPO / "requirements.txt").read_text()
    needed = closure(requirements(text), args.python, args.machine, args.have.split(","))
    if args.list:
        print("\n".join(needed))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    download([pin for pin in needed if Requirement(pin).name not in NO_WHEEL], args)
    for pin in (pin for pin in needed if Requirement(pin).name in NO_WHEEL):
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", args.folder, pin)
    for wheel in args.folder.glob("bitsandbytes-*.whl"):
        keep_kernels(wheel, f"cuda{args.cuda.replace('.', '')}")
    megabytes = sum(file.stat().st_size for file in args.folder.glob("*.whl")) / 1e6
    print(f"{len(needed)} wheels, {megabytes:.0f} MB; there:\n")
    print(
        f"  python3 -m pip install -q --no-index --no-deps --upgrade --target /tmp/site "
        f"{args.folder}/*.whl\n"
        "  PYTHONPATH=/tmp/site python3 benchmarks/gpu.py --out FOLDER"
    )


def requirements(text: str) -> list[Requirement]:
    """The lines of a requirements.txt, without those that are UNUSED."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    found = [Requirement(line) for line in lines if line]
    return [requirement for requirement in found if requirement.name not in UNUSED]


def closure(
    wanted: Iterable[Requirement], python: str, machine: str, have: Collection[str]
) -> list[str]:
    """`name==version` of each package that `wanted` needs on that machine, sorted. A package that
    is not installed here, because this Python does not need it, has no version.
    """
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
    }

    def walk(todo: list[Requirement], left_out: Collection[str] = ()) -> dict[str, str]:
        found: dict[str, str] = {}
        seen: set[tuple[str, str]] = set()
        while todo:
            requirement = todo.pop()
            name = canonicalize_name(requirement.name)
            # of a package that is there already, only what its extras need
            extras = {*requirement.extras, *([] if name in left_out else [""])}
            for extra in extras - {extra for other, extra in seen if other == name}:
                seen.add((name, extra))
                pin, needs = about(name)
                if name not in left_out:
                    found[name] = pin
                todo += [r for r in needs if applies(r, extra)]
        return found

    def applies(requirement: Requirement, extra: str = "") -> bool:
        marker = requirement.marker
        return marker is None or marker.evaluate({**environment, "extra": extra})

    of_torch = walk([Requirement("torch")])
    left_out = {*of_torch, *map(canonicalize_name, have)}
    return sorted(walk([r for r in wanted if applies(r)], left_out).values())


def about(name: str) -> tuple[str, list[Requirement]]:
    """`name==version` of an installed package, and what it requires."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return name, []
    version = package.version.partition("+")[0]
    return f"{name}=={version}", [Requirement(line) for line in package.requires or []]


def download(pins: list[str], args: argparse.Namespace) -> None:
    platforms = [f"manylinux_2_{minor}_{args.machine}" for minor in reversed(GLIBC)]
    platforms += [f"manylinux2014_{args.machine}", f"manylinux1_{args.machine}"]
    options = [word for platform in platforms for word in ("--platform", platform)]
    options += ["--python-version", args.python, "--implementation", "cp"]
    pip("download", "--no-deps", "--only-binary=:all:", *options, "-d", args.folder, *pins)


def keep_kernels(wheel: Path, kept: str) -> None:
    """Remove from a wheel of bitsandbytes the kernels for GPUs other than `kept`, nine tenths of
    it. pip installs it although its RECORD still names them.

    Raises:
        UserError: it has no kernels for `kept`.
    """
    draft = wheel.with_suffix(".draft")
    with ZipFile(wheel) as old, ZipFile(draft, "w", ZIP_DEFLATED) as new:
        kernels = {n: m[1] for n in old.namelist() if (m := re.search(r"libbitsandbytes_(\w+)", n))}
        if kept not in kernels.values():
            found = ", ".join(sorted(name for name in kernels.values() if name.startswith("cuda")))
            raise UserError(f"--cuda: {wheel.name} has no kernels for {kept}, only for {found}")
        for entry in old.infolist():
            if kernels.get(entry.filename, "cpu") in ("cpu", kept):
                new.writestr(entry, old.read(entry))
    os.replace(draft, wheel)


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(
        [str(word) for word in command], env={**os.environ, "DS_BUILD_OPS": "0"},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(f"pip {words[0]}: {(errors or done.stderr.splitlines() or ['failed'])[-1]}")


if __name__ == "__main__":
    exit_on_error(main)
