"""`python -m qinductor doctor`: what this machine has, and what of qinductor runs on it."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import torch
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler
from torch._vendor.packaging.version import Version

from qinductor import load, tables
from qinductor.caches import disk
from qinductor.op import OPS, Provider, missing_of
from qinductor.options import TARGETS

WIDTH = 100  # columns of the text
CPU_FEATURES = ("amx_tile", "avx512_bf16", "vnni")  # as torch.cpu asks for them
# Distribution -> whether qinductor needs it here; the extra that brings it is in the metadata.
SOFTWARE = {"torch": True, "sympy": True, "triton": sys.platform == "linux"}
SOFTWARE["nvidia-cutlass-dsl"] = False


@dataclasses.dataclass(frozen=True)
class Line:
    """One thing that was looked at.

    group     "machine", "software", "backend", or an operator's name
    found     what is there
    problem   what is wrong and what to do; None if nothing is
    required  whether the backend does not work without it
    """

    group: str
    name: str
    found: str
    problem: str | None = None
    required: bool = False


def diagnose() -> list[Line]:
    """Everything that is looked at, in the order it is printed in; imports the kernels."""
    return [*_machine(), *_software(), *_backend(), *_operators()]


def main(arguments: list[str]) -> int:
    """Prints what was found; returns 1 if something required is missing, else 0."""
    parser = argparse.ArgumentParser(prog="python -m qinductor doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the same as data")
    given = parser.parse_args(arguments)
    lines = diagnose()
    works = not any(line.problem and line.required for line in lines)
    if given.json:
        rows = [dataclasses.asdict(line) for line in lines]
        print(json.dumps({"works": works, "lines": rows}, indent=2))
    else:
        print(_text(lines))
        print("\nqinductor works here" if works else "\nqinductor does not work here: see FAIL")
    return 0 if works else 1


def _text(lines: list[Line]) -> str:
    """One line each, aligned; a blank line between groups; problems are wrapped."""
    wide = max(len(line.name) for line in lines)
    rows: list[str] = []
    for before, line in zip([None, *lines], lines, strict=False):
        if before is None or before.group != line.group:
            rows += ["", line.group] if rows else [line.group]
        mark = "" if line.problem is None else "FAIL" if line.required else "no"
        text = f"{line.found}: {line.problem}" if line.problem else line.found
        head = f"  {line.name.ljust(wide)}  {mark.ljust(4)}  "
        rows += textwrap.wrap(head + text, WIDTH, subsequent_indent=" " * len(head))
    return "\n".join(rows)


def _machine() -> Iterator[Line]:
    yield Line("machine", "python", platform.python_version())
    yield Line("machine", "system", platform.platform())
    has = [f for f in CPU_FEATURES if getattr(torch.cpu, f"_is_{f}_supported", bool)()]
    level = torch.backends.cpu.get_cpu_capability()
    threads = f"torch uses {torch.get_num_threads()} of {os.cpu_count()} threads"
    yield Line("machine", "cpu", f"{platform.machine()}, {', '.join([level, *has])}; {threads}")
    if not (gpus := _gpus()):
        yield Line("machine", "gpu", "none", _why_no_gpu())
    for i, (name, target, memory) in enumerate(gpus):
        cuda = f"CUDA {torch.version.cuda}, driver {_driver()}"
        yield Line("machine", f"gpu {i}", f"{name}, {target}, {memory / 2**30:.0f} GiB, {cuda}")


def _driver() -> str:
    """The version of NVIDIA's driver, which torch does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "unknown (no nvidia-smi)"


def _gpus() -> list[tuple[str, str, int]]:
    """(name, target, bytes of memory) of each GPU that torch can use."""
    if torch.version.hip or not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [(gpu.name, f"sm_{gpu.major}{gpu.minor}", gpu.total_memory) for gpu in found]


def _why_no_gpu() -> str:
    if torch.version.hip:
        return f"this torch is built for HIP {torch.version.hip}; wanted CUDA"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return f"CUDA {torch.version.cuda} sees no device"


