"""Compile every Triton, Gluon and CuTe kernel; compiling needs no GPU.

A module in qinductor.kernels with device code has `compile_checks()`: (name, callable) pairs, each
callable compiling one kernel for one target, raising if it cannot.
"""

import functools
import importlib
import inspect
import multiprocessing
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable

import qinductor.kernels

DEVICE_CODE = re.compile(r"^ *@(triton\.jit|gluon\.jit|cute\.kernel)\b", re.MULTILINE)


def found() -> tuple[list[tuple[str, Callable[[], None]]], list[str]]:
    """(the checks of all modules by name, what is wrong with modules)."""
    checks, wrong = [], []
    for info in pkgutil.walk_packages(qinductor.kernels.__path__, "qinductor.kernels."):
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if error.name != "cutlass":
                raise
            print(f"skipped {info.name}: CuTe DSL is not installed (pip install -e '.[cute]')")
            continue
        listed = getattr(module, "compile_checks", None)
        if listed is not None:
            checks += [(f"{info.name}: {name}", check) for name, check in listed()]
        elif DEVICE_CODE.search(inspect.getsource(module)):
            wrong.append(f"{info.name}: device code but no compile_checks()")
    return checks, wrong


def ran(part: int, parts: int) -> tuple[int, list[str]]:
    """(how many checks there are in one of so many parts, which of them failed)."""
    checks, failed = found()[0][part::parts], []
    for name, check in checks:
        try:
            check()
        except Exception:
            traceback.print_exc()
            failed.append(name)
    return len(checks), failed


def main() -> int:
    failed = found()[1]
    parts = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(parts) as pool:
        done = pool.map(functools.partial(ran, parts=parts), range(parts))
    failed += [name for _, names in done for name in names]
    for line in failed:
        print("FAILED", line)
    print(f"{sum(count for count, _ in done)} kernel checks ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
