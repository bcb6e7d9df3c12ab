"""Tokens of code, without comments and docstrings: python .ci/size.py"""

import ast
import io
import subprocess
import tokenize
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def count_tokens(file: str) -> int:
    source = Path(file).read_text()
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(t.type not in LAYOUT and t.start not in docstrings for t in tokens)


def imported_by(file: str, known: dict[str, str], seen: set[str]) -> set[str]:
    """The files that a file imports, and those that they import."""
    seen.add(file)
    for node in ast.walk(ast.parse(Path(file).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name in known and known[name] not in seen:
                imported_by(known[name], known, seen)
    return seen


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True)
    sizes = {file: count_tokens(file) for file in listed.stdout.splitlines()}
    known = {file.removesuffix(".py").replace("/", "."): file for file in sizes}
    tests = sum(size for file, size in sizes.items() if file.startswith("tests/"))
    print(
        f"train.py and its imports {sum(sizes[f] for f in imported_by('train.py', known, set())):,}"
    )
    print(f"all but tests {sum(sizes.values()) - tests:,}\ntests {tests:,}")


if __name__ == "__main__":
    main()