def _software() -> Iterator[Line]:
    wanted = _requirements()
    for name, required in SOFTWARE.items():
        limits, extra = wanted.get(name, ("", ""))
        source = f"pip install {name}" if not extra else f"pip install 'qinductor[{extra}]'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Line("software", name, "not installed", source, required)
            continue
        found = f"{version} (wanted {limits})" if limits else version
        problem = None if within(version, limits) else f"wanted {limits}"
        yield Line("software", name, version if problem else found, problem, required)
    try:
        yield Line("software", "C++ compiler", cpp_builder.get_cpp_compiler(), None, True)
    except InvalidCxxCompiler:
        problem = "Inductor compiles its CPU code with one; install g++ or set CXX"
        yield Line("software", "C++ compiler", "none", problem, True)


def _requirements() -> dict[str, tuple[str, str]]:
    """Distribution -> (versions, extra or ""), as our own metadata has them."""
    try:
        requires = importlib.metadata.requires("qinductor") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, tuple[str, str]] = {}
    for text in requires:
        match = re.match(r"([\w.-]+)([^;\[]*)(?:.*extra == ['\"](\w+))?", text)
        assert match is not None  # a requirement starts with a name
        name, limits, extra = match.groups("")
        found.setdefault(name, (limits.strip(), extra))
    return found


def within(version: str, limits: str) -> bool:
    """Whether a version, without its local part, is inside `>=2.11,<2.15`."""
    release = Version(Version(version).base_version)
    orders = {
        ">=": release.__ge__, "<=": release.__le__, "<": release.__lt__,
        ">": release.__gt__, "==": release.__eq__, "!=": release.__ne__,
    }  # fmt: skip
    found = re.findall(r"([<>=!]=|[<>])\s*([\w.]+)", limits)
    return all(orders[sign](Version(limit)) for sign, limit in found)


def _backend() -> Iterator[Line]:
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name="qinductor")
    value = ", ".join(entry.value for entry in found)
    problem = None if found else "pip install it (from a clone: pip install -e .)"
    yield Line("backend", "entry point", value or "not registered", problem, True)
    variable = "TORCHINDUCTOR_CACHE_DIR"
    ours = tables.root() / disk.name()
    cache = pathlib.Path(os.environ[variable]) if disk.is_set_by_user(variable) else ours
    there = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    problem = None if os.access(there, os.W_OK) else f"{there} cannot be written to"
    state = f"{cache} ({'there' if there == cache else 'not there yet'})"
    yield Line("backend", "cache", state, problem, True)
    for target in ("cpu", *dict.fromkeys(target for _, target, _ in _gpus())):
        yield _times(target)


def _times(target: str) -> Line:
    """Which table of measured times the dispatcher reads for this target."""
    name = tables.device(target)
    if name is None:
        return Line("backend", f"times {target}", "none: not the current device")
    entries = tables.load(name, tables.own()).entries
    mine = sum(entry.own for entry in entries)
    path = tables.own() / tables.file_of(name)
    found = f"weights tuned here: {mine} ({path}); tuned for {name}: {len(entries) - mine}"
    unmeasured = "the providers' limits" if target == "cpu" else "estimates"
    none = f"none for {name}: {unmeasured} choose; python -m qinductor tune"
    return Line("backend", f"times {target}", found if entries else none)


def _operators() -> Iterator[Line]:
    load()
    here = ["cpu", *dict.fromkeys(target for _, target, _ in _gpus())]
    for operator in OPS.values():
        for name, provider in operator.providers.items():
            runs = [target for target in here if provider.runs_on(target)]
            problem = why_not(provider, here)
            found = "not here" if problem else f"runs on {', '.join(runs)}"
            yield Line(operator.name, name, found, problem)


def why_not(provider: Provider, here: list[str]) -> str | None:
    """Why a provider runs on none of these targets, in one sentence; None if it does."""
    if not any(map(provider.runs_on, here)):
        made = ", ".join(filter(provider.runs_on, TARGETS)) or "no target"
        return f"it is for {made}; this machine has {', '.join(here)}"
    return missing_of(provider)
