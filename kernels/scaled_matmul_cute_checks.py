"""Compiles the CuTe DSL kernels of scaled_matmul, and says what is wrong with the code. No GPU."""

import dataclasses
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from qinductor.kernels.scaled_matmul import ScaledMatmul
from qinductor.kernels.scaled_matmul_cases import BF16, E5M2, E8M0, FP8, FP16, FP32, INT8, case
from qinductor.kernels.scaled_matmul_cute import device, heuristic
from qinductor.kernels.scaled_matmul_cute_form import Config, form_of

Check = tuple[str, Callable[[], None]]
N, K = 28672, 4096
FORMATS = {
    "fp8 tensor fast": case(FP8, 1, N, K, N, K, group=0, fast=True),
    "fp8 row": case(FP8, 1, N, K, 1, K, bias=BF16),
    "fp8 row fast": case(FP8, 1, N, K, 1, K, fast=True),
    "e5m2 row": case(FP8, 1, N, K, 1, K, E5M2, out=FP16, bias=FP32),
    "fp8 block128": case(FP8, 1, N, K, 128, 128, group=128),
    "fp8 block32": case(FP8, 1, N, K, 32, 32, group=32, scale=E8M0, weight_scale=E8M0),
    "fp8 batched": case(FP8, 1, 512, 512, 512, 512, group=0, experts=16),
    "int8 row": case("int8", 1, N, K, 1, K, INT8, out=FP32),
    "int8 block128": case("int8", 1, N, K, 128, 128, INT8, group=128, out=FP16),
}
PTX = "8.6"  # the oldest that has all that the kernels use
ROWS = (16, 4096)  # one for each order of the operands
_TYPES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "s8"}


@dataclasses.dataclass(frozen=True)
class Code:
    """PTX, registers of a thread and bytes of local memory as cuobjdump reads them, and what ptxas
    warns of, as where products run one at a time."""

    ptx: str
    registers: int
    stack: int
    warnings: tuple[str, ...] = ()


def tool(name: str = "cuobjdump") -> str | None:
    """A tool of CUDA that comes with Triton; None where there is none."""
    import triton

    found = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin", name)
    return found if os.access(found, os.X_OK) else None


def build(contract: ScaledMatmul, config: str) -> Code:
    """The code of one kernel. Errors: those of `coded`."""
    form, chosen = form_of(contract), Config.parse(config)
    return coded(lambda options: device().compiled(form, chosen, options))


def coded(compiled: Callable[[str], Any]) -> Code:
    """The code of the kernel that `compiled` makes with some options.

    Errors: what the compiler raises; RuntimeError where cuobjdump is not installed."""
    reader, assembler = tool(), tool("ptxas")
    if reader is None or assembler is None:
        raise RuntimeError("this Triton brings no cuobjdump and ptxas, by which code is read")
    with tempfile.TemporaryDirectory() as folder:
        made = compiled(f"--keep-ptx --keep-cubin --dump-dir={folder}")
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(made.artifacts.CUBIN)
        command = [reader, "-res-usage", path]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        ptx = made.artifacts.PTX
        command = [assembler, "-arch=sm_90a", "-", "-o", path]
        # Triton's ptxas may be older than the compiler, whose code says its version alone.
        code = re.sub(r"\.version \d+\.\d+", f".version {PTX}", ptx)
        heard = subprocess.run(command, check=True, capture_output=True, text=True, input=code)
    warnings = re.findall(r"Potential Performance Loss: (.*?) in the function", heard.stderr)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump says no registers: {said[-300:]}")
    registers, stack, local = map(int, found.groups())
    return Code(ptx, registers, stack + local, tuple(warnings))


def faults(code: Code, contract: ScaledMatmul, config: Config) -> str:
    """What is wrong with the code of a kernel; empty if nothing."""
    form, found = form_of(contract), []
    left, right = (form.w, form.a) if config.swap else (form.a, form.w)
    sums = "s32" if form.a == "int8" else "f32"
    want = rf"m64n{config.q}k32\S*\.{sums}\.{_TYPES[left]}\.{_TYPES[right]}"
    products = re.findall(r"wgmma\.mma_async\.\S+", code.ptx)
    if not products or not all(re.search(want, product) for product in products):
        found.append(f"products are {sorted(set(products))}, wanted {want}")
    if f"cp.async.bulk.tensor.{3 if form.batched else 2}d" not in code.ptx:
        found.append("tiles are not fetched by TMA")
    if (config.cluster > 1) != ("multicast::cluster" in code.ptx):
        found.append("tiles are fetched for other programs, or are not and should be")
    if (config.split > 1) != ("ld.shared::cluster" in code.ptx):
        found.append("parts of sums are not read from other programs, or should not be")
    if config.donates != ("setmaxnreg" in code.ptx):
        found.append("registers are not shared out as the config says")
    found += code.warnings
    if code.stack:
        found.append(f"{code.stack} bytes spill")
    most = 65536 // (config.threads(form) * config.blocks) // 8 * 8
    if code.registers > most or (config.donates and code.registers < most):
        found.append(f"{code.registers} registers of {most}")
    return "; ".join(found)


def held(contract: ScaledMatmul, config: str) -> None:
    """Compiles a kernel; RuntimeError with what is wrong with it."""
    found = faults(build(contract, config), contract, Config.parse(config))
    if found:
        raise RuntimeError(f"{contract.summary} {config}: {found}")


def checks() -> Iterator[Check]:
    """(name, check) of the kernels that are chosen for some numbers of rows."""
    for name, chosen in FORMATS.items():
        for m in ROWS:
            config = str(heuristic(chosen.contract, m))
            yield f"{name} M={m} {config}", partial(held, chosen.contract, config)
