"""Fuzzes what reads other people's files: a damaged or hostile file ends in a UserError, and runs
no code.

    python tests/fuzz.py                             every target, 10,000 cases each
    python tests/fuzz.py rows shards --seconds 60    two targets, for a minute each

Cases are valid files that hypothesis has changed (fuzz_targets.py), the same in each run. Anything
but a UserError is a failure, and so are a crash, 10 s of CPU time or 1 GiB of memory for one case,
and code of the file that ran. The files of the first case of each failure are kept; exit code 1.

Of 10,000 cases each, run once on two cores in 17 minutes, 453 of hostfile, 995 of config, 5,539 of
rows, 2,140 of state and 2,279 of shards were accepted, no code ran, and five kinds of failure were
found and mended: names and numbers too long for a path or a float, and a line break in a key.
"""

import argparse
import functools
import io
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
from hypothesis import strategies as st

REPO = Path(__file__).resolve().parent.parent
BATCH = 250  # cases per child process: a fork takes 50 ms, a crash loses the rest of its batch
CPU_SECONDS, MEMORY_BYTES = 10, 1 << 30
CANARY = "canary"
"""A file in the folder of a case that only code of the case creates."""
ACCEPTED, REFUSED = "accepted", "refused"


class Case(NamedTuple):
    """Input of a target."""

    files: dict[str, bytes]
    """Content by path in the folder of the case."""
    arguments: Any = None


class Target(NamedTuple):
    cases: st.SearchStrategy[Case]
    read: Callable[[Path, Any], None]
    """Reads the files of a case, given their folder and the case's arguments."""


class Failure(NamedTuple):
    target: str
    what: str
    """The exception, and the innermost line of the repository."""
    details: str


# --------------------------------------------------------------------------------------------------
# Changes


class RunsCode:
    """An object whose pickle creates the canary when it is loaded."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> tuple[Callable, tuple]:
        calls = {"mkdir": (os.mkdir, CANARY), "exec": (exec, f"open({CANARY!r}, 'w')"),
                 "open": (open, CANARY, "w"), "touch": (Path.touch, Path(CANARY))}  # fmt: skip
        function, *arguments = calls[self.how]
        return function, tuple(arguments)


def one_of(values: Sequence[Any]) -> st.SearchStrategy:
    """st.sampled_from for large values, which it would print to compare strategies."""
    return st.integers(0, len(values) - 1).map(lambda i: values[i])


RUNS_CODE = st.sampled_from(["mkdir", "exec", "open", "touch"]).map(RunsCode)
DEEP: list = functools.reduce(lambda inner, _: [inner], range(90), [])
ODD_TEXTS = (
    "", " ", "x", "0", "-1", "1e999", "\0", "\ud800", "\u202e", "é" * 300, "a" * 20_000, "..",
    "../x", "/dev/null", "-x", "~", "${HOME}", "%h", "$(touch canary)", "`touch canary`", "{{ 1 }}",
    "null", "rank_x.pt", "a\nb", "<|im_end|>",
)  # fmt: skip
ODD_NUMBERS = (0, -1, 1, 2, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, math.inf, math.nan)
ODD_TREES = ([], {}, [[]], [None], {"": None}, {"x": {"y": [1]}}, DEEP, [0] * 5000)
ODD = one_of([None, True, False, *ODD_NUMBERS, *ODD_TEXTS, *ODD_TREES])
REMOVED = object()


def paths(tree: Any, at: tuple = ()) -> Iterator[tuple]:
    """The path of every node of a tree of dicts, lists and tuples."""
    yield at
    if isinstance(tree, dict | list | tuple):
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from paths(inner, (*at, key))


def get(tree: Any, path: tuple) -> Any:
    return functools.reduce(lambda node, key: node[key], path, tree)


def replaced(tree: Any, path: tuple, new: Any) -> Any:
    """A copy of `tree` with `new` at `path`, or nothing there if that is REMOVED."""
    if not path:
        return None if new is REMOVED else new
    inner = replaced(tree[path[0]], path[1:], new) if len(path) > 1 else new
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    items = [(key, inner if key == path[0] else value) for key, value in items]
    items = [(key, value) for key, value in items if value is not REMOVED]
    return dict(items) if isinstance(tree, dict) else type(tree)(value for _, value in items)


@st.composite
def changed(draw: Any, tree: Any, odd: st.SearchStrategy = ODD, changes: int = 3) -> Any:
    """`tree` after up to `changes` changes of a node."""
    for _ in range(draw(st.integers(0, changes))):
        depth = draw(st.integers(1, 6))  # otherwise nearly all changes would be of leaves
        path = draw(one_of([path for path in paths(tree) if len(path) <= depth]))
        node, how = get(tree, path), draw(st.integers(0, 5))
        if how == 0:
            node = REMOVED
        elif how == 1:
            node = get(tree, draw(one_of(list(paths(tree)))))
        elif how == 2:
            node = [node, draw(odd)]
        elif how == 3 and isinstance(node, dict):
            node = {**node, draw(st.sampled_from(ODD_TEXTS)): draw(odd)}
        else:
            node = draw(odd)
        tree = replaced(tree, path, node)
    return tree


@st.composite
def damaged(draw: Any, content: bytes, words: tuple[bytes, ...] = (b"\0",)) -> bytes:
    """`content` after up to three changes of its bytes, some of which insert one of `words`."""
    for _ in range(draw(st.integers(0, 3))):
        at, how = draw(st.integers(0, len(content))), draw(st.integers(0, 7))
        length = draw(st.sampled_from([1, 1, 4, 8, 64, 4096]))
        before, here, after = content[:at], content[at : at + length], content[at + length :]
        if how == 0:  # cut off
            here = after = b""
        elif how == 1:  # cut out
            here = b""
        elif how == 2:
            here *= draw(st.sampled_from([2, 3, 200]))
        elif how == 3:
            here = draw(st.binary(min_size=1, max_size=8)) + here
        elif how == 4:
            here = draw(one_of(words)) + here
        elif how == 5:  # another number, as an offset or a length in a binary file
            size = draw(st.sampled_from([1, 4, 8]))
            number = draw(st.sampled_from([-1, 0, 1, 100, 10**6, 2**31 - 1, -(2**31), 2**40]))
            here = (number % 256**size).to_bytes(size, "little") + (here + after)[size:]
            after = b""
        elif here:  # flip a bit
            here = bytes([here[0] ^ (1 << draw(st.integers(0, 7)))]) + here[1:]
        content = before + here + after
    return content


# --------------------------------------------------------------------------------------------------
# Running cases


def place_of(error: BaseException) -> str:
    """FILE:LINE of the innermost frame in the repository, or in a library if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(f"{REPO}/") and "site-packages" not in f[0]]
    frame = (ours or frames)[-1]
    return f"{frame.filename.removeprefix(f'{REPO}/')}:{frame.lineno}"


