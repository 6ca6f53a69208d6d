"""Compiles the Triton kernels of scaled_matmul, and says what is wrong with the code. No GPU."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from qinductor.kernels.dequant_matmul_triton_checks import loop
from qinductor.kernels.scaled_matmul import FP32, ScaledMatmul
from qinductor.kernels.scaled_matmul_cases import (
    BF16,
    E4M3,
    E5M2,
    E8M0,
    FP8,
    FP16,
    INT8,
    INT32,
    UINT8,
    case,
)
from qinductor.kernels.scaled_matmul_triton_form import (
    PROMOTED,
    device_form,
    four,
    integral,
    slice_of,
)
from qinductor.kernels.scaled_matmul_triton_tiles import Config, heuristic
from qinductor.triton_compile import Compiled, compiled

Check = tuple[str, Callable[[], None]]
TYPES = {
    BF16: "bf16", FP16: "fp16", FP32: "fp32", INT8: "i8", E4M3: "fp8e4nv", E5M2: "fp8e5",
    E8M0: "u8", UINT8: "u8", INT32: "i32", torch.int64: "i64",
}  # fmt: skip


N, K = 28672, 4096
FORMATS = {
    "fp8 tensor": case(FP8, 1, N, K, N, K, group=0),
    "fp8 row": case(FP8, 1, N, K, 1, K, bias=BF16),
    "fp8 row fast": case(FP8, 1, N, K, 1, K, fast=True),
    "e5m2 row": case(FP8, 1, N, K, 1, K, E5M2, out=FP16),
    "fp8 block128": case(FP8, 1, N, K, 128, 128, group=128),
    "fp8 group128": case(FP8, 1, N, K, 1, 128, group=128),
    "fp8 block32": case(FP8, 1, N, K, 32, 32, group=32),
    "int8 row": case("int8", 1, N, K, 1, K, INT8),
    "int8 group128": case("int8", 1, N, K, 1, 128, INT8, group=128),
    "w4 fp8 group128": case("int4", 1, N, K, 1, 128),
    "w4 fp8 group32": case("int4", 1, N, K, 1, 32),
    "w4 fp8 channel": case("int4", 1, N, K, 1, K),
    "w4 int8 group128": case("int4", 1, N, K, 1, 128, INT8),
    "w4 int8 channel": case("int4", 1, N, K, 1, K, INT8),
    "int8 row zero": case("int8", 1, N, K, 1, K, INT8, zero=INT8),
    "int8 group128 zero": case("int8", 1, N, K, 1, 128, UINT8, zero=INT32),
    "w4 int8 group32 zero": case("int4", 1, N, K, 1, 32, INT8, zero=INT8),
    "w4 int8 group32 zero fp32": case("int4", 1, N, K, 1, 32, INT8, zero=INT8, out=FP32),
    "int8 group32 fp32": case("int8", 1, N, K, 1, 32, INT8, group=32, out=FP32),
    "w4 int8 group128 zero": case("int4", 1, N, K, 1, 128, INT8, zero=INT32),
    "w4 int8 channel zero": case("int4", 1, N, K, 1, K, INT8, group=0, zero=FP32),
    "w4 int8 token zero int64": case("int4", 1, N, K, 1, K, INT8, zero=torch.int64),
}
ROWS = (1, 64, 300)
LOOP = r"^( *)[^\n]*\bscf\.for\b.*?^\1\}"  # of TTGIR; of rows sorted by expert there are several
OTHERS = ("fp8 row", "fp8 block128", "int8 row", "w4 fp8 group128", "w4 int8 channel")


def checks() -> Iterator[Check]:
    """Checks of products, by the configs that are chosen where nothing was measured, and sums."""
    for name, chosen in FORMATS.items():
        for m in ROWS:
            yield _product(name, chosen.contract, str(heuristic(chosen.contract, m)), 90)
    for target in (80, 89, 100):
        for name in OTHERS:
            contract = FORMATS[name].contract
            yield _product(name, contract, str(heuristic(contract, 1)), target)
    for name in ("fp8 row", "int8 row", "int8 row zero"):
        yield _product(name, FORMATS[name].contract, "m16.n64.k128.s1.w4.p4.swap", 90)
        yield _product(name, FORMATS[name].contract, "m128.n128.k128.s1.w8.p3", 90)
    for target in (80, 90, 100):
        for name in ("fp8 row", "int8 row", "fp8 block128", "int8 row zero"):
            sums = partial(held, "sum_parts", FORMATS[name].contract, target, PARTS)
            yield f"sum_parts {name} sm_{target}", sums


PARTS = "m16.n64.k128.s4.w4.p4.swap"


def _product(name: str, contract: ScaledMatmul, config: str, target: int) -> Check:
    check = partial(held, "product", contract, target, config)
    return f"product {name} {config} sm_{target}", check


def held(kernel: str, contract: ScaledMatmul, target: int, config: str = "") -> None:
    """Compiles one kernel for sm_<target>; RuntimeError if its code is not as it should be."""
    made = build(kernel, contract, target, config)
    found = faults(made, contract, target) if kernel == "product" else spilled(made, target)
    if found:
        raise RuntimeError(f"{kernel} {config} of {contract.summary}, sm_{target}: {found}")


def build(kernel: str, contract: ScaledMatmul, target: int, config: str = "", asm: bool = True
          ) -> Compiled:  # fmt: skip
    """A kernel as the launch has it compiled, for aligned operands of multiples of 16."""
    from qinductor.kernels import scaled_matmul_triton_kernels as kernels

    c, w = contract, contract.weight
    chosen = Config.parse(config) if config else heuristic(contract, 16)
    chosen = chosen.within(contract, shared(target) * 9 // 10)
    wide = target < 89 and not integral(c)
    bs = min(slice_of(c) or PROMOTED, chosen.bk)
    tma = chosen.tma and target >= 90 and not four(c)
    code = "i8" if four(c) else TYPES[w.storage]
    form = device_form(c, wide)
    sums = "*i32" if integral(c) and not form.promote else "*fp32"
    parts = chosen.split > 1
    made = sums if parts else f"*{TYPES[c.out]}"
    held = FP32 if four(c) else w.scale
    arguments = {
        "a": "*u8" if wide else f"*{TYPES[INT8 if integral(c) else c.a]}",
        "w": "*u8" if wide and not four(c) else f"*{code}",
        "sa_ptr": f"*{TYPES[c.scale]}",
        "sw_ptr": f"*{TYPES[held]}" if held is not None else made,
        "z_ptr": made if c.zero is None else f"*{TYPES[c.zero]}",
        "sums_ptr": "*i32" if form.zero else made,
        "bias_ptr": f"*{TYPES[c.bias]}" if c.bias is not None else made,
        "out_ptr": made if kernel == "product" else f"*{TYPES[c.out]}",
        "parts_ptr": sums,
        **dict.fromkeys(
            ("a_stride", "w_stride", "out_stride", "N", "K", "sw_row", "sw_group"), "i32:16"
        ),
        **dict.fromkeys(("M", "split", "sa_group", "sa_row", "z_group", "z_row"), "i32"),
    }
    if tma:
        arguments["a"] = f"tensordesc<{TYPES[INT8 if integral(c) else c.a]}[{chosen.bm}, {bs}]>"
        arguments["w"] = f"tensordesc<{code}[{chosen.bn}, {bs}]>"
    constants: dict[str, Any] = {
        "F": form, "BM": chosen.bm, "BN": chosen.bn, "BK": chosen.bk, "BS": bs, "PARTS": parts,
        "STAGES": chosen.stages, "EVEN_K": w.k % chosen.bk == 0, "SWAP": chosen.swap or four(c),
        "TMA": tma, "PDL": target >= 90, "ASM": asm, "B": 256, "sa_row": 1, "z_row": 1,
    }  # fmt: skip
    function = getattr(kernels, kernel)
    taken = {name: value for name, value in constants.items() if name in function.arg_names}
    warps = chosen.warps if kernel == "product" else 4
    return compiled(function, arguments, taken, target, num_warps=warps, enable_fp_fusion=False)


def shared(target: int) -> int:
    """Bytes of shared memory that a program may have."""
    return {80: 163, 89: 99}.get(target, 227) << 10


def spilled(made: Compiled, target: int) -> str:
    """What is wrong with the memory of a program; empty if nothing is."""
    # As float16 operands take twice the registers: on sm_80 Triton 3.9 spills 8 bytes, 3.6 none.
    allowed = 16 if target < 89 else 0
    found = [f"{made.spills} bytes spill"] if made.spills > allowed else []
    if made.shared > shared(target):
        found.append(f"{made.shared} bytes of shared memory of {shared(target)}")
    return "; ".join(found)


def faults(made: Compiled, contract: ScaledMatmul, target: int) -> str:
    """What is wrong with a product; empty if nothing is.

    The next tiles must be on their way while tensor cores work. A product whose left operand is in
    registers must be over before they are written again, for which Triton (3.6 to 3.9) does not
    wait; and codes of 4 bits must go from the decoding to the product in one thread's registers.
    """
    found = [spilled(made, target)]
    steps = "".join(m[0] for m in re.finditer(LOOP, made.ttgir, re.DOTALL | re.MULTILINE))
    waits = re.findall(r"pendings = (\d+)", steps)
    if four(contract) and any(map(int, waits)):
        found.append("a product may still run when its operand is overwritten")
    fetched = "async_copy_global_to_local" in steps or "async_tma_copy" in steps
    if "tt.load" in steps or not fetched:
        found.append("a load of the loop is waited for")
    body = loop(made.ptx)
    if four(contract) and target == 90:
        if re.search(r"\b(st\.shared|stmatrix|shfl)\b", body):
            found.append("W moves between threads")
        products = re.findall(r"wgmma\.mma_async\S*\s*\{[^}]*\},\s*(\S)", body)
        if set(products) != {"{"}:
            found.append("W is no operand of wgmma in registers")
    word = "wgmma.mma_async" if target == 90 else "mma"
    if word not in body:
        found.append(f"no {word}")
    return "; ".join(filter(None, found))
