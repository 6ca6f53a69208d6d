"""Compiles the kernels of `cutlass_w4a8_moe_mm`, and says what is wrong with the code. No GPU."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from qinductor.kernels.dequant_matmul_triton_checks import loop
from qinductor.kernels.sgl_moe_matmul_triton import LADDER, LAID, SUMMED, WIDE, Config
from qinductor.sass import disassembled, early_writes
from qinductor.triton_compile import Compiled, compiled

Check = tuple[str, Callable[[], None]]
PARTS = "m16.n64.k256.s4.w4.p4.l16"
SHARED = {89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


def checks() -> Iterator[Check]:
    """Checks of every config, of both layouts of scales, and of x laid out."""
    for text in dict.fromkeys(text for texts in LADDER.values() for text in texts):
        yield f"moe product {text} sm_90", partial(held, text, 90)
    first = [texts[0] for texts in LADDER.values()]
    for text in dict.fromkeys((first[0], first[-1])):
        yield f"moe product {text} rows of scales sm_90", partial(held, text, 90, False)
        for target in (89, 100):
            yield f"moe product {text} sm_{target}", partial(held, text, target)
    yield f"moe product {PARTS} sm_90", partial(held, PARTS, 90)
    for target in (89, 90, 100):
        for experts in (32, 64, 1024):
            yield f"moe arrange {experts} sm_{target}", partial(laid, experts, target)
        yield f"moe sum_parts sm_{target}", partial(summed, 16, target)


def held(text: str, target: int, four: bool = True) -> None:
    """Compiles one product for sm_<target>; RuntimeError if its code is not as it should be."""
    found = faults(build(text, target, four), target)
    if found:
        raise RuntimeError(f"{text}, sm_{target}: {found}")


def build(text: str, target: int, four: bool = True, asm: bool = True) -> Compiled:
    """The product as the launch has it compiled, for sizes that are multiples of 16."""
    from qinductor.kernels.sgl_moe_matmul_kernels import product

    config = Config.parse(text).within(7168 if four else 768, SHARED[target] * 9 // 10)
    arguments = {
        "y_ptr": "*fp8e4nv", "w_ptr": "*i8", "s_ptr": "*i32", "scale_ptr": "*fp32",
        "out_ptr": "*bf16" if config.split == 1 else "*fp32", "table_ptr": "*i32",
        **dict.fromkeys(("tiles", "T"), "i32"),
        **dict.fromkeys(("out_row", "N", "K"), "i32:16"),
    }  # fmt: skip
    constants: dict[str, Any] = {
        "BM": config.bm, "BN": config.bn, "BK": config.bk, "LEAST": config.least, "FOUR": four,
        "PARTS": config.split > 1, "STAGES": config.stages, "WARPS": config.warps, "ASM": asm,
        "PDL": target >= 90,
    }  # fmt: skip
    options = {"num_warps": config.warps, "enable_fp_fusion": False}
    return compiled(product, arguments, constants, target, **options)


def faults(made: Compiled, target: int) -> str:
    """What is wrong with a product; empty if nothing is.

    On sm_90 a weight must go from its bytes to the product in the registers of one thread, the
    product must be over before they are written again, and the next tiles must be on their way.
    """
    allowed = 0 if target >= 90 else 64  # Triton 3.6 spills 40 bytes, 3.9 none
    found = [f"{made.spills} bytes spill"] if made.spills > allowed else []
    if made.shared > SHARED[target]:
        found.append(f"{made.shared} bytes of shared memory of {SHARED[target]}")
    if target != 90:
        return "; ".join(found)
    for steps in re.findall(r"scf\.for.*?scf\.yield", made.ttgir, re.DOTALL):
        if any(map(int, re.findall(r"pendings = (\d+)", steps))):
            found.append("a product may still run when its operand is overwritten")
        if "tt.load" in steps or "async_copy_global_to_local" not in steps:
            found.append("a load of the loop is waited for")
    body = loop(made.ptx)
    if re.search(r"\b(st\.shared|stmatrix|shfl)\b", body):
        found.append("W moves between threads")
    products = re.findall(r"wgmma\.mma_async\S*\s*\{[^}]*\},\s*(\S)", body)
    if set(products) != {"{"}:
        found.append("W is no operand of wgmma in registers")
    sass = disassembled(made.cubin)
    if sass is not None and (early := early_writes(sass)).writes:
        found.append(f"W's registers are written early: {early.writes[0]}")
    return "; ".join(dict.fromkeys(found))


def laid(experts: int, target: int) -> None:
    """Compiles `arrange` for so many experts; RuntimeError if it spills."""
    from qinductor.kernels.sgl_moe_matmul_kernels import arrange

    names = "x_ptr", "y_ptr", "offsets_ptr", "sizes_ptr", "table_ptr"
    arguments = {
        **dict.fromkeys(names, "*i32"), **dict.fromkeys(("x_row", "K"), "i32:16"),
        **dict.fromkeys(("T", "tiles", "tables", "E"), "i32"),
    }  # fmt: skip
    constants = {"EP": experts, "BT": min(128, WIDE // experts), "BM": 16, "B": LAID,
                 "PDL": target >= 90}  # fmt: skip
    made = compiled(arrange, arguments, constants, target, num_warps=4)
    if made.spills:
        raise RuntimeError(f"arrange, sm_{target}: {made.spills} bytes spill")


def summed(rows: int, target: int) -> None:
    """Compiles `sum_parts` of tiles of so many rows; RuntimeError if it spills."""
    from qinductor.kernels.sgl_moe_matmul_kernels import sum_parts

    arguments = {
        **dict.fromkeys(("parts_ptr", "scale_ptr"), "*fp32"), "out_ptr": "*bf16",
        "table_ptr": "*i32", **dict.fromkeys(("out_row", "N"), "i32:16"),
        **dict.fromkeys(("T", "tiles", "parts"), "i32"),
    }  # fmt: skip
    constants = {"BM": rows, "B": SUMMED, "PDL": target >= 90}
    made = compiled(sum_parts, arguments, constants, target, num_warps=4, enable_fp_fusion=False)
    if made.spills:
        raise RuntimeError(f"sum_parts, sm_{target}: {made.spills} bytes spill")
