"""Line budgets: what is over one is split, or listed in EXEMPT with a reason."""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

# Lines of code (nobody should save on blank lines, comments and docstrings) of what a compile and a
# call run through: qinductor/*.py but for NOT_CORE (of serving, a plain call runs few).
CORE_LINES = 2500
NOT_CORE = (
    "bench.py", "caches", "cells.py", "compare.py", "demo.py", "doctor.py", "explain.py",
    "formats.py", "peers.py", "sass.py", "serving", "testing.py", "timing.py", "trial.py",
    "triton_compile.py", "tune.py", "__main__.py",
)  # fmt: skip
FILE_LINES = 400
TEST_LINES = 1000  # a golden graph is long
FUNCTION_LINES = 60
DEVICE_LINES = 150  # straight-line kernels read better whole

# "path" or "path:qualified.name" -> why it may be longer
EXEMPT: dict[str, str] = {}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function below node with its qualified name."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}."
        if isinstance(child, Function):
            yield name[:-1], child
        yield from functions(child, name)


def code_lines(text: str) -> int:
    """Lines that hold a token of code."""
    free = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    before = tokenize.INDENT
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        statement = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        docstring = token.type == tokenize.STRING and statement
        if token.type not in free and not docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return len(lines)


def is_device(function: Function) -> bool:
    """Whether a decorator is triton.jit, gluon.jit, cute.jit or cute.kernel."""
    names = (ast.unparse(d).partition("(")[0] for d in function.decorator_list)
    return any(name in ("triton.jit", "gluon.jit", "cute.jit", "cute.kernel") for name in names)


def measure(path: Path, text: str) -> Iterator[tuple[str, int, int]]:
    """(what, lines, limit) of a file and, outside tests, of each of its functions."""
    test = path.parts[0] == "tests"
    yield str(path), len(text.splitlines()), TEST_LINES if test else FILE_LINES
    if test:
        return
    for name, function in functions(ast.parse(text)):
        limit = DEVICE_LINES if is_device(function) else FUNCTION_LINES
        yield f"{path}:{name}", (function.end_lineno or 0) - function.lineno + 1, limit


def main() -> int:
    # git lists new files too, skips ignored ones, and does not follow the symlinks
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    texts = {p: p.read_text() for p in map(Path, listed.splitlines()) if p.exists()}

    core = sum(
        code_lines(text)
        for path, text in texts.items()
        if path.parts[0] == "qinductor" and path.parts[1] not in NOT_CORE
    )
    rows = [("core", core, CORE_LINES)]
    rows += [row for path, text in texts.items() for row in measure(path, text)]
    over = {what: (lines, limit) for what, lines, limit in rows if lines > limit}

    errors = [f"{k}: {n} lines, limit {limit}" for k, (n, limit) in over.items() if k not in EXEMPT]
    errors += [f"{k}: exempt but within its limit; drop it" for k in EXEMPT if k not in over]
    print(*errors, f"core {core} of {CORE_LINES} lines, {len(texts)} files", sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
