"""Compile every Triton, Gluon and CuTe kernel; compiling needs no GPU.

A module in qinductor.kernels with device code has `compile_checks()`: (name, callable) pairs, each
callable compiling one kernel for one target, raising if it cannot.
"""

import importlib
import inspect
import pkgutil
import re
import sys
import traceback

import qinductor.kernels

DEVICE_CODE = re.compile(r"^ *@(triton\.jit|gluon\.jit|cute\.kernel)\b", re.MULTILINE)


def main() -> int:
    ran, failed = 0, []
    for info in pkgutil.walk_packages(qinductor.kernels.__path__, "qinductor.kernels."):
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if error.name != "cutlass":
                raise
            print(f"skipped {info.name}: CuTe DSL is not installed (pip install -e '.[cute]')")
            continue
        checks = getattr(module, "compile_checks", None)
        if checks is None:
            if DEVICE_CODE.search(inspect.getsource(module)):
                failed.append(f"{info.name}: device code but no compile_checks()")
            continue
        for name, check in checks():
            ran += 1
            try:
                check()
            except Exception:
                traceback.print_exc()
                failed.append(f"{info.name}: {name}")
    for line in failed:
        print("FAILED", line)
    print(f"{ran} kernel checks ran" if ran or failed else "no GPU kernel exists yet")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
