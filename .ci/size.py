"""Tokens of code, without comments and docstrings, and their limits: python .ci/size.py [--report]

Exit code 1 above a limit, unless with --report. The smallest copy is rendered if copier is there.
"""

import ast
import io
import shutil
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

# One percent above the sizes of today. CONTRIBUTING.md has the aims.
LIMITS = {
    "train.py and its imports": 51_650,
    "the program for rows": 19_750,
    "all but tests": 131_050,
    "tests": 129_300,
    "smallest copy, all but tests": 81_650,
    "smallest copy, tests": 34_050,
    "settings": 65,
}
ROWS = ("zerotrain/rows/", "scripts/tokenize/")
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def count_tokens(file: str | Path) -> int:
    source = Path(file).read_text()
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(t.type not in LAYOUT and t.start not in docstrings for t in tokens)


def imported_by(file: Path, known: dict[str, Path], seen: set[Path]) -> set[Path]:
    """Return a file, the files that it imports, and all that these import."""
    seen.add(file)
    for node in ast.walk(ast.parse(Path(file).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name in known and known[name] not in seen:
                imported_by(known[name], known, seen)
    return seen


def measure_folder(folder: Path, names: list[str]) -> tuple[int, int, int]:
    """Count the tokens of train.py and its imports, of all but the tests, and of the tests.

    Args:
        names: the Python files in the folder.
    """
    sizes = {folder / name: count_tokens(folder / name) for name in names}
    known = {name.removesuffix(".py").replace("/", "."): folder / name for name in names}
    tests = sum(size for file, size in sizes.items() if folder / "tests" in file.parents)
    path = imported_by(folder / "train.py", known, set())
    return sum(sizes[file] for file in path), sum(sizes.values()) - tests, tests


def count_settings() -> int:
    """Count the keys of a run config: the fields of its sections, without nested sections."""
    classes = [n for n in ast.parse(Path("zerotrain/config/schema.py").read_text()).body
               if isinstance(n, ast.ClassDef) and n.name.endswith("Config")]  # fmt: skip
    fields = [n for cls in classes for n in cls.body if isinstance(n, ast.AnnAssign)]
    return sum("Config" not in ast.unparse(field.annotation) for field in fields)


def measure_smallest_copy(files: list[str]) -> tuple[int, int]:
    """Count the tokens of the smallest copy: of all but its tests, and of its tests."""
    from copier import run_copy

    with tempfile.TemporaryDirectory() as temporary:
        template, copy = Path(temporary, "template"), Path(temporary, "copy")
        for name in files:  # without .git, which would give the newest tag
            (template / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, template / name)
        answers = {"project_name": "small", "scheduler": "none", "keep": []}
        run_copy(str(template), copy, data=answers, defaults=True, quiet=True)
        names = [str(file.relative_to(copy)) for file in copy.rglob("*.py")]
        return measure_folder(copy, names)[1:]


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    files = listed.stdout.splitlines()
    names = [name for name in files if name.endswith(".py")]
    path, rest, tests = measure_folder(Path(), names)
    rows = sum(count_tokens(name) for name in names if name.startswith(ROWS))
    found = dict(zip(LIMITS, (path, rows, rest, tests), strict=False))
    try:
        smallest = measure_smallest_copy(files)
        found |= zip(list(LIMITS)[4:6], smallest, strict=True)
    except ImportError:
        print("copier is not installed: the smallest copy is not measured")
    found["settings"] = count_settings()
    for name, size in found.items():
        over = f"  {size - LIMITS[name]:,} over" if size > LIMITS[name] else ""
        print(f"{name:30} {size:7,} of {LIMITS[name]:6,}{over}")
    is_over = any(size > LIMITS[name] for name, size in found.items())
    return int(is_over and "--report" not in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
