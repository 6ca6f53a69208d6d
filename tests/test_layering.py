"""Imports go one way: patterns -> operators in kernels -> contracts; the core knows neither."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import qinductor
from qinductor import passes
from qinductor.op import OPS

ROOT = Path(__file__).parents[1]
# Tools around the pipeline may use what the loader loads.
TOOLS = (
    "bench.py", "compare.py", "demo.py", "formats.py", "peers.py", "testing.py", "trial.py",
    "tune.py",
)  # fmt: skip
CORE = sorted(
    p
    for p in (ROOT / "qinductor").rglob("*.py")
    if p.name not in TOOLS and not {"kernels", "patterns"} & {*p.relative_to(ROOT).parts}
)
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))
PATTERNS = sorted((ROOT / "patterns").rglob("*.py"))
FORMATS = sorted((ROOT / "patterns" / "weight_formats").glob("*.py"))
FAMILIES = ("qinductor.kernels", "qinductor.patterns", "kernels", "patterns")


def names(path):
    return str(path.relative_to(ROOT))


def imported(tree):
    """Every module, and every name taken from a module, that is imported anywhere in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name, packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def wrong(path, packages, allowed_in=None):
    """What the file imports of these packages, but for the function `allowed_in`."""
    tree = ast.parse(path.read_text())
    if allowed_in is not None:
        tree.body = [node for node in tree.body if getattr(node, "name", None) != allowed_in]
    return [name for name in imported(tree) if within(name, packages)]


def test_there_is_something_to_look_at():
    assert len(CORE) > 10 and len(KERNELS) > 1
    assert len(FORMATS) > 1 and set(FORMATS) < set(PATTERNS)


@pytest.mark.parametrize("path", CORE, ids=names)
def test_the_core_imports_neither_kernels_nor_patterns(path):
    loader = "load" if path.name == "__init__.py" else None
    assert wrong(path, FAMILIES, allowed_in=loader) == []


def test_the_loader_imports_them():
    assert wrong(ROOT / "qinductor" / "__init__.py", FAMILIES)


@pytest.mark.parametrize("path", KERNELS, ids=names)
def test_kernels_see_no_graph_and_no_pattern(path):
    allowed = ("contracts", "op", "rates", "errors", "kernels", "triton_compile", "sass")
    allowed += ("caches.disk",)  # where what they compile is kept
    below = [f"qinductor.{name}" for name in allowed]
    assert [name for name in wrong(path, ("qinductor",)) if not within(name, below)] == []
    assert wrong(path, ("torch._dynamo", "kernels", "patterns")) == []
    # Settings of symbolic shapes are no graph.
    assert set(wrong(path, ("torch.fx",))) <= {"torch.fx.experimental._config"}
    named = [node.attr for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "attr")]
    assert not {"Node", "Graph"} & set(named)


@pytest.mark.parametrize("path", PATTERNS, ids=names)
def test_patterns_name_no_provider(path):
    qinductor.load()
    providers = [provider for entry in OPS.values() for provider in entry.providers.values()]
    assert providers
    classes = {type(provider).__name__ for provider in providers}
    called = {provider.name for provider in providers}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            assert node.id not in classes
        elif isinstance(node, ast.Attribute):
            assert node.attr not in classes | {"providers"}
        elif isinstance(node, ast.Constant):
            assert node.value not in called


@pytest.mark.parametrize("path", PATTERNS, ids=names)
def test_patterns_take_operators_not_providers_from_kernels(path):
    files = {
        name.split(".")[2] for name in wrong(path, ("qinductor.kernels",)) if name.count(".") > 1
    }
    assert files <= set(OPS), "a file of a provider is imported"
    assert wrong(path, ("kernels", "patterns")) == []


@pytest.mark.parametrize("path", FORMATS, ids=names)
def test_weight_formats_know_no_operator_and_no_pattern(path):
    own = ("patterns.weight_formats", "patterns.failures", "patterns.whole")
    below = ("contracts", "errors", "regions", *own)
    allowed = [f"qinductor.{name}" for name in below]
    assert [name for name in wrong(path, ("qinductor",)) if not within(name, allowed)] == []


def test_compiled_code_is_keyed_by_every_source(monkeypatch):
    read = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.resolve()) or b"")
    passes.sources.__wrapped__()
    assert set(read) >= {*CORE, *KERNELS, *PATTERNS}


RUN = """
import sys
import torch
import qinductor

class Int8(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randint(-128, 128, (32, 64), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(32, 1).bfloat16())

    def forward(self, x):
        return x @ (self.codes.bfloat16() * self.scale).t()

assert "qinductor.kernels" not in sys.modules, "importing qinductor loads the kernels"
torch.compile(Int8(), backend="qinductor")(torch.ones(2, 64, dtype=torch.bfloat16))
assert qinductor.last_report().lowered == 1
print(sorted({"kernels", "patterns"} & set(sys.modules)))
"""


def test_from_the_repository_root_no_folder_is_a_top_level_module():
    """Both names belong to other packages; a second import would register everything twice."""
    child = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines()[-1] == "[]"
