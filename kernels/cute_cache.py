"""Compiled CuTe DSL kernels: one of each kind in memory, and shared libraries on disk."""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from qinductor.caches import disk

OLDEST = 4, 8  # whose interfaces the kernels are written for
RUNTIME = "libcute_dsl_runtime.so"


@functools.cache
def missing() -> str | None:
    """What is not installed, in one sentence; None if nothing."""
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        return "CuTe DSL is not installed (pip install nvidia-cutlass-dsl apache-tvm-ffi)"
    if importlib.util.find_spec("tvm_ffi") is None:
        return "apache-tvm-ffi is not installed, by which CuTe DSL's kernels are called"
    match = re.match(r"(\d+)\.(\d+)", _version())
    if match is None or tuple(map(int, match.groups())) < OLDEST:
        return f"CuTe DSL is {_version()}; wanted {'.'.join(map(str, OLDEST))} or newer"
    return None


@functools.cache
def _version() -> str:
    """The installed compiler."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("nvidia-cutlass-dsl")
    return "of an unknown version"


def place(name: str) -> pathlib.Path | None:
    """Where the library of a kernel is kept; None where nothing can be.

    name  tells all that it was compiled for; our sources are in the folder's own name"""
    folder = disk.folder()
    digest = hashlib.sha256(f"{name} {_version()}".encode()).hexdigest()[:32]
    return None if folder is None else folder / "cute" / f"{digest}.so"


def kernel(name: str, build: Callable[[], Any]) -> Callable[..., Any]:
    """The kernel from disk, or compiled by `build` and kept there if a linker is installed.

    A library needs no compiler and loads in about a millisecond."""
    path = place(name)
    if path is None or not path.exists():
        built = build()
        if path is None or not store(built, path):
            return built  # type: ignore[no-any-return]
    return load(path)


def store(built: Any, path: pathlib.Path) -> bool:
    """Writes a compiled kernel's library, whole or not at all; whether that could be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            parts = [os.path.join(folder, part) for part in ("kernel.o", "kernel.so")]
            built.export_to_c(parts[0], function_name="kernel")
            command = ["cc", "-shared", "-o", parts[1], parts[0]]
            subprocess.run(command, check=True, capture_output=True)
            os.replace(parts[1], path)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@functools.cache
def _runtime() -> None:
    """Loads what all kernels call, of the CUDA that torch was built for if it is there."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = (spec and spec.submodule_search_locations) or []
    own = f"cu{(torch.version.cuda or '').partition('.')[0]}"
    found = [path for folder in folders for path in pathlib.Path(folder).glob(f"*/lib/{RUNTIME}")]
    found.sort(key=lambda path: (path.parts[-3] == own, path.parts[-3]))
    if found:
        ctypes.CDLL(str(found[-1]), mode=ctypes.RTLD_GLOBAL)


def load(path: pathlib.Path) -> Callable[..., Any]:
    """The kernel of a library."""
    import tvm_ffi

    _runtime()
    return tvm_ffi.load_module(str(path))["kernel"]  # type: ignore[no-any-return]