def run_case(target: Target, case: Case, folder: Path) -> tuple[str, str]:
    """Read a case in `folder`, the working directory. Returns ACCEPTED, REFUSED or what failed, and
    the details.
    """
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "canary_module.py").write_text(f"open({CANARY!r}, 'w')\nclass Model: pass\n")
    (folder / "arguments").write_text(ascii(case.arguments))
    outcome = ACCEPTED, ""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            target.read(folder, case.arguments)
    except (Exception, SystemExit) as error:
        details = "".join(traceback.format_exception_only(error)).strip()[:600]
        outcome = f"{type(error).__name__} at {place_of(error)}", details
        if type(error).__name__ == "UserError" and "\n" not in str(error):
            outcome = REFUSED, details
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if os.path.lexists(CANARY):
        sys.modules.pop("canary_module", None)
        return "code of the case ran", ": ".join(outcome)
    return outcome


def run_batch(target: Target, name: str, seed: int, cases: int, counts: Any, kept: Path) -> None:
    """Run a batch in the current directory, in a child process.

    Args:
        counts: of cases, and of accepted ones; shared with the parent.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path.insert(0, str(Path.cwd()))

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(target.cases)
    def run(case: Case) -> None:
        what, details = run_case(target, case, Path.cwd())
        counts[0] += 1
        counts[1] += what == ACCEPTED
        if what not in (ACCEPTED, REFUSED):
            keep(Failure(name, what, details), Path.cwd(), kept)

    run()


def keep(failure: Failure, folder: Path, kept: Path) -> None:
    """Keep the files of the first case of a failure."""
    label = "".join(c if c.isalnum() else "_" for c in f"{failure.target} {failure.what}")[:120]
    if not (kept / label).exists():
        shutil.copytree(folder, kept / label, symlinks=True)
        (kept / label / "failure.json").write_text(json.dumps(failure))


def run_cases(target: Target, name: str, cases: int, seconds: float, kept: Path) -> tuple[int, int]:
    """Run up to `cases` cases of a target, for about `seconds` at most. Returns how many, and how
    many of them were accepted.
    """
    fork, began, batch = multiprocessing.get_context("fork"), time.monotonic(), 0
    counts = fork.Array("q", 2, lock=False)
    while counts[0] < cases and time.monotonic() - began < seconds:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            arguments = target, name, batch, min(BATCH, cases - counts[0]), counts, kept
            child = fork.Process(target=run_batch, args=arguments)
            child.start()
            child.join()
            if code := child.exitcode:
                what = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                keep(Failure(name, what, "see its files"), Path(folder), kept)
                counts[0] += 1
            os.chdir(REPO)
        batch += 1
    return counts[0], counts[1]


def main() -> None:
    sys.path.insert(0, str(REPO))
    os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    from fuzz_targets import TARGETS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"default: {', '.join(TARGETS)}"
    )
    parser.add_argument("--cases", type=int, default=10_000, help="of each target")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for each target")
    args = parser.parse_args()
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"unknown target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    hypothesis.given(st.none())(lambda _: None)()  # the first takes a second to look for generators
    kept = Path(tempfile.mkdtemp(prefix="fuzz_"))
    for name in args.targets or TARGETS:
        began = time.monotonic()
        count, accepted = run_cases(TARGETS[name](), name, args.cases, args.seconds, kept)
        seconds = time.monotonic() - began
        print(f"{name}: {count:,} cases, {accepted:,} accepted, {seconds:.0f} s", flush=True)
    failures = [Failure(*json.loads(f.read_text())) for f in sorted(kept.glob("*/failure.json"))]
    for failure in failures:
        print(f"FAILED {failure.target}: {failure.what}: {failure.details}")
    if failures:
        print(f"their files: {kept}")
        sys.exit(1)
    shutil.rmtree(kept)
    print("no failures")


if __name__ == "__main__":
    import fuzz  # this file by the name under which fuzz_targets.py imports it

    fuzz.main()
